"""With virtual ranks, training has the same bits in every layout of data parallelism, pipelines and ZeRO.

Losses, norms, weights and moments are compared, of models with tied weights, dropout, clipping and shards of odd sizes.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.tiers import exhaustive
from tests.support.training import CONFIG, decoder_config, new_trainer, options_of, ranks_of
from tpfuse.choices import Implementation
from tpfuse.cli import run as run_command
from tpfuse.comm.sum_order import VirtualRanks, sum_in_rank_order
from tpfuse.errors import UserError
from tpfuse.ops import adamw
from tpfuse.switches import use
from tpfuse.testing.ranks import pool, run_apart
from tpfuse.train import trainer as trainers
from tpfuse.train.model_options import _check_cut as check_cut
from tpfuse.train.options import TrainCommand
from tpfuse.train.rank_model import ModelConfig
from tpfuse.zero import engine
from tpfuse.zero.reducer import direct

VIRTUAL, STEPS = 8, 10
GPT = replace(CONFIG, n_layer=4, n_embd=20)  # shards of stage 3 fill no whole vectors
MKL_CBWR_ALL, MKL_CBWR_STRICT = ~0, 0x10000  # of mkl.h
Piece = tuple[str, tuple[int, ...], tuple[tuple[int, int], ...], Tensor]  # name, shape of the whole, slices, values
Bits = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, weights and moments


def options(**given: Any) -> TrainCommand:
    return options_of(**{"dtype": "float32", "batch": 16, "micro_batch": 1, "virtual_ranks": VIRTUAL, **given})


def train(
    run: TrainCommand, name: Implementation, config: ModelConfig, mutant: str = ""
) -> tuple[list[float], list[float], list[Piece]]:
    """Train on this rank of a pool; return losses, norms, and the weights and moments that this rank owns."""
    with MUTANTS[mutant]() if mutant else use(implementation=name):
        trainer, windows = new_trainer(run, config)
        results = [trainer.train_step(windows, lambda: False) for _ in range(STEPS)]
    owned = [piece for piece in trainer.optimizer.rectangles() if piece.is_owner]
    pieces = [(f"{x.kind}.{x.name}", x.shape, x.slices, x.tensor.detach().clone()) for x in owned]
    return [result.loss for result in results], [result.grad_norm for result in results], pieces


def bits(run: TrainCommand, name: Implementation = "auto", config: ModelConfig = GPT, mutant: str = "") -> Bits:
    """Return what training gives on the ranks of a pool, with whole tensors."""
    ranks = pool(ranks_of(run)).run(train, run, name, config, mutant)
    whole: dict[str, Tensor] = {}
    for key, shape, slices, tensor in (piece for _, _, pieces in ranks for piece in pieces):
        target = whole.setdefault(key, torch.full(shape, torch.nan, dtype=tensor.dtype))
        target[tuple(slice(*bounds) for bounds in slices)] = tensor.view([stop - start for start, stop in slices])
    losses, norms, _ = ranks[0]
    assert all(other[:2] == (losses, norms) for other in ranks)
    assert not any(bool(x.isnan().any()) for x in whole.values()), "every element has an owner"
    return losses, norms, whole


def differing(found: Bits, expected: Bits) -> list[str]:
    """Return what is not equal to the bit, and by how much."""
    assert found[2].keys() == expected[2].keys()
    pairs = {name: (x, found[2][name].reshape(x.shape)) for name, x in expected[2].items()}
    for index, name in enumerate(("losses", "norms")):
        pairs[name] = (
            torch.tensor(expected[index], dtype=torch.float64),
            torch.tensor(found[index], dtype=torch.float64),
        )
    return [
        f"{name} by {(x.double() - y.double()).abs().amax(-1)}"
        for name, (x, y) in reversed(pairs.items())
        if not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (x, y)))
    ]


@functools.cache
def _on_one_rank(given: str) -> Bits:
    return bits(options(**eval(given)))


def on_one_rank(**given: Any) -> Bits:
    """Return the bits of one rank, or of the fewest ranks with these options."""
    return _on_one_rank(repr(given))


FIRST: dict[str, Any] = {"pp": 2, "pp_schedule": "zbv", "dp": 2, "stage": 3}
MORE: list[dict[str, Any]] = [
    {"dp": 2, "pp": 2, "stage": 1},
    *({"dp": dp, "stage": stage} for dp in (2, 4, 8) for stage in range(4)),
    *(
        {"pp": 2, "pp_schedule": schedule, "dp": dp, "stage": stage}
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")
        for dp, stage in ((1, 0), (2, 0), (2, 1), (2, 3), (4, 2))
    ),
    {"pp": 2, "dp": 8, "stage": 1},
    *({"dp": 4, "stage": 3, "replicas": replicas} for replicas in (2, 4)),
    *({"dp": 2, "stage": stage, "offload": "host"} for stage in (0, 2, 3)),
    *({"dp": 4, "stage": stage, "name": "collective"} for stage in range(4)),
]


@pytest.mark.parametrize("layout", [FIRST, *exhaustive(*MORE)], ids=str)
def test_every_layout_gives_the_same_bits(layout: dict[str, Any]) -> None:
    layout = dict(layout)
    name = layout.pop("name", "auto")
    assert differing(bits(options(**layout), name), on_one_rank()) == []


@pytest.mark.exhaustive
def test_the_kernels_of_zero_give_every_number_of_ranks_the_same_bits() -> None:
    """One rank has no such kernels, whose AdamW rounds otherwise than torch's."""
    expected = bits(options(dp=2, stage=1), "fused")
    for layout in ({"dp": 4, "stage": 1}, {"dp": 8, "stage": 2}, {"dp": 2, "stage": 2, "pp": 2}):
        assert differing(bits(options(**layout), "fused"), expected) == [], layout


def settings_of_a_run(flags: list[str], folder: Path) -> tuple[int, bool, str | None, bool | None]:
    """Train in this new process; return the threads, whether denormal numbers are left, MKL_CBWR, and MKL's own word.

    The last says whether MKL's products do not depend on addresses; None if this build of torch does not tell.
    """
    os.environ.pop("MKL_CBWR", None)
    os.environ["OMP_NUM_THREADS"] = "2"
    torch.set_flush_denormal(True)  # as a library does that was linked with -ffast-math
    options = "--train.steps 1 --train.eval-every 0 --train.virtual-ranks 2 --parallel.dp 1"
    assert run_command(["train", *flags, *options.split(), "--out", str(folder)]) == 0
    mkl = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    strict = bool(mkl.mkl_serv_cbwr_get(MKL_CBWR_ALL) & MKL_CBWR_STRICT) if hasattr(mkl, "mkl_serv_cbwr_get") else None
    return torch.get_num_threads(), bool(torch.tensor([1e-30]) * 1e-10), os.environ.get("MKL_CBWR"), strict


def test_a_run_computes_on_one_thread_and_whatever_the_addresses(flags: list[str], tmp_path: Path) -> None:
    """With two threads on one rank, and one on each of two, 152 tensors of a GPT of 256 features were different.

    With MKL_CBWR on some ranks alone, 155 tensors of a GPT on two tensor-parallel ranks were different.
    """
    threads, denormal, given, strict = run_apart(settings_of_a_run, flags, tmp_path / "run")
    assert (threads, denormal) == (1, True)
    instructions = torch.backends.cpu.get_cpu_capability()
    expected = f"{instructions},STRICT" if instructions in ("AVX2", "AVX512") else None
    assert given == expected
    assert expected is None or strict in (True, None), "MKL had computed before"


KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "autocast": {"autocast": "bfloat16"},
    "half moments": {"optim": {"state_dtype": "bfloat16"}},
    "Muon": {"optim": {"name": "muon"}},
    "Muon in bfloat16": {"dtype": "bfloat16", "optim": {"name": "muon"}},
    "recompute": {"recompute": "selective"},
    "chains": {"virtual_ranks": 4, "micro_batch": 2},
    "tp": {"tp": 2},
    "tp in bfloat16": {"tp": 2, "dtype": "bfloat16"},
    "cp": {"cp": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_has_the_same_bits(kind: str) -> None:
    layouts: list[dict[str, Any]] = [{"dp": 2, "stage": 1}, {"dp": 4, "stage": 2}, {"dp": 2, "stage": 3}]
    if kind != "cp":
        layouts += [{"dp": 2, "pp": 2}, {"pp": 2, "pp_schedule": "zbv", "dp": 2, "stage": 3}]
    expected = on_one_rank(**KINDS[kind])
    assert {str(each): differing(bits(options(**KINDS[kind], **each)), expected) for each in layouts} == {
        str(each): [] for each in layouts
    }


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any], Implementation]:
    """Return the kind of a training, a layout, and an implementation."""
    random = Random(seed)
    pick = random.choice
    chosen = pick(
        [*({"virtual_ranks": n, "batch": 32, "micro_batch": pick([1, 2, 4])} for n in (2, 4, 8)), {"tp": 2}, {"cp": 2}]
    )
    kind: dict[str, Any] = chosen | {
        "dtype": pick(["float32", "bfloat16"]), "recompute": pick(["none", "selective", "full"]),
        "clip": pick([0.0, 0.3]),
        "seed": seed, "optim": {"name": pick(["adamw", "muon"])},
    }  # fmt: skip
    most = min(kind.get("virtual_ranks", VIRTUAL), 4)
    layout: dict[str, Any] = {"dp": 2 ** random.randrange(most.bit_length()), "stage": random.randrange(4)}
    if random.random() < 0.5:
        layout |= {"pp": 2, "pp_schedule": pick(["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])}
    if layout["stage"] == 3 and "cp" not in kind:
        layout["replicas"] = 2 ** random.randrange(layout["dp"].bit_length())
    return kind, layout, "auto" if {"tp", "cp"} & kind.keys() else pick(["auto", "collective"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(48))
def test_layouts_drawn_by_a_seed_have_the_same_bits(seed: int) -> None:
    kind, layout, name = drawn(seed)
    try:
        run = options(**kind, **layout)
        found = bits(run, name)
    except ValueError as error:  # the schedule refuses this number of micro-batches
        pytest.skip(str(error))
    assert differing(found, on_one_rank(**kind)) == [], (kind, layout, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "optimizer"), [("llama", "adamw"), ("qwen3", "adamw"), ("mixtral", "muon")])
def test_models_of_transformers_have_the_same_bits(family: str, optimizer: str) -> None:
    config, kind = decoder_config(family, num_hidden_layers=4), {"optim": {"name": optimizer}}
    expected = bits(options(**kind), "auto", config)
    for layout in ({"dp": 2, "stage": 1}, {"dp": 4, "stage": 3}, {"pp": 2, "dp": 2, "stage": 2}, {"pp": 2, "stage": 1}):
        assert differing(bits(options(**kind, **layout), "auto", config), expected) == [], layout


@pytest.mark.parametrize(("family", "settings"), [("llama_tied", {}), ("llama", {"attention_dropout": 0.1})])
def test_models_whose_bits_depend_on_the_pipeline_are_refused(family: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"--train.virtual-ranks with --parallel.pp 2: the model (has|ties)"):
        check_cut(options(pp=2), decoder_config(family, **settings))


def _with_own_rank_first(parts: list[Tensor], out: Tensor) -> None:
    own = torch.distributed.get_rank()
    sum_in_rank_order([*parts[own:], *parts[:own]], out)


@contextmanager
def _replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of modules and classes."""
    with ExitStack() as patches:
        for place in places:
            patches.enter_context(mock.patch.object(*place))
        yield


MUTANTS: dict[str, Any] = {
    "own rank first": lambda: _replaced((direct, "sum_in_tree", _with_own_rank_first)),
    "a chain over ranks": lambda: _replaced((direct, "sum_in_tree", sum_in_rank_order)),
    "a chain over virtual ranks": lambda: _replaced((VirtualRanks, "of_micro_batch", lambda *_: 0)),
    "a norm by shards": lambda: _replaced((engine, "rounded", lambda total, *_: total)),
    "shards as they are cut": lambda: _replaced((adamw, "_filled", lambda x: x)),
    "both uses of the embedding together": lambda: _replaced((trainers, "SharedParameters", lambda *_: None)),
}
BROKEN: dict[str, dict[str, Any]] = {
    "own rank first": {"dp": 4, "stage": 1},
    "a chain over ranks": {"dp": 4, "stage": 1},
    "a chain over virtual ranks": {"dp": 2, "stage": 1},
    "a norm by shards": {"dp": 2, "stage": 1},
    "shards as they are cut": {"dp": 2, "stage": 3},
    "both uses of the embedding together": {"pp": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", BROKEN)
def test_each_rule_is_needed(mutant: str) -> None:
    """One rank and several break the same rule; the bits differ."""
    expected = bits(options(), mutant=mutant)
    assert differing(bits(options(**BROKEN[mutant]), mutant=mutant), expected)
