"""The sizes of a model, from which all costs follow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder.

    layers: the number of blocks. width: the features of a token between the blocks. heads, kv_heads: of a layer; fewer
    kv_heads than heads is grouped-query attention. head_size: the features of a head. inner: the width inside the MLP.
    gated: whether the MLP has a gate beside its first product. vocabulary: the number of tokens that the tables have.
    tokens: the length of a training sequence. positions: the rows of a learned table of positions, 0 without one. tied:
    whether the head is the embedding. biases: whether linear layers have biases. norm_bias: whether norms have one.
    dropout: whether masks of dropout are applied.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    gated: bool
    vocabulary: int
    tokens: int
    positions: int = 0
    tied: bool = True
    biases: bool = True
    norm_bias: bool = True
    dropout: bool = False

    @property
    def block_parameters(self) -> int:
        """Return the number of parameters of a block."""
        weights, biases = self.block_weights, 0
        if self.biases:
            heads = (self.heads + 2 * self.kv_heads) * self.head_size
            biases = heads + self.inner * (1 + self.gated) + 2 * self.width
        return weights + biases + 2 * self.width * (1 + self.norm_bias)

    @property
    def block_weights(self) -> int:
        """Return the number of elements of the matrices of a block."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_size * self.width
        return attention + (2 + self.gated) * self.inner * self.width

    @property
    def table_parameters(self) -> int:
        """Return the number of elements of the embedding of tokens, which are those of the head too."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model."""
        outside = self.table_parameters * (1 if self.tied else 2) + self.positions * self.width
        return self.layers * self.block_parameters + outside + self.width * (1 + self.norm_bias)

    @property
    def flops_per_token(self) -> int:
        """Return the operations of a training step for each token, forward and backward, without recomputation.

        A parameter of a product takes 6, and attention 12 T times the width of all heads (PaLM, arXiv:2204.02311,
        appendix B, which counts attention as if it were not causal).
        """
        products = self.layers * self.block_weights + self.table_parameters
        return 6 * products + 12 * self.layers * self.tokens * self.heads * self.head_size
