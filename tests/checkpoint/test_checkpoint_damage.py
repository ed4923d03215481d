"""Every damage to a checkpoint is found and named, and the newest undamaged checkpoint loads."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.tiers import exhaustive
from tpfuse.checkpoint import checkpoint, manifest
from tpfuse.checkpoint.checkpoint import CheckpointError, Shard

DATA = "rank-00000.safetensors"


def save(run: Path, step: int) -> Path:
    tensors = {"a": torch.full((3, 5), float(step)), "b": torch.arange(7) + step}
    shards = {n: [Shard(tuple(t.shape), tuple((0, s) for s in t.shape), t, True)] for n, t in tensors.items()}
    folder = checkpoint.save(run, step, shards, {"step": step}, keep=0, group=None, warn=pytest.fail)
    assert folder is not None
    return folder


def loaded_step(saved: checkpoint.Checkpoint | None) -> int:
    """Return the step whose tensors and state the checkpoint holds in full."""
    assert saved is not None
    a, b = torch.zeros(3, 5), torch.zeros(7, dtype=torch.int64)
    saved.load({"a": [Shard((3, 5), ((0, 3), (0, 5)), a, False)], "b": [Shard((7,), ((0, 7),), b, False)]})
    step = saved.state["step"]
    assert torch.equal(a, torch.full((3, 5), float(step))) and torch.equal(b, torch.arange(7) + step)
    return step


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    return tmp_path


def assert_falls_back(run: Path, file: str, *, to: int = 2) -> str:
    """Check that step `to` loads, and return the one warning, which must name the file and what was expected."""
    warnings: list[str] = []
    assert loaded_step(checkpoint.newest_good(run, warn=warnings.append)) == to
    assert len(warnings) == 3 - to
    assert "\n" not in warnings[0]
    damaged = re.escape(str(run / "step-3" / file))
    assert re.search(rf"damaged checkpoint: {damaged}: expected .+, found .", warnings[0])
    return warnings[0]


@pytest.mark.parametrize(
    ("name", "every"), [(DATA, 7), ("manifest.json", 7), *exhaustive((DATA, 1), ("manifest.json", 1))]
)
def test_every_flipped_byte_and_every_truncation_is_found(run, name, every):
    file = run / "step-3" / name
    sound = file.read_bytes()
    assert len(sound) > 200
    for index in range(0, len(sound), every):
        # All bits of the first bytes are flipped, where lengths, the header and the manifest's own digest are.
        for bit in range(8) if index < 100 else [index % 8]:
            damaged = bytearray(sound)
            damaged[index] ^= 1 << bit
            file.write_bytes(damaged)
            assert_falls_back(run, name)
    for length in {*range(0, len(sound), every), len(sound) - 1}:
        file.write_bytes(sound[:length])
        line = assert_falls_back(run, name)
        assert name != DATA or line.endswith(f"expected {len(sound)} bytes, found {length} bytes")
    file.write_bytes(sound + b" ")
    assert_falls_back(run, name)
    file.write_bytes(sound)
    assert loaded_step(checkpoint.newest_good(run, warn=pytest.fail)) == 3


@pytest.mark.parametrize("name", [DATA, "manifest.json"])
@pytest.mark.parametrize("instead", ["nothing", "folder", "link to nothing"])
def test_missing_files_are_found(run, name, instead):
    file = run / "step-3" / name
    file.unlink()
    if instead == "folder":
        file.mkdir()
    elif instead != "nothing":
        file.symlink_to(run / "nowhere")
    assert_falls_back(run, name)


def test_a_file_in_place_of_the_folder(run):
    shutil.rmtree(run / "step-3")
    (run / "step-3").write_text("?")
    assert_falls_back(run, "manifest.json")


def test_an_older_checkpoint_loads_if_newer_ones_are_damaged_and_else_an_error(run):
    (run / "step-3" / DATA).write_bytes(b"")
    (run / "step-2" / "manifest.json").unlink()
    assert_falls_back(run, DATA, to=1)
    shutil.rmtree(run / "step-1")
    warnings: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        checkpoint.newest_good(run, warn=warnings.append)
    assert f"{run}: expected a good checkpoint, found only damaged ones (2)" in str(caught.value)
    assert len(warnings) == 2 and f"step-3/{DATA}: expected" in str(caught.value)


def test_a_manifest_in_the_folder_of_another_step_is_found(run):
    (run / "step-3").rename(run / "step-4")
    warnings: list[str] = []
    assert loaded_step(checkpoint.newest_good(run, warn=warnings.append)) == 2
    assert warnings == [f"damaged checkpoint: {run}/step-4/manifest.json: expected the step of step-4, found step 3"]


def without_digest(table):
    del table["files"][DATA]["sha256"]


def file_elsewhere(table):
    table["files"]["../step-2/" + DATA] = table["files"].pop(DATA)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda table: table.update(format=3), "expected format 2, found format 3"),
        (lambda table: table.pop("state"), "the manifest has no 'state'"),
        (lambda table: table.pop("tensors"), "the manifest has no 'tensors'"),
        (lambda table: table.update(state=5), "'state' of the manifest is 5: expected dict"),
        (lambda table: table.update(files=[]), "'files' of the manifest is []: expected dict"),
        (without_digest, "has no 'sha256'"),
        (file_elsewhere, "'../step-2/"),
        (lambda table: table["files"].clear(), f"F32 in {{'{DATA}'}}"),
        (lambda table: table["tensors"]["a"].update(dtype="F7"), "F7"),
        (
            lambda table: table["tensors"]["a"]["slices"].clear(),
            "no slice holds 15 of the elements of the shape (3, 5)",
        ),
        (lambda table: table["tensors"]["a"]["slices"].append(table["tensors"]["a"]["slices"][0]), "overlaps"),
        (lambda table: table["tensors"]["a"]["slices"][0].update(ranges=[[0, 3], [0, 4]]), "no slice holds 3"),
        (lambda table: table["tensors"]["a"]["slices"][0].update(ranges=[[0, 3], [0, 6]]), "not inside"),
        (lambda table: table["tensors"]["a"]["slices"][0].update(ranges=[[0, 3]]), "not inside"),
        (lambda table: table["tensors"]["a"]["slices"][0].update(ranges=[[0, 3], [0]]), "ValueError"),
        (
            lambda table: table["tensors"]["a"]["slices"][0].pop("key"),
            "entry 0 of 'slices' of 'a' of 'tensors' of the manifest has no 'key'",
        ),
        (lambda table: table["tensors"]["a"]["slices"][0].update(key="b"), f"found {DATA} as b"),
        (lambda table: table["tensors"]["a"]["slices"][0].update(key=["a"]), "is ['a']: expected str"),
    ],
)
def test_inconsistent_manifests_are_found(run, change, found):
    """The digest is right, as in a manifest that another program, or another version, might write."""
    file = run / "step-3" / "manifest.json"
    table = json.loads(file.read_bytes())
    del table["sha256"]
    change(table)
    file.write_bytes(manifest.encode(table))
    assert found in assert_falls_back(run, "manifest.json")


def test_nothing_pickled_is_ever_loaded(run, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickle on a load path")

    for module in ("pickle", "_pickle"):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(f"{module}.{name}", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert loaded_step(checkpoint.newest_good(run, warn=pytest.fail)) == 3
