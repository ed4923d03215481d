"""The ranks of one model have equal inputs, draw equal tokens and call together what needs all, or an error says so."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.support.decoders import decoder
from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse.comm.agreement import agreement
from tpfuse.comm.collectives import one_model
from tpfuse.comm.collectives.one_model import FIRST, ONE_IN, compare_inputs
from tpfuse.comm.dispatch import connected, symmetric_memory
from tpfuse.comm.errors import Disagreement, PeerTimeout, named
from tpfuse.comm.settings import set_settings, settings
from tpfuse.drop_in.parallelize import parallelize, restore
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.patience import patient
from tpfuse.testing.ranks import on_ranks, pool

IDS = integers(1, 2, 7, low=3, high=101, dtype=torch.int64)
OTHER = integers(2, 2, 7, low=3, high=101, dtype=torch.int64)
CPU = torch.device("cpu")


def _refused(run: Callable[[], object]) -> str:
    """Return the text of the Disagreement, without the way out, which it must have."""
    with pytest.raises(Disagreement) as caught:
        run()
    text, _, way = str(caught.value).partition(": expected one sampler for each data-parallel rank, ")
    assert way.startswith('DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())')
    return text


@on_ranks(2)
def test_ranks_of_a_model_with_different_inputs_are_named_and_go_on() -> None:
    """Values, lengths, and arguments that one rank alone has; in a decoder over tp and cp, and in a GPT."""
    rank, begin = dist.get_rank(), "the ranks of one model have different inputs: "
    ids, labels = (IDS, OTHER)[rank], {"labels": IDS} if rank else {}
    for mesh in (tensor_mesh(), mesh_of(1, 1, 2)["cp"]):
        model = parallelize(decoder("llama"), mesh)
        assert _refused(partial(model, input_ids=ids)) == (
            f"LlamaForCausalLM: {begin}"
            "input_ids is int64 [2, 7] on rank 0, int64 [2, 7] on rank 1, with different values"
        )
        assert _refused(partial(model, IDS[:, : 7 - rank], **labels)) == (
            f"LlamaForCausalLM: {begin}input_ids is int64 [2, 7] on rank 0, int64 [2, 6] on rank 1;"
            " labels is not given on rank 0, int64 [2, 7] on rank 1"
        )
        assert model(input_ids=IDS, labels=IDS).loss.isfinite()
    small = GPTConfig(n_layer=1, n_head=2, n_embd=8, n_positions=9, vocab_size=101)
    gpt = parallelize_gpt(GPT(small), tensor_mesh())
    initialize(gpt, 0)
    for run in (lambda: gpt(IDS, IDS, loss_weight=1.0 + rank), lambda: generate(gpt, IDS, 1, seed=rank)):
        assert " on rank 0, " in _refused(run)
    assert "ids is " in _refused(lambda: gpt(ids))
    gpt(IDS)


@on_ranks(4)
def test_every_rank_of_a_mesh_learns_which_rank_differs() -> None:
    mesh = mesh_of(1, 2, 2)
    model = parallelize(decoder("llama"), mesh["cp", "tp"])
    ids = OTHER if dist.get_rank() == 3 else IDS
    text = _refused(lambda: model(input_ids=ids))
    first, other = ", ".join(map(named, range(3))), named(3)
    assert text.endswith(f"on {first}, int64 [2, 7] on {other}, with different values")


@on_ranks(2)
def test_the_first_calls_compare_and_then_one_in_so_many() -> None:
    """A call that a checkpoint repeats in the backward pass counts once, and so does one without gradients."""
    model, compared = parallelize(decoder("llama"), tensor_mesh()), []
    with mock.patch.object(one_model, "compare_inputs", lambda *_: compared.append(call)):
        for call in range(1, 2 * ONE_IN + 1):
            with torch.set_grad_enabled(call % 2 == 0):
                out = checkpoint(lambda: model(input_ids=IDS).logits, use_reentrant=False)
            if call % 2 == 0:
                out.sum().backward()
    assert compared == [*range(1, FIRST + 1), ONE_IN, 2 * ONE_IN]


@on_ranks(2)
def test_floats_may_differ_by_rounding_and_shards_are_not_compared() -> None:
    rank, mesh = dist.get_rank(), tensor_mesh()
    x, group = normal(1, 3, 500), [mesh.get_group()]

    def compare(given: Any) -> None:
        compare_inputs("a model", {"x": given}, group, CPU)

    compare(x * (1 + 1e-2 * rank))
    masked = torch.full((3, 500), torch.finfo(torch.float32).min)
    for one, other in ((x, normal(2, 3, 500)), (masked, masked.tril()), (x, x.double()), (x, 1.0), (True, False)):
        assert "x is " in _refused(partial(compare, (one, other)[rank]))
    shard, replica = (DTensor.from_local(x + rank, mesh, [layout]) for layout in (Shard(0), Replicate()))
    compare(shard)
    assert "x is " in _refused(lambda: compare(replica))
    for given in (torch.empty(0), torch.ones(2**18, dtype=torch.bool), torch.tensor(1), torch.ones(2, device="meta")):
        compare(given)
    compare([rank])  # an object, such as a streamer that one rank has


def _sampled(seed: int, mesh: Any = None, **options: Any) -> Tensor:
    model = decoder("llama").eval()
    if mesh is not None:
        parallelize(model, mesh)
    torch.manual_seed(seed)
    out: Tensor = model.generate(IDS[:, :3], max_new_tokens=8, do_sample=True, eos_token_id=None, **options)
    return out


@on_ranks(2)
def test_ranks_with_other_seeds_sample_the_text_of_the_first() -> None:
    rank = dist.get_rank()
    context = mesh_of(1, 1, 2)["cp"]
    assert torch.equal(_sampled(7 + rank, tensor_mesh()), _sampled(7))
    assert torch.equal(_sampled(7 + rank, context, use_cache=False), _sampled(7))
    assert torch.equal(_sampled(7 + rank, context), _sampled(7 + rank))  # each rank has computed all by itself
    assert not torch.equal(_sampled(8), _sampled(7))
    model = parallelize(decoder("llama"), tensor_mesh()).eval()
    text = _refused(lambda: model.generate((IDS, OTHER)[rank], max_new_tokens=1))
    assert text.startswith("generate: the ranks of one model have different inputs: inputs is int64 [2, 7] on rank 0, ")


def _fresh(family: str) -> tuple[Any, Any]:
    """Return a parallelized model on a mesh of its own, whose ranks have not met yet, and the mesh.

    Its name is new, since torch takes one of two equal meshes, with its group, for the other.
    """
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"ranks of {group.group_name}",))
    return parallelize(decoder(family), mesh), mesh


def _save_alone(folder: Path) -> list[str]:
    """Return what rank 0 learns that saves alone, and both ranks if the other goes on to the next forward pass."""
    before, rank = settings().timeout, dist.get_rank()
    model, _ = _fresh("llama")
    messages = []
    set_settings(timeout=1.0)
    try:
        if rank == 0:
            model.save_pretrained(folder)
    except PeerTimeout as error:
        messages.append(str(error))
    finally:
        set_settings(timeout=before)
    for connects in (False, True):  # they exchange texts by the store of their group, or in shared memory
        model, mesh = _fresh("llama")
        if connects:
            symmetric_memory(mesh.get_group(), CPU)
        with pytest.raises(Disagreement) as caught:
            model.save_pretrained(folder) if rank == 0 else model(input_ids=IDS)
        messages.append(str(caught.value))
        for memory in connected(mesh.get_group()):
            memory.reset()
    return messages


def test_a_rank_that_saves_alone_names_the_missing_rank(tmp_path: Path) -> None:
    first, second = pool(2).run(_save_alone, tmp_path / "out")
    op = "save_pretrained, which all ranks of the model call"
    assert first[0].startswith(f"{op}: rank 0 waited 1.0 s for rank 1; ")
    for messages in (first[1:], second):
        assert all(f"rank 0 runs {op}" in text and "rank 1 runs " in text for text in messages), messages
    assert not (tmp_path / "out").exists()


def _alone(folder: Path) -> dict[str, str]:
    """Return what rank 0 learns that calls alone what all ranks must call, by the operation."""
    model, mesh = _fresh("phi3")
    memory: Any = symmetric_memory(mesh.get_group(), CPU)

    def saves_together(model: Any) -> None:
        with agreement("saving", mesh.get_group()):
            model.save_pretrained(folder)

    learned = {}
    for name, run in (
        ("state_dict", lambda: model.state_dict()),
        ("restore", lambda: restore(model)),
        ("generate", lambda: model.generate(IDS)),
        ("agreement", lambda: saves_together(model)),
        ("evaluation", lambda: model(input_ids=IDS)),
    ):
        model(input_ids=IDS)
        memory.barrier()
        memory.timeout = memory.control.timeout = 1.0
        if dist.get_rank() == 0:
            started = time.monotonic()
            with pytest.raises(PeerTimeout) as caught:
                run()
            assert time.monotonic() - started < patient(20.0)
            learned[name] = str(caught.value)
        dist.barrier()
        memory.timeout = memory.control.timeout = patient(60.0)
        memory.reset()
    before = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.named_parameters()}
    restore(model)
    assert all(torch.equal(x.flatten(), before[name].flatten()) for name, x in model.named_parameters())
    return learned


@pytest.mark.exhaustive
def test_what_needs_all_ranks_names_the_missing_one_and_can_be_called_again(tmp_path: Path) -> None:
    learned, _ = pool(2).run(_alone, tmp_path)
    everyone = "which all ranks of the model call"
    operations = {
        "state_dict": f"state_dict of packed projections, {everyone}",
        "restore": f"restore, {everyone}",
        "generate": "generate",
        "agreement": f"save_pretrained, {everyone}",
        "evaluation": "all_reduce",
    }
    for name, operation in operations.items():
        assert learned[name].startswith(f"{operation}: rank 0 waited 1.") and "for rank 1; " in learned[name]
