"""The tuner works on the CPU, with interpreted kernels, a clock that tests control, and a table of its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tpfuse.cli import run
from tpfuse.errors import UserError
from tpfuse.kernels import configurations
from tpfuse.kernels.configurations import Configuration, choose_configuration, override, read_table, rows_of
from tpfuse.tools import search
from tpfuse.tools import tune as tuning
from tpfuse.tools.operator import CallCost, Launchers, Shape, Trial, check_rounding
from tpfuse.tools.operators import tiny_trials, trials
from tpfuse.tools.recorded import Job
from tpfuse.tools.resources import Compilation
from tpfuse.tools.search import Tuner, copies
from tpfuse.tools.search_space import SPACES, candidates, sensible
from tpfuse.tools.tune import tune, with_rows

CPU = torch.device("cpu")
TEXT = """# A table of two operators.
# One is small and one is large.

toy = [
    {families = ["interpreted", "sm_90"], bits = [16], at_most = {M = 64}, blocks = {BLOCK_M = 16, FAST = false}, num_warps = 4, num_stages = 3, measured = "not measured yet"},
    {families = ["interpreted"], bits = [16, 32], blocks = {BLOCK_M = 128, FAST = false}, num_warps = 8, num_stages = 4, measured = "not measured yet"},
]

other = [
    {families = ["interpreted"], bits = [16], blocks = {}, num_warps = 1, num_stages = 1, measured = "by \\"hand\\""},
]
"""  # noqa: E501
SPACE = {"toy": ({"BLOCK_M": (16, 32, 64, 128)}, {"num_warps": (2, 4), "FAST": (False, True)})}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "table.toml"
    path.write_text(TEXT)
    monkeypatch.setattr(configurations, "TABLE", path)
    configurations.forget()
    yield path
    monkeypatch.undo()
    configurations.forget()


@dataclass(frozen=True)
class Doubling(Shape):
    """Doubles its input. It is wrong, by `factor`, for rows that `broken` accepts, and fails for blocks of 64."""

    rows: int
    broken: Callable[[Configuration], bool]
    factor: float
    operator: str = "toy"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.rows} rows"

    def drawn(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"x": torch.randn(self.rows, device=device).to(dtype)}

    def costs(self) -> dict[str, CallCost]:
        return {"forward": CallCost(0.0, 1e9)}

    def launch(self, x: Tensor) -> tuple[Tensor, ...]:
        row = choose_configuration(self.operator, CPU, torch.bfloat16, M=self.rows)
        _Clock.last = row
        if self.broken(row):
            return (x * self.factor,)
        if row.blocks["BLOCK_M"] == 64:
            raise RuntimeError("out of resources")
        return (x * 2,)

    def launchers(self) -> Launchers:
        return {"forward": (self.launch, lambda x: (x * 2,))}


def _toy(rows: int, broken: Callable[[Configuration], bool] = lambda row: False, factor: float = 2.1) -> Trial:
    return Trial(Doubling(rows, broken, factor), "forward")


class _Clock:
    """A clock by which a call takes the seconds of the last row that a trial ran under."""

    last: Configuration

    def __init__(self, seconds: Callable[[Configuration], float]) -> None:
        self.seconds = seconds
        self.measured: list[Configuration] = []

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        self.measured.append(_Clock.last)
        return self.seconds(_Clock.last)


def _accept_all(tried: Sequence[Configuration], fitting: Sequence[Trial]) -> list[str]:
    return [""] * len(tried)


def _tuner(clock: _Clock, lines: list[str] | None = None, inspect: tuning.Inspect = _accept_all) -> Tuner:
    say = [].append if lines is None else lines.append
    return Tuner(CPU, torch.bfloat16, inspect, clock, say, "Toy GPU, 2026-01-02, triton 0")


def _seconds(row: Configuration) -> float:
    """Return the seconds of a row: blocks of 32, 2 warps and FAST are the best values."""
    return (1.0 + abs(row.blocks["BLOCK_M"] - 32) / 100) * (1 + row.num_warps / 10) * (0.5 if row.blocks["FAST"] else 1)


def test_the_best_row_is_found_and_written(table: Path) -> None:
    (best,) = tune(["toy"], _tuner(_Clock(_seconds)), [_toy(1000)], SPACE, table)
    assert (best.blocks, best.num_warps, best.num_stages) == ({"BLOCK_M": 32, "FAST": True}, 2, 4)
    assert best.measured == "Toy GPU, 2026-01-02, triton 0, 0.001667 TB/s at 1000 rows"
    small, elsewhere, large, wide, other = read_table(table)
    assert large == best and small.num_warps == 4 and other.measured == 'by "hand"'
    assert (elsewhere.family, wide.bits, wide.num_warps) == ("sm_90", 32, 8), "rows that shared a line stay"
    assert choose_configuration("toy", CPU, torch.bfloat16, M=1000) == best, "the table is read again"
    assert table.read_text().startswith("# A table of two operators.\n# One is small and one is large.\n\ntoy = [\n")


def test_another_file_keeps_its_rows_and_the_installed_table_its_own(table: Path, tmp_path: Path) -> None:
    """A first run has tuned the other operator of the file."""
    out = tmp_path / "out.toml"
    tune(["toy"], _tuner(_Clock(_seconds)), [_toy(1000)], SPACE, out)
    out.write_text(out.read_text().replace('by \\"hand\\"', "by a first run"))
    (best,) = tune(["toy"], _tuner(_Clock(lambda row: row.num_warps)), [_toy(1000)], SPACE, out)
    _, _, large, _, other = read_table(out)
    assert large == best and other.measured == "by a first run" and table.read_text() == TEXT
    for text in ("toy =", ""):
        out.write_text(text)
        with pytest.raises(UserError, match=r"cannot use the table .*out.toml: .*: give another file with --out"):
            tune(["toy"], _tuner(_Clock(_seconds)), [_toy(1000)], SPACE, out)


def test_each_row_is_tuned_by_the_trials_that_choose_it(table: Path) -> None:
    rows = tune(["toy"], _tuner(_Clock(_seconds)), [_toy(10), _toy(64), _toy(65)], SPACE, table)
    assert [row.at_most for row in rows] == [{"M": 64}, {}]
    assert [row.measured.rpartition(" at ")[2] for row in rows] == ["10 rows", "65 rows"]


def test_a_candidate_that_is_wrong_fails_or_spills_is_skipped_with_a_message(table: Path) -> None:
    def inspect(tried: Sequence[Configuration], fitting: Sequence[Trial]) -> list[str]:
        return ["spills 8 bytes" if row.blocks["BLOCK_M"] == 16 else "" for row in tried]

    lines: list[str] = []
    clock = _Clock(_seconds)
    trial = _toy(1000, broken=lambda row: row.blocks["BLOCK_M"] == 32)
    (best,) = tune(["toy"], _tuner(clock, lines, inspect), [trial], SPACE, table)
    assert best.blocks == {"BLOCK_M": 128, "FAST": True}
    assert {row.blocks["BLOCK_M"] for row in clock.measured} == {128}, "nothing else was timed"
    text = "\n".join(lines)
    assert "BLOCK_M=16 FAST=False num_warps=8 num_stages=4: skipped, spills 8 bytes" in text
    assert "skipped, AssertionError: output 0" in text
    assert "skipped, RuntimeError: out of resources" in text


def test_a_candidate_whose_machine_code_has_a_hazard_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is replaced: it plants a hazard in launches with groups of 77 tiles."""

    def compile_jobs(jobs: Sequence[Job]) -> Iterator[tuple[int, Compilation]]:
        for index, job in enumerate(jobs):
            hazards = ["MOV at 0010 writes the inputs"] if job.source.hash() == 77 else []
            yield index, Compilation("gemm", "sm_90", "bfloat16", "toy_kernel", {}, 4, 3, hazards=hazards)

    monkeypatch.setattr(tuning, "compile_jobs", compile_jobs)
    monkeypatch.setattr(tuning, "source_of", lambda x, family: SimpleNamespace(hash=lambda: x.arguments["GROUP_M"]))
    trial = next(trial for trial in tiny_trials() if trial.shape.__class__.__module__.endswith(".gemm"))
    rows = [row for row in read_table(configurations.TABLE) if row.key[:3] == ("gemm", "sm_90", 32)]
    planted = [replace(row, blocks=row.blocks | {"GROUP_M": 77}) for row in rows]
    reasons = tuning.inspect_compiled(torch.float32, "sm_90")([*planted, *rows], [trial])
    assert sorted(set(reasons)) == ["", "its machine code is wrong: MOV at 0010 writes the inputs"]
    assert not any(reasons[len(rows) :])


@pytest.mark.parametrize(
    ("seconds", "broken", "replaced"),
    [
        (lambda row: 1.0 if row.num_warps == 8 else 0.99, lambda row: False, False),  # a gain within noise
        (lambda row: 1.0 if row.num_warps == 8 else 0.5, lambda row: row.num_warps != 8, False),  # NaN
        (_seconds, lambda row: row.num_warps == 8 and not row.blocks["FAST"], True),
    ],
)
def test_the_present_row_stays_unless_it_is_wrong_but_is_measured(
    seconds: Callable[[Configuration], float], broken: Callable[[Configuration], bool], replaced: bool, table: Path
) -> None:
    (best,) = tune(["toy"], _tuner(_Clock(seconds)), [_toy(1000, broken, float("nan"))], SPACE, table)
    assert replaced == ((best.blocks, best.num_warps) != ({"BLOCK_M": 128, "FAST": False}, 8))
    assert best.measured.startswith("Toy GPU")


@pytest.mark.parametrize(
    ("operator", "plain", "taken"), [("gemm", 0.7, True), ("gemm", 0.5, False), ("all_gather_gemm", 0.5, True)]
)
def test_what_takes_the_place_of_plain_torch_must_be_faster_than_it(
    operator: str, plain: float, taken: bool, table: Path
) -> None:
    table.write_text(TEXT.replace("FAST = false", "PING_PONG = false").replace("toy", operator))
    configurations.forget()

    def measure(call: Callable[[], object]) -> float:
        if getattr(call, "func", None).__name__ == "plain":
            return plain
        call()
        return 0.6 if _Clock.last.blocks["PING_PONG"] else 1.0

    trial = Trial(Doubling(1000, lambda row: False, 2.1, operator), "forward")
    (best,) = tune([operator], _tuner(measure), [trial], {operator: ({"PING_PONG": (False, True)},)}, table)
    assert best.blocks["PING_PONG"] == taken


def test_a_candidate_that_is_slow_at_one_trial_is_not_tried_at_the_others(table: Path) -> None:
    clock = _Clock(lambda row: 1.0 if row.num_warps == 8 else 2.0)
    tune(["toy"], _tuner(clock), [_toy(100), _toy(200)], {"toy": ({"num_warps": (4, 8)},)}, table)
    assert [row.num_warps for row in clock.measured] == [8, 8, 4]


@pytest.mark.parametrize(
    ("trials", "deadline", "message"),
    [
        ([], float("inf"), "toy, 16 bits: left as it is, no trial chooses it"),
        ([_toy(1000, broken=lambda row: True)], float("inf"), "the present row does not work, AssertionError"),
        ([_toy(1000)], 0.0, "toy, 16 bits: left as it is, no time left"),
    ],
    ids=["no trial", "wrong", "no time"],
)
def test_a_row_is_left_as_it_is(table: Path, trials: list[Trial], deadline: float, message: str) -> None:
    lines: list[str] = []
    tuner = replace(_tuner(_Clock(_seconds), lines), deadline=deadline)
    assert tune(["toy"], tuner, trials, SPACE, table) == []
    assert table.read_text() == TEXT
    rows = [f"toy, {row}: left as it is, no trial chooses it" for row in ("16 bits, M <= 64", "16 bits", "32 bits")]
    assert message in "\n".join(lines) and (trials or lines == rows)


def test_a_search_ends_at_the_deadline(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes a second, and the deadline is in two and a half seconds."""
    clock = _Clock(lambda row: 1.0)
    for module in (search, tuning):
        monkeypatch.setattr(module, "monotonic", lambda: float(len(clock.measured)))
    (best,) = tune(["toy"], replace(_tuner(clock), deadline=2.5), [_toy(1000)], SPACE, table)
    assert len(clock.measured) == 3 and best.measured.startswith("Toy GPU")


def test_override_replaces_one_row_within_its_block(table: Path) -> None:
    small, _, large, _, _ = read_table(table)
    with override(replace(large, num_warps=1)) as served:
        assert choose_configuration("toy", CPU, torch.bfloat16, M=65).num_warps == 1
        assert choose_configuration("toy", CPU, torch.bfloat16, M=64) == small
        assert served == [replace(large, num_warps=1)]
    assert choose_configuration("toy", CPU, torch.bfloat16, M=65) == large


def test_writing_the_whole_table_changes_nothing() -> None:
    """The table's lines are those that the tuner writes, so no two lines of an operator could be merged."""
    text = configurations.TABLE.read_text(encoding="utf-8")
    assert with_rows(text, read_table(configurations.TABLE)) == text


def test_rows_that_agree_share_a_line_and_keep_their_order() -> None:
    """The order of the rows of one family and element type decides which of them is chosen."""
    line = '{families = %s, bits = %s, blocks = {}, num_warps = %d, num_stages = 1, measured = "never"},'
    text = "toy = [\n    " + line % ('["sm_80", "sm_90"]', "[16, 32]", 4) + "\n]\n"
    rows = rows_of(text, "toy")
    assert with_rows(text, rows) == text
    changed = [replace(rows[1], num_warps=8)]
    assert with_rows(text, changed).splitlines()[1:-1] == [
        "    " + line % ('["sm_80"]', "[16]", 4),
        "    " + line % ('["sm_80"]', "[32]", 8),
        "    " + line % ('["sm_90"]', "[16, 32]", 4),
    ]
    assert rows_of(with_rows(text, changed), "toy") == [rows[0], *changed, *rows[2:]]


def test_a_written_row_is_read_again_and_a_missing_one_is_an_error(table: Path) -> None:
    row = replace(read_table(table)[0], blocks={"BLOCK_M": 16, "TMA": True, "NAME": 'a "b" \\ é'}, measured="x\ty")
    assert rows_of(with_rows(TEXT, [row]), "toy")[0] == row
    with pytest.raises(ValueError, match=r"no row for \('toy', 'sm_90', 16, \(\('M', 1\),\)\)"):
        with_rows(TEXT, [Configuration("toy", "sm_90", 16, {"M": 1}, {}, 4, 1, "never")])


@pytest.mark.parametrize("trial", tiny_trials(), ids=lambda trial: f"{trial.shape} {trial.mode}")
def test_every_launcher_agrees_with_plain_torch(trial: Trial) -> None:
    inputs, again = trial.shape.drawn(CPU, torch.float32), trial.shape.drawn(CPU, torch.float32)
    assert all(again[name].nan_to_num().equal(x.nan_to_num()) for name, x in inputs.items())
    truth = trial.plain(**{name: x.double() if x.is_floating_point() else x for name, x in inputs.items()})
    outputs = trial.run(**copies(inputs))
    for name, actual, plain, exact in zip("abcd", outputs, trial.plain(**inputs), truth, strict=False):
        check_rounding(name, actual, plain, exact)


def test_trials_can_be_recorded_without_a_gpu() -> None:
    for trial in trials():
        assert all(x.is_meta for x in trial.shape.drawn(torch.device("meta"), torch.bfloat16).values())


def test_every_row_has_candidates() -> None:
    for row in read_table(configurations.TABLE):
        if row.family == "interpreted":
            continue
        steps = SPACES[row.operator]
        known = {name for step in steps for name in step if not name.startswith("num_")}
        assert known & row.blocks.keys(), row.operator
        assert 1 < len(list(candidates(row, steps[0]))) < 150, row
        assert all(sensible(candidate) for step in steps for candidate in candidates(row, step))


def test_candidates_that_no_hardware_can_run_are_left_out() -> None:
    blocks = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "TMA": True, "GROUP_M": 8}
    row = Configuration("gemm", "sm_90", 16, {}, blocks, 4, 3, "")
    assert sensible(row)
    assert not sensible(replace(row, family="sm_80")), "TMA"
    assert not sensible(replace(row, num_stages=8)), "256 KiB"
    assert not sensible(replace(row, blocks=blocks | {"BLOCK_M": 256, "BLOCK_N": 256})), "512 accumulators a thread"


def test_the_command_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["tune", "gemm", "--minutes", "1"]) == 2
    assert run(["tune", "softmax"]) == 2
    assert run(["tune", "--minute", "1"]) == 2
    assert run(["tune", "--minutes", "-1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tpfuse tune: error: there is no CUDA GPU here to measure on"
    assert lines[1].startswith("tpfuse tune: error: no search space for softmax: expected operators of gemm, ")
    assert "did you mean --minutes?" in lines[2]
    assert lines[3:] == ["tpfuse tune: error: --minutes -1.0: expected at least 0"]
