"""The units of stage 3, whose parameters are gathered and reduced together, and how ranks share them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from tpfuse.comm.layout import is_sharded, local_tensor
from tpfuse.comm.mesh import check_order, flat_group, rank_and_size, reducer_options, shown
from tpfuse.comm.sum_order import HALF
from tpfuse.zero.engine import trained_parameters
from tpfuse.zero.parameter_takeover import GradientPlace, check_own_sums, count_write, writes

_LOST = (
    "{name} was written to while it was gathered, and its shards do not have what was written: call"
    " engine.free_gathered() before you write to it, or use stage 2 if a forward pass writes to it"
)

TAKEN = (
    "{name}.grad is in ZeRO's shards, summed over the ranks: with ZeroOptimizer call its zero_grad() after each step,"
    " clip by its clip_grad_norm_(), and train in bfloat16, which needs no torch.amp.GradScaler; without it,"
    " engine.members[…].gradient has this rank's sums after finish()"
)


@dataclass(eq=False)
class Unit:
    """A module that `fully_shard` has taken, with those of its parameters that no other unit has, by their names."""

    number: int  # in the order in which units were made: that of the forward pass, and at last the model
    title: str  # in messages
    module: FSDPModule
    shards: dict[str, Parameter]  # DTensors, float32 for half types
    gathered: dict[str, Parameter] = field(default_factory=dict)  # they have memory while they are gathered

    def __post_init__(self) -> None:
        self.trained = {name: shard for name, shard in self.shards.items() if shard.requires_grad}.keys()
        self._seen = self._writes  # those before the last gather
        self._counted = dict.fromkeys(self.shards, 0)  # our own counts of writes to the gathered parameters

    @property
    def _writes(self) -> dict[str, int]:
        return {name: writes(shard) for name, shard in self.shards.items()}

    def count_writes(self) -> bool:
        """Tell autograd that gathered parameters change if their shards were written since the last call.

        Return whether any was. A backward pass that needs the old values is then an error of autograd, as it is for a
        plain model: `fully_shard` would compute it with the new ones.
        """
        before, self._seen = self._seen, self._writes
        written = [name for name, count in self._seen.items() if count != before[name]]
        count_write([self.gathered[name] for name in written])
        for name in written:
            self._counted[name] += 1
        return bool(written)

    def check(self) -> None:
        """Raise ValueError if others have written to a gathered parameter: its shards do not have that."""
        for name, parameter in self.gathered.items():
            if writes(parameter) != self._counted[name]:
                raise ValueError(_LOST.format(name=name))


class Sums(GradientPlace):
    """The place of the gradient of a shard, which is in `sums` instead."""

    sums: Tensor | None = None
    advice = "; compute a penalty of parameters in the model's forward, since outside of it they are this rank's shards"

    def give(self) -> None:
        """Set `.grad` to the sums, to which `fully_shard` adds."""
        self.parameter.grad = self.sums

    def take(self) -> None:
        """Move what is in `.grad` to the sums."""
        self.sums = self.parameter.grad
        self.leave(taken=self.sums is not None)


@dataclass(frozen=True)
class ShardedParameter:
    """A trained parameter."""

    name: str
    sharded: Parameter  # the DTensor of its shards, float32 for half types
    decay: bool
    in_norm: bool  # true on exactly one of the ranks with the same shard
    is_owner: bool  # whether this rank saves it: exactly one of them does
    place: Sums

    @property
    def gradient(self) -> Tensor:
        """Return the summed gradient of this rank's shard, in its shape; zeros if the parameter took no part."""
        if self.place.sums is None:
            return torch.zeros_like(local_tensor(self.sharded))
        return local_tensor(self.place.sums)

    def own_gradient(self) -> Tensor:
        """Return `gradient` as a tensor to which sums may be added."""
        if self.place.sums is None:
            self.place.sums = torch.zeros_like(self.sharded)
        return self.gradient


def inner_first(units: object) -> list[nn.Module]:
    """Return each unit once, units after those inside of them, as `fully_shard` must take them. Raise ValueError."""
    if not isinstance(units, Iterable):
        raise ValueError(f"shard: units is {shown(units)}: expected modules in an iterable, such as the model's blocks")
    each = list(dict.fromkeys(units))
    inside = {unit: set(unit.modules()) if isinstance(unit, nn.Module) else set() for unit in each}
    return sorted(each, key=lambda unit: len(inside[unit].intersection(each)))


def check_units(model: nn.Module, units: Sequence[nn.Module]) -> torch.dtype:
    """Return the dtype of the parameters. Raise ValueError if they or the units cannot be sharded."""
    modules = set(model.modules()) - {model}
    for unit in units:
        if not isinstance(unit, nn.Module) or unit not in modules:
            raise ValueError(
                f"shard: a unit is {shown(unit)} that is not a part of the model: expected modules, such as its"
                " blocks, by which it shares its parameters"
            )
        if isinstance(unit, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"shard: a unit is {shown(unit)}, which is never called: pass the modules in it")
    trained_parameters(model)
    check_own_sums(model)
    unit_of = dict.fromkeys(model.modules(), model)
    for module in model.modules():  # from the outside in
        if any(module is unit for unit in units):
            unit_of |= dict.fromkeys(module.modules(), module)
    first_use: dict[Parameter, tuple[str, nn.Module]] = {}
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = unit_of[model.get_submodule(name.rpartition(".")[0])]
        first, its_unit = first_use.setdefault(parameter, (name, unit))
        if its_unit is not unit:
            raise ValueError(f"{first} and {name} are one parameter in two units of stage 3: put both in one unit")
        if not parameter.ndim:
            raise ValueError(f"{name} is a scalar, and stage 3 cannot shard it: expected a parameter of shape (1,)")
        if not local_tensor(parameter).is_contiguous():
            raise ValueError(f"{name} is not contiguous, and stage 3 cannot shard it: expected a contiguous parameter")
        if parameter.is_floating_point() and parameter.numel():
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        several = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise ValueError(f"{several}: stage 3 expects parameters of one dtype")
    return next(iter(dtypes), torch.float32)


def shard_units(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    dtypes: tuple[torch.dtype, torch.dtype],
    offload: OffloadPolicy,
) -> list[Unit]:
    """Shard the parameters of the units, then those of the model that no unit has taken. Return the units so made.

    dtypes: that of the parameters and that in which gradients are reduced.
    """
    half = dtypes[0] in HALF
    param_dtype, reduce_dtype = dtypes if half else (None, None)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    names = {module: name for name, module in model.named_modules()}
    made, taken = list[Unit](), set[str]()
    for number, module in enumerate((*units, model)):
        inside = set(module.parameters())
        own = [name for name, p in model.named_parameters() if p in inside and p.numel() and name not in taken]
        taken.update(own)
        _widen(module)
        sharded = fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            shard_placement_fn=lambda p: Shard(shard_dim(local_tensor(p).shape, mesh.size())),
            ignored_params={p for p in module.parameters() if not p.numel()},  # torch cannot reduce their gradients
        )
        what = "the model's own parameters" if module is model else f"unit {names[module]}"
        title = f"{what} ({', '.join(own[:1] + ['…'] * (len(own) > 1))})"
        made.append(Unit(number, title, sharded, {name: model.get_parameter(name) for name in own}))
    *blocks, root = (unit.module for unit in made)
    for first, second in zip([root, *blocks], blocks, strict=False):
        first.set_modules_to_forward_prefetch([second])
    for first, second in zip([root, *blocks[::-1]], blocks[::-1], strict=False):
        first.set_modules_to_backward_prefetch([second])
    return made


def _widen(unit: nn.Module) -> None:
    """Convert the unit's own parameters of a half type to float32; tied parameters stay tied."""
    widened: dict[Parameter, Parameter] = {}
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype in HALF and parameter.numel():
                if parameter not in widened:
                    wide = parameter.detach().float()
                    widened[parameter] = Parameter(wide, requires_grad=parameter.requires_grad)
                module.register_parameter(name, widened[parameter])


def shard_dim(shape: Sequence[int], world: int) -> int:
    """Return the dimension in which stage 3 cuts a parameter of this local shape.

    This is the first dimension, unless cutting it would give a rank more than an eighth more than an equal share, as
    for GPT-2's packed [3, C, C]: then it is the first dimension that can be cut evenly, if there is one.
    """
    if -(-shape[0] // world) * world * 8 <= shape[0] * 9:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % world == 0), 0)


def data_mesh(mesh: DeviceMesh, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return two meshes: the ranks that share a copy of the model, along "shard", and those with the same shard of it.

    With several replicas the first one has the axes ("alone", "shard"), and one rank along "alone". So torch
    keeps sums that are not to be reduced over replicas yet, but the last of these sums is left to us.

    mesh: all its axes except "tp" and "pp" are data-parallel; together they are `replicas` × shards. Collective:
    all ranks of the mesh must call it. Raise ValueError if these ranks are not in ascending order.
    """
    names = tuple(name for name in mesh.mesh_dim_names or () if name not in ("pp", "tp"))
    wide = tuple(name for name in names if mesh[name].size() > 1) or names[:1]
    data = mesh[wide] if len(wide) == 1 else mesh[wide]._flatten("_".join(wide))
    check_order(data)
    options = reducer_options("replicate", "shard", together=2 if replicas > 1 else 1)
    sizes, names = (replicas, 1, data.size() // replicas), ("replicate", "alone", "shard")
    both = data._unflatten(0, sizes, names, backend_override=options)
    return both[("alone", "shard") if replicas > 1 else "shard"], both["replicate"]


def copies_of_shards(model: nn.Module, mesh: DeviceMesh, across: DeviceMesh) -> dict[str, tuple[int, int]]:
    """Return the parameters that stage 3 will shard and train: (ranks with the same shard, this rank's number there).

    mesh, across: the argument of `data_mesh`, and its second result. Collective: all ranks of the mesh must call it.
    """
    rank, ranks = rank_and_size(flat_group(mesh, "tp"))
    copies, copy = across.size(), across.get_local_rank()
    whole = (copies * ranks, copy * ranks + rank)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    return {name: (copies, copy) if is_sharded(p) else whole for name, p in trained.items()}
