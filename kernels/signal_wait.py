"""signal_wait: makes a stream wait for a word of symmetric memory.

It is for the host, which orders copies between ranks on streams: the kernel is one program that waits and ends, and
operations that follow on the stream see what the word's writer did before. It ends early when the abort word says so.
"""

import torch
import triton
from torch import Tensor

from tpfuse.kernels import launch
from tpfuse.kernels.checks import check_device, check_integers, check_shape
from tpfuse.kernels.signals import wait_signal, wrapped


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
        check_shape("signal_wait", name, x, (1,))
        check_integers("signal_wait", name, x, (torch.int32,))
        check_device("signal_wait", "flag", flag, name, x)
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
