"""Durable files, and the order in which a save makes things durable."""

import errno
import os
from pathlib import Path

import pytest
import torch

from tpfuse.checkpoint import checkpoint
from tpfuse.checkpoint.checkpoint import Shard
from tpfuse.checkpoint.durable import DurableFile, make_folder, remove, sync_folder


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError, match="/a'"):
        DurableFile(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_errors_name_the_file(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'"), DurableFile(tmp_path / "a") as file:
        file.write(b"x")
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_write_of_no_bytes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_: 0)
    with pytest.raises(OSError, match=r"wrote 0 bytes: '.*/a'"), DurableFile(tmp_path / "a") as file:
        file.write(b"x")


def test_links_are_removed_and_their_targets_are_not(tmp_path):
    make_folder(tmp_path / "b" / "c")
    (tmp_path / "b" / "c" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    remove(tmp_path / "link")
    assert (tmp_path / "b" / "c" / "file").exists()
    remove(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def calls(monkeypatch):
    """Record (name, path, …) of every call that changes the disk, in order."""
    record, paths = [], {}

    def recorded(name):
        function = getattr(os, name)

        def call(first, *rest, **options):
            result = function(first, *rest, **options)
            if name == "open":
                paths[result] = Path(f"/proc/self/fd/{result}").readlink()
                if rest[0] & os.O_CREAT:
                    record.append(("create", paths[result]))
            elif name in ("write", "fsync"):
                record.append((name, paths[first]))
            else:
                folder = options.get("dir_fd")
                named = Path(os.fspath(first)) if folder is None else paths[folder] / first
                record.append((name, named, *map(Path, rest if name == "rename" else ())))
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        recorded(name)
    return record


def test_everything_is_synced_before_it_is_relied_upon(tmp_path, calls):
    """Every file is synced after its last write, and the staging folder after its last file, before the rename. The
    run's folder is synced after the rename, before an older checkpoint is deleted."""
    run = tmp_path.resolve() / "run"
    tensors = {name: [Shard((9, 9), ((0, 9), (0, 9)), torch.ones(9, 9), True)] for name in "abc"}
    for step in (1, 2):
        calls.clear()
        assert checkpoint.save(run, step, tensors, {}, keep=1, group=None, warn=pytest.fail)
        staging, final = run / f".staging-step-{step}", run / f"step-{step}"
        rename = calls.index(("rename", staging, final))
        files = [entry[1] for entry in calls if entry[0] == "create"]
        assert {file.name for file in files} == {"manifest.json", "rank-00000.safetensors"}
        for file in files:
            last_write = max(i for i, entry in enumerate(calls) if entry == ("write", file))
            assert last_write < calls.index(("fsync", file)) < rename
        last_file = max(i for i, entry in enumerate(calls) if entry[0] == "create")
        assert last_file < calls.index(("fsync", staging)) < rename
        assert not [entry for entry in calls[rename + 1 :] if entry[0] in ("write", "create")]
        assert calls[rename + 1] == ("fsync", run)
    # A checkpoint is first renamed, which is made durable, and only then removed file by file.
    deleting = run / ".deleting-step-1"
    assert calls[rename + 2 : rename + 4] == [("rename", run / "step-1", deleting), ("fsync", run)]
    assert {entry[1] for entry in calls[rename + 4 :]} == {deleting, *(deleting / file.name for file in files)}
    assert calls[0] == ("mkdir", run / ".staging-step-2")


def test_a_new_run_folder_is_durable_before_anything_is_in_it(tmp_path, calls):
    root = tmp_path.resolve()
    make_folder(root / "a" / "b")
    sync_folder(root / "a" / "b")
    assert calls == [
        ("mkdir", root / "a"),
        ("fsync", root),
        ("mkdir", root / "a" / "b"),
        ("fsync", root / "a"),
        ("fsync", root / "a" / "b"),
    ]
