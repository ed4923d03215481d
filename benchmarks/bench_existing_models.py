"""Time a Llama of transformers on CPU ranks: tpfuse.parallelize, transformers' tp_plan, torch's plan and one process.

    python -m benchmarks.bench_existing_models [--ranks 2] [--rounds 15] [--tokens 1024] [--width 256]

The model has 4 layers, 8 heads, sdpa attention and random weights in float32. A call is a forward and a backward pass
with labels over one sequence; gradients are dropped before each. tp_plan="auto" loads the same weights from a folder;
torch's plan is parallelize_module with ColwiseParallel and RowwiseParallel where tp_plan has colwise and rowwise, on
whole sequences. tpfuse runs with sequence parallelism and without it. Losses must agree to 1e-5 of their value. The
single process has as many threads as there are ranks; `benchmarks.cpu_ranks` says how they alternate.
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpfuse
from benchmarks.cpu_ranks import ALONE, alternate, calls, pools, report
from benchmarks.harness import OURS, Parser, write_row
from tpfuse.train.hardware import keep_freed_memory

OURS_WHOLE, TRANSFORMERS, TORCH = "tpfuse_whole_sequences", "transformers_tp_plan", "torch_parallelize_module"
_LAYERS = 4


def _call(model: torch.nn.Module, ids: Tensor) -> Any:
    def call() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        value: float = loss.item()
        return value

    return call


def prepare(folder: str, tokens: int, alone: bool) -> dict[str, float]:
    """Fill `calls` with the candidates of this process and return their losses. Every rank must call it."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    keep_freed_memory()
    ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    new = LlamaForCausalLM.from_pretrained
    if alone:
        calls[ALONE] = _call(new(folder), ids)
    else:
        auto = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        calls[OURS] = _call(tpfuse.parallelize(new(folder), mesh), ids)
        calls[OURS_WHOLE] = _call(tpfuse.parallelize(new(folder), mesh, sequence_parallel=False), ids)
        calls[TRANSFORMERS] = _call(new(folder, distributed_config=auto), ids)
        plan = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"model.layers.*.{name}_proj": RowwiseParallel() for name in ("self_attn.o", "mlp.down")}
        plan |= {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        calls[TORCH] = _call(parallelize_module(new(folder), mesh, plan), ids)
    return {name: call() for name, call in calls.items()}


def make_folder(folder: str, width: int) -> None:
    """Save a Llama with random weights in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=width * 8 // 48 * 16, num_hidden_layers=_LAYERS,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Print a table, and keep it."""
    parser = Parser(__doc__)
    parser.option("--ranks", 2, "number of ranks")
    parser.option("--rounds", 15, "number of rounds")
    parser.option("--tokens", 1024, "length of the sequence in tokens")
    parser.option("--width", 256, "width of the model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, pools(arguments.ranks) as (ranks, alone):
        alone.run(make_folder, folder, arguments.width)
        losses = {each: each.run(prepare, folder, arguments.tokens, each is alone)[0] for each in (ranks, alone)}
        expected = losses[alone][ALONE]
        assert all(abs(x - expected) < 1e-5 * expected for each in losses.values() for x in each.values()), losses
        where = {name: each for each, names in losses.items() for name in names}
        times, others = alternate(where, arguments.rounds, seconds=0.0)
    sizes = {"tokens": arguments.tokens, "width": arguments.width, "layers": _LAYERS, "ranks": arguments.ranks}
    row = sizes | report(f"{arguments.ranks} ranks", times, others, OURS)
    write_row("existing_models", row, arguments.keep)


if __name__ == "__main__":
    main()
