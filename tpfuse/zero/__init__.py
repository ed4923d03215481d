"""ZeRO: data-parallel ranks shard the state of training among themselves; `shard` is the entrance."""

from tpfuse.zero.engine import adamw as adamw
from tpfuse.zero.engine import shard as shard
