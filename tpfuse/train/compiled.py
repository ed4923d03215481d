"""`--train.compile`: compiles the model by torch.compile and reports the compiler's errors in one line.

The functions import the compiler themselves. The import takes seconds, which only a run with the compiler spends.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tpfuse.errors import RunError, UserError
from tpfuse.train.hardware import device_count

_MOST = 300  # characters of the compiler's message


def check_compiler() -> None:
    """Raise UserError if there is no C++ compiler, which torch.compile calls on a machine without GPUs."""
    if device_count():
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "--train.compile needs a C++ compiler, and none was found: install g++, or name yours in the environment"
            " variable CXX"
        ) from None


def compiled(model: nn.Module, *, one_graph: bool, torch_dropout: bool = False) -> Callable[..., Any]:
    """Return the model compiled by torch.compile. one_graph: whether a break of the graph is an error.

    torch_dropout: whether the model has torch's own dropout, whose masks are then those of eager steps.
    """
    from tqdm import tqdm

    # The compiler uses tqdm, whose default lock is a semaphore of the system, which would outlive the rank.
    tqdm.set_lock(threading.RLock())
    return torch.compile(model, fullgraph=one_graph, options={"fallback_random": True} if torch_dropout else None)


@contextlib.contextmanager
def compiler_errors(step: int) -> Iterator[None]:
    """Convert an error of torch.compile in a step to a RunError of one line."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        reason = str(error).strip().partition("\n\n")[0][:_MOST]  # what follows is advice for developers
        raise RunError(f"step {step}: torch.compile failed: {reason} (train without --train.compile)") from error
