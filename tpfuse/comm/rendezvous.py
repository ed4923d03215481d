"""An exchange for ranks that share no memory yet: each writes into the store of their process group.

A collective of the group would not serve, because it cannot name a rank that does not come.
"""

import json
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tpfuse.comm.errors import PeerTimeout

_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def exchange(group: dist.ProcessGroup, value: Any, op: str, timeout: float) -> list[Any]:
    """Returns every rank's value, in rank order. Collective. A value is anything that JSON can hold.

    Raises PeerTimeout, which names the first rank that does not come within `timeout` seconds.
    """
    _counts[group] = count = _counts.get(group, 0) + 1
    store = dist.distributed_c10d._get_process_group_store(group)
    store.set(f"tpfuse exchange {count}: {group.rank()}", json.dumps(value))
    values, ranks = [], dist.get_process_group_ranks(group)
    for rank in range(group.size()):
        key = f"tpfuse exchange {count}: {rank}"
        try:
            store.wait([key], timedelta(seconds=timeout))
            values.append(json.loads(store.get(key)))
        except RuntimeError as error:
            detail = "it has not come to the first exchange of the ranks"
            raise PeerTimeout(
                op, step=-1, rank=ranks[group.rank()], peer=ranks[rank], waited=timeout, detail=detail
            ) from error
    return values
