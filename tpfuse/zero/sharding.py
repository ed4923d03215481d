"""The entrance to ZeRO: `shard` gives the parameters of a model to the engine of a stage.

    mesh = build_mesh("cpu", dp=4, tp=2)
    engine = shard(model, mesh, stage=2)
    optimizer = adamw(engine, weight_decay=0.1)
    for batches in data:
        for index, batch in enumerate(batches):
            engine.start(last=index == len(batches) - 1)  # gradients are exchanged in the last backward pass
            (loss_sum(model, batch) / labels).backward()  # gradients are summed over ranks, not averaged
        engine.finish()
        optimizer.step(lr=1e-3, factor=min(1.0, 1.0 / engine.norm()))

`tpfuse.ZeroOptimizer` does this for loops that were written for PyTorch's DDP.
"""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tpfuse.choices import Accumulate, GradientDtype, MomentDtype
from tpfuse.comm import collectives
from tpfuse.comm.agreement import agreement
from tpfuse.comm.layout import local_tensor, model_device
from tpfuse.comm.mesh import (
    AXES,
    DATA_AXES,
    check_order,
    default_group,
    flat_group,
    group_of_ends,
    rank_and_size,
    shown,
)
from tpfuse.comm.sum_order import VirtualRanks
from tpfuse.parallel.pipeline.shared_parameters import SharedParameters
from tpfuse.zero.bucket_layout import BUCKET_BYTES
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.engine import RankGroups
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.muon import MuonOptions
from tpfuse.zero.muon_matrices import Rows, matrices_of
from tpfuse.zero.offload import FileStore, file_bytes, moment_dtype, state_bytes, state_store
from tpfuse.zero.parameter_takeover import partial_gradients
from tpfuse.zero.reducer.collective import reserve_as_with_nccl
from tpfuse.zero.reducer.inter_node import Compression
from tpfuse.zero.unit_updater import UnitUpdater

_CHOICES = {"gradient_dtype": GradientDtype, "reduce_dtype": GradientDtype, "accumulate": Accumulate}
# The arguments of `shard` that some stages lack: the default, and the stages that have them.
_STAGES = {"replicas": (1, (3,)), "gradient_dtype": ("float32", (0, 1, 2)), "compression": (None, (0, 1, 2))}


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    stage: int,
    units: Iterable[nn.Module] = (),
    replicas: int = 1,
    shared: SharedParameters | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    gradient_dtype: GradientDtype = "float32",
    reduce_dtype: GradientDtype | None = None,
    accumulate: Accumulate = "sharded",
    compression: Compression | None = None,
    matrices: Mapping[str, int | Sequence[Rows]] | None = None,
    offload: str | PathLike[str] = "none",
    virtual_ranks: int = 0,
    micro_batches: int = 1,
) -> GradientBuckets | FullySharded:
    """Return the engine that takes over the parameters of `model` at this stage of ZeRO (arXiv:1910.02054).

    model: its parameters, of any shapes, are plain or DTensors on the mesh's axis "tp". Data-parallel ranks get
    the parameters and buffers of the first of them, as under DDP.

    mesh: all ranks that train the model: a mesh whose axes are named among "pp", "dp", "cp" (or "ring" and
    "ulysses") and "tp". Ranks along "dp" and "cp" have the same parameters and different tokens; gradients are summed
    over them. None: all ranks of torch's default group are data-parallel.

    stage: 0 (nothing is sharded), 1 (AdamW's state), 2 (gradients too) or 3 (parameters too). Stage 3 on one
    data-parallel rank has nothing to shard, and is stage 2.

    units: for stage 3: modules of the model in the order of its forward pass, such as its blocks. The parameters of a
    unit are gathered while it computes; all other parameters are gathered during the whole pass. replicas: for stage 3:
    the number of copies of the model (HSDP); it must divide the number of data-parallel ranks.

    shared: `pipeline.shared` of a `tpfuse.Pipeline`.

    bucket_bytes: for stages 0 to 2: the size of a bucket's float32 gradients, by default that of torch's DDP.
    gradient_dtype: for stages 0 to 2: the dtype in which gradients are accumulated and kept, "float32" (float64 for
    float64) or "parameter" for the parameters' own. reduce_dtype: the dtype in which gradients are sent, by default
    `gradient_dtype`; stage 3 accumulates in it too. Sums are float32 in both cases, except the whole sums of stage 0
    and all sums of stage 3, which have the dtype that is sent.

    accumulate: for stages 2 and 3: what a rank keeps of the gradients of earlier micro-batches. "sharded": its shard of
    their sum. Each backward pass is reduced, and where reductions run beside products the next pass computes meanwhile.
    "whole": whole gradients, of which only the last pass of a step sends the sum. Stages 0 and 1 always keep those.

    compression: for stages 0 to 2: the compression of gradients that nodes send each other
    (`tpfuse.zero.compression`). It compresses the sum of a step, so gradients accumulate whole.

    matrices: the parameters that Muon updates, as `tpfuse.zero.hidden_matrices` returns them; a number instead of rows
    says how many matrices of equal height a parameter packs; one of three dimensions stacks such weights. AdamW updates
    all others, and without this argument all.

    offload: the place of what the update alone uses, float32 masters and moments (`tpfuse.zero.offload`): "none" (the
    parameters' device), "host" (the host's memory) or a folder on a local disk. At stage 3 the shards are the masters;
    unless it is "none", they and their gradients are in the host's memory; for a folder, `adamw` moves them there.

    virtual_ranks: not 0: the sums of gradients have the same bits for every number of data-parallel ranks that divides
    this power of two, for all stages and for all pipelines, if each rank computes on one thread and MKL in one mode (on
    CPUs, see docs/training.md), on the same hardware, with the same tensor and context parallelism. Virtual rank v has
    sequences v B / N to (v + 1) B / N of a batch of B, and computes them in `micro_batches` passes. Real ranks have
    N / ranks successive ones, and pass their micro-batches in this order; gradients accumulate whole, in one more
    tensor for each doubling of N / ranks.

    Collective. Raise ValueError for arguments of another kind, for a mesh that lacks ranks of the model, and for
    parameters that the stage cannot shard (complex ones; at stage 3 scalars, parameters of several dtypes, and those
    that two units share). Raise ValueError on every rank if data-parallel ranks have parameters of other names, shapes
    or dtypes. Raise PeerTimeout.
    """
    _check(
        model, mesh, stage, replicas=replicas, gradient_dtype=gradient_dtype,
        reduce_dtype=reduce_dtype or gradient_dtype, accumulate=accumulate, compression=compression,
    )  # fmt: skip
    hidden = matrices_of(model, matrices or {})
    shared = SharedParameters() if shared is None else shared
    if shared.ends is not None and "pp" not in (mesh.mesh_dim_names or () if mesh else ()):
        raise ValueError('shard: mesh has no axis "pp", along which the stages that share parameters are')
    data = default_group() if mesh is None else flat_group(mesh, *DATA_AXES)
    _, ranks = rank_and_size(data)
    if replicas < 1 or ranks % replicas:
        raise ValueError(f"replicas {replicas}: expected a number that divides the {ranks} data-parallel ranks")
    device, fully = model_device(model), stage == 3 and ranks > 1
    groups = RankGroups(data, data, data, dp=ranks)
    if mesh is not None:
        kept = () if fully else DATA_AXES
        ends = None if shared.ends is None else group_of_ends(mesh, *shared.ends, *kept)
        tensor_rank, _ = rank_and_size(flat_group(mesh, "tp"))
        _, dp = rank_and_size(flat_group(mesh, "dp"))
        groups = RankGroups(data, flat_group(mesh, *DATA_AXES, "tp"), flat_group(mesh, *AXES), ends, dp, tensor_rank)
    if virtual_ranks and (compression or "parameter" in (gradient_dtype, reduce_dtype)):
        raise ValueError("virtual_ranks: expected gradients in float32, without compression, whose sums have one order")
    virtual = VirtualRanks.of(virtual_ranks, micro_batches, groups.dp)
    trained = any(x.requires_grad and x.numel() for x in model.parameters())
    if not collectives.on_any_rank(trained, device, groups.world):  # one stage of a pipeline may be frozen
        raise ValueError("shard: the model has no parameter that requires a gradient")
    if fully:
        if mesh is None:
            mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp",))
        engine: GradientBuckets | FullySharded = FullySharded(
            model,
            groups,
            mesh=mesh,
            units=units,
            replicas=replicas,
            reduce_dtype=reduce_dtype or "float32",
            accumulate=accumulate,
            uses=shared.uses,
            tied=shared.tied,
            matrices=hidden,
            offload=offload,
            virtual=virtual,
        )
    else:
        engine = GradientBuckets(
            model,
            groups,
            stage=min(stage, 2),
            bucket_bytes=bucket_bytes,
            gradient_dtype=gradient_dtype,
            reduce_dtype=reduce_dtype,
            accumulate=accumulate,
            compression=compression,
            uses=shared.uses,
            pipelined=mesh is not None and "pp" in (mesh.mesh_dim_names or ()),
            tied=shared.tied,
            matrices=hidden,
            virtual=virtual,
        )
        engine.offload = offload
    if virtual_ranks:
        reserve_as_with_nccl(device)
    return engine


def adamw(
    engine: GradientBuckets | FullySharded,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    muon: MuonOptions | None = None,
    state_dtype: MomentDtype = "float32",
) -> BucketUpdater | UnitUpdater:
    """Return the AdamW of the shards of an engine; its method `step(lr, factor)` updates all parameters.

    Its state is where the engine's `offload` says (`shard`), which is collective for a folder.

    betas, eps, weight_decay: as in torch.optim.AdamW; biases and norms have no weight decay. muon: the options of Muon,
    which updates the engine's `matrices`, if it has any. state_dtype: the dtype in which AdamW's moments are kept,
    "float32" (float64 for float64), or "bfloat16", rounded up or down so that they keep their expectation
    (kernels/adamw.py); Muon's momentum is never bfloat16. Raise ValueError for bfloat16 moments of float64 parameters,
    and, on every rank, if a rank cannot use the folder.
    """
    options: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    options |= {"muon": muon, "state_dtype": state_dtype}
    offload = engine.offload
    with agreement(f"offload {offload}", engine.world_group):
        if isinstance(engine, FullySharded):
            by_muon, sizes = {matrix.name for matrix in engine.matrices}, engine.shard_bytes
            for member in engine.members:
                one, elements = member.sharded.dtype, local_tensor(member.sharded).numel()
                kept = [one] if member.name in by_muon else [moment_dtype(state_dtype, one)] * 2
                sizes += [elements * dtype.itemsize for dtype in kept]
            nbytes = sum(map(file_bytes, sizes))
        else:
            nbytes = state_bytes([bucket.layout for bucket in engine.buckets], engine.stage, state_dtype)
        store = state_store(offload, engine.device, nbytes)
    if isinstance(engine, FullySharded) and isinstance(store, FileStore):
        engine.move_shards(store)
    optimizer = UnitUpdater if isinstance(engine, FullySharded) else BucketUpdater
    return optimizer(engine, store=None if offload == "none" else store, **options)


def _check(model: object, mesh: DeviceMesh | None, stage: int, **given: object) -> None:
    """Raise ValueError for arguments of `shard` of another kind, or that the stage or the mesh cannot have."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"shard got {shown(model)}: expected the model, an nn.Module, since the names and the modules of its"
            " parameters matter too"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("shard got a model in DDP, which it replaces: expected the model, its .module")
    if meta := next((name for name, parameter in model.named_parameters() if parameter.is_meta), None):
        raise ValueError(f"shard: {meta} is on the meta device: expected values, as after model.to_empty(device=…)")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("shard: fully_shard has this model, as an engine of stage 3 does: expected a new model")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage {shown(stage)}: expected 0, 1, 2 or 3")
    for name, kind in _CHOICES.items():
        if given[name] not in get_args(kind):
            names = " or ".join(f'"{each}"' for each in get_args(kind))
            raise ValueError(f"shard: {name} is {shown(given[name])}: expected {names}")
    for name, (usual, stages) in _STAGES.items():
        if given[name] != usual and stage not in stages:
            raise ValueError(f"shard: {name} is not for stage {stage}: expected stage {' or '.join(map(str, stages))}")
    _check_mesh(mesh)
    _check_tensor_parallel(model, mesh)


def _check_mesh(mesh: object) -> None:
    """Raise ValueError unless the mesh has names that say what each axis is for, and all wide axes."""
    if mesh is None:
        return
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"shard: mesh is {shown(mesh)}: expected a DeviceMesh, or None if all ranks are data-parallel")
    names = mesh.mesh_dim_names
    if not names or not set(names) <= set(AXES):
        raise ValueError(
            f"shard: mesh has the axes {names}: expected names among {', '.join(AXES)}, as in"
            ' init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))'
        )
    check_order(mesh)
    root = mesh._get_root_mesh()
    for axis, name in enumerate(root.mesh_dim_names or ()):
        if name in AXES and name not in names and root.size(axis) > 1:
            raise ValueError(
                f'shard: mesh is a slice without "{name}", which has {root.size(axis)} ranks: pass the whole mesh'
            )


def _check_tensor_parallel(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Raise ValueError if tensor-parallel ranks of the model are not those along "tp" of the mesh."""
    tensor = None if mesh is None or "tp" not in (mesh.mesh_dim_names or ()) else mesh["tp"]
    known = [] if tensor is None else tensor.mesh.flatten().tolist()
    way = 'pass the mesh of all ranks, with the model\'s axis named "tp"'
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            ranks = parameter.device_mesh.mesh.flatten().tolist()
            if ranks != known:
                raise ValueError(f"shard: {name} is on the ranks {ranks}, and the mesh has {known} along tp: {way}")
    partial = partial_gradients(model)
    if partial and len(known) < 2:
        raise ValueError(
            f"shard: gradients such as {min(partial)}'s are partial sums over tensor-parallel ranks: {way}"
        )
