"""`make check`: four of the main parts, each against a known answer, in at most 15 seconds on two idle cores.

It runs on CPUs alone, and interprets Triton's kernels. The tests know far more: `make test`.
"""

import contextlib
import importlib.util
import io
import multiprocessing.forkserver
import os
import runpy
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
if __name__ == "__main__":  # the server of ranks imports its modules while this process imports its own
    multiprocessing.set_forkserver_preload([
        "tpfuse.testing.ranks", "tests.support.training", "tpfuse.drop_in.parallelize",
        "transformers.models.llama.modeling_llama",
    ])  # fmt: skip
    multiprocessing.forkserver.ensure_running()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.explore import explore
from tpfuse.explore.mutants import mutants_of, surviving
from tpfuse.testing import ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WORLD = 2


def explorer() -> None:
    """Explore the hand-over of numbers: no schedule fails, and without any one of its synchronising lines one does."""
    spec = importlib.util.spec_from_file_location("hand_over", EXAMPLES / "hand_over.py")
    assert spec is not None and spec.loader is not None
    hand_over = sys.modules["hand_over"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hand_over)
    explore(hand_over.protocol, world=WORLD)
    assert mutants_of(hand_over)
    assert surviving(lambda changed: changed.protocol, [hand_over], world=WORLD) == []


def layers() -> None:
    """Run the example's MLP on ranks."""
    ranks.pool(WORLD).run(_mlp)


def _mlp() -> None:
    """Compare the MLP of the example, on these ranks, with plain torch on one rank, in float64."""
    from tpfuse.testing.compare import Expected
    from tpfuse.testing.inputs import normal

    group = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with group, contextlib.redirect_stdout(io.StringIO()):  # these ranks have a group already, and keep it
        mlp = runpy.run_path(str(EXAMPLES / "mlp.py"))["mlp"]
    mlp.zero_grad()

    def plain(x: Tensor, **weights: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, weights["0.weight"], weights["0.bias"]), approximate="tanh")
        return F.linear(hidden, weights["1.weight"], weights["1.bias"])

    weights = {name: parameter.full_tensor().detach() for name, parameter in mlp.named_parameters()}
    x, grad = (normal(seed, 2, 64 * WORLD, 512, dtype=torch.float32) for seed in (1, 2))
    expected = Expected(plain, {"x": x, **weights}, grad)
    own = slice(None), slice(dist.get_rank() * 64, dist.get_rank() * 64 + 64)
    mine = x[own].clone().requires_grad_()
    out = mlp(mine)
    out.backward(grad[own])
    expected.check("out", out, own)
    expected.check("x", mine.grad, own)
    for name, parameter in mlp.named_parameters():
        expected.check(name, parameter.grad.full_tensor())


def training() -> None:
    """Take a training step of a small GPT by tensor parallelism, and on one rank, in float64."""
    (alone,) = ranks.pool(1).run(_step, 1)
    for found in ranks.pool(WORLD).run(_step, WORLD):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)


def _step(tp: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return the loss, the norm of the gradient, and the weights after a step."""
    from tests.support.training import options_of, train

    losses, norms, weights = train(options_of(tp=tp), 1)
    return losses, norms, {name: weight.flatten() for name, weight in weights.items()}


def parallelize() -> None:
    """Convert a model on ranks."""
    ranks.pool(WORLD).run(_llama)


def _llama() -> None:
    """Compare a small Llama before and after tpfuse.parallelize, in float64."""
    import tpfuse
    from tests.support.decoders import decoder, exact
    from tests.support.meshes import tensor_mesh
    from tpfuse.comm.layout import gather_whole
    from tpfuse.testing.inputs import integers

    model, ids = decoder("llama"), integers(1, 2, 9, low=3, high=101, dtype=torch.int64)

    def evaluated() -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: gather_whole(p.grad) for name, p in model.named_parameters()}

    with exact(model):
        expected = evaluated()
        tpfuse.parallelize(model, tensor_mesh())
        torch.testing.assert_close(evaluated(), expected, rtol=1e-9, atol=1e-12)


CHECKS = {
    explorer: "explorer     examples/hand_over.py is free of races, and has one without any of its synchronising lines",
    layers: f"layers       examples/mlp.py on {WORLD} ranks has the output and the gradients of plain torch",
    training: f"training     a step of a small GPT on {WORLD} ranks has the loss and the weights of one rank",
    parallelize: f"parallelize  a Llama of transformers on {WORLD} ranks has the loss and the gradients of one rank",
}


def main() -> int:
    """Run the checks, print a line for each, and return 1 if one has failed, else 0."""
    started, failed = perf_counter(), 0
    with ThreadPoolExecutor(1) as beside:  # ranks start while this process explores
        runs = {check: beside.submit(check).result for check in CHECKS if check is not explorer}
        for check, text in CHECKS.items():
            try:
                runs.get(check, check)()
                print(f"ok      {text}", flush=True)
            except Exception:
                traceback.print_exc()
                print(f"FAILED  {text}", flush=True)
                failed += 1
    verdict = f"FAILED: {failed} of {len(CHECKS)} checks" if failed else f"passed: all {len(CHECKS)} checks"
    print(f"{verdict}, in {perf_counter() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
