"""State in a file equals state in memory to the bit, stays mostly on disk, and leaves no file and no full disk."""

import errno
import io
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.tiers import exhaustive
from tests.zero.two_memories import DEVICE, TwoMemories
from tests.zero.zero_training import ADAMW, Layout, check_same, engine_of, micro_batches, train_step, whole
from tpfuse.choices import Accumulate
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.traffic import Traffic
from tpfuse.ops.adamw import adamw_
from tpfuse.testing.inputs import normal
from tpfuse.testing.ranks import on_ranks, pool
from tpfuse.zero import MuonOptions, adamw, fsdp_internals, offload
from tpfuse.zero.bucket_layout import BucketLayout, Segment
from tpfuse.zero.offload import FileStore, MemoryStore, check_space, state_bytes
from tpfuse.zero.reducer import shard_update
from tpfuse.zero.reducer.shard_update import Rates, ShardUpdate, Staging, StateStore

RATES = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SIZES = (63, 1000, 5000)  # elements of three shards


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that may be used for state, even if the machine's temporary files are in memory."""
    monkeypatch.setattr(offload, "_IN_MEMORY", ())
    return tmp_path


def _trained(store: StateStore, dtype: torch.dtype, steps: int = 4) -> list[Tensor]:
    """Return masters, moments and parameters of three shards after some updates, by shard and by block."""
    half = dtype is torch.bfloat16
    state_dtype = torch.float32 if half else dtype
    shards = []
    for index, size in enumerate(SIZES):
        state = [store.tensor(f"{name} {index}", size, state_dtype) for name in ("master", "exp_avg", "exp_avg_sq")]
        assert all(not x.any() for x in state)
        for part in store.blocks(state[:1]):
            state[0][part] = normal(index, size, dtype=state_dtype)[part]
        shards.append((*state, torch.zeros(size, dtype=dtype) if half else None))
    staging = Staging()
    for step in range(steps):
        number = torch.tensor(step + 1.0)
        for index, (master, exp_avg, exp_avg_sq, parameter) in enumerate(shards):
            gradient, follower = normal(100 * step + index, len(master), dtype=dtype), shards[(index + 1) % 3][:3]
            covered = 0
            for part in store.blocks((master, exp_avg, exp_avg_sq), following=follower):
                assert part.start == covered
                covered = part.stop
                states = [master[part]], [exp_avg[part]], [exp_avg_sq[part]]
                with staging.host(gradient[part], master[part] if parameter is None else parameter[part]) as (g, new):
                    adamw_(states[0], [g], *states[1:], [new if half else None], **RATES, step=number)
            assert covered == len(master)
    return [x for shard in shards for x in shard if x is not None]


def _stores(folder: Path) -> Iterator[StateStore]:
    yield MemoryStore("cpu", 256)
    for block in (16, 48, 1008, 1024, 16 * 10**5):
        yield FileStore(folder, 3 * 8 * sum(SIZES), block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_updates_are_equal_to_the_bit_in_every_store(folder: Path, dtype: torch.dtype) -> None:
    expected = _trained(MemoryStore("cpu"), dtype)
    for store in _stores(folder):
        for found, wanted in zip(_trained(store, dtype), expected, strict=True):
            assert torch.equal(found, wanted)


def test_state_survives_release_and_parts_of_a_tensor_have_their_own_blocks(folder: Path) -> None:
    """A bucket's two halves, with and without weight decay, are parts of the same tensors, at any offset."""
    store = FileStore(folder, 8 + 4 * 10000 + 8 * 10, block=512)
    store.tensor("odd", 3, torch.bfloat16).fill_(2.0)
    whole, small = store.tensor("whole", 10000, torch.float32), store.tensor("small", 10, torch.float64)
    for number, half in enumerate((whole[:3777], whole[3777:])):
        for part in store.blocks([half, torch.empty(len(half))]):  # the store does not own the second one
            half[part] = torch.arange(part.start, part.stop) + 10**6 * number
    small.fill_(0.5)
    store.release()
    assert torch.equal(whole, torch.cat([torch.arange(3777.0), torch.arange(10000.0 - 3777) + 10**6]))
    assert (small == 0.5).all()


def test_a_loop_over_blocks_that_ends_early_releases_its_block(folder: Path) -> None:
    store = FileStore(folder, 4000, block=112)
    whole = store.tensor("whole", 1000, torch.float32)
    released: list[tuple[int, int]] = []

    def advise(advice: int, tensors: Sequence[Tensor], part: slice) -> None:
        released.extend([(part.start, part.stop)] * (advice == mmap.MADV_DONTNEED))

    store._advise = advise  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        for part in store.blocks([whole]):
            if part.start == 224:
                raise KeyError
    assert released == [(0, 112), (112, 224), (224, 336)]


def test_empty_shards_have_no_blocks(folder: Path) -> None:
    for store in (MemoryStore("cpu", 16), FileStore(folder, 0)):
        nothing = store.tensor("nothing", 0, torch.float32)
        assert list(store.blocks([nothing], following=[nothing])) == []
    with pytest.raises(ValueError, match="exp_avg of bucket 3: 8 bytes of state do not fit in the 1 bytes of the file"):
        FileStore(folder, 0).tensor("exp_avg of bucket 3", 2, torch.float32)


def _resident(store: FileStore) -> int:
    """Return the bytes of the store's mapping that are in this process's memory."""
    start = f"{store._bytes.data_ptr():x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(start))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident memory is read from /proc")
def test_one_block_is_resident_at_a_time(folder: Path) -> None:
    """A quarter of each tensor, one mebibyte, is resident, and the pages around it that the kernel maps on a read."""
    block, around = 2**20, 2**17
    store = FileStore(folder, 12 * block, block=block // 4)
    state = [store.tensor(name, block, torch.float32) for name in ("master", "exp_avg")]
    for _ in range(2):
        for part in store.blocks(state, following=state):
            for x in state:
                x[part] += 1.0
            assert 2 * block <= _resident(store) <= 2 * (block + around)
        assert _resident(store) <= around, "blocks stay resident after the last one"
    assert all((x == 2.0).all() for x in state)
    # The kernel may reclaim single pages, but not a block.
    assert 7 * block < _resident(store) <= 8 * block, "the test cannot measure what is resident"
    store.release()
    assert _resident(store) <= around
    parameters = store.tensor("parameters", block, torch.float32)  # as at stage 3
    rates = Rates(step=torch.tensor(1.0), **RATES)
    ShardUpdate(*state, None, block, rates, store).apply(torch.ones(block), parameters)
    assert _resident(store) <= around, "parameters stay resident after their update"
    assert parameters.all()


def test_a_full_disk_is_an_error_of_one_line_and_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"too little space: 1048576.00 GiB are needed, [\d.]+ GiB are free"):
        FileStore(folder, 2**50)
    expected = f"offload {folder}: cannot allocate 2.00 MiB there: No space left on device"
    full = mock.Mock(
        side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    )  # another process has filled the disk
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        FileStore(folder, 2**21)
    assert not list(folder.iterdir())


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot allocate the space of a file")
def test_the_space_is_allocated_at_once(folder: Path) -> None:
    store = FileStore(folder, 3 * 2**20)
    assert os.fstat(store._file.fileno()).st_blocks * 512 >= 3 * 2**20
    assert not list(folder.iterdir()), "the file has a name, so it would survive the process"


def test_a_folder_that_cannot_be_used_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, tmp_path / "missing"):
        with pytest.raises(ValueError, match=f"^offload {re.escape(str(path))} is not a folder: [^\n]*$"):
            check_space(path, 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="is not writable: "):
        check_space(tmp_path, 1)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")
def test_a_folder_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^offload /dev/shm is in memory \(tmpfs\): expected a folder on a"):
        check_space(Path("/dev/shm"), 1)


class _Stream:
    """A stream that copies when a caller waits: early reads get old values, and overwritten sources are lost."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def test_staging_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy that do not block happen late, as on a device; the staging buffers are reused nevertheless."""
    stream, copy = _Stream(), Tensor.copy_

    def late(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        stream.waiting.append(lambda: copy(target, source))
        return target

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(shard_update, "_on_host", lambda x: False)
    monkeypatch.setattr(shard_update, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(Tensor, "copy_", late)
    staging = Staging()
    gradients, parameters = torch.arange(100.0), torch.arange(100.0, 200.0, dtype=torch.float64)
    expected = parameters + gradients
    for start in range(0, 100, 30):  # the last block is shorter
        part = slice(start, start + 30)
        with staging.host(gradients[part], parameters[part], read=True) as (gradient, new):
            assert gradient.data_ptr() != gradients[part].data_ptr() and new.dtype is torch.float64
            new.add_(gradient)
        assert stream.waiting, "the copy back has blocked"
    stream.synchronize()
    assert torch.equal(parameters, expected)
    with pytest.raises(KeyError), staging.host(gradients, parameters) as (_, new):
        new.zero_()
        raise KeyError
    stream.synchronize()
    assert torch.equal(parameters, expected), "a block whose update failed was copied back"


def _layout(dtype: torch.dtype, size: int, world: int) -> BucketLayout:
    return BucketLayout("replicated", dtype, (Segment("w", torch.Size([size]), 0, size, True),), size, size, world)


def test_bytes_of_state() -> None:
    layouts = [_layout(torch.bfloat16, 640, 4), _layout(torch.float32, 320, 2), _layout(torch.float64, 64, 1)]
    assert state_bytes(layouts, 0) == 12 * 640 + 8 * 320 + 16 * 64
    for stage in (1, 2):
        assert state_bytes(layouts, stage) == 12 * 160 + 8 * 160 + 16 * 64
    assert state_bytes(layouts, 3) == 12 * 160 + 12 * 160 + 24 * 64, "the shards of all parameters are masters"
    assert state_bytes(layouts[:2], 0, "bfloat16") == 8 * 640 + 4 * 320
    with pytest.raises(ValueError, match="state_dtype bfloat16 is for parameters of float32 or a half type, not for"):
        state_bytes(layouts, 0, "bfloat16")


def test_stores_by_name(folder: Path) -> None:
    cpu = torch.device("cpu")
    for name, kind in (("none", MemoryStore), ("host", MemoryStore), (folder, FileStore), (str(folder), FileStore)):
        store = offload.state_store(name, cpu, 40)
        assert type(store) is kind and store.tensor("x", 10, torch.float32).tolist() == [0.0] * 10


def _on_two_memories(
    name: str, layout: Layout, accumulate: Accumulate, muon: MuonOptions | None, place: str
) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Train without offload, and with it as if the host's memory and the device's were apart."""
    runs = []
    for offloads in (False, True):
        options: dict[str, Any] = {"accumulate": accumulate, "offload": place if offloads else "none"}
        case, engine = engine_of(name, layout, muon=muon, **options)
        with mock.patch.object(offload, "_IN_MEMORY", ()):
            optimizer = adamw(engine, **ADAMW, muon=muon)
        memories = TwoMemories()
        pieces, matrices = list(optimizer.rectangles()), {matrix.name for matrix in engine.matrices}
        by_muon = [piece for piece in pieces if piece.name in matrices and piece.kind == "exp_avg"]
        state = [piece.tensor for piece in pieces]
        if offloads:
            engine.device, shards = DEVICE, list[Tensor]()
            for unit in engine._units:
                for each in (fsdp_internals._group(unit.module), *fsdp_internals._parameters(unit.module).values()):
                    each.device = DEVICE
                for shard, padded in fsdp_internals.padded_shards(unit.module).items():
                    shards += [padded, local_tensor(shard)]
            if optimizer._muon is not None:
                optimizer._muon._traffic = Traffic()  # between the devices, and not counted below
            for tensor in (*state, optimizer._step, *shards):
                memories.keep(tensor)
            assert (
                "shards in the host's memory" if place == "host" else f"parameters in {place})"
            ) in engine.explanation()[0]
            if place != "host":
                file = engine._store
                assert all(0 <= x.data_ptr() - file._bytes.data_ptr() < len(file._bytes) for x in (*state, *shards))
                torch.save(case.model.state_dict(), io.BytesIO())
                assert file._used == len(file._bytes)
        norms, batches = [], micro_batches(layout, 3)
        with memories.used() if offloads else nullcontext():
            for step in range(2):
                copied, received = memories.to_device + memories.to_host, engine.traffic.received
                norms.append(train_step(case, engine, optimizer, batches, step))
                if offloads and layout == Layout(dp=2):
                    # A rank sends its shards to the other one whenever it gathers them, and receives its part of a sum.
                    # What is sent for the last rank is padded. What Muon adds to its shards comes from the device, and
                    # the sum of squares and its bound, 16 bytes, go there.
                    copied, sent = memories.to_device + memories.to_host - copied, engine.traffic.received - received
                    sent += sum(piece.tensor.nbytes for piece in by_muon) + 16
                    assert copied == sent if dist.get_rank() == 0 else 0 < copied < sent
            if offloads and place != "host":
                assert _resident(file) == 0, "pages stay in this process after an update"
                with torch.no_grad():
                    case.loss(batches[0], 0)
                assert _resident(file) == 0, "pages stay in this process after shards were gathered"
                engine.free_gathered()
        assert all(memories.on_host(tensor) == offloads for tensor in state if tensor.numel())
        runs.append((whole(engine), norms))
    return runs


TWO_MEMORIES = [
    ("gpt", Layout(dp=2), "sharded", MuonOptions(momentum=0.9), "a folder"),
    *exhaustive(
        ("toy", Layout(dp=2), "sharded", None, "host"),
        ("gpt", Layout(dp=2), "whole", None, "host"),
        ("toy", Layout(dp=4, replicas=2), "sharded", None, "host"),
        ("gpt", Layout(tp=2, dp=2), "sharded", MuonOptions(momentum=0.9), "host"),
    ),
]


@pytest.mark.parametrize(("name", "layout", "accumulate", "muon", "place"), TWO_MEMORIES)
def test_shards_of_stage_3_are_in_the_memory_of_the_host(
    tmp_path: Path, name: str, layout: Layout, accumulate: Accumulate, muon: MuonOptions | None, place: str
) -> None:
    """Replicas add the sums of micro-batches in another order; otherwise offload changes no bit."""
    place, tolerance = str(tmp_path) if place == "a folder" else place, 1e-12 * (layout.replicas > 1)
    for (expected, norms), (weights, found) in pool(layout.world).run(
        _on_two_memories, name, layout, accumulate, muon, place
    ):
        check_same(weights, expected, tolerance)
        assert found == pytest.approx(norms, rel=tolerance, abs=0.0)


@on_ranks(2)
def test_a_parameter_that_was_frozen_before_its_shard_moved_is_refused(tmp_path: Path) -> None:
    case, engine = engine_of("toy", Layout(dp=2), offload=str(tmp_path))
    next(x for x in case.model.parameters() if x.requires_grad).requires_grad_(False)
    with mock.patch.object(offload, "_IN_MEMORY", ()):
        adamw(engine, **ADAMW)
    with pytest.raises(ValueError, match="requires_grad is False now"):
        engine.start(last=True)
