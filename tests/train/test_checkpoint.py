"""Checkpoints come back bit by bit, on any layout, and the old ones are kept as promised."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tpfuse.comm.layout import Slices
from tpfuse.testing.ranks import pool
from tpfuse.train import checkpoint, safetensors_file
from tpfuse.train.checkpoint import CheckpointError, CheckpointMismatch, Part

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
    """Global tensors of random bits, NaNs with payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, dtype) in SHAPES.items():
        size = torch.empty((), dtype=dtype).element_size() * math.prod(shape)
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
        tensors[name] = bits.view(dtype).view(shape)
    return tensors


def part(whole: Tensor, slices: Slices, writer: bool = True) -> Part:
    return Part(tuple(whole.shape), slices, whole[tuple(slice(*s) for s in slices)], writer)


def whole_parts(seed: int) -> dict[str, Part]:
    return {name: part(whole, tuple((0, n) for n in whole.shape)) for name, whole in wholes(seed).items()}


def grid_parts(seed: int, rank: int, world: int) -> dict[str, Part]:
    """Every tensor cut into a random grid, some cells empty, some held by several ranks of which one writes."""
    choose = random.Random(seed)
    parts = {}
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
        writer = rank // math.prod(cells) == choose.randrange(world // math.prod(cells))
        parts[name] = part(whole, tuple(slices), writer)
    return parts


def silent(line: str) -> None:
    raise AssertionError(f"unexpected warning: {line}")


def save_grid(run: Path, seed: int, step: int = 1) -> str:
    group = dist.group.WORLD
    assert group is not None
    parts = grid_parts(seed, group.rank(), group.size())
    return str(checkpoint.save(run, step, parts, STATE, keep=0, group=group, warn=silent))


def load_grid(folder: Path, seed: int) -> bool:
    expected = grid_parts(seed, dist.get_rank(), dist.get_world_size())
    assert_loads(checkpoint.open_checkpoint(folder), expected)
    return True


def assert_loads(saved: checkpoint.Checkpoint, expected: dict[str, Part]) -> None:
    """What is loaded into parts of junk equals the expected parts bit by bit."""
    parts = {n: Part(p.shape, p.slices, torch.ones_like(p.tensor).contiguous(), False) for n, p in expected.items()}
    saved.load(parts)
    for name, loaded in parts.items():
        wanted = expected[name].tensor.contiguous()
        assert loaded.tensor.dtype == wanted.dtype
        assert torch.equal(loaded.tensor.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)), name


def save_whole(run: Path, step: int, *, keep: int = 0, warn=silent) -> Path | None:
    return checkpoint.save(run, step, whole_parts(step), STATE | {"step": step}, keep=keep, group=None, warn=warn)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_round_trip_of_one_rank(tmp_path):
    run = tmp_path / "new" / "run"
    assert save_whole(run, 5) == run / "step-5"
    assert names(run / "step-5") == ["manifest.json", "rank-00000.safetensors"]
    saved = checkpoint.newest_good(run, warn=silent)
    assert saved.step == 5 and saved.folder == run / "step-5"
    assert saved.state == STATE | {"step": 5}
    assert_loads(saved, whole_parts(5))


@pytest.mark.parametrize("chunk", [1, 7, 64, 4 * 2**20])
def test_files_are_read_by_the_safetensors_library(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", chunk)
    expected = wholes(1)
    parts = whole_parts(1)
    transposed = expected["matrix"].T
    parts["transposed"] = part(transposed, ((0, 100), (0, 63)))
    parts["strided"] = part(expected["cube"][:, ::2, 1:4], ((0, 3), (0, 2), (0, 3)))
    folder = checkpoint.save(tmp_path, 1, parts, {}, keep=0, group=None, warn=silent)
    content = (folder / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(content[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % parts[name].tensor.element_size() == 0, f"{name} is not aligned"
    loaded = load_file(folder / "rank-00000.safetensors")
    assert loaded.keys() == parts.keys() - {"empty"}
    for name, tensor in loaded.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), parts[name].tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resharding_from_and_to_random_grids(tmp_path, world):
    for seed in range(5):
        folder = tmp_path / f"{seed}" / "step-1"
        assert pool(world).run(save_grid, folder.parent, seed) == [str(folder)] * world
        assert pool(world % 4 + 1).run(load_grid, folder, seed) == [True] * (world % 4 + 1)
        saved = checkpoint.newest_good(folder.parent, warn=silent)
        for cells in (1, 2, 3, 4, 6, 12):
            for rank in range(cells):
                assert_loads(saved, grid_parts(seed, rank, cells))


def test_replicas_are_written_once(tmp_path):
    folder = Path(pool(4).run(save_grid, tmp_path, 3)[0])
    manifest = json.loads((folder / "manifest.json").read_text())
    elements = sum(math.prod(b - a for a, b in s["ranges"]) for t in manifest["tensors"].values() for s in t["slices"])
    assert elements == sum(math.prod(shape) for shape, _ in SHAPES.values())
    in_files = sum(t.nbytes for name in manifest["files"] for t in load_file(folder / name).values())
    assert in_files == sum(whole.nbytes for whole in wholes(3).values())


def test_only_ranks_that_write_have_a_file(tmp_path):
    folder = Path(pool(3).run(save_one_writer, tmp_path)[0])
    assert names(folder) == ["manifest.json", "rank-00001.safetensors"]
    assert_loads(checkpoint.newest_good(tmp_path, warn=silent), whole_parts(1))


def save_one_writer(run: Path) -> str:
    parts = whole_parts(1)
    for each in parts.values():
        each.writer = dist.get_rank() == 1
    return str(checkpoint.save(run, 1, parts, {}, keep=0, group=dist.group.WORLD, warn=silent))


def test_loading_writes_into_views_in_place(tmp_path):
    save_whole(tmp_path, 1)
    flat = torch.full((63 * 100 + 10,), 7.0)
    view = flat[5 : 5 + 30 * 40].view(40, 30).T.requires_grad_()
    part_of_matrix = Part((63, 100), ((20, 50), (60, 100)), view, False)
    checkpoint.newest_good(tmp_path, warn=silent).load({"matrix": part_of_matrix})
    expected = wholes(1)["matrix"][20:50, 60:100]
    assert torch.equal(view.detach().contiguous().view(torch.int32), expected.contiguous().view(torch.int32))
    assert flat[:5].eq(7).all() and flat[5 + 30 * 40 :].eq(7).all()


@pytest.mark.parametrize("change", ["name", "shape", "dtype"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, change):
    save_whole(tmp_path, 1)
    parts = {
        "one": Part((1,), ((0, 1),), torch.full((1,), 7.0), True),
        "missing" if change == "name" else "matrix": part(
            torch.zeros((64 if change == "shape" else 63, 100), dtype=torch.half if change == "dtype" else None),
            ((0, 64 if change == "shape" else 63), (0, 100)),
        ),
    }
    with pytest.raises(CheckpointMismatch, match="missing" if change == "name" else "matrix") as caught:
        checkpoint.newest_good(tmp_path, warn=silent).load(parts)
    assert "\n" not in str(caught.value) and isinstance(caught.value, ValueError)
    assert parts["one"].tensor.item() == 7.0


def test_parts_that_contradict_themselves(tmp_path):
    wrong = Part((4, 4), ((0, 2), (0, 4)), torch.zeros(4, 4), True)
    with pytest.raises(ValueError, match="part of w"):
        checkpoint.save(tmp_path, 1, {"w": wrong}, {}, keep=0, group=None, warn=silent)
    with pytest.raises(ValueError, match="complex64"):
        numbers = part(torch.zeros(3, dtype=torch.complex64), ((0, 3),))
        checkpoint.save(tmp_path, 1, {"w": numbers}, {}, keep=0, group=None, warn=silent)
    with pytest.raises(TypeError, match="JSON"):
        checkpoint.save(tmp_path, 1, {}, {"path": object()}, keep=0, group=None, warn=silent)
    assert not (tmp_path / "step-1").exists()


def save_wrong(run: Path, what: str) -> str:
    """Saves what cannot be saved, then what can: every rank must have come out of the first in step."""
    rank, group = dist.get_rank(), dist.group.WORLD
    rows = {"gap": (rank * 5, rank * 5 + 4), "overlap": (0, 10), "shape": (rank * 5, rank * 5 + 5)}
    start, stop = rows.get(what, (rank * 5, rank * 5 + 5))
    wrong = Part((10 + (what == "shape") * rank, 2), ((start, stop), (0, 2)), torch.ones(stop - start, 2), True)
    if what == "scalar":
        wrong = Part((), (), torch.ones(()), True)
    if what == "raise" and rank == 1:
        wrong.tensor = None  # type: ignore[assignment]
    state = {"x": object()} if what == "state" else {}
    try:
        checkpoint.save(run, 1, {"w": wrong}, state, keep=0, group=group, warn=silent)
        message = "saved"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    assert save_grid(run, 0, 2) == str(run / "step-2")
    return message


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("gap", "ValueError: w cannot be saved: no slice holds 4", "ValueError: w cannot be saved: no slice holds 4"),
        ("overlap", "ValueError: w cannot be saved: the slice", "ValueError: w cannot be saved: the slice"),
        ("scalar", "ValueError: w cannot be saved: the slice ()", "ValueError: w cannot be saved: the slice ()"),
        ("shape", "ValueError: w is F32 (11, 2) on rank 1", "ValueError: w is F32 (11, 2) on rank 1"),
        ("raise", "RuntimeError: stopped by an error on rank 1: AttributeError", "AttributeError"),
        ("state", "TypeError", "RuntimeError: stopped by an error on rank 0: TypeError"),
    ],
)
def test_errors_of_one_rank_reach_all(tmp_path, what, first, second):
    messages = pool(2).run(save_wrong, tmp_path, what)
    assert messages[0].startswith(first) and messages[1].startswith(second)
    assert names(tmp_path) == ["step-2"]


def test_keeps_the_newest(tmp_path):
    for step in (1, 2, 10, 9, 30):
        assert save_whole(tmp_path, step, keep=3 if step > 2 else 0)
    assert names(tmp_path) == ["step-10", "step-30", "step-9"]
    save_whole(tmp_path, 31, keep=1)
    assert names(tmp_path) == ["step-31"]


def test_a_step_saved_late_is_kept_beside_newer_ones(tmp_path):
    for step in (10, 20, 5):
        save_whole(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step-20", "step-5"]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save_whole(tmp_path, step)
    flip(tmp_path / "step-3" / "rank-00000.safetensors", -1)
    (tmp_path / "step-4" / "manifest.json").unlink()
    said = []
    save_whole(tmp_path, 5, keep=2, warn=said.append)
    assert names(tmp_path) == ["step-2", "step-3", "step-4", "step-5"]
    assert len(said) == 2 and "step-4/manifest.json" in said[0] and "step-3/rank-00000" in said[1]


def flip(file: Path, index: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[index] ^= 1 << bit
    file.write_bytes(content)


def test_a_good_step_is_never_written_over(tmp_path, monkeypatch):
    folder = save_whole(tmp_path, 1)
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    assert checkpoint.save(tmp_path, 1, whole_parts(99), {}, keep=1, group=None, warn=silent) == folder
    assert {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()} == before
    assert names(tmp_path) == ["step-1"]
    # The save that made it may have failed after its rename.
    synced = []
    monkeypatch.setattr(checkpoint, "sync_folder", synced.append)
    checkpoint.save(tmp_path, 1, whole_parts(99), {}, keep=1, group=None, warn=silent)
    assert synced == [tmp_path]


def test_a_damaged_step_is_replaced(tmp_path):
    said = []
    flip(save_whole(tmp_path, 1) / "rank-00000.safetensors", 100)
    assert save_whole(tmp_path, 1, keep=1, warn=said.append) == tmp_path / "step-1"
    assert len(said) == 1 and "step-1/rank-00000.safetensors: expected SHA-256" in said[0]
    assert names(tmp_path) == ["step-1"]
    assert_loads(checkpoint.newest_good(tmp_path, warn=silent), whole_parts(1))


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "step-7.txt").write_text("mine")
    (tmp_path / "step-007").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert checkpoint.newest_good(tmp_path, warn=silent) is None
    assert checkpoint.newest_good(tmp_path / "nowhere", warn=silent) is None
    save_whole(tmp_path, 1, keep=1)
    save_whole(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["metrics.jsonl", "step-007", "step-2", "step-7.txt"]


def test_a_file_that_is_not_the_manifests_is_found_while_loading(tmp_path):
    """Between verification and loading, or on a rank that did not verify."""
    folder = save_whole(tmp_path, 1)
    saved = checkpoint.open_checkpoint(folder)
    (folder / "rank-00000.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: expected a readable safetensors file"):
        saved.load(whole_parts(1))
    other = tmp_path / "other"
    checkpoint.save(other, 1, {"one": part(torch.zeros(3), ((0, 3),))}, {}, keep=0, group=None, warn=silent)
    (other / "step-1" / "rank-00000.safetensors").rename(folder / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"expected one as \('F32', \[1\]\), found \('F32', \[3\]\)"):
        saved.load({"one": part(torch.zeros(1), ((0, 1),))})
