"""Several nodes on one machine: two network namespaces with two ranks each, or ranks that only pretend to be apart.

`run_on_nodes(function, *args)` is `pool(4).run` with ranks 0 and 1 in one network namespace and ranks 2 and 3 in
another. A virtual cable (a veth pair) joins the two namespaces. All traffic between them passes through the cable,
where the kernel counts it, and traffic that would not reach another host does not reach the other namespace. The
namespaces have no names: they disappear with the last process in them, however that process ends.

The namespaces need util-linux, iproute2 and either root or the permission to make user namespaces; NotPermitted says
what is missing.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import torch.distributed as dist

from tpfuse.comm import host
from tpfuse.testing.patience import Deadline, patient
from tpfuse.testing.ranks import RankPool, serve_in

NODES, RANKS_PER_NODE = 2, 2
CABLE = "tpfuse0"  # the name of the network interface on each node
ADDRESSES = ("10.213.0.1", "10.213.0.2")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PORT = 29500  # always free: no other process runs in the namespace
_HOLD = "echo ready; exec cat"  # runs until its standard input is closed, also by the end of the process that holds it


class NotPermitted(RuntimeError):
    """This machine does not permit us to make network namespaces; the message says why."""


class NetworkNodes:
    """Two network namespaces joined by a virtual cable. The constructor raises NotPermitted."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[str]] = []
        self._as_user: tuple[str, ...] = ()
        try:
            try:
                self._hold("unshare", "--net")
            except NotPermitted:
                self._hold("unshare", "--user", "--map-root-user", "--net")
                self._as_user = ("--user", "--preserve-credentials")
            self._hold(*self.command(0), "unshare", "--net")
            peer = str(self._holders[1].pid)
            self._do(0, f"ip link add {CABLE} type veth peer name {CABLE} netns {peer}")
            for node, address in enumerate(ADDRESSES):
                self._do(node, f"ip address add {address}/24 dev {CABLE}")
                self._do(node, f"ip link set {CABLE} up")
                self._do(node, "ip link set lo up")
        except BaseException:
            self.close()
            raise

    def _hold(self, *command: str) -> None:
        """Start a process by `command` that keeps the namespaces which `command` makes. Raise NotPermitted."""
        try:
            holder = subprocess.Popen(
                [*command, "sh", "-c", _HOLD],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        except OSError as error:
            raise NotPermitted(f"{command[0]}: {error.strerror}") from None
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "ready":
            raise NotPermitted(holder.communicate()[1].strip())
        self._holders.append(holder)

    def _do(self, node: int, command: str) -> None:
        done = subprocess.run([*self.command(node), *command.split()], capture_output=True, text=True)
        if done.returncode:
            raise NotPermitted(f"{command}: {done.stderr.strip()}")

    def command(self, node: int) -> list[str]:
        """Return the words that, put before a command, run it on `node`."""
        return ["nsenter", "--target", str(self._holders[node].pid), "--net", *self._as_user]

    def place(self, node: int) -> tuple[int, bool]:
        """Return the id of the process that keeps the namespaces of `node`, and whether it has a user namespace."""
        return self._holders[node].pid, bool(self._as_user)

    def networks(self) -> set[str]:
        """Return the names that /proc gives to the network namespaces of the nodes."""
        return {network_of(holder.pid) for holder in self._holders}

    def close(self) -> None:
        """End every process on the nodes, and with them the nodes."""
        networks, deadline = self.networks() - {network_of("self")}, Deadline(10.0)
        while (processes := processes_in(networks)) and deadline.left():  # a process may start another meanwhile
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            sleep(0.02)
        for holder in self._holders:
            holder.communicate()
        self._holders = []


@functools.cache
def why_not_permitted() -> str:
    """Return the reason why we cannot make network namespaces on this machine; empty if we can."""
    try:
        NetworkNodes().close()
    except NotPermitted as error:
        return f"no network namespaces: {error}"
    return ""


def network_of(process: int | str) -> str:
    """Return the name that /proc gives to a process's network namespace; empty if we may not read it."""
    try:
        return str(Path(f"/proc/{process}/ns/net").readlink())
    except OSError:
        return ""


def processes_in(networks: Collection[str]) -> list[int]:
    """Return the ids of the processes in these network namespaces."""
    numbers = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [number for number in numbers if network_of(number) in set(networks) - {""}]


def bytes_sent() -> int:
    """Return the number of bytes that this rank's node has sent through the cable so far, headers included."""
    # /sys/class/net would show the interfaces of the namespace in which it was mounted.
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(CABLE + ":"))
    return int(line.partition(":")[2].split()[8])


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that this rank's node sends within the block; the list holds their number afterwards.

    Every rank must enter the block.
    """
    count: list[int] = []
    dist.barrier()
    before = bytes_sent()
    dist.barrier()  # every rank of the node has read the count before any of them sends
    yield count
    dist.barrier()
    count.append(bytes_sent() - before)
    dist.barrier()


def _serve_on_node(holder: int, as_user: bool, *args: Any) -> None:
    """Serve as a rank in the namespaces of the process `holder`. This process has one thread, as setns requires."""
    for kind in ("user", "net") if as_user else ("net",):
        with Path(f"/proc/{holder}/ns/{kind}").open() as namespace:
            if _LIBC.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
    serve_in(*args)


class NodePool(RankPool):
    """A pool of four ranks on two nodes, in namespaces of its own. The ranks find each other by rank 0's TCP store."""

    def __init__(self, timeout: float = 120.0, grace: float = 5.0) -> None:
        super().__init__(NODES * RANKS_PER_NODE, timeout, grace)
        self._nodes: NetworkNodes | None = None

    def _start(self) -> None:
        self._nodes = NetworkNodes()
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": CABLE}
        meeting = f"tcp://{ADDRESSES[0]}:{_PORT}"
        for rank in range(self.world):
            place = self._nodes.place(rank // RANKS_PER_NODE)
            self._start_rank(rank, meeting, _serve_on_node, *place, environment)

    def close(self) -> None:
        """End the ranks and the nodes at once."""
        super().close()
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = None


@functools.cache
def _pool() -> NodePool:
    pool = NodePool()
    atexit.register(pool.close)
    return pool


def run_on_nodes(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` on four ranks, two on each node, as `RankPool.run`. Raise RankError and NotPermitted."""
    return _pool().run(function, *args)


def torchrun_on_nodes(
    arguments: Sequence[str], timeout: float = 120.0, restarts: int = 0
) -> list[subprocess.CompletedProcess[str]]:
    """Start a module with its arguments by torchrun on both nodes, four ranks in all; return what each node's run gave.

    restarts: how often torchrun starts the ranks of a node again. No process is left afterwards. Raise NotPermitted,
    and TimeoutExpired after `timeout` seconds (see `patience`).
    """
    nodes = NetworkNodes()

    def start(node: int) -> subprocess.CompletedProcess[str]:
        torchrun = (
            f"-m torch.distributed.run --nnodes {NODES} --node-rank {node} --nproc-per-node {RANKS_PER_NODE}"
            f" --max-restarts {restarts}"
            f" --master-addr {ADDRESSES[0]} --master-port {_PORT} --local-addr {ADDRESSES[node]} -m"
        )
        return subprocess.run(
            [*nodes.command(node), sys.executable, *torchrun.split(), *arguments],
            env={**os.environ, "GLOO_SOCKET_IFNAME": CABLE},
            capture_output=True, text=True, timeout=patient(timeout),
        )  # fmt: skip

    try:
        with ThreadPoolExecutor(NODES) as executor:
            return list(executor.map(start, range(NODES)))
    finally:
        nodes.close()


@contextlib.contextmanager
def pretended_nodes(*sizes: int) -> Iterator[dist.ProcessGroup]:
    """Let the ranks of a pool pretend to be on nodes with `sizes` ranks each; yield a new group of all ranks.

    An existing group would not do, because what is known of its nodes is cached.
    """

    node = next(node for node in range(len(sizes)) if dist.get_rank() < sum(sizes[: node + 1]))
    real = host.node_identity
    host.node_identity = lambda: f"{real()}-{node}"
    try:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        yield group
    finally:
        host.node_identity = real
