"""nn.Modules made of the operators: tensor- and sequence-parallel, with DTensor parameters."""

from typing import TYPE_CHECKING

from tpfuse._lazy import lazy_names

_MODULES = {
    "ColumnParallelLinear": "tpfuse.layers.column_parallel_linear",
    "RowParallelLinear": "tpfuse.layers.row_parallel_linear",
    "VocabParallelEmbedding": "tpfuse.layers.vocab_parallel_embedding",
    "PositionEmbedding": "tpfuse.layers.position_embedding",
    "LayerNorm": "tpfuse.layers.layer_norm",
    "RMSNorm": "tpfuse.layers.rms_norm",
    "Dropout": "tpfuse.layers.dropout",
}
__all__ = [*_MODULES]

if TYPE_CHECKING:
    from tpfuse.layers.column_parallel_linear import ColumnParallelLinear as ColumnParallelLinear
    from tpfuse.layers.dropout import Dropout as Dropout
    from tpfuse.layers.layer_norm import LayerNorm as LayerNorm
    from tpfuse.layers.position_embedding import PositionEmbedding as PositionEmbedding
    from tpfuse.layers.rms_norm import RMSNorm as RMSNorm
    from tpfuse.layers.row_parallel_linear import RowParallelLinear as RowParallelLinear
    from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding as VocabParallelEmbedding
else:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
