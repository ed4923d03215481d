"""Offloaded activations: what `full` recomputation keeps of a block, its input, is in the host's memory until then.

A second stream copies the input to pinned memory while the block computes, and back while the next block computes its
gradients (the idea is vDNN's, arXiv:1602.08124; torch's save_on_cpu copies on the computing stream, which waits):

    computing   block 0    block 1    block 2  | gradients of 2   gradients of 1   gradients of 0
    copying     0 to host  1 to host  2 to host| 1 back           0 back

In the forward pass the device holds one input, of the last block that has begun. The backward pass begins with it. From
then on the device holds the input of the block that computes and of the one before it. Streams and memory:

- A copy to the host begins when the computing stream has written the input.
- The device's memory of an input is freed when the next block begins. The computing stream waits for the copy first.
- An input that returns is in memory of the copying stream, so only other copies reuse it. Each of them waits for what
  the computing stream has to do by then, and so for the last use of that memory.
- The computing stream waits for an input before it uses it.

Bits are copied, so results are those without. A tensor without a history, such as a message in a pipeline, belongs to
someone else, who keeps it: it stays on the device.
"""

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class CopyStream:
    """The stream of copies between a GPU and the host, and its order with the current stream; tests replace it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Let later copies wait for what the current stream has to do now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def to_host(self, x: Tensor) -> Tensor:
        """Return pinned memory, into which x is copied. Raise MemoryError."""
        try:
            host = torch.empty_like(x, device="cpu", pin_memory=True)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise MemoryError(f"the host cannot pin {x.nbytes} more bytes for offloaded activations") from error
        with torch.cuda.stream(self._stream):
            return host.copy_(x, non_blocking=True)

    def to_device(self, host: Tensor) -> Tensor:
        """Return memory of the copying stream, into which a pinned tensor is copied."""
        with torch.cuda.stream(self._stream):
            return host.to(self._device, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        """Return the end of the copies until now."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait until copies have passed an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


class _Kept:
    """The input of a block. Autograd keeps it as long as a backward pass may ask for it, which may be several."""

    def __init__(self, x: Tensor, copies: CopyStream, before: "ReferenceType[_Kept] | None") -> None:
        copies.follow()
        self.before = before  # the input that was kept before this one
        self._copies, self._host = copies, copies.to_host(x)
        self._there: Tensor | None = x  # the tensor on the device, as long as it is there
        self._original, self._version = True, x._version
        self._copied = copies.record()

    def fetch(self) -> None:
        """Begin to copy the input back, unless it is on the device."""
        if self._there is None:
            self._copies.follow()
            self._there, self._original = self._copies.to_device(self._host), False
            self._copied = self._copies.record()

    def take(self) -> Tensor | None:
        """Return the tensor on the device, None if it is not there, and keep only that of the host.

        Raise RuntimeError if it has been written to: autograd does not see that of tensors that hooks keep, and the
        copy may have either values.
        """
        x, self._there = self._there, None
        if x is not None:
            self._copies.wait(self._copied)
            if self._original and x._version != self._version:
                raise RuntimeError(
                    f"the input of a block, {tuple(x.shape)}, was written to in place while it was offloaded: train"
                    " without offloaded activations"
                )
        return x


class OffloadedInputs:
    """The offloaded inputs of the blocks of a model on a GPU.

    `partial(OffloadedInputs(), recompute)` stands for `recompute`, a function that calls
    torch.utils.checkpoint.checkpoint, such as `tpfuse.parallel.recompute.recomputed_whole`.
    """

    def __init__(self) -> None:
        self._copies: CopyStream | None = None  # of the first input's device
        self._last: ReferenceType[_Kept] | None = None

    def __call__(self, recompute: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Return recompute(*inputs, **options). Inputs with a history are kept in the host's memory.

        inputs: the function that is computed again, and its arguments.
        """
        own = {x.data_ptr() for x in inputs if isinstance(x, Tensor) and x.grad_fn is not None and x.numel()}

        def keep(x: Tensor) -> Tensor | _Kept:
            if x.data_ptr() not in own:
                return x
            self._copies = self._copies or CopyStream(x.device)
            last = None if self._last is None else self._last()
            if last is not None:
                last.take()
            kept = _Kept(x.detach(), self._copies, self._last)
            self._last = ref(kept)
            return kept

        with saved_tensors_hooks(keep, _given):
            return recompute(*inputs, **options)


def _given(kept: Tensor | _Kept) -> Tensor:
    """Return an input for a backward pass, and begin to copy back the one that it will ask for next."""
    if isinstance(kept, Tensor):
        return kept
    kept.fetch()
    x = kept.take()
    assert x is not None
    before = None if kept.before is None else kept.before()
    if before is not None:
        before.fetch()
    return x
