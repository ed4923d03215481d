"""A pool of ranks: processes that are started once for each world size and reused by every test.

`pool(4).run(function, *args)` runs `function(*args)` on four CPU ranks at once, in a Gloo group that is their
default group, and returns the result of each. A rank finds the function by its file and name, so the function must be
at the top level of a module; arguments and results are pickled. `on_ranks` makes a test whose whole body runs on every
rank. If a rank raises, dies or is late, `run` raises
RankError with every rank's traceback, and the next use starts the pool again. The ranks take over this process's
settings of deterministic algorithms: whether they are required, and whether torch only warns of others.
"""

import atexit
import contextlib
import fcntl
import functools
import importlib.util
import inspect
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tpfuse.comm.errors import set_coordinates
from tpfuse.comm.limits import set_threads
from tpfuse.testing.patience import Deadline, patient

# The modules that the server imports before it forks ranks; a program may add to them before it starts its first pool.
PRELOADED = ["torch.distributed.tensor", "triton.language", "tpfuse.testing.ranks"]

_MOST_GROUPS = 12  # a rank that has made more process groups ends, and its pool is started again

_functions: dict[tuple[str, str], Callable[..., Any]] = {}


class RankError(RuntimeError):
    """The failures of one run of a pool, with the rank and the traceback of each."""


def _find(file: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of the module in `file`, which is loaded once under a name of its own."""
    if (file, name) not in _functions:
        module_name = "tpfuse_rank_" + file.replace("/", "_").removesuffix(".py")
        module = sys.modules.get(module_name)
        if module is None:
            spec = importlib.util.spec_from_file_location(module_name, file)
            assert spec is not None and spec.loader is not None
            module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        _functions[file, name] = inspect.unwrap(getattr(module, name))
    return _functions[file, name]


def serve_in(
    environment: dict[str, str],
    rank: int,
    world: int,
    meeting: str,
    timeout: float,
    deterministic: tuple[bool, bool],
    connection: Connection,
) -> None:
    """Join the group as a rank, then run functions until the pool closes the connection.

    environment: that of the process that started the rank. meeting: the URL of the rendezvous, as `init_process_group`
    takes it. timeout: seconds of a collective operation. deterministic: whether algorithms must be deterministic, and
    whether torch only warns of those that are not.
    """
    _take_over(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A rank that the pool has stopped goes on, and ends, when the process of the pool has ended.
    fcntl.fcntl(connection.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection.fileno(), fcntl.F_SETSIG, signal.SIGCONT)
    flags = fcntl.fcntl(connection.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(connection.fileno(), fcntl.F_SETFL, flags | os.O_ASYNC)
    set_threads(1)
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            file, name, args = connection.recv()
        except EOFError:
            return
        set_coordinates({})  # forget those of the run before
        torch.manual_seed(0)  # the random numbers of a run do not depend on the runs before it
        try:
            value = _find(file, name)(*args)
            connection.send((True, (value, len(dist.distributed_c10d._world.pg_map))))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def _take_over(environment: dict[str, str]) -> None:
    """Replace this process's environment by that of the process that started it.

    A process that the server forks has the environment that the server had when it started.
    """
    wanted, current = (each.get("TRITON_INTERPRET", "0") for each in (environment, os.environ))
    assert wanted == current, f"TRITON_INTERPRET was {current} and is {wanted}: set it before the first pool is started"
    os.environ.clear()
    os.environ.update(environment)


def _server() -> Any:
    """Return the multiprocessing context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _call(environment: dict[str, str], file: str, name: str, args: tuple[Any, ...], connection: Connection) -> None:
    """Run a function in the process of `run_apart`, and send its result or its traceback."""
    _take_over(environment)
    set_threads(1)
    try:
        connection.send((True, _find(file, name)(*args)))
    except BaseException:
        connection.send((False, traceback.format_exc()))


def run_apart(function: Callable[..., Any], *args: Any, timeout: float = 280.0) -> Any:
    """Run `function(*args)` in a new process and return its result.

    The process has no group, and no thread but its first, so that it may fork. timeout: seconds on an idle machine.
    Raise RankError.
    """
    assert isinstance(function, FunctionType), f"{function}: expected a function at the top level of a module"
    ours, theirs = multiprocessing.Pipe()
    code, deadline = function.__code__, Deadline(timeout)
    arguments = (dict(os.environ), code.co_filename, function.__qualname__, args, theirs)
    process = _server().Process(target=_call, args=arguments, daemon=False)
    process.start()
    theirs.close()
    try:
        while not ours.poll(deadline.next_look()):
            if not deadline.left():
                raise RankError("no answer in time")
        fine, value = ours.recv()
    except EOFError:
        raise RankError("the process died") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if not fine:
        raise RankError(value)
    return value


class RankPool:
    """`world` processes that form a Gloo group. They are stopped (SIGSTOP) between two calls of `run`.

    timeout: seconds for one `run`. grace: seconds that the other ranks have to fail by themselves once one has failed.
    Both hold for an idle machine (see `patience`).
    """

    def __init__(self, world: int, timeout: float = 120.0, grace: float = 5.0) -> None:
        self.world, self.timeout, self.grace = world, timeout, grace
        self.groups = 0  # the most process groups that a rank had after the last run
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: str | None = None

    def _context(self) -> Any:
        # A fork cannot use CUDA if its server has begun to use CUDA, even by an import.
        return multiprocessing.get_context("spawn") if torch.cuda.is_available() else _server()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="tpfuse-ranks-")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(self.world):
            self._start_rank(rank, f"file://{self._folder}/store", serve_in, dict(os.environ))

    def _start_rank(self, rank: int, meeting: str, target: Callable[..., None], *first: object) -> None:
        """Start a rank's process, which calls `target` with `first` and the arguments of `serve_in` from rank on."""
        deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        context = self._context()
        ours, theirs = context.Pipe()
        args = (*first, rank, self.world, meeting, patient(self.timeout), deterministic, theirs)
        process = context.Process(target=target, args=args, daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)

    def close(self) -> None:
        """End the ranks at once."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self.groups = [], [], 0
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on every rank and return the results in rank order. Raise RankError."""
        assert isinstance(function, FunctionType), f"{function}: expected a function at the top level of a module"
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send((function.__code__.co_filename, function.__qualname__, args))
        results, failures = self._collect()
        if failures:
            # A rank that raised may have left the others inside a collective operation: the group cannot be used again.
            self.close()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        self.groups = max(groups for _, groups in results.values())
        # A thread of Gloo wakes up 100 times a second for each group: ranks that rest take time from those that work.
        self._signal(signal.SIGSTOP)
        return [results[rank][0] for rank in range(self.world)]

    def _collect(self) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline, failed = Deadline(self.timeout), False
        while len(results) + len(failures) < self.world:
            open_ranks = [r for r in range(self.world) if r not in results and r not in failures]
            if failures and not failed:
                failed, deadline = True, Deadline(min(deadline.left(), self.grace))
            ready = wait([self._connections[r] for r in open_ranks], deadline.next_look())
            if not ready and not deadline.left():
                failures |= dict.fromkeys(open_ranks, "no answer in time")
            for rank in open_ranks:
                if self._connections[rank] not in ready:
                    continue
                try:
                    fine, value = self._connections[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(patient(10.0))
                    fine, value = False, f"died with exit code {self._processes[rank].exitcode}"
                (results if fine else failures)[rank] = value
        return results, failures


def _take_a_gpu() -> None:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


class GpuRankPool(RankPool):
    """A pool of ranks on GPUs, which share the GPUs if there are fewer of them; kernels are compiled, not interpreted.

    overlapping: whether ranks that share a GPU may have symmetric memory.
    """

    def __init__(self, world: int, timeout: float = 400.0, *, overlapping: bool = True) -> None:
        super().__init__(world, timeout, grace=20.0)
        self._overlapping = overlapping

    def _start(self) -> None:
        with mock.patch.dict(os.environ, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=str(int(self._overlapping))):
            os.environ.pop("TRITON_INTERPRET", None)
            super()._start()
        self.run(_take_a_gpu)


_pools: dict[int, RankPool] = {}


def pool(world: int) -> RankPool:
    """Return the pool of this world size, which is started at its first `run` and kept until the process ends.

    If its ranks have made many process groups, they end first, and the next `run` starts new ones.
    """
    if world not in _pools:
        _pools[world] = RankPool(world)
        atexit.register(_pools[world].close)
    if _pools[world].groups > _MOST_GROUPS:
        _pools[world].close()
    return _pools[world]


def on_ranks(*sizes: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that runs on every rank of a pool.

        @pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2)])
        @on_ranks("tp", "dp")
        def test_something(tp: int, dp: int) -> None: ...

    The number of ranks is the product of `sizes`, which are numbers or names of the test's parameters. A name that is
    no parameter of the function becomes a parameter of the test alone.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        own, more = list(signature.parameters), [size for size in sizes if isinstance(size, str)]
        more = [name for name in more if name not in own]

        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            world = math.prod(arguments[size] if isinstance(size, str) else size for size in sizes)
            pool(world).run(function, *(arguments[name] for name in own))

        added = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in more]
        test.__signature__ = signature.replace(parameters=[*added, *signature.parameters.values()])  # type: ignore[attr-defined]
        return test

    return decorate
