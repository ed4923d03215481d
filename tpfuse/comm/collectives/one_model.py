"""Equal inputs and equal random numbers, which the ranks of one model must share.

Along tensor, context and pipeline parallelism the ranks compute parts of one result. If their inputs differ, so that
each part belongs to another batch, the result is that of no batch, and no shape tells. So ranks compare their inputs.
A training loop's mistakes show in its first calls; later ones, such as tokens that ranks have drawn by themselves, in
any call. So a model compares its first calls, and then one in so many: all of its ranks count alike.

A comparison reads the inputs on the host, which on a GPU waits for the work before it. Calls without one cost a count.
Nothing is compared where the host cannot read values: in graphs of torch.compile, and while a CUDA graph is captured.
Nor is it in a backward pass, where a checkpoint computes a call again.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfuse.comm.agreement import exchange
from tpfuse.comm.collectives import all_gather
from tpfuse.comm.collectives.collective import share_
from tpfuse.comm.errors import Disagreement, named
from tpfuse.comm.layout import has_values, is_sharded, local_tensor, model_device

FIRST, ONE_IN = 3, 16  # the calls of a model that compare: the first ones, and then one in so many
_MOST_COMPARED = 2**16  # elements of a tensor that ranks compare, at equal distances
_MOST_SENT = 2**10  # elements of a tensor of floats that ranks send each other if its bits differ
# Floats that ranks have computed by the same code may differ by rounding, as those of an encoder whose kernels add
# atomically. This share of their norm is above what half types lose in a deep one, and below that of other samples.
_ROUNDING = 0.1
_MOST_NAMED = 4  # ranks of one version of an input, and versions, in a message
_DIFFERENT = -1  # what a rank passes on along the next axis of a mesh; digests are at least 0
_WAY = (
    'expected one sampler for each data-parallel rank, DistributedSampler(data, mesh["dp"].size(),'
    ' mesh["dp"].get_local_rank()), or (data, 1, 0) without "dp", and equal seeds for whatever draws inputs or tokens'
)


@dataclass(frozen=True)
class _Input:
    """The properties of an input that ranks compare."""

    described: str  # its dtype and shape, or its value
    digest: int = 0  # that of its bytes
    sample: Tensor | None = None  # float64, of floats

    def is_like(self, other: "_Input") -> bool:
        """Return whether two inputs are equal, or equal floats but for rounding."""
        if (self.described, self.digest) == (other.described, other.digest):
            return True
        if self.described != other.described or self.sample is None or other.sample is None:
            return False
        return bool((self.sample - other.sample).norm() <= _ROUNDING * self.sample.norm())


class InputComparison:
    """Compares the inputs of some calls of a model. called: its name in errors."""

    def __init__(self, called: str) -> None:
        self._called, self._calls = called, dict[tuple[int, ...], int]()

    def __call__(
        self,
        given: Mapping[str, Any],
        model: nn.Module,
        sizes: tuple[int, ...],
        groups: Callable[[], Sequence[dist.ProcessGroup]],
    ) -> None:
        """Count a call, and compare its arguments if it is due. Collective, and raises as `compare_inputs` does.

        sizes: how many ranks compute this call together along each axis of their mesh; groups: returns their
        groups. Calls of other sizes are counted apart: with a key/value cache, a rank of a context may run alone.
        """
        if max(sizes) == 1 or _is_hidden(given):
            return
        call = self._calls[sizes] = self._calls.get(sizes, 0) + 1
        if call <= FIRST or not call % ONE_IN:
            compare_inputs(self._called, given, groups(), model_device(model))


def _is_hidden(given: Mapping[str, Any]) -> bool:
    """Return whether the host can read no values now, or a call is computed again."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return True
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    capturing = any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()
    return capturing or not all(map(has_values, tensors))


def compare_inputs(
    called: str, given: Mapping[str, Any], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    """Raise Disagreement, on every rank alike, if the ranks of one model are given different inputs.

    called: the model or the operation, for the message. given: the inputs by name; tensors, numbers, strings and bools
    count, other objects and None do not. Of a large tensor, elements at equal distances count. Floats may differ by
    rounding. groups: those of this rank along the axes of a mesh whose ranks share the model; the call is a
    collective of them on `device`.
    """
    own = _inputs(given)
    text = repr([(name, each.described, each.digest) for name, each in sorted(own.items())])
    digest = zlib.crc32(text.encode())
    for group in groups:
        digests = all_gather(torch.tensor([digest], device=device), group).tolist()
        digest = digests[0] if len(set(digests)) == 1 else _DIFFERENT
    if digest == _DIFFERENT:
        mine = dist.get_rank(), _inputs(given, sampled=True)
        of_ranks = exchange(mine, *groups, op=f"comparison of the inputs of {called}")
        _refuse(called, dict(sorted(of_ranks, key=itemgetter(0))))


def _inputs(given: Mapping[str, Any], *, sampled: bool = False) -> dict[str, _Input]:
    """Return what is compared of the inputs, and (sampled) some of their floats.

    The host copies the values of tensors from each device at once.
    """
    plain = {name: _Input(repr(x)) for name, x in given.items() if isinstance(x, bool | int | float | str)}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    pieces = {name: _covered(x) for name, x in tensors.items()}
    values: dict[str, Tensor] = {}
    for device in {x.device for x in pieces.values()}:
        here = [name for name, x in pieces.items() if x.device == device]
        on_host = torch.cat([pieces[name].view(torch.uint8) for name in here]).cpu()
        values |= zip(here, on_host.split_with_sizes([pieces[name].nbytes for name in here]), strict=True)
    return plain | {name: _described(x, values[name], sampled) for name, x in tensors.items()}


def _covered(x: Tensor) -> Tensor:
    """Return the elements of a tensor that are compared: of a large one those at equal distances, of a shard none."""
    local = local_tensor(x)
    if is_sharded(x) or not has_values(x) or x.layout is not torch.strided:
        return torch.empty(0, dtype=x.dtype)
    return local.reshape(-1)[:: 1 + local.numel() // _MOST_COMPARED].contiguous()


def _described(x: Tensor, data: Tensor, sampled: bool) -> _Input:
    """Return what is compared of a tensor whose elements that count have the bytes `data`."""
    sample = None
    if sampled and x.is_floating_point():
        elements = data.clone().view(x.dtype)  # `data` need not begin where an element may
        sample = elements[:: 1 + len(elements) // _MOST_SENT].double().nan_to_num(0.0, 1e30, -1e30)
    described = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    return _Input(described, zlib.crc32(data.numpy().tobytes()), sample)


def _refuse(called: str, of_ranks: Mapping[int, Mapping[str, _Input]]) -> None:
    """Raise Disagreement if an input is not like that of the first rank, with the ranks of each version of it."""
    nothing, differences = _Input("not given"), []
    for name in sorted(set().union(*of_ranks.values())):
        versions: list[tuple[_Input, list[int]]] = []
        for rank, inputs in of_ranks.items():
            mine = inputs.get(name, nothing)
            ranks = next((ranks for version, ranks in versions if mine.is_like(version)), None)
            if ranks is None:
                versions.append((mine, [rank]))
            else:
                ranks.append(rank)
        if len(versions) > 1:
            texts = [f"{version.described} on {_named(ranks)}" for version, ranks in versions[:_MOST_NAMED]]
            values = len({version.described for version, _ in versions}) < len(versions)
            differences.append(f"{name} is {', '.join(texts)}{', with different values' * values}")
    if differences:
        raise Disagreement(
            f"{called}: the ranks of one model have different inputs: {'; '.join(differences[:3])}: {_WAY}"
        )


def _named(ranks: Sequence[int]) -> str:
    """Return the names of the first of these ranks, and how many others there are."""
    others = f" and {len(ranks) - _MOST_NAMED} others" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(named, ranks[:_MOST_NAMED])) + others


def share_generators(groups: Iterable[dist.ProcessGroup], device_type: str) -> None:
    """Set the states of torch's default generators, of the CPU and of the device, to those of the first rank."""
    for group in groups:
        state = torch.get_rng_state().to(device_type)
        share_(state, group)
        torch.set_rng_state(state.cpu())
        if device_type != "cpu":
            devices = torch.get_device_module(device_type)
            state = devices.get_rng_state().to(device_type)
            share_(state, group)
            devices.set_rng_state(state.cpu())
