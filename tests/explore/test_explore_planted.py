"""A sequential run finds each of 52 faults planted in two protocols; 6 correct variants of them pass every schedule.

The kind of a fault is `order` if the result is wrong under some interleaving, `weak` if only hardware that reorders
accesses shows it (semantics, scopes, barriers), `hang` if the program can block, and `data` if the result is always
wrong. Tests with real processes, which compared results with a reference, showed 35 of the 52 faults, with or without
random delays.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.support.tiers import exhaustive
from tpfuse.explore import ExploreError, ProtocolError, Sequential, explore
from tpfuse.explore.fresh_modules import fresh

FOLDER = Path(__file__).parent / "protocols"


def _protocol(name):
    spec = importlib.util.spec_from_file_location(f"tpfuse_tests_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GATHER, SCATTER = _protocol("push_all_gather"), _protocol("push_reduce_scatter")

# all-gather
SIGNAL = 'tl.atomic_xchg(flag + rank * C + chunk, epoch, sem="release", scope="sys")'
POLL = 'while tl.atomic_add(flags + tile, 0, sem="acquire", scope="sys") != epoch:'
STORE = "tl.store(slot + (rank * C + chunk) * SIZE + offs, tl.load(x + chunk * SIZE + offs))"
GUARD = "        memory.barrier()  # before a peer pushes again what is still read here\n"
LAUNCH = "        multiply["
BARRIER = "    tl.debug_barrier()\n"
AT_LEAST = (POLL, POLL.replace("!=", "<"))
NO_GUARD, GUARD_EARLY = (GUARD, ""), (LAUNCH, "        memory.barrier()\n" + LAUNCH)
GUARD_HALF = (GUARD, GUARD.replace("memory", "if epoch % 2: memory"))
# reduce-scatter
TAKE = 'while tl.atomic_cas(there, 0, 1, sem="release", scope="sys") != 0:\n                pass'
GIVE = 'while tl.atomic_cas(here + pid * W + peer, 1, 0, sem="acquire", scope="sys") != 1:\n                pass'
XCHG = (TAKE, 'tl.atomic_xchg(there, 1, sem="release", scope="sys")')
KEEP = (GIVE, GIVE.replace("1, 0", "1, 1"))
BEGIN = "    barrier(pads, pid, rank, W)\n    slot = "
READS = "    for source in range(W):\n        acc += tl.load(slot + source * SIZE + offs)\n"
END = "    tl.store(out + offs, acc)\n    barrier(pads, pid, rank, W)\n"
PEERS = "        if peer != rank:\n            "
PAIR = "        if (peer != rank) and (peer + rank != 1):\n            "
SIGNALS, WAITS = "    for peer in range(W):\n" + PEERS + "there", "    here = tl.load"


def _in(text, old, new):
    return text, text.replace(old, new)


PLANTED = {  # name: (protocol, kind, substitutions)
    "as it is": (GATHER, "correct", []),
    "signal by counting": (GATHER, "correct", [(SIGNAL, SIGNAL.replace("xchg", "add").replace("epoch", "1"))]),
    "wait for at least": (GATHER, "correct", [AT_LEAST]),
    "no signal": (GATHER, "hang", [(SIGNAL, "pass")]),
    "no signal to one peer": (GATHER, "hang", [(SIGNAL, f"if pid // C != 0:\n        {SIGNAL}")]),
    "no wait": (GATHER, "order", [(POLL, "while False:")]),
    "no wait for the last chunk": (GATHER, "order", [_in(POLL, "while ", "while (pid != W * C - 1) and ")]),
    "no guard": (GATHER, "order", [NO_GUARD]),
    "guard before the reads": (GATHER, "order", [NO_GUARD, GUARD_EARLY]),
    "guard every other time": (GATHER, "order", [GUARD_HALF]),
    "at least, no guard": (GATHER, "order", [AT_LEAST, NO_GUARD]),
    "at least, guard before the reads": (GATHER, "order", [AT_LEAST, NO_GUARD, GUARD_EARLY]),
    "at least, guard every other time": (GATHER, "order", [AT_LEAST, GUARD_HALF]),
    "signal the old epoch": (GATHER, "hang", [_in(SIGNAL, "epoch", "epoch - 1")]),
    "wait for the old epoch": (GATHER, "order", [_in(POLL, "!= epoch", "< epoch - 1")]),
    "wait for any epoch": (GATHER, "order", [_in(POLL, "!= epoch", "== 0")]),
    "relaxed signal": (GATHER, "weak", [_in(SIGNAL, "release", "relaxed")]),
    "relaxed wait": (GATHER, "weak", [_in(POLL, "acquire", "relaxed")]),
    "signal of scope gpu": (GATHER, "weak", [_in(SIGNAL, "sys", "gpu")]),
    "wait of scope gpu": (GATHER, "weak", [_in(POLL, "sys", "gpu")]),
    "semantics swapped": (GATHER, "weak", [_in(SIGNAL, "release", "acquire"), _in(POLL, "acquire", "release")]),
    "signal by a store": (GATHER, "weak", [(SIGNAL, "tl.store(flag + rank * C + chunk, epoch)")]),
    "wait by a load": (GATHER, "weak", [(POLL, "while tl.load(flags + tile, volatile=True) != epoch:")]),
    "signal before the store": (GATHER, "order", [(STORE, SIGNAL), (BARRIER + "    " + SIGNAL, "    " + STORE)]),
    "no debug_barrier": (GATHER, "weak", [(BARRIER, "")]),
    "signal to the wrong peer": (GATHER, "hang", [_in("tl.load(flags + peer)", "peer", "(peer + 1) % W")]),
    "wait on the wrong source": (GATHER, "hang", [_in(POLL, "flags + tile", "flags + (tile + C) % (W * C)")]),
    "wait on another source": (GATHER, "order", [_in(POLL, "+ tile", "+ ((rank + 1) % W) * C + tile % C")]),
    "signal the next chunk": (GATHER, "order", [_in(SIGNAL, "+ chunk", "+ (chunk + 1) % C")]),
    "wait for the next chunk": (GATHER, "order", [_in(POLL, "+ tile", "+ source * C + (tile + 1) % C")]),
    "wait for the first chunk": (GATHER, "order", [_in(POLL, "+ tile", "+ source * C")]),
    "store at the next chunk": (GATHER, "data", [_in(STORE, "(rank * C + chunk)", "(rank * C + (chunk + 1) % C)")]),
    "half stored after the signal": (
        GATHER,
        "order",
        [
            (STORE, STORE[:-1] + ", mask=offs < SIZE // 2)"),
            (SIGNAL, SIGNAL + "\n    " + STORE[:-1] + ", mask=offs >= SIZE // 2)"),
        ],
    ),
    "barrier as it is": (SCATTER, "correct", []),
    "barrier without debug_barrier": (SCATTER, "weak", [(BARRIER, "")]),
    "barrier of acq_rel": (SCATTER, "correct", [_in(TAKE, "release", "acq_rel"), _in(GIVE, "acquire", "acq_rel")]),
    "no first barrier": (SCATTER, "order", [(BEGIN, "    slot = ")]),
    "no second barrier": (SCATTER, "order", [(END, END.split("    barrier")[0])]),
    "barrier only waits": (SCATTER, "hang", [(TAKE, "pass")]),
    "barrier only signals": (SCATTER, "hang", [(GIVE, "pass")]),
    "barrier, relaxed signal": (SCATTER, "weak", [_in(TAKE, "release", "relaxed")]),
    "barrier, relaxed wait": (SCATTER, "weak", [_in(GIVE, "acquire", "relaxed")]),
    "barrier, signal of scope gpu": (SCATTER, "weak", [_in(TAKE, "sys", "gpu")]),
    "barrier, wait of scope gpu": (SCATTER, "weak", [_in(GIVE, "sys", "gpu")]),
    "barrier, semantics swapped": (SCATTER, "weak", [_in(TAKE, "release", "acquire"), _in(GIVE, "acquire", "release")]),
    "signal in the receiver's place": (SCATTER, "hang", [("+ pid * W + rank\n", "+ pid * W + peer\n")]),
    "signal overwrites": (SCATTER, "hang", [XCHG]),
    "wait does not reset": (SCATTER, "hang", [KEEP]),
    "signal overwrites, wait does not reset": (SCATTER, "order", [KEEP, XCHG]),
    "one place for all programs": (
        SCATTER,
        "correct",
        [("+ pid * W + rank\n", "+ rank\n"), ("here + pid * W + peer", "here + peer")],
    ),
    "signal to the next program": (
        SCATTER,
        "order",
        [("+ pid * W + rank\n", "+ ((pid + 1) % tl.num_programs(0)) * W + rank\n")],
    ),
    "first barrier of program 0": (SCATTER, "order", [(BEGIN, "    if pid == 0:\n    " + BEGIN)]),
    "second barrier of program 0": (SCATTER, "order", [_in(END, "    barrier", "    if pid == 0:\n        barrier")]),
    "one pair left out": (
        SCATTER,
        "order",
        [(PEERS + "there", PAIR + "there"), (PEERS + "while tl.atomic_cas(here", PAIR + "while tl.atomic_cas(here")],
    ),
    "one slot for all": (SCATTER, "data", [("slot + rank * M * N", "slot")]),
    "second barrier before the reads": (
        SCATTER,
        "order",
        [(END, END.split("    barrier")[0]), (READS, "    barrier(pads, pid, rank, W)\n" + READS)],
    ),
    "last slot read late": (
        SCATTER,
        "order",
        [
            _in(READS, "range(W)", "range(W - 1)"),
            (
                END,
                "    barrier(pads, pid, rank, W)\n    acc += tl.load(slot + (W - 1) * SIZE + offs)\n"
                "    tl.store(out + offs, acc)\n",
            ),
        ],
    ),
    "wait, then signal": (SCATTER, "hang", None),
}


def _source(name):
    module, _, substitutions = PLANTED[name]
    text = Path(module.__file__).read_text()
    if substitutions is None:  # swap the two loops of the barrier
        head, rest = text.split(SIGNALS)
        signal, rest = rest.split(WAITS)
        wait, tail = rest.split("\n\n\n", 1)
        return head + WAITS + wait + "\n" + SIGNALS + signal.rstrip() + "\n\n\n" + tail
    for old, new in substitutions:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return text


def _names(correct):
    """Return names as parameters: the first of each kind in each protocol belongs to the first tier."""

    firsts = {(module, kind): name for name, (module, kind, _) in reversed(PLANTED.items())}
    names = [name for name, (_, kind, _) in PLANTED.items() if (kind == "correct") == correct]
    return [x for name in names for x in ([name] if name in firsts.values() else exhaustive(name))]


@pytest.mark.parametrize("name", _names(correct=False))
def test_a_sequential_run_finds(name: str) -> None:
    module = PLANTED[name][0]
    with fresh([module], {module.__name__: _source(name)}) as [copy], pytest.raises(ExploreError) as caught:
        explore(copy.program, 3, schedules=[Sequential()])
    if isinstance(caught.value, ProtocolError):
        assert "wrong result" in str(caught.value)


@pytest.mark.parametrize("name", _names(correct=True))
def test_no_alarm_on(name: str) -> None:
    module = PLANTED[name][0]
    with fresh([module], {module.__name__: _source(name)}) as [copy]:
        report = explore(copy.program, 3, seeds=range(1))
    assert len(report.schedules) == 3
