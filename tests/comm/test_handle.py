"""The processes of a group's ranks, which the flight record of ranks without shared memory names."""

import json
import os
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tpfuse.comm import handle, host
from tpfuse.comm.flight_record import Process


class _Group:
    """The group, as its rank 0 sees it."""

    def rank(self) -> int:
        return 0


def test_processes_that_have_announced_themselves_on_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is on another node, rank 2 has not come yet, and rank 3 has ended."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    group: Any = _Group()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6, 7])
    store.set("tpfuse process: 1", json.dumps(["another node", os.getpid()]))
    store.set("tpfuse process: 3", json.dumps([host.node_identity(), 2**22 + 1]))
    monkeypatch.setattr(handle, "_announced", set())
    handle.announce(group)
    found = handle._processes(group)
    assert found == [Process(4, os.getpid(), ended=False), Process(7, 2**22 + 1, ended=True)]
