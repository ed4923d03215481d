"""tpfuse: tensor-parallel layers whose matrix products communicate while they compute.

The names in `__all__` are the public ones, beside ParallelTrainer. Each is imported when it is first used, so that
`import tpfuse` needs neither torch nor Triton.
"""

import os
from typing import TYPE_CHECKING

from tpfuse import _layout as _layout
from tpfuse._lazy import lazy_names
from tpfuse._version import __version__ as __version__

# Without a workspace of a fixed size cuBLAS may give results with other bits in another run, and torch refuses to call
# it if deterministic algorithms are required. cuBLAS reads this variable when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_MODULES = {
    # layers
    "ColumnParallelLinear": "tpfuse.layers.column_parallel_linear",
    "RowParallelLinear": "tpfuse.layers.row_parallel_linear",
    "VocabParallelEmbedding": "tpfuse.layers.vocab_parallel_embedding",
    "PositionEmbedding": "tpfuse.layers.position_embedding",
    "LayerNorm": "tpfuse.layers.layer_norm",
    "RMSNorm": "tpfuse.layers.rms_norm",
    # models
    "GPT": "tpfuse.models.gpt",
    "parallelize": "tpfuse.drop_in.parallelize",
    "restore": "tpfuse.drop_in.parallelize",
    "FusedColwiseParallel": "tpfuse.drop_in.styles",
    "FusedRowwiseParallel": "tpfuse.drop_in.styles",
    "FusedSequenceParallel": "tpfuse.drop_in.styles",
    "FusedPrepareModuleInput": "tpfuse.drop_in.styles",
    # training
    "ParallelTrainer": "tpfuse.drop_in.trainer",
    "Pipeline": "tpfuse.parallel.pipeline.pipeline",
    "ZeroOptimizer": "tpfuse.zero.optimizer",
    "zero": "tpfuse.zero",
    # operators
    "ring_attention": "tpfuse.ops.ring_attention.ring_attention",
    "SequenceLayout": "tpfuse.ops.ring_attention.layout",
    "attention": "tpfuse.ops.attention",
    "gemm": "tpfuse.ops.gemm",
    "all_gather_linear": "tpfuse.ops.linear.all_gather_linear",
    "linear_reduce_scatter": "tpfuse.ops.linear.linear_reduce_scatter",
    "linear_all_reduce": "tpfuse.ops.linear.linear_all_reduce",
    "linear_cross_entropy": "tpfuse.ops.linear_cross_entropy",
    # implementations
    "use": "tpfuse.switches",
    "autotune": "tpfuse.comm.autotune",
    "explain": "tpfuse.layers.explain",
    # kernels of your own
    "symmetric_memory": "tpfuse.comm.dispatch",
    "explore": "tpfuse.explore",
    # when something is slow or wrong
    "profile": "tpfuse.profile",
    "PeerTimeout": "tpfuse.comm.errors",
    "Disagreement": "tpfuse.comm.errors",
}
__all__ = [name for name in _MODULES if name != "ParallelTrainer"]  # which needs transformers

if TYPE_CHECKING:  # These are the same names for editors and type checkers. A test compares them with the table.
    from tpfuse import explore as explore
    from tpfuse import profile as profile
    from tpfuse import zero as zero
    from tpfuse.comm.autotune import autotune as autotune
    from tpfuse.comm.dispatch import symmetric_memory as symmetric_memory
    from tpfuse.comm.errors import Disagreement as Disagreement
    from tpfuse.comm.errors import PeerTimeout as PeerTimeout
    from tpfuse.drop_in.parallelize import parallelize as parallelize
    from tpfuse.drop_in.parallelize import restore as restore
    from tpfuse.drop_in.styles import FusedColwiseParallel as FusedColwiseParallel
    from tpfuse.drop_in.styles import FusedPrepareModuleInput as FusedPrepareModuleInput
    from tpfuse.drop_in.styles import FusedRowwiseParallel as FusedRowwiseParallel
    from tpfuse.drop_in.styles import FusedSequenceParallel as FusedSequenceParallel
    from tpfuse.drop_in.trainer import ParallelTrainer as ParallelTrainer
    from tpfuse.layers.column_parallel_linear import ColumnParallelLinear as ColumnParallelLinear
    from tpfuse.layers.explain import explain as explain
    from tpfuse.layers.layer_norm import LayerNorm as LayerNorm
    from tpfuse.layers.position_embedding import PositionEmbedding as PositionEmbedding
    from tpfuse.layers.rms_norm import RMSNorm as RMSNorm
    from tpfuse.layers.row_parallel_linear import RowParallelLinear as RowParallelLinear
    from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from tpfuse.models.gpt import GPT as GPT
    from tpfuse.ops.attention import attention as attention
    from tpfuse.ops.gemm import gemm as gemm
    from tpfuse.ops.linear.all_gather_linear import all_gather_linear as all_gather_linear
    from tpfuse.ops.linear.linear_all_reduce import linear_all_reduce as linear_all_reduce
    from tpfuse.ops.linear.linear_reduce_scatter import linear_reduce_scatter as linear_reduce_scatter
    from tpfuse.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from tpfuse.ops.ring_attention.layout import SequenceLayout as SequenceLayout
    from tpfuse.ops.ring_attention.ring_attention import ring_attention as ring_attention
    from tpfuse.parallel.pipeline.pipeline import Pipeline as Pipeline
    from tpfuse.switches import use as use
    from tpfuse.zero.optimizer import ZeroOptimizer as ZeroOptimizer
else:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
