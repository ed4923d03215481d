"""`tpfuse plan --calibrate FILE.toml` measures this machine and describes it as `tpfuse.cost.hardware` does.

CPU ranks share the cores. So their rates are those that a rank reaches while as many ranks compute as the cores can,
and `at_once` says how many these are, by the rate of more ranks than that.
"""

import json
import os
import signal
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from types import FrameType

import numpy as np
import torch
import torch.distributed as dist

from tpfuse.comm.host import processor
from tpfuse.comm.probe import available_memory
from tpfuse.cost.hardware import Gpu, Link, save
from tpfuse.cost.program import TPFUSE
from tpfuse.plan.machine_times import BLOCKS, HEAD, LARGE, SHAPES, SIZES, SMALL, Found, measure
from tpfuse.train.errors import RunError, UserError
from tpfuse.train.hardware import keep_freed_memory, set_threads
from tpfuse.train.launch import STOP_SIGNALS, RankInfo, device_of, join, start_ranks
from tpfuse.train.messages import warn

CPU_RANKS = 4
_TIMEOUT = 60.0  # seconds that a rank waits for another one
STREAMS, COMPUTING = ("copy", "AdamW"), ("residual", "GELU", "norm")  # by what they show: the bandwidth, and the share
_LEAST = 1e-9  # seconds: a time that is less than the others' noise
_FREE = 0.9  # of the cores' time: below, other programs have slowed the measurement down


def calibrate(path: Path) -> str:
    """Measures this machine, writes the file, and returns what was found. Raises UserError and RunError.

    The file is written at the end and at once: a calibration that is stopped leaves the file that was there before.
    """
    _check(path)
    ranks = torch.cuda.device_count() if torch.cuda.is_available() else CPU_RANKS
    with tempfile.TemporaryDirectory(prefix="tpfuse-calibration-") as folder:
        times = Path(folder) / "times.json"
        status = start_ranks(measure_rank, ranks, times, timeout=_TIMEOUT)
        if status:
            raise RunError(f"the calibration did not end, so {path} was not written", status)
        found = found_from(json.loads(times.read_text(encoding="utf-8")))
    gpu, link, sources = described(path.stem, found, _device())
    try:
        save(gpu, path, sources, link)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    if found.share < _FREE:
        warn(f"other programs took {1 - found.share:.0%} of the cores, so {path} says less than this machine can")
    return "\n".join(_report(path, gpu, link))


def _check(path: Path) -> None:
    """Raises UserError if the file cannot be written, before the machine is measured."""
    if path.suffix != ".toml":
        raise UserError(f"--calibrate {path}: expected the name of a TOML file, such as machine.toml")
    if path.is_dir():
        raise UserError(f"--calibrate {path}: this is a folder")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--calibrate {path}: files cannot be written to the folder {path.parent}")


def measure_rank(info: RankInfo, times: Path) -> int:
    """Measures as one of the ranks, and returns 0. Rank 0 writes what was found to the file `times`, as JSON."""
    for number in STOP_SIGNALS:
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they were blocked while this rank was starting
    device, at_once = device_of(info), info.world
    if device.type == "cpu":
        set_threads(info.world)
        keep_freed_memory()
        at_once = min(info.world, len(os.sched_getaffinity(0)))
    if info.world > 1:
        join(info, device, _TIMEOUT)
    found = measure(device, at_once, min(info.world, max(2, at_once)))
    if info.rank == 0:
        times.write_text(json.dumps(asdict(found)), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def found_from(document: Mapping[str, object]) -> Found:
    """Returns what `measure` has found, from JSON, where the numbers of ranks are texts."""
    found = Found(**document)  # type: ignore[arg-type]
    found.rates = {int(busy): rate for busy, rate in found.rates.items()}
    return found


@dataclass(frozen=True)
class Device:
    """What needs no measurement. ranks: their number here. memory: bytes of each. multiprocessors: 0 for a CPU."""

    name: str
    ranks: int
    memory: float
    multiprocessors: int

    @property
    def kind(self) -> str:
        """Return the type of torch's device."""
        return "cuda" if self.multiprocessors else "cpu"

    @property
    def usual(self) -> str:
        """Return the dtype of the products in training."""
        return "bfloat16" if self.multiprocessors else "float32"


def _device() -> Device:
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return Device(gpu.name, torch.cuda.device_count(), float(gpu.total_memory), gpu.multi_processor_count)
    memory = float(available_memory() or 0) or float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Device(f"{processor()}, {len(os.sched_getaffinity(0))} cores", CPU_RANKS, memory / CPU_RANKS, 0)


def described(name: str, found: Found, device: Device) -> tuple[Gpu, Link | None, dict[str, str]]:
    """Returns the device, its link (None for one rank), and where each number comes from."""
    rates = _product_rates(found, device)
    fastest, (rate, packing) = max(rates[device.usual]), _products_fit(found, device)
    _, _, sequences, heads, length = SIZES[device.kind]
    attention = 3.5 * 4 * sequences * heads * length**2 * HEAD / 2 / found.attention
    bandwidth = _bytes_a_second(found, STREAMS)
    at_once = device.ranks * found.rates[device.ranks] / found.rates[found.computing]
    gpu = Gpu(
        name,
        device.memory,
        half_rate=max(rates["bfloat16"]),
        single_rate=max(rates["float32"]),
        product_share=min(1.0, rate / fastest),
        packing_share=1.0 if device.multiprocessors else min(1.0, packing / bandwidth),
        attention_share=min(1.0, attention / fastest),
        bandwidth=bandwidth,
        elementwise_share=min(1.0, _bytes_a_second(found, COMPUTING) / bandwidth),
        multiprocessors=device.multiprocessors,
        launch_seconds=found.launch,
        host_seconds=found.blocks / (2 * TPFUSE.block_operators * BLOCKS),
        unaligned_share=0.5 if device.multiprocessors else 1.0,
        at_once=0.0 if device.multiprocessors else min(at_once, float(device.ranks)),
        wait_seconds=found.wait,
    )
    link = linked(name, found, min(device.ranks, max(2, found.computing)))
    return gpu, link, _sources(found, device, link)


def _operations(device: Device) -> list[float]:
    return [6.0 * m * k * n for m, k, n in SHAPES[device.kind]]


def _product_rates(found: Found, device: Device) -> dict[str, list[float]]:
    """Returns the operations per second of each of `SHAPES`, by dtype."""
    operations = _operations(device)
    return {dtype: [a / b for a, b in zip(operations, times, strict=True)] for dtype, times in found.products.items()}


def _products_fit(found: Found, device: Device) -> tuple[float, float]:
    """Returns the operations per second of products, and the bytes per second at which a CPU packs their matrices.

    They are fitted to the times of `SHAPES`, with equal weights for relative errors.
    """
    times, operations = np.array(found.products[device.usual]), np.array(_operations(device))
    moved = np.array([3 * 4.0 * (m * k + k * n + m * n) for m, k, n in SHAPES[device.kind]])
    if device.multiprocessors:
        return float(operations.sum() / times.sum()), 1.0
    columns = np.stack([operations, moved], axis=1) / times[:, None]
    seconds = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    if seconds.min() <= 0:  # packing takes no time that is seen
        return float(operations.sum() / times.sum()), 1 / _LEAST
    return float(1 / seconds[0]), float(1 / seconds[1])


def _sources(found: Found, device: Device, link: Link | None) -> dict[str, str]:
    by = f"measured on {device.name}, {date.today().isoformat()}, by tpfuse plan --calibrate"
    rates = zip(SHAPES[device.kind], _product_rates(found, device)[device.usual], strict=True)
    shapes = [f"{'x'.join(map(str, shape))} {rate / 1e9:.0f}" for shape, rate in rates]
    each = [f"{name} {_bytes_a_second(found, [name]) / 1e9:.1f}" for name in found.elementwise]
    busy = [f"{ranks} busy {rate / found.rates[1]:.2f}" for ranks, rate in sorted(found.rates.items())]
    details = {
        "memory": "of the device" if device.multiprocessors else f"what is available, for each of {device.ranks} ranks",
        "half_rate": "the fastest of the products, forward and backward, in bfloat16",
        "single_rate": "the fastest of the products, forward and backward, in float32",
        "product_share": f"of {device.usual}; GFLOP/s by rows, inputs and outputs: {', '.join(shapes)}",
        "packing_share": "fitted to the products, with product_share",
        "attention_share": f"{SIZES[device.kind][-1]} tokens, causal, head size {HEAD}, forward and backward",
        "bandwidth": f"of {' and '.join(STREAMS)}; GB/s: {', '.join(each)}",
        "elementwise_share": f"of {', '.join(COMPUTING)}, forward and backward",
        "launch_seconds": "an addition to 256 numbers",
        "host_seconds": f"blocks of width 16, counted as {2 * TPFUSE.block_operators} operators, forward and backward",
        "wait_seconds": f"what an all-reduce of two ranks adds while {device.ranks} compute",
        "at_once": f"rate of each rank, as a share of that of one alone: {', '.join(busy)}",
    }
    sources = {field.name: f"{by}: {details[field.name]}" if field.name in details else by for field in fields(Gpu)[1:]}
    sources |= {
        "price": "not measured",
        "links": "any",
        "unaligned_share": "not measured" if device.multiprocessors else "assumed",
    }
    if link is not None:
        text = f"{by}: all-gather, reduce-scatter and all-reduce of {4 * SMALL} and {4 * LARGE} bytes, and messages"
        sources |= {f"link.{field.name}": text for field in fields(Link)[1:]}
    return sources


def _bytes_a_second(found: Found, names: Iterable[str]) -> float:
    pairs = [found.elementwise[name] for name in names]
    return sum(moved for moved, _ in pairs) / sum(seconds for _, seconds in pairs)


def linked(name: str, found: Found, ranks: int) -> Link | None:
    """Returns the link, from what the collectives of so many ranks take; None if nothing communicates.

    A collective of n ranks takes a start, n - 1 steps of a latency, and the bytes of n - 1 of n parts; an all-reduce
    takes twice the steps and the bytes.
    """
    if not found.message:
        return None
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


def _report(path: Path, gpu: Gpu, link: Link | None) -> list[str]:
    lines = [
        f"{path}: {gpu.single_rate / 1e9:.0f} GFLOP/s in float32, {gpu.bandwidth / 1e9:.1f} GB/s,"
        f" {gpu.host_seconds * 1e6:.1f} us for an operator"
    ]
    if link is not None:
        lines.append(
            f"between ranks: {link.bandwidth / 1e9:.1f} GB/s, {link.latency * 1e6:.1f} us for a message and"
            f" {link.start * 1e6:.1f} us for a collective"
        )
    if gpu.is_host:
        lines.append(
            f"more than {gpu.at_once:.1f} ranks take turns, and lose {gpu.wait_seconds * 1e6:.0f} us when they wait for"
            " each other"
        )
    return [*lines, f"plan with it: tpfuse plan --gpu {path} --gpus N"]
