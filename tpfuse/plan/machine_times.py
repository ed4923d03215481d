"""Times of this machine's ranks: products, other operators, attention, operators that are issued, and communication.

Every rank runs `measure`. Ranks on GPUs measure together. CPU ranks share cores, caches and memory, so a time depends
on the number of busy ranks: as many ranks as can compute at once measure what a rank does, and then all ranks together
measure how they share the cores, and what they lose when they wait for each other.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfuse.comm.collectives import all_gather, all_reduce, reduce_scatter
from tpfuse.comm.collectives.collective import gather_objects
from tpfuse.comm.messages import Route, open_messages
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.ops.adamw import adamw_

SECONDS = 0.25  # for which one operator is measured
SMALL, LARGE = 1 << 8, 1 << 20  # elements of the messages that show the latency and the bandwidth
CALLS = {SMALL: 200, LARGE: 12}  # of a collective or message of so many elements
WAITS = 20  # of ranks for each other in one call that is measured
_IN_A_ROW = 20  # calls on a GPU, so that the host runs ahead as in training

Shape = tuple[int, int, int]
# Rows, inputs and outputs of products: the linear layers of small, medium and large models, and few rows of tokens.
SHAPES: dict[str, Sequence[Shape]] = {
    "cpu": ((512, 128, 512), (2048, 128, 384), (2048, 512, 128), (64, 768, 3072), (256, 768, 2304), (256, 3072, 768)),
    "cuda": ((2048, 1024, 4096), (8192, 1600, 6400), (8192, 6400, 1600), (4096, 4096, 16384), (8192, 8192, 8192)),
}
# Tokens, features, sequences, heads and length of the operators that the memory's bandwidth bounds, and of attention.
SIZES = {"cpu": (1024, 768, 8, 4, 128), "cuda": (8192, 4096, 8, 16, 1024)}
STREAM = {"cpu": 1 << 24, "cuda": 1 << 27}  # elements that are copied and updated, more than caches hold
HEAD = 64  # features of a head
BLOCKS = 4  # of the model whose operators take no time but that of the host


@dataclass
class Found:
    """Seconds of calls, as `Clock` measures them.

    products: of each of `SHAPES` in float32 and in bfloat16, forward and both gradients together. attention: forward
    and backward. elementwise: by operator, the bytes and the seconds. launch: of the smallest kernel. blocks: of
    `BLOCKS` blocks, forward and backward, of a model so small that its operators take only the host's time.
    collectives: by name, of `SMALL` and `LARGE` elements. message: of both sizes too. rates: by the number of busy
    ranks, the products per second of each. computing: the number of ranks that can compute at the same time. share: of
    its cores' time, which a rank had while so many computed. wait: what a rank loses whenever it waits for another one,
    if more ranks compute than can at the same time.
    """

    products: dict[str, list[float]] = field(default_factory=dict)
    attention: float = 0.0
    elementwise: dict[str, list[float]] = field(default_factory=dict)
    launch: float = 0.0
    blocks: float = 0.0
    collectives: dict[str, list[float]] = field(default_factory=dict)
    message: list[float] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)
    computing: int = 1
    share: float = 1.0
    wait: float = 0.0


class Clock:
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
            times.append(self._seconds(call))
        found = sorted(times)[len(times) // 5]
        self._barrier()
        return found if self._group is None else max(gather_objects(found, self._group, op="times of calibration"))

    def _seconds(self, call: Callable[[], object]) -> float:
        repeats = 1 if self._device.type == "cpu" else _IN_A_ROW
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (time.perf_counter() - started) / repeats

    def _barrier(self) -> None:
        if self._group is not None:
            all_reduce(torch.zeros(1, device=self._device), self._group)


def measure(device: torch.device, at_once: int, members: int) -> Found:
    """Return what this rank has found; only rank 0 has all. Collective among all ranks of the default group, if any.

    at_once: the number of ranks, the first ones, that can compute at the same time. members: of those that communicate.
    """
    found = Found(computing=at_once)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    computing, communicating = (dist.new_group(range(size)) if size > 1 else None for size in (at_once, members))
    if rank < at_once:
        _measure_rank(found, Clock(device, computing), device)
    if communicating is not None and rank < members:
        _measure_communication(found, Clock(device, communicating), device, communicating)
    for busy in sorted({1, at_once, ranks}):
        if ranks > 1:
            dist.barrier()
        if rank < busy:
            found.rates[busy], share = _rate(device)
            found.share = share if busy == at_once else found.share
    if at_once < ranks:
        found.wait = _wait(device)
    return found


def _measure_rank(found: Found, clock: Clock, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found.products[str(dtype).removeprefix("torch.")] = [
            sum(clock(call) for call in products(shape, device, dtype)) for shape in SHAPES[device.type]
        ]
    _, _, sequences, heads, length = SIZES[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    qkv = torch.randn(3, sequences, heads, length, HEAD, device=device, dtype=dtype)
    q, k, v = (each.requires_grad_() for each in qkv.unbind())

    def attention() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    found.attention = clock(attention)
    for name, (moved, call) in elementwise(device.type, device, dtype).items():
        found.elementwise[name] = [moved, clock(call)]
    x, one = torch.randn(16, 16, device=device), torch.zeros((), device=device)
    found.launch = clock(lambda: x.add_(one))
    model = GPT(GPTConfig(16, 8, 16, BLOCKS, 1), device=device, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1)
    ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
    found.blocks = clock(lambda: model(ids, ids, loss_weight=1.0).backward())


def products(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """Return the three products of a linear layer: forward, and the gradients of its input and of its weight."""
    m, k, n = shape
    x, weight, grad = (
        torch.randn(rows, columns, device=device).to(dtype) for rows, columns in ((m, k), (n, k), (m, n))
    )
    return [lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x]


def elementwise(kind: str, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return the operators that the memory's bandwidth bounds, by name: (bytes that it reads and writes, call).

    kind: of the device. copy and AdamW stream through more memory than caches hold, and compute little.
    """
    tokens, width = SIZES[kind][:2]
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    other, weight = torch.randn_like(x), torch.ones(width, device=device, dtype=dtype)
    master, grad, first, second = (torch.rand(STREAM[kind], device=device) for _ in range(4))
    rates: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    rates["step"] = torch.ones((), device=device)

    def backward_too(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(x), x, other)

    return {
        "copy": (2 * grad.nbytes, lambda: master.copy_(grad)),
        "AdamW": (7 * grad.nbytes, lambda: adamw_([master], [grad], [first], [second], [None], **rates)),
        "residual": (3 * other.nbytes, lambda: other + other),
        "GELU": (5 * other.nbytes, backward_too(lambda y: F.gelu(y, approximate="tanh"))),
        "norm": (5 * other.nbytes, backward_too(lambda y: F.layer_norm(y, (width,), weight))),
    }


def _measure_communication(found: Found, clock: Clock, device: torch.device, group: dist.ProcessGroup) -> None:
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


def _wait(device: torch.device) -> float:
    """Return the seconds that an all-reduce of two ranks adds to what both compute, while all other pairs do the same.

    Collective among all ranks of the default group.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = dist.new_group(range(ranks))
    pairs = [dist.new_group(range(first, min(first + 2, ranks))) for first in range(0, ranks, 2)]
    pair, clock = pairs[rank // 2], Clock(device, everyone)
    calls, number = products(SHAPES[device.type][0], device, torch.float32), torch.zeros(1, device=device)

    def compute(*, waits: bool) -> None:
        for _ in range(WAITS):
            for call in calls:
                call()
            if waits:
                all_reduce(number, pair)

    alone, waiting = (clock(partial(compute, waits=waits), CALLS[LARGE]) for waits in (False, True))
    return max(0.0, waiting - alone) / WAITS


def _rate(device: torch.device) -> tuple[float, float]:
    """Return the products of a linear layer, with its gradients, that this rank computes in a second.

    The second number is the share of the time of its threads for which the rank had a core; 1 on a GPU.
    """
    calls, done = products(SHAPES[device.type][0], device, torch.float32), 0
    started, processor = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - started) < 3 * SECONDS:
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += 1
    used = (time.process_time() - processor) / passed / torch.get_num_threads()
    return done / passed, 1.0 if device.type == "cuda" else min(1.0, used)
