"""`tpfuse plan --calibrate` measures this machine and writes a file that `tpfuse plan` reads."""

import copy
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.command import Command
from tpfuse.cli import run
from tpfuse.cost.hardware import Gpu, Link, load_gpu, load_link, save
from tpfuse.plan import machine_times
from tpfuse.plan.calibrate import Device, described
from tpfuse.plan.cluster import planned_cluster, sources_of
from tpfuse.plan.machine_times import SHAPES, Clock, Found, measure
from tpfuse.testing.ranks import on_ranks
from tpfuse.train.options import PlanCommand

CPU, GPU = Device("a CPU of 2 cores", 4, 5e9, 0), Device("a GPU", 2, 80e9, 132)


def _found(kind: str = "cpu") -> Found:
    """Returns round times: 100 GFLOP/s, 10 us for a message and 20 us more for a collective, and 4 ranks on 2 cores."""
    seconds = [6.0 * m * k * n / 100e9 for m, k, n in SHAPES[kind]]
    sent = 4 * machine_times.LARGE / 1e9  # seconds at 1 GB/s of a whole tensor
    return Found(
        {"float32": seconds, "bfloat16": [x / 2 for x in seconds]}, 0.01,
        {"copy": [2e8, 0.01], "AdamW": [7e8, 0.04], "residual": [3e7, 0.01], "GELU": [5e7, 0.01], "norm": [5e7, 0.01]},
        1e-6, 0.001,
        {"all-gather": [30e-6, 30e-6 + sent / 2], "reduce-scatter": [30e-6, 30e-6 + sent / 2],
         "all-reduce": [40e-6, 40e-6 + sent]},
        [10e-6, 10e-6 + sent], {1: 10.0, 2: 8.0, 4: 4.0}, 2,
    )  # fmt: skip


def _described(found: Found, device: Device = CPU) -> tuple[Gpu, Link]:
    gpu, link, _ = described("mine", found, device)
    assert link is not None
    return gpu, link


def test_numbers_follow_from_times() -> None:
    gpu, link = _described(_found())
    assert (gpu.single_rate, gpu.half_rate, gpu.product_share) == pytest.approx((100e9, 200e9, 1.0))
    assert (link.bandwidth, link.latency, link.start) == pytest.approx((1e9, 10e-6, 20e-6))
    assert gpu.at_once == pytest.approx(2.0) and gpu.is_host  # at half the rate of two ranks, four take turns
    gpu, _ = _described(_found("cuda"), GPU)
    assert gpu.at_once == 0 and not gpu.is_host and gpu.multiprocessors == 132


def test_ranks_with_cores_of_their_own_take_no_turns() -> None:
    found = _found()
    found.rates, found.computing = {1: 10.0, 4: 9.9}, 4
    assert _described(found)[0].at_once == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("plant", "slower"),
    [
        (
            lambda x: x.products.update(float32=[2 * t for t in x.products["float32"]]),
            {"single_rate", "attention_share"},
        ),
        (lambda x: x.products["float32"].__setitem__(3, 0.018), {"packing_share"}),
        (lambda x: setattr(x, "attention", 0.1), {"attention_share"}),
        (lambda x: x.elementwise.update(GELU=[5e7, 0.1]), {"elementwise_share"}),
        (lambda x: x.elementwise.update(AdamW=[7e8, 0.05]), {"bandwidth", "elementwise_share"}),
        (lambda x: setattr(x, "launch", 5e-6), {"launch_seconds"}),
        (lambda x: setattr(x, "blocks", 0.01), {"host_seconds"}),
        (lambda x: x.collectives["all-reduce"].__setitem__(1, 0.1), {"link.bandwidth"}),
        (lambda x: x.collectives["all-gather"].__setitem__(0, 45e-6), {"link.start"}),
        (lambda x: x.message.__setitem__(0, 15e-6), {"link.latency", "link.start"}),
        (lambda x: x.rates.update({4: 2.0}), {"at_once"}),
        (lambda x: setattr(x, "wait", 1e-3), {"wait_seconds"}),
    ],
)
def test_slow_times_show_in_their_own_numbers(plant: Callable[[Found], None], slower: set[str]) -> None:
    found = _found()
    plant(found)
    changed = set()
    for prefix, before, after in zip(("", "link."), _described(_found()), _described(found), strict=True):
        for name, value in vars(after).items():
            if isinstance(value, float) and value != pytest.approx(getattr(before, name), rel=0.02):
                changed.add(prefix + name)
    assert changed == slower


def test_the_file_is_read_again(tmp_path: Path) -> None:
    gpu, link, sources = described("mine", _found(), CPU)
    file = tmp_path / "mine.toml"
    save(gpu, file, sources, link)
    cluster = planned_cluster(command := PlanCommand(gpu=str(file), gpus=2))
    assert (cluster.gpu, cluster.inside) == (gpu, link) == (load_gpu(str(file)), load_link(str(file)))
    shown = sources_of(command, cluster)
    assert shown["mine link latency"].startswith("measured on a CPU of 2 cores, 20")
    assert "64x768x3072 100" in shown["mine product_share"] and "4 busy 0.40" in shown["mine at_once"]


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: object) -> str:
        assert run(["plan", *map(str, words)]) == 2
        text = capsys.readouterr().err
        assert text.startswith("tpfuse plan: error: ") and text.count("\n") == 1
        return text

    for name, reason in (
        ("machine", "expected the name of a TOML file, such as machine.toml"),
        ("missing/machine.toml", "files cannot be written to the folder"),
    ):
        assert reason in error("--calibrate", tmp_path / name)
    (tmp_path / "folder.toml").mkdir()
    assert "this is a folder" in error("--calibrate", tmp_path / "folder.toml")
    assert "leave out the other options" in error("--calibrate", tmp_path / "m.toml", "--gpus", "4")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


@pytest.mark.exhaustive
def test_planted_delays_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_times, "SECONDS", 0.01)
    usual, delay = machine_times.products, 0.02

    def slow(*arguments: object) -> list[Callable[[], object]]:
        return [lambda call=call: (time.sleep(delay), call()) for call in usual(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(machine_times, "products", slow)
    found = measure(torch.device("cpu"), 1, 1)
    assert all(x > 3 * delay for times in found.products.values() for x in times)
    assert 0 < found.elementwise["residual"][1] < delay and 0 < found.launch < found.blocks < 1
    assert 0 < found.rates[1] < 1 / (3 * delay) and not found.message


@pytest.mark.exhaustive
@on_ranks(2)
def test_planted_delays_of_communication_are_measured() -> None:
    device, group = torch.device("cpu"), dist.group.WORLD
    assert group is not None
    plain, slow = Found(), Found()
    machine_times._measure_communication(plain, Clock(device, group), device, group)
    usual = machine_times.all_gather

    def late(*arguments: object) -> object:
        time.sleep(0.02)
        return usual(*arguments)  # type: ignore[arg-type]

    machine_times.all_gather = late  # type: ignore[assignment]
    try:
        machine_times._measure_communication(slow, Clock(device, group), device, group)
    finally:
        machine_times.all_gather = usual
    assert min(slow.collectives["all-gather"]) >= 0.02 > slow.collectives["all-reduce"][0]
    assert 0 < plain.message[0] < plain.message[1] and copy.copy(plain.collectives).keys() == slow.collectives.keys()


@pytest.mark.processes
def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.toml"
    assert run(["plan", "--calibrate", str(file)]) == 0
    text = capsys.readouterr().out
    gpu, link = load_gpu(str(file)), load_link(str(file))
    assert str(file) in text and f"{link.bandwidth / 1e9:.1f} GB/s" in text
    assert gpu.single_rate > 1e8 and gpu.bandwidth > 1e7 and 0 < link.latency < 1
    assert run(["plan", "--model", "tiny", "--gpu", str(file), "--gpus", "2"]) == 0


@pytest.mark.processes
def test_a_stopped_calibration_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text("old")
    command = Command(["-m", "tpfuse", "plan", "--calibrate", str(file)])
    while len(command.ranks()) < 2:
        time.sleep(0.05)
    time.sleep(3.0)
    command.send(signal.SIGTERM, [command.process.pid])
    _, error = command.end(128 + signal.SIGTERM)
    assert error.count("\n") == 1 and f"so {file} was not written" in error
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]
