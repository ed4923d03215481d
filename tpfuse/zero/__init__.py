"""ZeRO: data-parallel ranks shard the state of training among themselves; `shard` is the entrance."""

from tpfuse.zero.muon import MuonOptions as MuonOptions
from tpfuse.zero.muon_matrices import hidden_matrices as hidden_matrices
from tpfuse.zero.sharding import adamw as adamw
from tpfuse.zero.sharding import shard as shard
