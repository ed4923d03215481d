"""Time tensor parallelism on CPU ranks alternately: tpfuse, torch's over Gloo, and one process with as many threads.

    python -m benchmarks.bench_tensor_parallel [--ranks 2] [--rounds 15] [mlp gpt]

mlp: a sequence-parallel MLP with biases (column-parallel, gelu_tanh, row-parallel), forward and backward. x arrives as
the rank's shard of the tokens; the parameters are DTensors on both sides, and all gradients are dropped before each
call. Output and gradients are checked first against float64 (tpfuse's within the bound of the tests). gpt: a training
step of the preset that `make train` runs, with its batch, data, clipping and optimizer. The candidates are tpfuse's
Trainer, and the same model in `benchmarks.torch_gpt` under `parallelize_module` with torch's fused AdamW and
clip_grad_norm_. Both begin with the same weights, and losses and gradient norms of three steps must agree. All
processes keep freed memory, as `tpfuse train` does.

The single process (torch's layers for the MLP, tpfuse with tp 1 for the GPT) has as many threads as there are ranks;
`benchmarks.cpu_ranks` says how they alternate.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.cpu_ranks import ALONE, alternate, calls, pools, report, whole
from benchmarks.harness import OURS, Parser, write_row
from benchmarks.torch_gpt import TorchGPT, parallelize
from tpfuse.comm.mesh import build_mesh
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.models.gpt import GPTConfig
from tpfuse.testing.compare import Expected
from tpfuse.testing.ranks import RankPool
from tpfuse.train.batches import Windows
from tpfuse.train.config import parse_train
from tpfuse.train.hardware import keep_freed_memory
from tpfuse.train.options import TrainCommand
from tpfuse.train.schedule import learning_rate
from tpfuse.train.trainer import Trainer

TORCH = "torch"


@dataclass(frozen=True)
class TpSubject:
    """A compared computation."""

    name: str
    prepare: Callable[[tuple[int, ...], bool], list[str]]
    sizes: tuple[int, ...] = ()


def _mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh"), down, down_bias)


def _linears(inputs: dict[str, Tensor]) -> tuple[nn.Linear, nn.Linear]:
    layers = []
    for name in ("up", "down"):
        weight = inputs[name]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(inputs[f"{name}_bias"])
        layers.append(layer)
    return layers[0], layers[1]


def _tpfuse_mlp(up: nn.Linear, down: nn.Linear, mesh: DeviceMesh) -> nn.Module:
    first = ColumnParallelLinear.from_linear(up, activation="gelu_tanh", sequence_parallel=True, device_mesh=mesh)
    return nn.Sequential(first, RowParallelLinear.from_linear(down, sequence_parallel=True, device_mesh=mesh))


def _torch_mlp(up: nn.Linear, down: nn.Linear, mesh: DeviceMesh | None) -> nn.Module:
    model = nn.Sequential(up, nn.GELU("tanh"), down)
    if mesh is None:
        return model
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    return parallelize_module(model, mesh, plan)


def _check_mlp(name: str, model: nn.Module, x: Tensor, out: Tensor, part: slice, expected: Expected) -> None:
    assert x.grad is not None
    results = {"x": x.grad, "out": out.detach()}
    gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    results |= dict(zip(("up", "up_bias", "down", "down_bias"), gradients, strict=True))
    for key, actual in results.items():
        index = part if key in ("x", "out") else slice(None)
        if name == OURS:
            expected.check(key, actual, index)
        truth = expected.float64[key][index]
        torch.testing.assert_close(actual.double(), truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


def prepare_mlp(sizes: tuple[int, ...], alone: bool) -> list[str]:
    """Fill `calls` with checked forward and backward passes of (tokens, width), and return their names. Collective."""
    calls.clear()
    tokens, width = sizes
    generator = torch.Generator().manual_seed(tokens + width)
    shapes = {"x": (tokens, width), "up": (4 * width, width), "up_bias": (4 * width,)}
    shapes |= {"down": (width, 4 * width), "down_bias": (width,)}
    inputs = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    grad = torch.randn(tokens, width, generator=generator)
    expected = Expected(_mlp, inputs, grad)
    share = tokens // dist.get_world_size()
    part = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    mesh = None if alone else init_device_mesh("cpu", (dist.get_world_size(),))
    models = {} if mesh is None else {OURS: _tpfuse_mlp(*_linears(inputs), mesh)}
    models[ALONE if alone else TORCH] = _torch_mlp(*_linears(inputs), mesh)
    for name, model in models.items():
        calls[name] = call = _forward_and_backward(model, inputs["x"][part].clone().requires_grad_(), grad[part])
        _check_mlp(name, model, *call(), part, expected)
    return list(calls)


def _forward_and_backward(model: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    parameters = list(model.parameters())

    def call() -> tuple[Tensor, Tensor]:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        out: Tensor = model(x)
        out.backward(grad)  # type: ignore[no-untyped-call]
        return x, out

    return call


def preset(tp: int) -> tuple[TrainCommand, GPTConfig, Windows]:
    """Return the run of `make train`, but on 4096 bytes that follow a rule."""
    options = parse_train(["--model.preset", "tiny"])
    options = replace(options, parallel=replace(options.parallel, tp=tp, dp=1))
    model = options.model
    config = GPTConfig(256, model.n_positions, model.n_embd, model.n_layer, model.n_head, model.bias, model.dropout)
    count = np.arange(4096)
    tokens = ((count * 7 + count // 5) % 256).astype(np.uint16)
    return options, config, Windows(tokens, config.n_positions, options.train.seed, "train", options.train.batch)


def _torch_step(model: TorchGPT, options: TrainCommand, windows: Windows) -> Callable[[], tuple[float, float]]:
    """Return a step like Trainer's, which returns (loss, gradient norm)."""
    optim, batch = options.optim, options.train.batch
    optimizer, done = model.optimizer(optim), 0

    def step() -> tuple[float, float]:
        nonlocal done
        ids, targets = windows.sequences(done, 0, batch, torch.device("cpu"))
        optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = model(ids, targets)
            loss.backward()
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), optim.clip, foreach=True))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, done, options.train.steps, batch * windows.length)
        optimizer.step()
        done += 1
        return whole(loss).item(), norm.item()

    return step


def prepare_gpt(sizes: tuple[int, ...], alone: bool) -> list[str]:
    """Fill `calls` with checked training steps, and return their names. Every rank must call it."""
    keep_freed_memory()
    world = 1 if alone else dist.get_world_size()
    options, config, windows = preset(world)
    mesh = None if alone else build_mesh("cpu", dp=1, tp=world)
    trainer = Trainer(options, config, mesh, torch.device("cpu"))
    weights = {name: whole(p).detach().clone() for name, p in trainer.model.named_parameters()}

    def own_step() -> tuple[float, float]:
        result = trainer.train_step(windows, lambda: False)
        return result.loss, result.grad_norm

    model = TorchGPT(config)
    model.load(weights)
    if mesh is not None:
        parallelize(model, mesh["tp"])
    torch_step = _torch_step(model, options, windows)
    for _ in range(3):
        np.testing.assert_allclose(own_step(), torch_step(), rtol=1e-4)
    calls.clear()
    calls.update({ALONE: own_step} if alone else {OURS: own_step, TORCH: torch_step})
    return list(calls)


def measure(subject: TpSubject, ranks: RankPool, alone: RankPool, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return what `alternate` does, for all candidates of the subject."""
    where = {
        name: each for each in (ranks, alone) for name in each.run(subject.prepare, subject.sizes, each is alone)[0]
    }
    return alternate(where, rounds, seconds=0.15)


SUBJECTS = (
    TpSubject("mlp", prepare_mlp, (768, 128)),
    TpSubject("mlp", prepare_mlp, (1024, 768)),
    TpSubject("gpt", prepare_gpt),
)


def main() -> None:
    """Print a table for each subject, and keep it."""
    parser = Parser(__doc__)
    parser.add_argument(
        "subjects", nargs="*", choices=["mlp", "gpt", []], metavar="mlp|gpt", help="what to measure (default: both)"
    )
    parser.option("--ranks", 2, "number of ranks")
    parser.option("--rounds", 15, "number of rounds")
    arguments = parser.parse_args()
    with pools(arguments.ranks) as (ranks, alone):
        for subject in SUBJECTS:
            if not arguments.subjects or subject.name in arguments.subjects:
                times, others = measure(subject, ranks, alone, arguments.rounds)
                row = {"subject": subject.name, "sizes": subject.sizes, "ranks": arguments.ranks}
                row |= report(f"{subject.name} {' x '.join(map(str, subject.sizes))}", times, others, OURS)
                write_row("tensor_parallel", row, arguments.keep)


if __name__ == "__main__":
    main()
