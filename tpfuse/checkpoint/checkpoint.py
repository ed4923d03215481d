"""Crash-safe checkpoints: `RUN/step-N/` is complete and sound, or it does not exist.

    RUN/step-N/rank-00000.safetensors   the slices of this rank, one file for each rank that writes any
    RUN/step-N/manifest.json            SHA-256 of itself; size and SHA-256 of every file; every tensor's global
                                        shape, dtype and saved slices; the caller's state

All files are written and synced in `RUN/.staging-step-N`, which one rename turns into `step-N`. A folder that is to be
deleted is first renamed to `RUN/.deleting-…`, so that no half-deleted folder is taken for a checkpoint. Saving is a
sequence of local phases. Each phase ends in one exchange of its outcome (`agree`), so that all ranks see the same one.
It is repeated while rank 0 deletes older checkpoints, so that the other ranks wait no longer than for a collective.

A tensor is stored as rectangles [start, stop) of its global shape, as the ranks hold them: none, one or several on each
rank. A loading rank reads the intersections of these with its own rectangles, so any layout loads into any other.
"""

import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from tpfuse.checkpoint.durable import DurableFile, make_folder, remove, sha256_of, sync_folder
from tpfuse.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    check_shard,
    describe,
    digest,
    encode,
    extent,
    file_name,
    index_within,
    intersection,
    owned_shards,
    read_manifest,
    slices_of,
    tensor_table,
)
from tpfuse.checkpoint.manifest import Shard as Shard
from tpfuse.checkpoint.manifest import Shards as Shards
from tpfuse.checkpoint.safetensors_file import DTYPES, write_safetensors
from tpfuse.checkpoint.untrusted import Unreadable, check_regular
from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.layout import Slices
from tpfuse.errors import CheckpointError as CheckpointError
from tpfuse.errors import UserError

_STEP = re.compile(r"step-(0|[1-9]\d*)")
# The key in the file, the slice stored there, its intersection with the shard, the shard.
_Wanted = tuple[str, Slices, Slices, Shard]


class Checkpoint:
    """The checkpoint in a folder, whose manifest is sound. Raise CheckpointError.

    sound: the files that `verify` or `load` has found to be sound too. state: the state that was given to `save`, as
    JSON returns it (tuples are lists, keys are text).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest, self.sound = folder, read_manifest(folder), set[str]()
        self.step: int = self.manifest["step"]
        self.state: Any = self.manifest["state"]

    def verify(self) -> None:
        """Read every file once. Raise CheckpointError if a size or a SHA-256 is not the manifest's."""
        for name in self.manifest["files"]:
            self._verify(name)

    def _verify(self, name: str) -> None:
        file, entry = self.folder / name, self.manifest["files"][name]
        if name in self.sound:
            return
        try:
            size = check_regular(file)
            if size != entry["size"]:
                raise CheckpointError(file, f"{entry['size']} bytes", f"{size} bytes")
            digest = sha256_of(file)
        except (OSError, Unreadable) as error:
            raise CheckpointError(file, f"a file of {entry['size']} bytes", str(error)) from error
        if digest != entry["sha256"]:
            raise CheckpointError(file, f"SHA-256 {entry['sha256']}", digest)
        self.sound.add(name)

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Return the global shapes of the tensors whose names begin with `prefix`, by the rest of their names."""
        tensors = self.manifest["tensors"].items()
        return {name.removeprefix(prefix): tuple(x["shape"]) for name, x in tensors if name.startswith(prefix)}

    def load(self, shards: Shards) -> None:
        """Fill every shard from the files. Other tensors of the checkpoint are not read.

        Raise UserError, before any shard is written, for a tensor that the checkpoint does not have or has in
        another shape or dtype. Raise CheckpointError for a file that cannot be read, or that is not what the manifest
        says, even if another rank has verified it before.
        """
        wanted: dict[str, list[_Wanted]] = {}
        for name, shard in [(name, shard) for name, several in shards.items() for shard in several]:
            check_shard(name, shard)
            for stored in self._fitting_entry(name, shard)["slices"]:
                saved = slices_of(stored["ranges"])
                both = intersection(saved, shard.slices)
                if both is not None:
                    wanted.setdefault(stored["file"], []).append((stored["key"], saved, both, shard))
        for name, reads in wanted.items():
            file = self.folder / name
            self._verify(name)
            try:
                self._read(file, reads)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(file, "a readable safetensors file", str(error)) from error

    def _fitting_entry(self, name: str, shard: Shard) -> dict[str, Any]:
        entry = self.manifest["tensors"].get(name)
        if entry is None and 0 in shard.shape:  # an empty tensor may have no shards
            return {"slices": []}
        if entry is None:
            raise UserError(f"{self.folder} has no tensor {name}: it is of another model or optimizer")
        there, here = (tuple(entry["shape"]), entry["dtype"]), (shard.shape, DTYPES.get(shard.tensor.dtype))
        if there != here:
            raise UserError(
                f"{self.folder} has {name} as {there[1]} {there[0]}, but it is to be loaded into {here[1]} {here[0]}: "
                "resume with the model and the dtype that were saved"
            )
        result: dict[str, Any] = entry
        return result

    @staticmethod
    def _read(file: Path, reads: list[_Wanted]) -> None:
        with safe_open(str(file), framework="pt") as reader:
            for key, saved, both, shard in reads:
                source = reader.get_slice(key)
                stored = source.get_dtype(), source.get_shape()
                expected = DTYPES[shard.tensor.dtype], [*extent(saved)]
                if stored != expected:
                    raise CheckpointError(file, f"{key} as {expected}", str(stored))
                shard.tensor.detach()[index_within(both, shard.slices)].copy_(source[index_within(both, saved)])


def differing(saved: Checkpoint, shards: Shards, group: dist.ProcessGroup | None) -> list[str]:
    """Return the tensors that, once loaded, are not what was saved, on any rank. Collective over `group`.

    The digests of a tensor's owned shards must add up to the manifest's, and every copy of such a shard must be equal
    to it.
    """
    tensors = saved.manifest["tensors"]
    own = {name: [(shard.is_owner, shard.slices, digest(shard)) for shard in held] for name, held in shards.items()}
    ranks = exchange(own, group, op="digests")
    owned: dict[str, dict[Slices, int]] = {}
    for name, held in ((name, held) for of_rank in ranks for name, held in of_rank.items()):
        owned.setdefault(name, {}).update({slices: value for is_owner, slices, value in held if is_owner})
    sums = {name: sum(values.values()) % 2**64 for name, values in owned.items() if name in tensors}
    found = [name for name in sums if sums[name] != tensors[name]["digest"]]
    for rank, of_rank in enumerate(ranks):
        for name, held in of_rank.items():
            if any(owned[name].get(slices, value) != value for _, slices, value in held):
                found.append(f"{name} of rank {rank}")
    return found


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of all checkpoints, good and damaged, newest first."""
    if not run.is_dir():
        return []
    folders = [path for path in run.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _good(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    return checkpoint


def newest_good(run: Path, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is sound to the last byte, or None if the run has no checkpoint.

    `warn` is called for each damaged checkpoint, which is skipped. One rank should call this function and send the step
    to the others, which then open it by `Checkpoint`. Raise CheckpointError if all checkpoints are damaged, and OSError
    if the run's folder cannot be listed.
    """
    damaged = []
    for folder in checkpoint_folders(run):
        try:
            return _good(folder)
        except CheckpointError as error:
            damaged.append(error)
            warn(f"damaged checkpoint: {error}")
    if damaged:
        raise CheckpointError(run, "a good checkpoint", f"only damaged ones ({len(damaged)}); the newest: {damaged[0]}")
    return None


_SAVING = "saving a checkpoint"  # in errors


class _Saving:
    """The phases of one call of `save` on one rank. Its warnings are given at the end, when no rank waits any more."""

    def __init__(self, run: Path, step: int, shards: Shards, rank: int) -> None:
        self.run, self.step, self.shards, self.rank, self.warnings = run, step, shards, rank, list[str]()
        self.final, self.staging = run / f"step-{step}", run / f".staging-step-{step}"

    def begin(self) -> bool:
        """Return on rank 0 whether a good checkpoint of this step exists; if not, make an empty staging folder."""
        if not self.run.is_dir():
            make_folder(self.run)
        self._clear()
        if os.path.lexists(self.final):
            try:
                _good(self.final)
                sync_folder(self.run)  # the save that wrote it may have failed in this very call
                return True
            except CheckpointError as error:
                self.warnings.append(f"damaged checkpoint, replaced by a new one: {error}")
        make_folder(self.staging)
        return False

    def _clear(self) -> None:
        for path in [*self.run.glob(".staging-*"), *self.run.glob(".deleting-*")]:
            try:
                remove(path)
            except OSError as error:
                self.warnings.append(f"cannot remove files of an earlier save: {error}")

    def write(self) -> tuple[str, int, str] | None:
        """Write this rank's file and return its name, size and SHA-256; return None if there is nothing to write."""
        tensors = {key: shard.tensor for name, held in self.shards.items() for key, shard in owned_shards(name, held)}
        if not tensors:
            return None
        with DurableFile(self.staging / file_name(self.rank)) as file:
            write_safetensors(file, tensors)
        return file.path.name, file.size, file.sha256

    def commit(self, manifest: dict[str, Any]) -> None:
        """Write the manifest on rank 0 and rename the staging folder."""
        with DurableFile(self.staging / MANIFEST) as file:
            file.write(encode(manifest))
        sync_folder(self.staging)
        if os.path.lexists(self.final):
            self.final.rename(self.run / f".deleting-{self.final.name}")
        self.staging.rename(self.final)
        sync_folder(self.run)

    def tidy(self, keep: int) -> None:
        """Delete, on rank 0, the checkpoints that are too old."""
        try:
            self._prune(keep)
            self._clear()
        except OSError as error:
            self.warnings.append(f"step {self.step} is saved, but older checkpoints cannot be removed: {error}")

    def _prune(self, keep: int) -> None:
        """Delete checkpoints older than `keep` good ones, but never the one that was just written.

        No checkpoint is deleted before `keep` newer ones have been read and found good.
        """
        folders = checkpoint_folders(self.run)
        if not 0 < keep < len(folders):
            return
        good = 0
        for folder in folders:
            if folder == self.final:
                good += 1
                continue
            if good >= keep:
                folder.rename(self.run / f".deleting-{folder.name}")
                continue
            try:
                _good(folder)
                good += 1
            except CheckpointError as error:
                self.warnings.append(f"damaged checkpoint, not counted among the {keep} that are kept: {error}")
        sync_folder(self.run)  # makes the renames durable before anything in those folders is deleted


def _is_done(work: Future[None]) -> bool:
    """Wait half a second for `work` and return whether it is done. Raise what it has raised."""
    return work in wait([work], 0.5).done and work.result() is None


def save(
    run: Path,
    step: int,
    shards: Shards,
    state: dict[str, Any],
    *,
    keep: int,
    group: dist.ProcessGroup | None,
    warn: Callable[[str], None],
) -> Path | None:
    """Save a checkpoint and return its folder, or None on all ranks if saving failed. Collective over `group`.

    shards: by name, all shards that this rank holds. state: a value for JSON; that of rank 0 is stored. keep: how many
    of the newest good checkpoints are kept (0: all); the older ones among them are read whole before any is deleted.
    group: None for one rank. warn: called on rank 0, with one line. A good checkpoint of this step that exists already
    is returned as it is; a damaged one is replaced.

    If the disk of any rank fails (OSError), `warn` is called and None is returned; all files of this save are removed
    as far as the disk allows. Raise ValueError for a negative step, and for shards that are not a partition of their
    tensors, TypeError for a state that JSON cannot hold, and RuntimeError if a rank died or raised another error.
    """
    if step < 0:
        raise ValueError(f"checkpoint.save: step is {step}: expected at least 0")
    rank = 0 if group is None else group.rank()
    saving = _Saving(Path(run), step, shards, rank)
    together = partial(agreement, _SAVING, group, alike=OSError, by_rank=True)
    try:
        with together():
            own = describe(shards), rank == 0 and saving.begin()
        begun = exchange(own, group, op=_SAVING)
        if not begun[0][1]:
            tensors = tensor_table([description for description, _ in begun])
            with together():
                file = saving.write()
            written = exchange(file, group, op=_SAVING)
            files = {entry[0]: {"size": entry[1], "sha256": entry[2]} for entry in written if entry}
            manifest = {"format": FORMAT, "step": step, "files": files, "tensors": tensors, "state": state}
            with together():
                if rank == 0:
                    saving.commit(manifest)
            with ThreadPoolExecutor(1) as worker:
                tidied = worker.submit(saving.tidy, keep) if rank == 0 else None
                # Older checkpoints that are kept are read whole, which may take longer than a collective.
                done = False
                while not done:
                    with together():
                        done = tidied is None or _is_done(tidied)
                    done = all(exchange(done, group, op=_SAVING))
        saved: Path | None = saving.final
    except OSError as failure:
        said = f"step {step} was not saved: {failure}; training continues, and the next save tries again"
        saving.warnings.insert(0, said)
        saved = None
        if rank == 0:
            saving._clear()
    for line in saving.warnings if rank == 0 else []:
        warn(line)
    return saved
