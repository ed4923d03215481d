"""Buckets hold the sums of all ranks' gradients, reduce them during the backward pass, and refuse wrong use."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

from tests.support.meshes import mesh_of, tensor_mesh
from tpfuse import explain
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.layout import local_slices
from tpfuse.kernels.launch import multiprocessors, recording
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.switches import use
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks
from tpfuse.zero import fully_sharded, shard
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.compression import Bf16Compression
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.optimizer import ZeroOptimizer
from tpfuse.zero.reducer import collective
from tpfuse.zero.reducer.collective import CollectiveReducer

CONFIG = GPTConfig(vocab_size=63, n_positions=16, n_embd=24, n_layer=2, n_head=12, dropout=0.2)


def _gradients(buckets: GradientBuckets) -> dict[str, Tensor]:
    """Return the gradients by name at stage 0, where all ranks have whole sums."""
    return {
        segment.name: bucket.layout.view(bucket.reduced_shard, segment)
        for bucket in buckets.buckets
        for segment in bucket.layout.segments
    }


class _Toy(nn.Module):
    """Four layers in a row, one of which is frozen, and one layer that is not used."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(9, 9, dtype=dtype) for _ in range(3))
        self.unused, self.frozen = nn.Linear(9, 5, dtype=dtype), nn.Linear(9, 9, dtype=dtype)
        self.frozen.requires_grad_(False)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(integers(seed, *parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.frozen(self.second(self.first(x))))
        return out


def _run(model: nn.Module, buckets: GradientBuckets, batches: list[Tensor]) -> None:
    for index, x in enumerate(batches):
        buckets.start(last=index == len(batches) - 1)
        model(x).sum().backward()
    buckets.finish()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the buckets that are reduced from now on."""
    events: list[str] = []
    start_reduce = CollectiveReducer.start_reduce

    def record(reducer: CollectiveReducer, index: int, *, more: bool = False) -> None:
        events.append(f"send {index}")
        start_reduce(reducer, index, more=more)

    monkeypatch.setattr(CollectiveReducer, "start_reduce", record)
    return events


def test_reduction_starts_while_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events = recorded(monkeypatch)
    model = _Toy()
    del model.unused
    model.first.register_full_backward_hook(lambda *_: events.append("first layer's backward"))
    buckets = shard(model, stage=0, bucket_bytes=1)
    x = integers(1, 4, 9, dtype=torch.float64).requires_grad_()
    sent = [f"send {index}" for index in range(len(buckets.buckets))]
    _run(model, buckets, [x])
    assert len(sent) == 6 and [event for event in events if event in sent] == sent
    assert events.index("first layer's backward") >= 4
    events.clear()
    buckets.start(last=False)
    model(x).sum().backward()
    assert not set(events) & set(sent), "a micro-batch that is not the last has communicated"
    buckets.start(last=True)
    model(x).sum().backward()
    assert [event for event in events if event in sent] == sent


def test_buckets_are_reduced_in_one_order_even_if_gradients_arrive_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, ranks whose gradients arrive in another order, or not at all, would reduce different buckets."""
    sent = recorded(monkeypatch)
    model = _Toy()
    buckets = shard(model, stage=0, bucket_bytes=1)
    buckets.start(last=True)
    model.first(torch.ones(4, 9, dtype=torch.float64)).sum().backward()
    assert sent == [], "the buckets of later layers are not complete"
    buckets.finish()
    assert sent == [f"send {index}" for index in range(len(buckets.buckets))]


@on_ranks(2)
def test_gradients_that_torchs_styles_leave_as_partial_sums_are_summed() -> None:
    """The norm has such gradients. At stage 2 a second pass follows, whose gradients are added to the first one's."""
    whole = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6)).double()
    x = integers(1, 2, 6, 4, dtype=torch.float64)
    whole(x).square().sum().backward()
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
    for stage in (0, 2):
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6)).double()
        model.load_state_dict(whole.state_dict())
        parallelize_module(model, tensor_mesh(), plan)  # type: ignore[arg-type]
        buckets = shard(model, mesh_of(1, 2), stage=stage)
        passes = 2 if stage else 1
        buckets.start(last=True)
        for _ in range(passes):
            model(x.chunk(2, 1)[dist.get_rank()]).square().sum().backward()
        buckets.finish()
        for name, found in _gradients(buckets).items():
            part = whole.get_parameter(name).grad[
                tuple(slice(*each) for each in local_slices(model.get_parameter(name)))
            ]  # type: ignore[index]
            torch.testing.assert_close(found, passes * part, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_a_model_without_tensor_parallel_layers_counts_once_in_the_norm() -> None:
    model = nn.Linear(4, 3).double()
    optimizer = ZeroOptimizer(model, mesh_of(1, 2), stage=1)
    gradients = torch.autograd.grad(model(torch.ones(2, 4).double()).square().sum(), list(model.parameters()))
    model(torch.ones(2, 4).double()).square().sum().backward()
    for max_norm in (-1.0, torch.nan):
        with pytest.raises(ValueError, match="expected a norm that is not negative"):
            optimizer.clip_grad_norm_(max_norm)
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), expected, rtol=1e-12, atol=0.0)


@on_ranks(2)
def test_a_local_part_of_a_half_type_that_was_written_is_trained() -> None:
    layer = ColumnParallelLinear(4, 6, device_mesh=tensor_mesh(), dtype=torch.bfloat16)
    buckets = shard(layer, mesh_of(1, 2), stage=0)
    optimizer = BucketUpdater(buckets, weight_decay=0.0)
    with torch.no_grad():
        layer.weight.to_local().fill_(3.0)  # type: ignore[operator]
    _run(layer, buckets, [torch.ones(2, 4, dtype=torch.bfloat16)])
    optimizer.step(0.0)
    assert (layer.weight.to_local() == 3.0).all()  # type: ignore[operator]


@on_ranks(2)
def test_a_rank_names_non_finite_gradients_in_its_shards() -> None:
    """Set one element after another of this rank's shards to NaN."""
    model, segments = _Toy(), 0
    buckets = shard(model, stage=1)
    assert buckets.data_ranks == 2 and buckets.world_group is dist.group.WORLD
    _run(model, buckets, [integers(1, 4, 9, dtype=torch.float64)])
    for bucket in buckets.buckets:
        for segment, part in bucket.layout.segments_in(bucket.shard):
            for element in (part.start, part.stop - 1):
                before = bucket.reduced_shard[element - bucket.shard.start].item()
                bucket.reduced_shard[element - bucket.shard.start] = torch.nan
                assert buckets.nonfinite() == [segment.name]
                bucket.reduced_shard[element - bucket.shard.start] = before
            segments += 1
    assert segments > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_have_float32_masters(dtype: torch.dtype) -> None:
    model = nn.Linear(63, 100, dtype=dtype)
    before = model.weight.detach().clone()
    buckets = shard(model, stage=0)
    (bucket,) = buckets.buckets
    assert bucket.values.dtype == dtype and bucket.layout.state_dtype == torch.float32
    assert torch.equal(model.weight, before)
    # 1 + 2^-10 needs more bits than bfloat16 has: the sum must be computed in float32.
    batches = [torch.ones(1, 63, dtype=dtype), torch.full((1, 63), 2.0**-10, dtype=dtype)]
    _run(model, buckets, batches)
    assert torch.equal(_gradients(buckets)["weight"], torch.full((100, 63), 1 + 2.0**-10))
    optimizer = BucketUpdater(buckets)
    master = optimizer.state(bucket)["model"]
    assert master.dtype == torch.float32 and torch.equal(master[: 63 * 100].view(100, 63), before.float())
    first = master.clone()
    optimizer.step(1e-6)  # much less than the smallest change of a weight of a half type
    assert not torch.equal(master, first) and torch.equal(bucket.values, master.to(dtype))
    half = shard(nn.Linear(63, 100, dtype=dtype), stage=0, gradient_dtype="parameter")
    assert half.buckets[0].reducer.gradient_buffer(0).dtype == dtype


def test_gradients_accumulate_whole_under_compression_and_the_engine_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, line in (
        ({}, "ZeRO stage 2 (one rank): micro-batches add up in shards, each one when it is reduced"),
        ({"accumulate": "whole"}, "ZeRO stage 2 (one rank): micro-batches add up in whole gradients"),
        (
            {"compression": Bf16Compression()},
            "ZeRO stage 2 (gradients accumulate whole, since compression is that of a step's sum, one rank):"
            " micro-batches add up in whole gradients",
        ),
    ):
        explain(shard(nn.Linear(2, 2), stage=2, **options))  # type: ignore[arg-type]
        assert capsys.readouterr().out == line + "\n"


def test_buckets_hold_one_dtype_each() -> None:
    model = nn.Sequential(nn.Linear(9, 9, dtype=torch.float32), nn.Linear(9, 9, dtype=torch.bfloat16))
    before = [p.detach().clone() for p in model.parameters()]
    buckets = shard(model, stage=0)
    assert sorted(str(bucket.values.dtype) for bucket in buckets.buckets) == ["torch.bfloat16", "torch.float32"]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_matrices_have_weight_decay() -> None:
    parameters = dict(GPT(CONFIG).named_parameters())
    names = {name for name in parameters if name.endswith("weight") and ".ln_" not in name}
    assert names == {name for name, parameter in parameters.items() if decays(name, parameter)}


@on_ranks(2)
def test_bad_arguments_are_refused() -> None:
    mesh, gpt = mesh_of(1, 2), parallelize_gpt(GPT(CONFIG), tensor_mesh())
    initialize(gpt, 1)
    layer = nn.Linear(2, 2)
    norm = nn.LayerNorm(2)
    norm.sum_gradients = True  # type: ignore[assignment]
    for model, given, options, message in (
        (layer.parameters(), mesh, {}, r"^shard got a generator: expected the model, an nn\.Module"),
        (layer, "WORLD", {}, "^shard: mesh is 'WORLD': expected a DeviceMesh, or None"),
        (layer, mesh.get_group("tp"), {}, "^shard: mesh is a ProcessGroup: expected a DeviceMesh"),
        (layer, init_device_mesh("cpu", (2,)), {}, "mesh has the axes None: expected names among pp, dp"),
        (layer, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), {}, r"mesh has the axes \('ep',\): expec"),
        (layer, mesh["dp"], {}, '^shard: mesh is a slice without "tp", which has 2 ranks: pass the whole mesh'),
        (gpt, None, {}, r"wte.weight is on the ranks \[0, 1\], and the mesh has \[\] along tp: pass the mesh of all"),
        (gpt, mesh_of(2, 1), {}, r"wte.weight is on the ranks \[0, 1\], and the mesh has \[\d\] along tp: pass"),
        (norm, None, {}, "^shard: gradients such as bias's are partial sums over tensor-parallel ranks: pass the mesh"),
        (layer, mesh, {"stage": 4}, "^stage 4: expected 0, 1, 2 or 3$"),
        (layer, mesh, {"gradient_dtype": torch.bfloat16}, 'gradient_dtype is a dtype: expected "float32" or "param'),
        (layer, mesh, {"reduce_dtype": "bfloat16"}, r"reduce_dtype is 'bfloat16': expected \"float32\" or"),
        (layer, mesh, {"stage": 3, "replicas": 2}, "^replicas 2: expected a number that divides the 1 data-parallel"),
        (layer, mesh, {"replicas": 2}, "^shard: replicas is not for stage 0: expected stage 3$"),
        (
            layer,
            mesh,
            {"stage": 2, "accumulate": "float32"},
            "^shard: accumulate is 'float32': expected \"sharded\" or",
        ),
        (layer, mesh, {"stage": 3, "gradient_dtype": "parameter"}, "gradient_dtype is not for stage 3: expected"),
        (layer, mesh, {"stage": 3, "compression": Bf16Compression()}, "compression is not for stage 3: expected stage"),
        (nn.Linear(2, 2).requires_grad_(False), mesh, {}, "no parameter that requires a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            shard(model, given, **{"stage": 0, **options})  # type: ignore[arg-type]


def test_wrong_order_of_calls_is_refused() -> None:
    model = nn.Linear(2, 2)
    buckets = shard(model, stage=0)
    buckets.start(last=True)
    with pytest.raises(ValueError, match="finish"):
        buckets.start(last=True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"call start\(\) before each backward pass"):
        model(torch.ones(1, 2)).sum().backward()
    buckets.finish()
    with pytest.raises(ValueError, match=r"call start\(\) before each backward pass"):
        model(torch.ones(1, 2)).sum().backward()
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"bias\.requires_grad is False now: make a new engine"):
        buckets.start(last=True)


def test_each_update_requires_new_gradients() -> None:
    model = nn.Linear(2, 2)
    buckets = shard(model, stage=1)
    optimizer, x = BucketUpdater(buckets), torch.ones(1, 2)
    for last in (False, True):
        with pytest.raises(ValueError, match=r"call finish\(\) after the last backward pass"):
            optimizer.step(1e-3)
        buckets.start(last=last)
        model(x).sum().backward()
        if not last:
            with pytest.raises(ValueError, match="without a last micro-batch"):
                buckets.finish()
    buckets.finish()
    before = model.weight.detach().clone()
    optimizer.step(1e-3)
    assert not torch.equal(model.weight, before)
    before.copy_(model.weight)
    with pytest.raises(ValueError, match=r"step\(\) once"):
        optimizer.step(1e-3)
    assert optimizer.updates == 1 and torch.equal(model.weight, before)


@on_ranks(2)
def test_a_reducer_with_nccl_leaves_multiprocessors_to_it_until_it_is_closed() -> None:
    mesh = mesh_of(2, 1)
    with use(implementation="collective"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda *_: "nccl")
        patch.setattr(collective, "connected", list)
        buckets = shard(_Toy(), mesh, stage=2)
    with recording("sm_90"):
        assert multiprocessors(torch.device("meta")) == 116
        assert buckets.reasons[0].endswith("products leave 16 multiprocessors to NCCL")
        buckets.close()
        assert multiprocessors(torch.device("meta")) == 132
    with pytest.MonkeyPatch.context() as patch:
        reserved: list[dist.ProcessGroup] = []
        patch.setattr(fully_sharded, "reserve", reserved.append)
        shard(_Toy(), mesh, stage=3)  # it never ends
    assert [group.size() for group in reserved] == [2]


@on_ranks(2)
def test_layers_that_communicate_before_a_reducer_with_nccl_cause_a_warning() -> None:
    mesh = mesh_of(2, 1)
    symmetric_memory(mesh.get_group("dp"), torch.device("cpu")).channel(lambda *_: None, "a layer's", 16)
    with use(implementation="collective"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda *_: "nccl")
        with pytest.warns(UserWarning, match="make the engine or optimizer before the first forward pass"):
            shard(_Toy(), mesh, stage=2).close()
