"""The parameters that an engine takes over: each once, with every module that holds it, and on other storage."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import Parameter

from tpfuse.comm.layout import from_local


@dataclass
class Member:
    """A parameter and the (module, attribute) pairs that hold it: several where weights are tied."""

    name: str
    parameter: Parameter
    owners: list[tuple[nn.Module, str]]


def take_partial_gradients(model: nn.Module) -> set[str]:
    """Names of the parameters whose gradients their modules sum over tensor-parallel ranks, which they do no more."""
    names = set()
    for prefix, module in model.named_modules():
        if getattr(module, "sum_gradients", False):
            setattr(module, "sum_gradients", False)  # noqa: B010 (nn.Module's __setattr__ is typed for modules)
            names |= {name for name, _ in module.named_parameters(prefix, recurse=False)}
    return names


def trained_parameters(model: nn.Module) -> list[Member]:
    """The parameters that require a gradient, in the model's order, each once."""
    members: dict[int, Member] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            path, _, attribute = name.rpartition(".")
            member = members.setdefault(id(parameter), Member(name, parameter, []))
            member.owners.append((model.get_submodule(path), attribute))
    return list(members.values())


def rebuilt(parameter: Parameter, storage: Tensor) -> Parameter:
    """The same parameter (mesh, placement, requires_grad) on other storage."""
    mesh = getattr(parameter, "device_mesh", None)
    dim = next((p.dim for p in getattr(parameter, "placements", ()) if hasattr(p, "dim")), None)
    return Parameter(from_local(storage, mesh, dim, parameter.shape), requires_grad=parameter.requires_grad)
