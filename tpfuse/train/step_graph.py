"""`--train.cuda-graph`: the forward and backward passes of a training step as one CUDA graph.

The host of a small model launches kernels for longer than the GPU computes them. A replayed graph launches all of them
by one call. On an H100, GPT-2 124M trained at 390k tokens/s with it and at 173k to 240k without (2026-11-26), so it is
the default there. What follows the passes in a step stays as it is: sums over ranks, the norm, the one `.item()`, the
update. So learning rates and decisions remain the host's (Megatron-LM's `FullCudaGraphWrapper` leaves the optimizer
out too).

A replay repeats the device's work with the arguments of its capture, and nothing that the host did. So

- tokens, targets and the keys of dropout are copied into the tensors that the captured step has read;
- the other values of a micro-batch, such as the factor of its loss, must be those of the capture: if float16's loss
  scale or a shape has changed, the step is captured anew;
- hooks of parameters only write gradients in the graph. The engine begins the step before it, which may wait for other
  ranks, and sums over ranks after it: so these sums do not overlap with the backward pass;
- kernels that communicate keep their epochs in device memory and count on. Their deadline is that of the whole replay,
  and NCCL's that of the sum that follows it.

The first steps are launched as ever, on the stream of the capture, as the notes on CUDA graphs of torch's documentation
ask: then libraries are initialised, implementations are measured, and buffers exist. They are steps of the run, and so
is the first replay, which follows the capture.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.comm.dispatch import connected
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.handle import is_lost_peer
from tpfuse.errors import RunError
from tpfuse.train.batches import MicroBatch
from tpfuse.train.hardware import is_out_of_memory
from tpfuse.train.options import TrainCommand
from tpfuse.train.rules import forbids_graph
from tpfuse.zero.gradient_buckets import GradientBuckets

LAUNCHED = 3  # steps before the capture, as many as in the example of torch's documentation


def replays(options: TrainCommand, device: torch.device, world: int) -> bool:
    """Return whether the steps of these options are replayed. world: all ranks of the run.

    By itself a run of several ranks launches them: its sums would not overlap with the backward pass.
    """
    chosen = options.train.cuda_graph
    automatic = chosen == "auto" and device.type == "cuda" and world == 1 and not forbids_graph(options)
    return chosen == "yes" or automatic


class GraphCalls:
    """The calls of CUDA that `StepGraph` needs; tests replace them. `compute` puts work on the current stream.

    group: the ranks with which the captured work communicates; None for none.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._device, self._group = device, group
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    def launch(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return compute(), on the stream of captures, between what is before and after it on the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = compute()
        current.wait_stream(self._stream)
        return result

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Capture compute() and return its result, which is there after a replay."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            return compute()

    def replay(self) -> None:
        """Put the captured work on the current stream."""
        assert self._graph is not None
        with ExitStack() as stack:
            for memory in [] if self._group is None else connected(self._group):
                stack.enter_context(memory.guard("replay of a step", kernel=True))
            self._graph.replay()

    def release(self) -> None:
        """Free the graph and its memory. NCCL ends a group only when no graph has its collectives (commDestroySync)."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


class StepGraph:
    """The passes of a rank's steps: some launched ones, a capture, and replays. All ranks make and use it alike.

    group: the tensor-parallel ranks; None for one.
    """

    def __init__(self, engine: GradientBuckets, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._engine, self._calls = engine, GraphCalls(device, group)
        self._launched = 0
        self._baked: list[list[object]] | None = None  # what the captured step did not read from tensors
        self._batches: list[MicroBatch] = []  # the tensors that it has read
        self._total = torch.empty(0)

    def run(self, batches: list[MicroBatch], compute: Callable[[list[MicroBatch]], Tensor], step: int) -> Tensor:
        """Return compute(batches), launched or replayed, between the engine's first and last call of a step.

        compute: runs the passes, and calls `engine.start(last=False)` before each. Raise RunError, which names the
        step, if they cannot be captured.
        """
        engine, baked = self._engine, [[_baked(value) for value in batch] for batch in batches]
        engine.start(last=False)  # before the graph: it may wait until gradients can be written
        if self._launched < LAUNCHED:
            self._launched += 1
            total = self._calls.launch(lambda: compute(batches))
            engine.start(last=True)
            return total
        captured = self._baked == baked
        if captured:
            for kept, batch in zip(self._batches, batches, strict=True):
                for old, new in zip(kept, batch, strict=True):
                    if isinstance(old, Tensor) and isinstance(new, Tensor):
                        old.copy_(new)
        else:
            self.release()
            self._capture(batches, compute, step)
            self._baked = baked
        self._calls.replay()
        engine.start(last=True)
        if captured:
            engine.take_all()
        return self._total

    def _capture(self, batches: list[MicroBatch], compute: Callable[[list[MicroBatch]], Tensor], step: int) -> None:
        try:
            self._total = self._calls.capture(lambda: compute(batches))
        except PeerTimeout:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # torch ends a capture that has failed by an error of its own
            if isinstance(cause, (ValueError, PeerTimeout)) or is_lost_peer(cause) or is_out_of_memory(cause):
                raise cause from None
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            raise RunError(
                f"step {step}: its passes cannot be captured: {reason} (train with --train.cuda-graph no)"
            ) from error
        assert all(bucket.complete for bucket in self._engine.buckets), "a parameter has no gradient"
        self._batches = batches

    def release(self) -> None:
        """Free the graph and its memory, at the latest before the process groups are destroyed."""
        self._baked = None
        self._calls.release()


def _baked(value: object) -> object:
    """Return what a capture fixes of a value of a micro-batch: of a tensor its shape and dtype."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value
