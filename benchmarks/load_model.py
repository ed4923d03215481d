"""Parallelize a GPT-2 of Hugging Face's form from a safetensors file: seconds, bytes read and peak memory of each rank.

    torchrun --nproc-per-node 2 -m benchmarks.load_model [--preset gpt2-774m] [--folder build] [--dtype float32]

The first rank writes a file of random weights to the folder, and removes it at the end. The peak is the kernel's count
of this process's resident memory (VmHWM) beyond what it holds before; pages of the file count while they are mapped.
The program fails if a rank has held more than its shards and one whole parameter, with 32 MiB for everything else.
gpt2-1558m has 25 heads, so that it needs 5 ranks or 25.
"""

import argparse
import json
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.offload_step import peak_resident
from tpfuse.comm.layout import local_tensor
from tpfuse.drop_in.parallelize import parallelize
from tpfuse.drop_in.weights import empty_model
from tpfuse.train.config import PRESETS, load_preset

_OTHER = 2**25  # bytes of memory that are no weights: modules, plans, pages of code


def _make(preset: str, dtype: torch.dtype) -> nn.Module:
    model = load_preset(preset)["model"]
    sizes = {name: model[name] for name in ("n_layer", "n_head", "n_embd") if name in model}
    config = GPT2Config(**sizes, vocab_size=50257, n_positions=1024)
    made: Any = empty_model(GPT2LMHeadModel._from_config, config, dtype=dtype)
    return made  # type: ignore[no-any-return]


def write_random(model: nn.Module, file: Path) -> None:
    """Write random values for all parameters of an empty model, one after another."""
    header: dict[str, Any] = {}
    end = 0
    for name, parameter in model.named_parameters():
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[parameter.dtype]
        header[name] = {"dtype": dtype, "shape": list(parameter.shape), "data_offsets": [end, end + parameter.nbytes]}
        end += parameter.nbytes
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for parameter in model.parameters():
            values = torch.randn(min(parameter.numel(), 2**20), dtype=torch.float32).div_(50).to(parameter.dtype)
            block = values.view(torch.uint8).numpy().tobytes()
            for start in range(0, parameter.nbytes, len(block)):
                stream.write(block[: parameter.nbytes - start])


def _resident() -> int:
    """Return the resident memory in bytes, from which the peak is counted from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_resident()


def main() -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="gpt2-774m")
    parser.add_argument("--folder", type=Path, default=Path("build"))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    started = time.perf_counter()
    model = _make(options.preset, dtype)
    made = time.perf_counter() - started
    folder = [tempfile.mkdtemp(prefix="load-model-", dir=options.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        if dist.get_rank() == 0:
            write_random(model, Path(folder[0]) / "model.safetensors")
        dist.barrier()
        before = _resident()
        started = time.perf_counter()
        sizes = {id(parameter): parameter.nbytes for parameter in model.parameters()}
        parallelize(model, mesh, weights=folder[0])
        seconds = time.perf_counter() - started
        peak = peak_resident() - before
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
    held = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    whole, largest = sum(sizes.values()), max(sizes.values())
    allowed = held + largest + _OTHER
    rank, mib = dist.get_rank(), 2**20
    print(
        f"rank {rank}: {options.preset} {options.dtype}, {whole / mib:.0f} MiB, made empty in {made:.1f} s,"
        f" parallelized and loaded in {seconds:.1f} s; peak {peak / mib:.0f} MiB for {held / mib:.0f} MiB of shards,"
        f" at most {allowed / mib:.0f} MiB with the largest parameter ({largest / mib:.0f} MiB)",
        flush=True,
    )
    dist.destroy_process_group()
    return int(peak > allowed)


if __name__ == "__main__":
    sys.exit(main())
