"""Checks of the values of a tensor, made only where reading them costs nothing."""

from collections.abc import Iterable

from torch import Tensor

from tpfuse.comm.layout import is_traced


def check_range(x: Tensor, lowest: int, highest: int, message: str, besides: Iterable[int] = ()) -> None:
    """Raise ValueError unless all integers in x are from `lowest` to `highest`, both included, or in `besides`.

    message: the text of the error, with the fields {low} and {high} for the extremes of the others. Only CPU tensors
    with values are checked (on CUDA a check would stop the stream), and not while torch.compile traces (it would break
    the graph).
    """
    if x.device.type != "cpu" or is_traced(x):
        return
    for value in besides:
        x = x[x != value]
    if not x.numel():
        return
    low, high = int(x.min()), int(x.max())
    if low < lowest or high > highest:
        raise ValueError(message.format(low=low, high=high))


def check_cumulative(operator: str, name: str, x: Tensor, rows: int, longest: int | None = None) -> None:
    """Raise ValueError unless x [S + 1] begins with 0, never decreases and ends at `rows` or before.

    longest: the length of the longest document according to the caller. Only the tensors that `check_range` reads are
    checked.
    """
    if x.device.type != "cpu" or is_traced(x):
        return
    first, last, lengths = int(x[0]), int(x[-1]), x.diff()
    expected = f"expected cumulative lengths from 0 to at most {rows}, the number of rows"
    if first != 0 or last > rows:
        raise ValueError(f"{operator}: {name} goes from {first} to {last}: {expected}")
    if (lengths < 0).any():
        index = int((lengths < 0).nonzero()[0])
        raise ValueError(f"{operator}: {name} decreases from {int(x[index])} to {int(x[index + 1])}: {expected}")
    if longest is not None and len(lengths) and int(lengths.max()) > longest:
        raise ValueError(f"{operator}: {name} has a document of {int(lengths.max())} rows: expected at most {longest}")
