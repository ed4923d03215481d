"""signal_wait and set_signal: make a stream wait for a word of symmetric memory, or set one in any rank's memory.

They are for the host, which orders copies between ranks on streams: each kernel is one program. signal_wait waits and
ends, and operations that follow on the stream see what the word's writer did before. It ends early when the abort word
says so. set_signal comes after everything that precedes it on the stream. The driver's own operation for that,
cuStreamWriteValue32, cannot write another GPU's memory since CUDA 13.1 (NVIDIA/nccl issue 2052).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels import launch
from tpfuse.kernels.checks import check_dtype, check_tensor
from tpfuse.kernels.signals import peer_pointer, signal, wait_signal, wrapped


@triton.jit(do_not_specialize=["epoch"])
def signal_wait_kernel(
    flag_ptr,  # [1] int32, read
    abort_ptr,  # [1] int32, read
    trace_ptr,  # [programs, words] int64, written; or None
    epoch,
):
    wait_signal(flag_ptr, epoch, abort_ptr, None, trace_ptr)


def signal_wait(flag: Tensor, epoch: int, abort: Tensor) -> None:
    """Make the current stream wait until `flag` is `epoch` or later, as int32 that wrap around, or `abort` is not 0.

    flag: [1] int32, in any rank's symmetric memory; abort: [1] int32. Raise ValueError for other tensors.
    """
    for name, x in (("flag", flag), ("abort", abort)):
        check_tensor("signal_wait", name, x, (1,), (torch.int32,), ("flag", flag))
    launch.launch(
        signal_wait_kernel,
        (1,),
        num_warps=1,
        num_stages=1,
        flag_ptr=flag,
        abort_ptr=abort,
        trace_ptr=None,
        epoch=wrapped(epoch),
    )


@triton.jit(do_not_specialize=["owner", "index", "epoch"])
def set_signal_kernel(
    flags_ptr,  # [world] int64, addresses of int32 words, of which one is written
    owner,
    index,
    epoch,
):
    signal(peer_pointer(flags_ptr, owner, tl.int32) + index, epoch)


def set_signal(flags: Tensor, owner: int, index: int, epoch: int) -> None:
    """Set word `index` of rank `owner`'s flags to `epoch`, as an int32 that wraps around, on the current stream.

    flags: [world] int64, the addresses of all ranks' flags, on this rank's device. Raise ValueError for another tensor.
    """
    check_dtype("set_signal", "flags", flags, (torch.int64,))
    launch.launch(
        set_signal_kernel,
        (1,),
        num_warps=1,
        num_stages=1,
        flags_ptr=flags,
        owner=owner,
        index=index,
        epoch=wrapped(epoch),
    )
