# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/late_rank.py
import time

import torch
import torch.distributed as dist

from tpfuse import Disagreement, PeerTimeout, symmetric_memory
from tpfuse.comm.settings import set_settings
from tpfuse.ops.collectives import all_reduce

dist.init_process_group("gloo")
set_settings(timeout=4.0)  # flight_folder=Path("runs") would write the last operations of all ranks as JSON
group, rank = dist.group.WORLD, dist.get_rank()
memory = symmetric_memory(group, torch.device("cpu"))
all_reduce(torch.ones(4), group)
try:
    time.sleep(6 * rank)  # rank 1 comes too late
    all_reduce(torch.ones(4), group)
except PeerTimeout as error:
    print(error)
    memory.reset()  # on every rank; then the group works again
try:
    all_reduce(torch.ones(4 + rank), group)  # not the same operation on both ranks
except Disagreement as error:
    print(error)
print(all_reduce(torch.ones(2), group))
dist.destroy_process_group()
