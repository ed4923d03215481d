"""Ranks measure together which candidate is the fastest, and all take the same decision."""

import json
import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.comm import autotune as tuner
from tpfuse.comm import decisions as stored
from tpfuse.comm.autotune import autotune, decide
from tpfuse.comm.comparison import tensors
from tpfuse.comm.decisions import Decision, add_decisions, machine, read_decisions
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import Disagreement
from tpfuse.comm.host import replace_file
from tpfuse.comm.settings import set_settings, settings
from tpfuse.switches import chosen_kernels
from tpfuse.testing.ranks import RankError, on_ranks, pool

CPU = torch.device("cpu")


def _sleeping(seconds: float, runs: list[str], name: str) -> Callable[[], None]:
    def run() -> None:
        runs.append(name)
        time.sleep(seconds)

    return run


def _decided(
    case: str,
    seconds: dict[str, list[float]],
    file: str,
    known: dict[str, Decision] | None = None,
    budget: float = 20.0,
) -> tuple[Decision, list[str]]:
    """Return the decision, and the candidates that this rank ran. seconds: each candidate's time on each rank."""
    group = dist.new_group()
    runs: list[str] = []
    candidates = {name: _sleeping(each[group.rank()], runs, name) for name, each in seconds.items()}
    with autotune(budget, known=known, file=Path(file)) as found:
        taken = decide(group, CPU, case, candidates, "first", _nothing)
    assert found.decisions == {case: taken}
    return taken, runs


def _nothing() -> None:
    pass


def _case(tmp_path: Path) -> str:
    """Return a case that no other test has: decisions hold for the job, and tests share the processes of ranks."""
    return f"a product of {tmp_path}"


def test_the_candidate_with_the_fastest_slowest_rank_is_taken(tmp_path: Path) -> None:
    file, case = tmp_path / "folder" / "decisions.json", _case(tmp_path)
    seconds = {"first": [0.001, 0.030], "second": [0.012, 0.012]}  # Rank 0 alone would take the first one.
    (found, runs), (other, _) = pool(2).run(_decided, case, seconds, str(file))
    assert found == other and found.taken == "second"
    assert found.milliseconds["first"] >= 30 and found.milliseconds["second"] >= 12
    assert runs == ["first", "second"] * (1 + tuner.ROUNDS)  # They run in turn, so that a disturbance affects both.
    assert read_decisions(file, machine("cpu")) == {case: found}


def test_the_next_run_reads_the_decision_and_measures_nothing(tmp_path: Path) -> None:
    file, case = tmp_path / "decisions.json", _case(tmp_path)
    kept = Decision("second", {"first": 2.0, "second": 1.0})
    add_decisions(file, machine("cpu"), {"another case": kept, case: kept})
    seconds = {"first": [0.0, 0.0], "second": [0.01, 0.01]}  # A measurement would decide otherwise.
    assert pool(2).run(_decided, case, seconds, str(file)) == [(kept, [])] * 2
    assert pool(2).run(_decided, case + "2", seconds, str(file))[0][0].taken == "first"
    assert set(read_decisions(file, machine("cpu"))) == {"another case", case, case + "2"}


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'{"MACHINE": 3}',
        b'{"MACHINE": {"CASE": {"taken": "third", "milliseconds": {"third": 1}}}}',  # a candidate that is gone
        b'{"MACHINE": {"CASE": {"taken": 1}}}',
        b'{"MACHINE": {"CASE": {"taken": "second", "milliseconds": {"first": 1}}}}',
        b'{"MACHINE": {"CASE": {"taken": "second", "milliseconds": {"second": -1}}}}',
        b'{"MACHINE": {"CASE": {"taken": "second", "milliseconds": {"second": NaN}}}}',
    ],
)
def test_a_damaged_file_is_replaced_after_a_new_measurement(tmp_path: Path, damage: bytes) -> None:
    file, case = tmp_path / "decisions.json", _case(tmp_path)
    file.write_bytes(damage.replace(b"MACHINE", machine("cpu").encode()).replace(b"CASE", case.encode()))
    found, runs = pool(1).run(_decided, case, {"first": [0.0], "second": [0.01]}, str(file))[0]
    assert found.taken == "first" and runs
    assert read_decisions(file, machine("cpu")) == {case: found}


def test_a_resumed_run_decides_as_before_and_ignores_the_file(tmp_path: Path) -> None:
    file, case = tmp_path / "decisions.json", _case(tmp_path)
    add_decisions(file, machine("cpu"), {case: Decision("first", {"first": 1.0, "second": 2.0})})
    seconds = {"first": [0.0, 0.0], "second": [0.0, 0.0]}
    for before in (Decision("second", {"first": 2.0, "second": 1.0}), Decision("second")):
        assert pool(2).run(_decided, case, seconds, str(file), {case: before}) == [(before, [])] * 2


def test_with_no_time_left_the_usual_candidate_is_taken_and_nothing_is_stored(tmp_path: Path) -> None:
    file, case = tmp_path / "decisions.json", _case(tmp_path)
    seconds = {"first": [0.01, 0.01], "second": [0.0, 0.0]}
    assert pool(2).run(_decided, case, seconds, str(file), None, 0.0) == [(Decision("first"), [])] * 2
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_no_error() -> None:
    seconds = {"first": [0.01], "second": [0.0]}
    found, _ = pool(1).run(_decided, "without a file", seconds, "/proc/no/decisions.json")[0]
    assert found.taken == "second"


@pytest.mark.parametrize(
    ("second", "usual", "taken"), [(0.979, "first", "second"), (0.981, "first", "first"), (0.981, "second", "second")]
)
@on_ranks(1)
def test_another_candidate_must_be_faster_than_the_usual_one_by_more_than_the_margin(
    second: float, usual: str, taken: str
) -> None:
    """Each candidate has one outlier, downwards or upwards."""
    times, seen = {"first": 1.0, "second": second}, {"first": 0, "second": 0}

    def milliseconds(run: Callable[[], str], device: torch.device) -> float:
        name = run()
        seen[name] += 1
        return times[name] * ({"first": 0.1, "second": 10.0}[name] if seen[name] == 3 else 1.0)

    with pytest.MonkeyPatch.context() as patch, autotune(600, file=Path("/proc/no")):
        patch.setattr(tuner, "_milliseconds", milliseconds)
        candidates = {name: partial(str, name) for name in times}
        found = decide(dist.new_group(), CPU, f"margin {second} {usual}", candidates, usual, _nothing)
    assert found.taken == taken


@on_ranks(2)
def test_groups_of_one_job_decide_alike(tmp_path: Path) -> None:
    """Each rank is a group of its own, which would decide for another candidate alone."""
    groups, rank = [dist.new_group([0]), dist.new_group([1])], dist.get_rank()
    file, case = tmp_path / str(rank), _case(tmp_path)
    candidates = {"first": _sleeping(0.02 * (1 - rank), [], "first"), "second": _sleeping(0.02 * rank, [], "second")}
    with autotune(600, file=file):
        taken = decide(groups[rank], CPU, case, candidates, "first", _nothing).taken
    assert read_decisions(file, machine("cpu"))[case].taken == taken
    every = [""] * 2
    dist.all_gather_object(every, taken)
    assert every[0] == every[1]


@pytest.mark.parametrize("known", [False, True])
@on_ranks(2)
def test_ranks_that_disagree_end_with_both_sides_named(known: bool, tmp_path: Path) -> None:
    group = dist.new_group()
    rank = group.rank()
    case, before = ("one case", {"one case": Decision("ab"[rank])}) if known else (f"case {rank}", {})
    message = "^rank 0 measures 'one case with a', rank 1 'one case with b'$"
    if not known:
        message = f"^rank {1 - rank} runs measuring case {1 - rank}, rank {rank} runs measuring case {rank}$"
    candidates = {"a": _nothing, "b": _nothing}
    with autotune(600, known=before, file=tmp_path / "file"), pytest.raises(Disagreement, match=message):
        decide(group, CPU, case, candidates, "a", _nothing)


def _raising(ranks: list[int], usual: str, file: str) -> tuple[str, list[str], list[str]]:
    """Make candidate "b" raise on some ranks after a barrier; the other ranks wait in another barrier after it."""
    before = settings().timeout
    set_settings(timeout=3.0)
    group = dist.new_group()
    memory = symmetric_memory(group, CPU)
    set_settings(timeout=before)
    recovered = []

    def b() -> None:
        memory.barrier("before")
        if group.rank() in ranks:
            raise ValueError("b cannot be computed")
        memory.barrier("after")

    reset = memory.reset

    def recorded() -> None:
        reset()
        recovered.append("reset")

    memory.reset = recorded  # type: ignore[method-assign]

    with autotune(600, file=Path(file)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        candidates = {"a": memory.barrier, "b": b}
        taken = decide(group, CPU, f"case {ranks} {usual} {file}", candidates, usual, _nothing).taken
    memory.barrier("the memory is of use")
    return taken, recovered, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("ranks", [[0, 1], *exhaustive([1])])
def test_a_candidate_that_raises_is_left_out_with_a_warning(tmp_path: Path, ranks: list[int]) -> None:
    file = str(tmp_path / "decisions.json")
    (taken, recovered, texts), (other, _, none) = pool(2).run(_raising, ranks, "a", file)
    assert (taken, other, recovered, none) == ("a", "a", ["reset"], [])
    assert len(texts) == 1 and "b is not taken: " in texts[0] and "b cannot be computed" in texts[0]


X = torch.linspace(-4, 4, 63)  # what candidates compute, as far as they are right
# Each row has what the candidates compute, what the second one computes on the second rank (None: the same), and what
# is said of it.
RESULTS: dict[str, tuple[Any, Any, str]] = {
    "right": (X, None, ""),
    "right, some not computed": ((None, [X, None]), None, ""),
    "an ulp apart": (X.half(), X.half().nextafter(torch.tensor(9.0).half()), ""),
    "two ulps of the largest apart": (X.half(), X.half() + 2**-7, "differs from that of first by 7.812e-03, allowed"),
    "wrong in one element": ((X, X), (X, torch.cat([X[:-1], X[:1]])), "result 2 of 2 differs from that of first by 8"),
    "NaN": (X, X.where(X < 3, math.nan), "differs from that of first by inf, allowed"),
    "another dtype": (X, X.double(), "its results are float64 [63]; those of first are float32 [63]"),
    "another shape": (X, X[:62], "its results are float32 [62]; those of first are float32 [63]"),
    "not computed": ((X, None), (None, X), "its results are nothing, float32 [63]; those of first are float32 [63], n"),
    "wrong beside an overflow": (X.half().where(X < 3, math.inf), X.half() + 1, "differs from that of first by 1.00"),
    "of an overflow": (X.half().where(X < 3, math.inf), X.half(), ""),
}


@pytest.mark.parametrize("what", RESULTS)
@on_ranks(2)
def test_a_candidate_whose_results_differ_on_one_rank_is_left_out(what: str, tmp_path: Path) -> None:
    group, runs = dist.new_group(), list[str]()
    usual, wrong, said = RESULTS[what]
    computed = wrong if wrong is not None and group.rank() == 1 else usual

    def run(name: str, result: Any) -> Any:
        runs.append(name)
        return result

    def exact() -> Any:
        assert chosen_kernels() == "torch"
        return [X.double() if isinstance(x, Tensor) else x for x in tensors(usual)]

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(tuner, "_milliseconds", lambda run, device: 2.0 - (run.args[0] == "second"))
        candidates = {"second": partial(run, "second", computed), "first": partial(run, "first", usual)}
        with autotune(600, file=tmp_path / "decisions.json"):
            taken = decide(group, CPU, f"{what} {tmp_path}", candidates, "first", exact).taken
    assert taken == ("first" if said else "second") and runs == ["first", "second"]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (bool(said) and group.rank() == 0)
    if texts:
        assert texts[0].startswith(f"{what} {tmp_path}: second is not taken: on rank 1: {said}")


@on_ranks(2)
def test_without_an_exact_result_the_usual_candidate_is_taken(tmp_path: Path) -> None:
    def exact() -> None:
        if group.rank() == 1:
            raise torch.OutOfMemoryError("no memory is left")

    group, file = dist.new_group(), tmp_path / "decisions.json"
    with autotune(600, file=file), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken = decide(group, CPU, f"inexact {tmp_path}", {"a": _nothing, "b": _nothing}, "a", exact)
    assert taken == Decision("a") and not file.exists() and len(caught) == (group.rank() == 0)
    if caught:
        said = "a is taken, since nothing can be compared with it: on rank 1: OutOfMemoryError"
        assert said in str(caught[0].message)


def _tried(file: str, case: str, b: Callable[[], object], lost: bool = False) -> tuple[str, list[str], str, list[bool]]:
    """Try candidate "b" for two cases.

    Return the candidates that ran, the warnings, the error, and for each time that the file was written whether it had
    a candidate that was being tried.

    lost: whether the first rank's GPU is unusable after an error.
    """
    group, runs, writes = dist.new_group(), list[str](), list[bool]()

    def write(path: Path, text: str) -> None:
        writes.append("being tried" in text)
        replace_file(path, text)

    candidates = {"a": partial(runs.append, "a"), "b": lambda: runs.append("b") or b()}  # type: ignore[func-returns-value]
    text = ""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(stored, "replace_file", write)
        patch.setattr(tuner, "_is_lost", lambda device: lost and group.rank() == 0)
        with autotune(600, file=Path(file)):
            try:
                decide(group, CPU, case, candidates, "a", _nothing)
                decide(group, CPU, f"{case} again", candidates, "a", _nothing)
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
    return "".join(runs), [str(warning.message) for warning in caught], text, writes


def _raise(error: BaseException) -> None:
    raise error


def _killed(file: str, case: str) -> dict[str, Any]:
    """Try a candidate in a child that it kills; return what the child leaves in the file."""
    child = os.fork()
    if not child:
        stored.job = lambda: "another job"
        _tried(file, case, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return dict(json.loads(Path(file).read_text())[machine("cpu")])


def test_a_candidate_that_killed_its_run_is_left_out_until_its_entry_is_deleted(tmp_path: Path) -> None:
    file, case = tmp_path / "decisions.json", _case(tmp_path)
    kept = Decision("a", {"a": 1.0})
    add_decisions(file, machine("cpu"), {"another case": kept})
    ranks = pool(1)
    (left,) = ranks.run(_killed, str(file), case)
    assert set(left) == {"another case", "being tried"}
    assert [(trial["candidate"], trial["case"]) for trial in left["being tried"]] == [("b", case)]
    add_decisions(file, machine("cpu"), {"a third case": kept})  # keeps the entry
    ran, texts, error, _ = ranks.run(_tried, str(file), case, _nothing)[0]
    assert (ran, error) == ("", "")  # nothing is left to compare
    assert texts == [
        f"b is not tried: a run ended while it computed {case} for the first time. To try it again, delete its entry"
        f" in 'being tried' of {file}"
    ]
    assert read_decisions(file, machine("cpu")) == {"another case": kept, "a third case": kept}
    document = json.loads(file.read_text())
    del document[machine("cpu")]["being tried"]
    file.write_text(json.dumps(document))
    ran, texts, _, _ = ranks.run(_tried, str(file), f"{case} later", _nothing)[0]
    assert "b" in ran and not texts and set(read_decisions(file, machine("cpu"))) >= {"another case", f"{case} later"}


@pytest.mark.parametrize(
    ("error", "lost", "said", "written"),
    [
        (ValueError("no"), False, "", [True, False, False] * 2),  # the trial, its end, the decision
        (KeyboardInterrupt(), False, "KeyboardInterrupt: ", [True, False]),
        (RuntimeError("an illegal access"), True, "has made a GPU unusable, which ends this run; the next one", [True]),
    ],
)
def test_only_a_candidate_that_ends_the_run_leaves_an_entry(
    tmp_path: Path, error: BaseException, lost: bool, said: str, written: list[bool]
) -> None:
    file = tmp_path / "decisions.json"
    ran, texts, found, writes = pool(1).run(_tried, str(file), _case(tmp_path), partial(_raise, error), lost)[0]
    assert said in found and bool(said) == bool(found) and len(texts) == 2 * (not said) and "b" in ran
    assert writes == written and ("being tried" in file.read_text()) == lost


def test_an_error_of_the_usual_candidate_is_raised(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ValueError: b cannot be computed"):
        pool(2).run(_raising, [0, 1], "b", str(tmp_path / "decisions.json"))


def test_autotune_blocks_cannot_be_nested() -> None:
    with pytest.raises(ValueError, match=r"autotune: -1 seconds: expected 0 or more"), autotune(-1):
        pass
    with autotune(1), pytest.raises(RuntimeError, match="is in such a block already"), autotune(1):
        pass
    assert not tuner.is_autotuning()


def test_decisions_of_another_machine_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "decisions.json"
    ours, theirs = {"case": Decision("a", {"a": 1.0})}, {"case": Decision("b", {"b": 1.0})}
    add_decisions(file, "theirs", theirs)
    add_decisions(file, "ours", ours)
    assert read_decisions(file, "ours") == ours and read_decisions(file, "theirs") == theirs
    assert read_decisions(file, "another") == {}
    assert str(Decision("a", {"b": 2.0, "a": 1.0, "c": 1.5})) == "a 1 ms, c 1.5 ms, b 2 ms"
    assert list(tmp_path.iterdir()) == [file]
    (plain := tmp_path / "plain").touch()
    assert file.stat().st_mode == plain.stat().st_mode, "others may read it as far as umask says"


def test_the_machine_changes_with_versions_and_the_table_of_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.cache_clear()
    before = machine("cpu")
    assert f"torch {torch.__version__}" in before
    table = tmp_path / "configurations.toml"
    table.write_text("")
    machine.cache_clear()
    monkeypatch.setattr(stored, "TABLE", table)
    assert machine("cpu") != before
    machine.cache_clear()
