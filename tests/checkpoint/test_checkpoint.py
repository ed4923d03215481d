"""Checkpoints load bit by bit on any layout, and old checkpoints are kept as documented."""

import itertools
import json
import math
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.support.tiers import exhaustive
from tpfuse.checkpoint import checkpoint, manifest, safetensors_file
from tpfuse.checkpoint.checkpoint import CheckpointError, Shard
from tpfuse.comm.layout import Slices
from tpfuse.errors import UserError
from tpfuse.testing.ranks import pool
from tpfuse.zero.shard_slices import rectangles, state_rectangles

SHAPES = {
    "scalar": ((), torch.float64),
    "one": ((1,), torch.float32),
    "empty": ((0, 63), torch.bfloat16),
    "matrix": ((63, 100), torch.float32),
    "half": ((17, 5), torch.float16),
    "cube": ((3, 4, 5), torch.bfloat16),
    "wide": ((2, 999), torch.float64),
    "ids": ((129,), torch.int64),
    "bytes": ((1001,), torch.uint8),
    "flags": ((7,), torch.bool),
}
STATE = {"layout": {"tp": 2}, "rate": 0.1, "lowest loss": math.inf, "ε": ["a", None, -1]}


def wholes(seed: int) -> dict[str, Tensor]:
    """Return global tensors of random bits, including NaNs with payloads."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, dtype) in SHAPES.items():
        size = torch.empty((), dtype=dtype).element_size() * math.prod(shape)
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
        tensors[name] = bits.view(dtype).view(shape)
    return tensors


def shard(whole: Tensor, slices: Slices, is_owner: bool = True) -> Shard:
    return Shard(tuple(whole.shape), slices, whole[tuple(slice(*s) for s in slices)], is_owner)


def whole_shards(seed: int) -> dict[str, list[Shard]]:
    return {name: [shard(whole, tuple((0, n) for n in whole.shape))] for name, whole in wholes(seed).items()}


def grid_shards(seed: int, rank: int, world: int) -> dict[str, list[Shard]]:
    """Cut every tensor into a random grid. Some cells are empty, and some are held by several ranks, one of which
    writes."""
    choose = random.Random(seed)
    shards = {}
    for name, whole in wholes(seed).items():
        cells = [1] * whole.ndim
        for _ in range(3):
            if whole.ndim and world % (math.prod(cells) * 2) == 0:
                cells[choose.randrange(whole.ndim)] *= 2
            if whole.ndim and world % (math.prod(cells) * 3) == 0:
                cells[choose.randrange(whole.ndim)] *= 3
        cell, slices = rank % math.prod(cells), []
        for size, count in zip(whole.shape, cells, strict=True):
            cuts = [0, *sorted(choose.randint(0, size) for _ in range(count - 1)), size]
            slices.append((cuts[cell % count], cuts[cell % count + 1]))
            cell //= count
        is_owner = rank // math.prod(cells) == choose.randrange(world // math.prod(cells))
        shards[name] = [shard(whole, tuple(slices), is_owner)]
    return shards


def silent(line: str) -> None:
    raise AssertionError(f"unexpected warning: {line}")


def save_shards(run: Path, make: Callable[..., Any], seed: int, step: int = 1) -> str:
    group = dist.group.WORLD
    assert group is not None
    shards = make(seed, group.rank(), group.size())
    return str(checkpoint.save(run, step, shards, STATE, keep=0, group=group, warn=silent))


def load_shards(folder: Path, make: Callable[..., Any], seed: int) -> bool:
    expected = make(seed, dist.get_rank(), dist.get_world_size())
    saved = checkpoint.Checkpoint(folder)
    assert_loads(saved, expected)
    assert checkpoint.differing(saved, expected, dist.group.WORLD) == [], "however the tensors are cut"
    return True


def assert_written_once(saved: checkpoint.Checkpoint, seed: int) -> None:
    in_files = sum(t.nbytes for name in saved.manifest["files"] for t in load_file(saved.folder / name).values())
    assert in_files == sum(whole.nbytes for whole in wholes(seed).values())


def assert_loads(saved: checkpoint.Checkpoint, expected: dict[str, list[Shard]]) -> None:
    """Load into shards filled with other values, and check that they equal the expected shards bit by bit."""
    shards = {
        name: [Shard(p.shape, p.slices, torch.ones_like(p.tensor).contiguous(), False) for p in held]
        for name, held in expected.items()
    }
    saved.load(shards)
    for name, held in expected.items():
        for loaded, wanted in zip(shards[name], held, strict=True):
            assert loaded.tensor.dtype == wanted.tensor.dtype
            assert torch.equal(bits(loaded.tensor), bits(wanted.tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def save_whole(run: Path, step: int, *, keep: int = 0, warn=silent) -> Path | None:
    return checkpoint.save(run, step, whole_shards(step), STATE | {"step": step}, keep=keep, group=None, warn=warn)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_one_rank_loads_what_it_saved(tmp_path):
    run = tmp_path / "new" / "run"
    assert save_whole(run, 5) == run / "step-5"
    assert names(run / "step-5") == ["manifest.json", "rank-00000.safetensors"]
    saved = checkpoint.newest_good(run, warn=silent)
    assert saved.step == 5 and saved.folder == run / "step-5"
    assert saved.state == STATE | {"step": 5}
    assert_loads(saved, whole_shards(5))


@pytest.mark.parametrize("chunk", [7, 4 * 2**20, *exhaustive(1, 64)])
def test_files_are_read_by_the_safetensors_library(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", chunk)
    expected = wholes(1)
    shards = whole_shards(1)
    transposed = expected["matrix"].T
    shards["transposed"] = [shard(transposed, ((0, 100), (0, 63)))]
    shards["strided"] = [shard(expected["cube"][:, ::2, 1:4], ((0, 3), (0, 2), (0, 3)))]
    folder = checkpoint.save(tmp_path, 1, shards, {}, keep=0, group=None, warn=silent)
    content = (folder / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(content[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % shards[name][0].tensor.element_size() == 0, f"{name} is not aligned"
    loaded = load_file(folder / "rank-00000.safetensors")
    assert loaded.keys() == shards.keys() - {"empty"}
    for name, tensor in loaded.items():
        assert torch.equal(bits(tensor), bits(shards[name][0].tensor)), name


@pytest.mark.parametrize(("world", "seeds"), [(3, 1), *exhaustive((1, 2), (2, 5), (3, 5), (4, 5))])
def test_random_grids_of_shards_load_into_one_another(tmp_path, world, seeds):
    for seed in range(seeds):
        folder = tmp_path / f"{seed}" / "step-1"
        assert pool(world).run(save_shards, folder.parent, grid_shards, seed) == [str(folder)] * world
        assert pool(world % 4 + 1).run(load_shards, folder, grid_shards, seed) == [True] * (world % 4 + 1)
        saved = checkpoint.newest_good(folder.parent, warn=silent)
        assert_written_once(saved, seed)
        for cells in (1, 2, 3, 4, 6, 12):
            for rank in range(cells):
                assert_loads(saved, grid_shards(seed, rank, cells))


def test_what_was_loaded_wrong_is_named(tmp_path):
    save_whole(tmp_path, 1)
    saved = checkpoint.newest_good(tmp_path, warn=silent)
    for name, (shape, _) in SHAPES.items():
        shards = whole_shards(1)
        assert checkpoint.differing(saved, shards, None) == []
        if not math.prod(shape):
            continue
        elements = bits(shards[name][0].tensor).view(math.prod(shape), -1)
        changed = elements.clone()
        changed[-1] ^= 1
        swapped = elements.roll(1, 0)
        for wrong in (changed, swapped)[: len(elements)]:
            shards[name][0].tensor = wrong.view(-1).view(shards[name][0].tensor.dtype).view(shape)
            assert checkpoint.differing(saved, shards, None) == [name]


def wrong_copy(run: Path) -> list[str]:
    """Return what differs if the second rank's copy, which it does not save, is wrong in one element."""
    shards = {"w": [Shard((5,), ((0, 5),), torch.arange(5.0), dist.get_rank() == 0)]}
    checkpoint.save(run, 1, shards, STATE, keep=0, group=dist.group.WORLD, warn=silent)
    shards["w"][0].tensor[3] += dist.get_rank()
    return checkpoint.differing(checkpoint.Checkpoint(run / "step-1"), shards, dist.group.WORLD)


def test_a_wrong_copy_of_another_rank_is_named(tmp_path):
    assert pool(2).run(wrong_copy, tmp_path) == [["w of rank 1"]] * 2


def test_only_ranks_that_write_have_a_file(tmp_path):
    folder = Path(pool(3).run(save_one_writer, tmp_path)[0])
    assert names(folder) == ["manifest.json", "rank-00001.safetensors"]
    assert_loads(checkpoint.newest_good(tmp_path, warn=silent), whole_shards(1))


def save_one_writer(run: Path) -> str:
    shards = whole_shards(1)
    for (each,) in shards.values():
        each.is_owner = dist.get_rank() == 1
    return str(checkpoint.save(run, 1, shards, {}, keep=0, group=dist.group.WORLD, warn=silent))


def test_loading_writes_into_views_in_place(tmp_path):
    save_whole(tmp_path, 1)
    flat = torch.full((63 * 100 + 10,), 7.0)
    view = flat[5 : 5 + 30 * 40].view(40, 30).T.requires_grad_()
    shard_of_matrix = Shard((63, 100), ((20, 50), (60, 100)), view, False)
    checkpoint.newest_good(tmp_path, warn=silent).load({"matrix": [shard_of_matrix]})
    expected = wholes(1)["matrix"][20:50, 60:100]
    assert torch.equal(view.detach().contiguous().view(torch.int32), expected.contiguous().view(torch.int32))
    assert flat[:5].eq(7).all() and flat[5 + 30 * 40 :].eq(7).all()


@pytest.mark.parametrize("change", ["name", "shape", "dtype"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, change):
    save_whole(tmp_path, 1)
    shards = {
        "one": [Shard((1,), ((0, 1),), torch.full((1,), 7.0), True)],
        "missing" if change == "name" else "matrix": [
            shard(
                torch.zeros((64 if change == "shape" else 63, 100), dtype=torch.half if change == "dtype" else None),
                ((0, 64 if change == "shape" else 63), (0, 100)),
            )
        ],
    }
    with pytest.raises(UserError, match="missing" if change == "name" else "matrix") as caught:
        checkpoint.newest_good(tmp_path, warn=silent).load(shards)
    assert "\n" not in str(caught.value)
    assert shards["one"][0].tensor.item() == 7.0


def test_wrong_shards_states_and_steps_are_refused(tmp_path):
    wrong = Shard((4, 4), ((0, 2), (0, 4)), torch.zeros(4, 4), True)
    with pytest.raises(ValueError, match="shard of w"):
        checkpoint.save(tmp_path, 1, {"w": [wrong]}, {}, keep=0, group=None, warn=silent)
    with pytest.raises(ValueError, match="complex64"):
        numbers = shard(torch.zeros(3, dtype=torch.complex64), ((0, 3),))
        checkpoint.save(tmp_path, 1, {"w": [numbers]}, {}, keep=0, group=None, warn=silent)
    with pytest.raises(TypeError, match="JSON"):
        checkpoint.save(tmp_path, 1, {}, {"path": object()}, keep=0, group=None, warn=silent)
    with pytest.raises(ValueError, match="step is -1"):  # `newest_good` would not find it
        checkpoint.save(tmp_path, -1, {}, {}, keep=0, group=None, warn=silent)
    assert not list(tmp_path.glob("step-*"))


def save_wrong(run: Path, what: str) -> str:
    """Save shards that cannot be saved and then shards that can. Every rank must leave the first call in step."""
    rank, group = dist.get_rank(), dist.group.WORLD
    rows = {"gap": (rank * 5, rank * 5 + 4), "overlap": (0, 10), "shape": (rank * 5, rank * 5 + 5)}
    start, stop = rows.get(what, (rank * 5, rank * 5 + 5))
    wrong = Shard((10 + (what == "shape") * rank, 2), ((start, stop), (0, 2)), torch.ones(stop - start, 2), True)
    if what == "scalar":
        wrong = Shard((), (), torch.ones(()), True)
    if what == "raise" and rank == 1:
        wrong.tensor = None  # type: ignore[assignment]
    state = {"x": object()} if what == "state" else {}
    try:
        checkpoint.save(run, 1, {"w": [wrong]}, state, keep=0, group=group, warn=silent)
        message = "saved"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    assert save_shards(run, grid_shards, 0, 2) == str(run / "step-2")
    return message


def save_slowly(run: Path) -> list[str]:
    """Save while the ranks' collectives have a second, and reading an older checkpoint takes two."""
    group = dist.new_group(timeout=timedelta(seconds=1), backend="gloo")
    good = checkpoint._good
    with mock.patch.object(checkpoint, "_good", lambda folder: (sleep(2), good(folder))[1]):
        for step in (1, 2, 3):
            checkpoint.save(run, step, grid_shards(0, group.rank(), 2), {}, keep=2, group=group, warn=silent)
    dist.destroy_process_group(group)
    return names(run)


def test_ranks_wait_while_older_checkpoints_are_read(tmp_path):
    assert pool(2).run(save_slowly, tmp_path) == [["step-2", "step-3"]] * 2


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("gap", "ValueError: w cannot be saved: no slice holds 4", ""),
        ("overlap", "ValueError: w cannot be saved: the slice", ""),
        ("scalar", "ValueError: w cannot be saved: the slice ()", ""),
        ("shape", "ValueError: w is F32 (11, 2) on rank 1", ""),
        ("raise", "RankFailed: saving a checkpoint failed on rank 1: AttributeError", "AttributeError"),
        ("state", "TypeError", "RankFailed: saving a checkpoint failed on rank 0: TypeError"),
    ],
)
def test_errors_of_one_rank_reach_all(tmp_path, what, first, second):
    messages = pool(2).run(save_wrong, tmp_path, what)
    assert messages[0].startswith(first) and messages[1].startswith(second or first)
    assert names(tmp_path) == ["step-2"]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 10, 9, 30):
        assert save_whole(tmp_path, step, keep=3 if step > 2 else 0)
    assert names(tmp_path) == ["step-10", "step-30", "step-9"]
    save_whole(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-30", "step-5"], "a step that is saved later than a newer one is kept"


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save_whole(tmp_path, step)
    flip(tmp_path / "step-3" / "rank-00000.safetensors", -1)
    (tmp_path / "step-4" / "manifest.json").unlink()
    warnings = []
    save_whole(tmp_path, 5, keep=2, warn=warnings.append)
    assert names(tmp_path) == ["step-2", "step-3", "step-4", "step-5"]
    assert len(warnings) == 2 and "step-4/manifest.json" in warnings[0] and "step-3/rank-00000" in warnings[1]


def flip(file: Path, index: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[index] ^= 1 << bit
    file.write_bytes(content)


def test_a_good_step_is_never_written_over(tmp_path, monkeypatch):
    folder = save_whole(tmp_path, 1)
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    assert checkpoint.save(tmp_path, 1, whole_shards(99), {}, keep=1, group=None, warn=silent) == folder
    assert {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()} == before
    assert names(tmp_path) == ["step-1"]
    # The save that made it may have failed after its rename.
    synced = []
    monkeypatch.setattr(checkpoint, "sync_folder", synced.append)
    checkpoint.save(tmp_path, 1, whole_shards(99), {}, keep=1, group=None, warn=silent)
    assert synced == [tmp_path]


def test_a_damaged_step_is_replaced(tmp_path):
    warnings = []
    flip(save_whole(tmp_path, 1) / "rank-00000.safetensors", 100)
    assert save_whole(tmp_path, 1, keep=1, warn=warnings.append) == tmp_path / "step-1"
    assert len(warnings) == 1 and "step-1/rank-00000.safetensors: expected SHA-256" in warnings[0]
    assert names(tmp_path) == ["step-1"]
    assert_loads(checkpoint.newest_good(tmp_path, warn=silent), whole_shards(1))


def test_files_that_are_no_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "step-7.txt").write_text("mine")
    (tmp_path / "step-007").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert checkpoint.newest_good(tmp_path, warn=silent) is None
    assert checkpoint.newest_good(tmp_path / "nowhere", warn=silent) is None
    save_whole(tmp_path, 1, keep=1)
    save_whole(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["metrics.jsonl", "step-007", "step-2", "step-7.txt"]


def test_a_file_that_differs_from_the_manifest_is_found_while_loading(tmp_path):
    """The file differs between verification and loading, or on a rank that did not verify it."""
    folder = save_whole(tmp_path, 1)
    saved = checkpoint.Checkpoint(folder)
    (folder / "rank-00000.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: expected \d+ bytes, found 4 bytes"):
        saved.load(whole_shards(1))
    saved.sound.add("rank-00000.safetensors")  # the bytes when it was verified
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: expected a readable safetensors file"):
        saved.load(whole_shards(1))
    other = tmp_path / "other"
    checkpoint.save(other, 1, {"one": [shard(torch.zeros(3), ((0, 3),))]}, {}, keep=0, group=None, warn=silent)
    (other / "step-1" / "rank-00000.safetensors").rename(folder / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"expected one as \('F32', \[1\]\), found \('F32', \[3\]\)"):
        saved.load({"one": [shard(torch.zeros(1), ((0, 1),))]})


def cut_shards(seed: int, rank: int, world: int) -> dict[str, list[Shard]]:
    """Cut every tensor into two column shards if possible, and give each rank a random range of the elements."""
    choose = random.Random(seed)
    shards: dict[str, list[Shard]] = {}
    for name, whole in wholes(seed).items():
        middle = whole.shape[-1] // 2 if whole.ndim else 0
        columns = [(0, middle), (middle, whole.shape[-1])] if middle else [None]
        for column in columns:
            place = tuple((0, size) for size in whole.shape)
            place = place if column is None else (*place[:-1], column)
            size = math.prod(b - a for a, b in place)
            cuts = [0, *sorted(choose.randint(0, size) for _ in range(world - 1)), size]
            owned = range(cuts[rank], cuts[rank + 1])
            flat = whole[tuple(slice(*each) for each in place)].flatten()[owned.start : owned.stop]
            for piece in state_rectangles(name, tuple(whole.shape), place, owned, {"model": flat}, True):
                shards.setdefault(name, []).append(Shard(piece.shape, piece.slices, piece.tensor, piece.is_owner))
    return shards


@pytest.mark.parametrize(("world", "seeds"), [(3, 1), *exhaustive((1, 3), (3, 5))])
def test_a_rank_saves_several_shards_of_one_tensor(tmp_path, world, seeds):
    for seed in range(seeds):
        folder = tmp_path / f"{seed}" / "step-1"
        assert pool(world).run(save_shards, folder.parent, cut_shards, seed) == [str(folder)] * world
        saved = checkpoint.newest_good(folder.parent, warn=silent)
        keys = [(s["file"], s["key"]) for table in saved.manifest["tensors"].values() for s in table["slices"]]
        assert len(set(keys)) == len(keys) > len(SHAPES)
        assert_written_once(saved, seed)
        assert pool(2).run(load_shards, folder, cut_shards, seed) == [True] * 2
        for ranks in (1, 3, 4, 7):
            for rank in range(ranks):
                assert_loads(saved, cut_shards(seed, rank, ranks))
                assert_loads(saved, grid_shards(seed, rank, ranks))


def test_keys_are_the_name_of_the_tensor_and_a_number_from_the_second_on(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    shards = {"w": [shard(whole, ((1, 2), (0, 4)), False), *(shard(whole, ((i, i + 1), (0, 4))) for i in range(3))]}
    folder = checkpoint.save(tmp_path, 1, shards, {}, keep=0, group=None, warn=silent)
    loaded = load_file(folder / "rank-00000.safetensors")
    assert {key: tensor.tolist() for key, tensor in loaded.items()} == {
        "w": [[0, 1, 2, 3]],
        "w#1": [[4, 5, 6, 7]],
        "w#2": [[8, 9, 10, 11]],
    }
    with pytest.raises(ValueError, match="w#1 cannot be saved"):
        checkpoint.save(tmp_path, 2, {"w#1": shards["w"]}, {}, keep=0, group=None, warn=silent)
    with pytest.raises(ValueError, match="w has shards of different tensors on one rank"):
        other = [shards["w"][0], shard(whole.half(), ((0, 1), (0, 4)))]
        checkpoint.save(tmp_path, 2, {"w": other}, {}, keep=0, group=None, warn=silent)
    with pytest.raises(ValueError, match="overlaps"):
        checkpoint.save(tmp_path, 2, {"w": shards["w"] + shards["w"][1:]}, {}, keep=0, group=None, warn=silent)


def random_partition(choose: random.Random, shape: tuple[int, ...], cuts: int) -> list[Slices]:
    """Return the rectangles that result from cutting a random one in two again and again."""
    whole = [tuple((0, size) for size in shape)]
    for _ in range(cuts):
        index, dimension = choose.randrange(len(whole)), choose.randrange(len(shape))
        start, stop = whole[index][dimension]
        if stop - start > 1:
            cut, old = choose.randrange(start + 1, stop), whole.pop(index)
            whole += [(*old[:dimension], half, *old[dimension + 1 :]) for half in ((start, cut), (cut, stop))]
    choose.shuffle(whole)
    return whole


def test_flaws_of_partitions_agree_with_counting_every_element():
    choose = random.Random(0)
    pinwheel = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    assert manifest.flaw((3, 3), pinwheel) is None
    assert "holds 1" in str(manifest.flaw((3, 3), pinwheel[:-1]))
    covered = [((0, 5), (0, 1)), ((1, 2), (1, 2)), ((3, 4), (0, 1))]  # the first overlaps the third
    turned = [((0, 2), (0, 1)), ((1, 2), (0, 2))]  # a partition if the dimensions of one of them change places
    for shape, saved in (((5, 2), covered), ((2, 2), turned)):
        assert "overlaps" in str(manifest.flaw(shape, saved))
    for _ in range(300):
        shape = tuple(choose.randint(1, 5) for _ in range(choose.randint(1, 3)))
        saved = random_partition(choose, shape, choose.randint(0, 8))
        assert manifest.flaw(shape, saved) is None
        for _ in range(choose.randint(1, 2)):  # move one edge
            index, dimension = choose.randrange(len(saved)), choose.randrange(len(shape))
            start = choose.randrange(shape[dimension])
            edge = start, choose.randint(start + 1, shape[dimension])
            saved[index] = (*saved[index][:dimension], edge, *saved[index][dimension + 1 :])
        count = torch.zeros(shape, dtype=torch.int64)
        for slices in saved:
            count[tuple(slice(*each) for each in slices)] += 1
        found = str(manifest.flaw(shape, saved))
        assert ("overlaps" in found) == bool(count.gt(1).any())
        assert ("no slice holds" in found) == bool(count.eq(0).any() and not count.gt(1).any())


def test_slices_of_a_large_run_are_not_compared_pair_by_pair(monkeypatch):
    """The run has 64 ranks: 8 column shards, and 8 ranks with a range of each."""
    saved: list[Slices] = []
    for column in range(8):
        cuts = [0, *(4096 * 128 // 8 * rank + 7 + 2096 * column for rank in range(1, 8)), 4096 * 128]
        for start, stop in itertools.pairwise(cuts):
            for (rows, (low, high)), _ in rectangles((4096, 128), range(start, stop)):
                saved.append((rows, (column * 128 + low, column * 128 + high)))
    assert len(saved) == 64 + 2 * 56
    compared = []
    monkeypatch.setattr(manifest, "intersection", lambda *pair: compared.append(pair))
    assert manifest.flaw((4096, 1024), saved) is None
    assert not compared, "planes separate them all"
