"""`tpfuse plan --calibrate` measures GPUs and writes a file that `tpfuse plan` reads."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.cli import run
from tpfuse.commands.plan import calibrate
from tpfuse.commands.plan.calibrate import SHAPES, CallClock, MachineTimes, gpu_of, measure, sources_of
from tpfuse.commands.plan.planned import planned_cluster
from tpfuse.commands.plan.planned import sources_of as shown_sources
from tpfuse.plan.hardware import GpuSpec, described, load_gpu
from tpfuse.testing.ranks import on_ranks
from tpfuse.train.options import PlanCommand


def _times() -> MachineTimes:
    """Return round times: 100 TFLOP/s, 10 us for a message and 20 us more for a collective."""
    seconds = [6.0 * m * k * n / 100e12 for m, k, n in SHAPES]
    sent = 4 * calibrate.LARGE / 1e9  # seconds at 1 GB/s of a whole tensor
    return MachineTimes(
        {"float32": [2 * x for x in seconds], "bfloat16": seconds}, 0.01,
        {"copy": [2e8, 0.01], "AdamW": [7e8, 0.04], "residual": [3e7, 0.01], "GELU": [5e7, 0.01], "norm": [5e7, 0.01]},
        1e-6, 0.001,
        {"all-gather": [30e-6, 30e-6 + sent / 2], "reduce-scatter": [30e-6, 30e-6 + sent / 2],
         "all-reduce": [40e-6, 40e-6 + sent]},
        [10e-6, 10e-6 + sent],
    )  # fmt: skip


def _gpu(found: MachineTimes) -> GpuSpec:
    return gpu_of("mine", found, 80e9, 132, 2)


def test_numbers_follow_from_times() -> None:
    gpu = _gpu(_times())
    assert (gpu.single_rate, gpu.half_rate, gpu.product_share) == pytest.approx((50e12, 100e12, 1.0))
    assert (gpu.link.bandwidth, gpu.link.latency, gpu.link.start) == pytest.approx((1e9, 10e-6, 20e-6))
    assert gpu.multiprocessors == 132


@pytest.mark.parametrize(
    ("plant", "slower"),
    [
        (lambda x: x.products.update(float32=[3 * t for t in x.products["float32"]]), {"single_rate"}),
        (lambda x: x.products["bfloat16"].__setitem__(4, 0.1), {"product_share"}),
        (lambda x: setattr(x, "attention", 0.1), {"attention_share"}),
        (lambda x: x.elementwise.update(GELU=[5e7, 0.1]), {"elementwise_share"}),
        (lambda x: x.elementwise.update(AdamW=[7e8, 0.05]), {"bandwidth", "elementwise_share"}),
        (lambda x: setattr(x, "launch", 5e-6), {"launch_seconds"}),
        (lambda x: setattr(x, "blocks", 0.01), {"host_seconds"}),
        (lambda x: x.collectives["all-reduce"].__setitem__(1, 0.1), {"link.bandwidth"}),
        (lambda x: x.collectives["all-gather"].__setitem__(0, 45e-6), {"link.start"}),
        (lambda x: x.message.__setitem__(0, 15e-6), {"link.latency", "link.start"}),
    ],
)
def test_slow_times_show_in_their_own_numbers(plant: Callable[[MachineTimes], None], slower: set[str]) -> None:
    found = _times()
    plant(found)
    before, after = _gpu(_times()), _gpu(found)
    changed = set()
    for prefix, old, new in (("", before, after), ("link.", before.link, after.link)):
        for name, value in vars(new).items():
            if isinstance(value, float) and value != pytest.approx(getattr(old, name), rel=0.02):
                changed.add(prefix + name)
    assert changed == slower


def test_the_file_is_read_again(tmp_path: Path) -> None:
    gpu, file = _gpu(_times()), tmp_path / "mine.toml"
    file.write_text(described(gpu, sources_of(_times(), "an H100")))
    cluster = planned_cluster(command := PlanCommand(gpu=str(file), gpus=2))
    assert cluster.gpu == gpu == load_gpu(str(file))
    shown = shown_sources(command, cluster)
    assert shown["mine link latency"].startswith("measured on an H100, 20")
    assert "8192x8192x8192 100000" in shown["mine product_share"]


def test_bad_input_and_machines_without_gpus_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: object) -> str:
        assert run(["plan", *map(str, words)]) == 2
        text = capsys.readouterr().err
        assert text.startswith("tpfuse plan: error: ") and text.count("\n") == 1
        return text

    (tmp_path / "folder.toml").mkdir()
    for name, reason in (
        ("machine", "expected the name of a TOML file, such as machine.toml"),
        ("missing/machine.toml", "files cannot be written to the folder"),
        ("folder.toml", "this is a folder"),
    ):
        assert reason in error("--calibrate", tmp_path / name)
    assert "leave out the other options" in error("--calibrate", tmp_path / "m.toml", "--gpus", "4")
    if not torch.cuda.is_available():
        assert "torch finds no GPU here" in error("--calibrate", tmp_path / "m.toml")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


@pytest.mark.exhaustive
def test_planted_delays_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that measure run on any device: here on a CPU, with small sizes."""
    for name, value in (
        ("SECONDS", 0.01), ("_IN_A_ROW", 1), ("STREAM", 1 << 16), ("TOKENS", 64), ("WIDTH", 64),
        ("SHAPES", [(64, 64, 64)]), ("ATTENTION", (1, 2, 64, 16)),
    ):  # fmt: skip
        monkeypatch.setattr(calibrate, name, value)
    usual, delay = calibrate.products, 0.02

    def slow(*arguments: object) -> list[Callable[[], object]]:
        return [lambda call=call: (time.sleep(delay), call()) for call in usual(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate, "products", slow)
    found = measure(torch.device("cpu"), None)
    assert all(x > 3 * delay for times in found.products.values() for x in times)
    assert 0 < found.elementwise["residual"][1] < delay and 0 < found.launch < found.blocks < 1
    assert not found.message


@pytest.mark.exhaustive
@on_ranks(2)
def test_planted_delays_of_communication_are_measured() -> None:
    device, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    usual, usual_messages = calibrate.all_gather, calibrate.open_messages

    def late(*arguments: object) -> object:
        time.sleep(0.02)
        return usual(*arguments)  # type: ignore[arg-type]

    def late_messages(*arguments: Any) -> Any:
        messages = usual_messages(*arguments)
        send = messages.send

        def send_late(number: int, x: Tensor) -> None:
            if x.numel() == calibrate.LARGE:
                time.sleep(0.02)
            send(number, x)

        messages.send = send_late  # type: ignore[method-assign]
        return messages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_IN_A_ROW", 1)
        plain, slow = MachineTimes(), MachineTimes()
        calibrate._measure_communication(plain, CallClock(device, group), device, group)
        patch.setattr(calibrate, "all_gather", late)
        patch.setattr(calibrate, "open_messages", late_messages)
        calibrate._measure_communication(slow, CallClock(device, group), device, group)
    assert min(slow.collectives["all-gather"]) >= 0.02 > slow.collectives["all-reduce"][0]
    assert plain.message[0] > 0 and slow.message[0] < 0.02 <= slow.message[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.toml"
    assert run(["plan", "--calibrate", str(file)]) == 0
    gpu = load_gpu(str(file))
    assert str(file) in capsys.readouterr().out
    assert gpu.single_rate > 1e12 and gpu.bandwidth > 1e11
    assert run(["plan", "--model", "tiny", "--gpu", str(file), "--gpus", "1"]) == 0
