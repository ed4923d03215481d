"""`tpfuse plan --calibrate FILE.toml` measures the GPUs of this machine and describes them (`tpfuse.plan.hardware`).

Every rank runs `measure`: products, other operators, attention, operators that the host issues, and communication.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives import all_gather, all_reduce, reduce_scatter
from tpfuse.comm.host import replace_file
from tpfuse.comm.messages import Route, open_messages
from tpfuse.errors import RunError, UserError
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.ops.adamw import adamw_
from tpfuse.plan.hardware import NO_LINK, GpuSpec, Link, described
from tpfuse.plan.sizes import TPFUSE
from tpfuse.train.launch import STOP_SIGNALS, RankInfo, device_of, join, start_ranks

_TIMEOUT = 60.0  # seconds that a rank waits for another one
SECONDS = 0.25  # for which one operator is measured
SMALL, LARGE = 1 << 8, 1 << 20  # elements of the messages that show the latency and the bandwidth
CALLS = {SMALL: 200, LARGE: 12}  # of a collective or message of that many elements
_IN_A_ROW = 20  # calls, so that the host runs ahead as in training
Shape = tuple[int, int, int]
# Rows, inputs and outputs of products: the linear layers of small, medium and large models.
SHAPES: list[Shape] = [
    (2048, 1024, 4096), (8192, 1600, 6400), (8192, 6400, 1600), (4096, 4096, 16384), (8192, 8192, 8192)
]  # fmt: skip
TOKENS, WIDTH = 8192, 4096  # of the operators that the memory's bandwidth bounds
ATTENTION = 8, 16, 1024, 64  # sequences, heads, length, and features of a head
STREAM = 1 << 27  # elements that are copied and updated, more than caches hold
STREAMS, COMPUTING = ("copy", "AdamW"), ("residual", "GELU", "norm")  # by what they show: the bandwidth, and the share
BLOCKS = 4  # of the model whose operators take no time but that of the host
_LEAST = 1e-9  # seconds: a time that is less than the others' noise


@dataclass
class MachineTimes:
    """Seconds of calls, as `CallClock` measures them."""

    # Of each of `SHAPES` in float32 and in bfloat16, forward and both gradients together.
    products: dict[str, list[float]] = field(default_factory=dict)
    # Forward and backward.
    attention: float = 0.0
    # By operator, the bytes and the seconds.
    elementwise: dict[str, list[float]] = field(default_factory=dict)
    # Of the smallest kernel.
    launch: float = 0.0
    # Of `BLOCKS` blocks, forward and backward, of a model so small that its operators take only the host's time.
    blocks: float = 0.0
    # By name, of `SMALL` and `LARGE` elements.
    collectives: dict[str, list[float]] = field(default_factory=dict)
    # Of both sizes too; empty for one rank.
    message: list[float] = field(default_factory=list)


class CallClock:
    """Measures calls on a device. group: the ranks that measure together; None for one rank."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._device, self._group = device, group

    def __call__(self, call: Callable[[], object], calls: int | None = None) -> float:
        """Return the seconds of a call, of the slowest rank. Every rank of the group must call it.

        A fifth of the calls take less time: other programs only add time to some calls.

        calls: their number, the same on every rank, for calls that communicate; None: for about `SECONDS`.
        """
        for _ in range(2):
            call()
        self._barrier()
        times: list[float] = []
        deadline = time.perf_counter() + SECONDS
        while len(times) < (3 if calls is None else calls) or (calls is None and time.perf_counter() < deadline):
            started = time.perf_counter()
            for _ in range(_IN_A_ROW):
                call()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append((time.perf_counter() - started) / _IN_A_ROW)
        found = sorted(times)[len(times) // 5]
        self._barrier()
        return float(max(exchange(found, self._group, op="times of calibration")))

    def _barrier(self) -> None:
        if self._group is not None:
            all_reduce(torch.zeros(1, device=self._device), self._group)


def calibrate(path: Path) -> str:
    """Measure this machine, write the file, and return what was found. Raise UserError and RunError.

    The file is written at the end, in one step: a calibration that is stopped leaves the file that was there before.
    """
    if path.suffix != ".toml":
        raise UserError(f"--calibrate {path}: expected the name of a TOML file, such as machine.toml")
    if path.is_dir():
        raise UserError(f"--calibrate {path}: this is a folder")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--calibrate {path}: files cannot be written to the folder {path.parent}")
    if not torch.cuda.is_available():
        raise UserError(f"--calibrate {path}: torch finds no GPU here, and tpfuse plan plans for GPUs alone")
    device = torch.cuda.get_device_properties(0)
    ranks = torch.cuda.device_count()
    with tempfile.TemporaryDirectory(prefix="tpfuse-calibration-") as folder:
        file = Path(folder) / "times.json"
        status = start_ranks(measure_rank, ranks, file, timeout=_TIMEOUT)
        if status:
            raise RunError(f"the calibration did not end, so {path} was not written", status)
        times = MachineTimes(**json.loads(file.read_text(encoding="utf-8")))
    gpu = gpu_of(path.stem, times, float(device.total_memory), device.multi_processor_count, ranks)
    try:
        replace_file(path, described(gpu, sources_of(times, device.name)))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    link = [] if gpu.link == NO_LINK else [
        f"between ranks: {gpu.link.bandwidth / 1e9:.1f} GB/s, {gpu.link.latency * 1e6:.1f} us for a message and"
        f" {gpu.link.start * 1e6:.1f} us for a collective"
    ]  # fmt: skip
    return "\n".join(
        [
            f"{path}: {gpu.half_rate / 1e12:.0f} TFLOP/s in bfloat16, {gpu.bandwidth / 1e9:.0f} GB/s,"
            f" {gpu.host_seconds * 1e6:.1f} us for an operator",
            *link,
            f"plan with it: tpfuse plan --gpu {path} --gpus N",
        ]
    )


def measure_rank(info: RankInfo, file: Path) -> int:
    """Measure as one of the ranks, and return 0. Rank 0 writes the times to `file`, as JSON."""
    for number in STOP_SIGNALS:
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they were blocked while this rank was starting
    device = device_of(info)
    if info.world > 1:
        join(info, device, _TIMEOUT)
    found = measure(device, dist.group.WORLD if info.world > 1 else None)
    if info.rank == 0:
        file.write_text(json.dumps(asdict(found)), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def measure(device: torch.device, group: dist.ProcessGroup | None) -> MachineTimes:
    """Return the times of this rank. Collective among the ranks of the group; None for one rank."""
    found, clock = MachineTimes(), CallClock(device, group)
    for dtype in (torch.float32, torch.bfloat16):
        found.products[str(dtype).removeprefix("torch.")] = [
            sum(clock(call) for call in products(shape, device, dtype)) for shape in SHAPES
        ]
    sequences, heads, length, size = ATTENTION
    qkv = torch.randn(3, sequences, heads, length, size, device=device, dtype=torch.bfloat16)
    q, k, v = (each.requires_grad_() for each in qkv.unbind())

    def attention() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    found.attention = clock(attention)
    for name, (moved, call) in elementwise(device).items():
        found.elementwise[name] = [moved, clock(call)]
    x, one = torch.randn(16, 16, device=device), torch.zeros((), device=device)
    found.launch = clock(lambda: x.add_(one))
    model = GPT(GPTConfig(16, 8, 16, BLOCKS, 1), device=device, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1)
    ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
    found.blocks = clock(lambda: model(ids, ids, loss_weight=1.0).backward())
    if group is not None:
        _measure_communication(found, clock, device, group)
    return found


def products(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """Return the three products of a linear layer: forward, and the gradients of its input and of its weight."""
    m, k, n = shape
    x, weight, grad = (
        torch.randn(rows, columns, device=device).to(dtype) for rows, columns in ((m, k), (n, k), (m, n))
    )
    return [lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x]


def elementwise(device: torch.device) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return the operators that the memory's bandwidth bounds, by name: (bytes that it reads and writes, call).

    copy and AdamW stream through more memory than caches hold, and compute little.
    """
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    other, weight = torch.randn_like(x), torch.ones(WIDTH, device=device, dtype=torch.bfloat16)
    master, grad, first, second = (torch.rand(STREAM, device=device) for _ in range(4))
    rates: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    rates["step"] = torch.ones((), device=device)

    def backward_too(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(x), x, other)

    return {
        "copy": (2 * grad.nbytes, lambda: master.copy_(grad)),
        "AdamW": (7 * grad.nbytes, lambda: adamw_([master], [grad], [first], [second], [None], **rates)),
        "residual": (3 * other.nbytes, lambda: other + other),
        "GELU": (5 * other.nbytes, backward_too(lambda y: F.gelu(y, approximate="tanh"))),
        "norm": (5 * other.nbytes, backward_too(lambda y: F.layer_norm(y, (WIDTH,), weight))),
    }


def _measure_communication(
    found: MachineTimes, clock: CallClock, device: torch.device, group: dist.ProcessGroup
) -> None:
    for name, function in (("all-gather", all_gather), ("reduce-scatter", reduce_scatter), ("all-reduce", all_reduce)):
        share = group.size() if name == "all-gather" else 1
        inputs = [torch.randn(size // share, device=device) for size in CALLS]
        found.collectives[name] = [
            clock(partial(function, x, group), calls) for x, calls in zip(inputs, CALLS.values(), strict=True)
        ]
    routes = [Route("calibration, there", 0, 1, 1), Route("calibration, back", 1, 0, 1)]
    messages = open_messages(group, device, torch.float32, routes, 4 * LARGE)

    def there_and_back(x: Tensor) -> None:
        for number, route in enumerate(routes):
            if group.rank() == route.source:
                messages.send(number, x)
            elif group.rank() == route.target:
                messages.release(number, messages.receive(number, x.shape, x.dtype))

    found.message = [
        clock(partial(there_and_back, torch.randn(size, device=device)), calls) / 2 for size, calls in CALLS.items()
    ]
    messages.finish()


def gpu_of(name: str, found: MachineTimes, memory: float, multiprocessors: int, ranks: int) -> GpuSpec:
    """Return the GPU with its link. memory: bytes. multiprocessors: the SM count. ranks: those that communicated."""
    rates, operations = product_rates(found), [6.0 * m * k * n for m, k, n in SHAPES]
    fastest = max(rates["bfloat16"])
    sequences, heads, length, size = ATTENTION
    attention = 3.5 * 4 * sequences * heads * length**2 * size / 2 / found.attention
    bandwidth = _bytes_a_second(found, STREAMS)
    return GpuSpec(
        name,
        memory,
        half_rate=fastest,
        single_rate=max(rates["float32"]),
        product_share=min(1.0, sum(operations) / sum(found.products["bfloat16"]) / fastest),
        attention_share=min(1.0, attention / fastest),
        bandwidth=bandwidth,
        elementwise_share=min(1.0, _bytes_a_second(found, COMPUTING) / bandwidth),
        multiprocessors=multiprocessors,
        launch_seconds=found.launch,
        host_seconds=found.blocks / (2 * TPFUSE.block_operators * BLOCKS),
        link=link_of(name, found, ranks) if found.message else NO_LINK,
    )


def product_rates(found: MachineTimes) -> dict[str, list[float]]:
    """Return the operations per second of each of `SHAPES`, by dtype."""
    operations = [6.0 * m * k * n for m, k, n in SHAPES]
    return {dtype: [a / b for a, b in zip(operations, times, strict=True)] for dtype, times in found.products.items()}


def link_of(name: str, found: MachineTimes, ranks: int) -> Link:
    """Return the link that the times of collectives among this number of ranks show.

    A collective of n ranks takes a start, n - 1 steps of a latency, and the bytes of n - 1 of n parts; an all-reduce
    takes twice the steps and the bytes.
    """
    latency = found.message[0]
    times = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    steps = {each: count * (ranks - 1) for each, count in times.items()}
    small = [found.collectives[each][0] for each in times]
    start = (sum(small) - sum(steps.values()) * latency) / len(steps)
    if start <= 0:  # a message waits longer for its rank than a step of a collective
        latency, start = (sum(small) + latency) / (sum(steps.values()) + 1), _LEAST
    sent = sum(times.values()) * (ranks - 1) / ranks * 4 * LARGE + 4 * LARGE
    seconds = sum(large - small for small, large in [*found.collectives.values(), found.message])
    return Link(name, sent / max(seconds, _LEAST), latency, start)


def sources_of(found: MachineTimes, device: str) -> Mapping[str, str]:
    """Return where each number comes from. device: the name that torch gives to the GPU."""
    by = f"measured on {device}, {date.today().isoformat()}, by tpfuse plan --calibrate"
    rates = zip(SHAPES, product_rates(found)["bfloat16"], strict=True)
    shapes = [f"{'x'.join(map(str, shape))} {rate / 1e9:.0f}" for shape, rate in rates]
    each = [f"{name} {_bytes_a_second(found, [name]) / 1e9:.1f}" for name in found.elementwise]
    details = {
        "memory": "of the device",
        "half_rate": "the fastest of the products, forward and backward, in bfloat16",
        "single_rate": "the fastest of the products, forward and backward, in float32",
        "product_share": f"of bfloat16; GFLOP/s by rows, inputs and outputs: {', '.join(shapes)}",
        "attention_share": f"{ATTENTION[2]} tokens, causal, head size {ATTENTION[3]}, forward and backward",
        "bandwidth": f"of {' and '.join(STREAMS)}; GB/s: {', '.join(each)}",
        "elementwise_share": f"of {', '.join(COMPUTING)}, forward and backward",
        "launch_seconds": "an addition to 256 numbers",
        "host_seconds": f"blocks of width 16, counted as {2 * TPFUSE.block_operators} operators, forward and backward",
    }
    sources = {item.name: f"{by}: {details[item.name]}" if item.name in details else by for item in fields(GpuSpec)}
    sources |= {"price": "not measured", "unaligned_share": "not measured"}
    text = f"{by}: all-gather, reduce-scatter and all-reduce of {4 * SMALL} and {4 * LARGE} bytes, and messages"
    return sources | {f"link {item.name}": text for item in fields(Link)}


def _bytes_a_second(found: MachineTimes, names: tuple[str, ...] | list[str]) -> float:
    pairs = [found.elementwise[name] for name in names]
    return sum(moved for moved, _ in pairs) / sum(seconds for _, seconds in pairs)
