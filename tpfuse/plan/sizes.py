"""The subject of a plan: the sizes of a model, the layout of its ranks, and the program that trains it."""

from dataclasses import dataclass
from typing import NamedTuple

from tpfuse.choices import Accumulate, Balance, ContextSchedule, Implementation, PipelineSchedule, Recompute


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder."""

    name: str
    # The number of blocks.
    layers: int
    # The features of a token between the blocks.
    width: int
    # The heads of queries and of keys and values in a layer; fewer of the latter is grouped-query attention.
    heads: int
    kv_heads: int
    # The features of a head.
    head_size: int
    # The width inside the MLP.
    inner: int
    # Whether the MLP has a gate beside its first product.
    gated: bool
    # The rows of the table of tokens.
    vocabulary: int
    # The length of a training sequence.
    tokens: int
    # The rows of a learned table of positions; 0 without one.
    positions: int = 0
    # Whether the head is the embedding.
    tied: bool = True
    # Whether linear layers have biases.
    biases: bool = True
    # Whether norms have a bias.
    norm_bias: bool = True
    # Whether masks of dropout are applied.
    dropout: bool = False
    # The elements of a block's norms beside its two norms of `width` features, such as those of queries and keys.
    more_norms: int = 0
    # The rows and columns of the matrices that a block has in the place of an MLP, such as those of experts, of which
    # each tensor-parallel rank has an equal part; () if it has an MLP.
    other_matrices: tuple[tuple[int, int], ...] = ()
    # Whether the model is the GPT of `tpfuse.models`, whose loss never has all logits in memory.
    is_gpt: bool = False
    # The bytes that autograd keeps of a token in a block of transformers, as it is and with tpfuse's norms and dropout,
    # which tensor-parallel ranks have; 0 if they are not known, () for the formula of `tpfuse.plan.activations`.
    kept: tuple[float, ...] = ()

    @property
    def block_parameters(self) -> int:
        """Return the number of parameters of a block."""
        weights, biases = self.block_weights, 0
        if self.biases:
            heads = (self.heads + 2 * self.kv_heads) * self.head_size
            biases = heads + self.inner * (1 + self.gated) + 2 * self.width
        return weights + biases + 2 * self.width * (1 + self.norm_bias) + self.more_norms

    @property
    def block_weights(self) -> int:
        """Return the number of elements in a block's matrices."""
        return sum(rows * columns for rows, columns in self.block_matrices)

    @property
    def block_matrices(self) -> tuple[tuple[int, int], ...]:
        """Return the features out and in of each linear layer of a block; packed ones are several."""
        query, key, inner, width = self.heads * self.head_size, self.kv_heads * self.head_size, self.inner, self.width
        attention = (query, width), (key, width), (key, width), (width, query)
        return (*attention, *(self.other_matrices or ((inner, width),) * (1 + self.gated) + ((width, inner),)))

    @property
    def table_parameters(self) -> int:
        """Return the number of elements in the embedding of tokens, and in the head."""
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


class RankShare(NamedTuple):
    """A rank's share of a micro-batch, which decides what the rank computes. The fields are those of `RankLayout`."""

    tp: int
    cp: int
    micro_batch: int
    recompute: Recompute


@dataclass(frozen=True)
class RankLayout:
    """The options of `tpfuse train` that decide how fast a step is and how much memory it needs."""

    # The numbers of tensor-, context-, data- and pipeline-parallel ranks. Neighbouring ranks are tensor-parallel, then
    # context-, data- and pipeline-parallel.
    tp: int
    cp: int
    dp: int
    pp: int
    # The schedule of the pipeline, and the stages of each of its ranks.
    schedule: PipelineSchedule
    stages_per_rank: int
    # The stage of ZeRO.
    zero: int
    # The activations that the backward pass computes again.
    recompute: Recompute
    # The sequences of a micro-batch of a data-parallel rank.
    micro_batch: int
    # The sequences of a step over all ranks, a multiple of dp x micro_batch.
    batch: int
    # The copies of the model at stage 3 of ZeRO, each of which dp x cp / copies ranks share.
    copies: int = 1

    @property
    def share(self) -> RankShare:
        """Return a rank's share of a micro-batch."""
        return RankShare(self.tp, self.cp, self.micro_batch, self.recompute)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of each data-parallel rank in a step."""
        return self.batch // (self.dp * self.micro_batch)


@dataclass(frozen=True)
class TrainingProgram:
    """The kernels of a training program, what it overlaps, and the bytes of its numbers.

    `TPFUSE` is ours. `benchmarks.measured_runs` describes others, to compare predictions with their measurements.
    """

    name: str
    # Whether one kernel computes attention; otherwise scores are written to memory.
    fused_attention: bool = True
    # Whether tensor-parallel ranks share the tokens between their products; otherwise they all-reduce.
    sequence_parallel: bool = True
    # Whether products overlap with the communication of tensor-parallel ranks, chunk by chunk.
    overlap_tp: bool = True
    # Whether gradients are reduced while backward passes compute, and parameters of ZeRO's stage 3 gathered ahead.
    overlap_dp: bool = True
    # Operators that the host issues for a block's forward pass, and again for its backward pass.
    block_operators: int = 16
    # Operators that take as long to issue as a collective.
    collective_operators: float = 2
    # Further operators of each pass of a stage.
    pass_operators: float = 4
    # Whether pipeline stages have equally many blocks; otherwise the cut counts the head as well.
    equal_stages: bool = False
    # The bytes of an element of a parameter, of an accumulated gradient, and of a gradient that is sent.
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    # What a rank keeps of the gradients of earlier micro-batches at stages 2 and 3 of ZeRO.
    accumulate: Accumulate = "sharded"
    # How often a rank has the whole gradients beside that, for open subtrees of virtual ranks; None without such ranks.
    subtrees: int | None = None
    # The bytes of an element that a product takes or returns under autocast; 0 without it: those of a parameter.
    autocast_bytes: int = 0
    # Whether kernels of Triton compute, or torch's, which keep masks of dropout and statistics in the dtype of x.
    triton: bool = True
    # How context-parallel ranks attend to each other's tokens, and which tokens of a sequence they have.
    context_schedule: ContextSchedule = "auto"
    implementation: Implementation = "collective"
    balance: Balance = "zigzag"
    ulysses: int = 1
    # Whether one operator computes the activation of a gated MLP and its product with the gate.
    fused_gate: bool = False
    # Whether the optimizer keeps its moments in bfloat16.
    half_moments: bool = False
    # Whether the inputs of blocks that are computed again as a whole are in the host's memory.
    offloads_inputs: bool = False
    # Whether a tensor for each weight of a block stands for its gradient, which is in a buffer of another type.
    placeholder_gradients: bool = False
    # Whether ranks have slots in symmetric memory for what they send.
    symmetric_slots: bool = True
    # The iterations with which Muon orthogonalises the matrices of the blocks, which have one moment; 0 without Muon.
    muon_steps: int = 0
    # Bytes that the context of CUDA, libraries and gaps between tensors take.
    reserve: float = 1.5 * 2**30

    @property
    def state_bytes(self) -> int:
        """Return the bytes that a summed gradient, and a master, take for each element: at least 4."""
        return max(self.parameter_bytes, 4)

    @property
    def moment_bytes(self) -> int:
        """Return the bytes of an element of a moment."""
        return 2 if self.half_moments else self.state_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes of an element's two moments, and of its master if the parameter has a half type."""
        return 2 * self.moment_bytes + (self.state_bytes if self.parameter_bytes < 4 else 0)


TPFUSE = TrainingProgram("tpfuse")
