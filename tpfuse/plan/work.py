"""The work of a rank in one pass of one micro-batch through a block, the embedding or the head.

All numbers count one tensor- and context-parallel rank. A backward pass computes two products for each product of the
forward pass: the gradient of its input and that of its weight. Activations have 16 bits.

The time of a product follows from its shape: a roofline over tiles that multiprocessors compute in waves. A
multiprocessor computes a tile of results at a time, of 128 x 256, 128 x 128 or 64 x 128; a smaller tile reads its
factors more often and so reaches less of the rate. The last wave takes as long as a full one (NVIDIA, Matrix
Multiplication Background User's Guide, "Tile Quantization" and "Wave Quantization"). The tile that takes the least time
counts. If tiles are fewer than multiprocessors, the product is also cut along `inner`. No product is faster than its
matrices move through memory.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil

from tpfuse.plan.hardware import GpuSpec
from tpfuse.plan.sizes import ModelSizes, RankShare, TrainingProgram

HALF = 2  # bytes of an element of an activation
TILES = ((128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8))  # rows, columns, and the share of the rate
_ALIGNED = 16 // HALF  # elements of a 16-byte load
_LEAST_INNER = 256  # the least length of a cut along `inner`


@dataclass(frozen=True)
class MatrixProduct:
    """`count` products of matrices, [rows, inner] x [inner, columns]."""

    rows: int
    columns: int
    inner: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Return the operations of all products."""
        return 2.0 * self.rows * self.columns * self.inner * self.count

    @property
    def gradients(self) -> tuple["MatrixProduct", "MatrixProduct"]:
        """Return the products that compute the gradients of both factors."""
        return (
            MatrixProduct(self.rows, self.inner, self.columns, self.count),
            MatrixProduct(self.inner, self.columns, self.rows, self.count),
        )


@cache
def product_seconds(product: MatrixProduct, gpu: GpuSpec, size: int = HALF) -> float:
    """Return the seconds of all products on numbers of `size` bytes, without their launch."""
    rows, columns, inner, count = product.rows, product.columns, product.inner, product.count
    rate = gpu.rate(size) * gpu.product_share
    if columns % _ALIGNED or inner % _ALIGNED or rows % _ALIGNED:
        rate *= gpu.unaligned_share
    compute = product.flops / rate
    if gpu.multiprocessors:
        compute *= min(_slowdown(product, gpu.multiprocessors, tile) for tile in TILES)
    matrices = rows * inner, inner * columns, rows * columns
    return max(compute, size * count * sum(matrices) / gpu.bandwidth)


def _slowdown(product: MatrixProduct, multiprocessors: int, tile: tuple[int, int, float]) -> float:
    """Return how many times longer a product takes in tiles than if all multiprocessors computed all the time."""
    rows, columns, share = tile
    across, down = ceil(product.rows / rows), ceil(product.columns / columns)
    tiles = across * down * product.count
    padded = across * rows * down * columns / (product.rows * product.columns)
    splits = max(1, min(multiprocessors // tiles, product.inner // _LEAST_INNER))
    waves = tiles * splits / multiprocessors
    return padded * ceil(waves) / waves / share


@dataclass(frozen=True)
class Work:
    """The work of a pass."""

    products: tuple[MatrixProduct, ...]
    # The operations of fused attention.
    attention_flops: float
    # The bytes that operators read and write whose time the memory's bandwidth bounds.
    elementwise_bytes: float
    # The number of operators that the host issues.
    operators: float
    # The bytes read and written to add gradients of weights to those of earlier passes.
    accumulated_bytes: float = 0.0


def tokens(sizes: ModelSizes, share: RankShare) -> int:
    """Return the tokens of a micro-batch that tensor-parallel ranks have together."""
    return share.micro_batch * sizes.tokens // share.cp


@cache
def block(sizes: ModelSizes, share: RankShare, program: TrainingProgram) -> tuple[Work, Work]:
    """Return the forward and the backward pass of a block."""
    tp, rows = share.tp, tokens(sizes, share)
    width, inner = sizes.width, -(-sizes.inner // tp)
    heads, kv_heads = -(-sizes.heads // tp), -(-sizes.kv_heads // tp)
    products = (
        MatrixProduct(rows, (heads + 2 * kv_heads) * sizes.head_size, width),
        MatrixProduct(rows, width, heads * sizes.head_size),
        MatrixProduct(rows, (1 + sizes.gated) * inner, width),
        MatrixProduct(rows, width, inner),
    )
    between = rows * width / (tp if program.sequence_parallel else 1)
    hidden = float(rows) * inner
    # Forward: two norms read and write, two additions read two tensors and write one, the activation reads its inputs.
    forward = between * HALF * (2 * 2 + 2 * 3) + hidden * HALF * (2 + sizes.gated)
    # Backward: a norm reads its input and a gradient and writes one. It adds the residual's gradient in the GPT;
    # elsewhere an addition does. The activation writes a gradient for each input.
    backward = between * HALF * 2 * (3 + (1 if sizes.is_gpt else 3)) + hidden * HALF * (3 + 2 * sizes.gated)
    added = sizes.block_parameters / tp * (program.parameter_bytes + 2 * program.gradient_bytes)
    if sizes.dropout:
        forward, backward = forward + 2 * between, backward + 2 * between * (1 + 2 * HALF)
    attention = 4.0 * rows * sizes.tokens * heads * sizes.head_size
    if program.fused_attention:  # causal: half of the scores; backward computes five products instead of two
        return (
            Work(products, attention / 2, forward, program.block_operators),
            Work(_gradients(products), 2.5 * attention / 2, backward, program.block_operators, added),
        )
    more, scores = _scores(sizes, share, heads)
    return (
        Work((*products, *more), 0.0, forward + scores[0], program.block_operators),
        Work(_gradients((*products, *more)), 0.0, backward + scores[1], program.block_operators, added),
    )


def _scores(sizes: ModelSizes, share: RankShare, heads: int) -> tuple[tuple[MatrixProduct, ...], tuple[float, float]]:
    """Return the products of attention that writes its scores, and the bytes of its other operators, both passes.

    These are softmax and dropout, and copies that put the heads of queries, keys, values and results together. heads:
    those of a rank.
    """
    rows, count = tokens(sizes, share), share.micro_batch * heads
    length, scores = rows * heads // count, float(rows) * sizes.tokens * heads
    dropout = 2 * HALF + 1 if sizes.dropout else 0
    copies = 4.0 * rows * heads * sizes.head_size * 2 * HALF
    products = (
        MatrixProduct(length, sizes.tokens, sizes.head_size, count),
        MatrixProduct(length, sizes.head_size, sizes.tokens, count),
    )
    return products, (scores * (2 * HALF + dropout) + copies, scores * (3 * HALF + dropout) + copies)


@cache
def recomputed(sizes: ModelSizes, share: RankShare, program: TrainingProgram) -> Work | None:
    """Return what the backward pass of a block computes again, which is None without recomputation."""
    if share.recompute == "none":
        return None
    forward, _ = block(sizes, share, program)
    if share.recompute == "full":
        return forward
    activation = float(tokens(sizes, share)) * -(-sizes.inner // share.tp) * HALF * (2 + sizes.gated)
    if program.fused_attention:
        return Work((), forward.attention_flops, activation, 2)
    products, scores = _scores(sizes, share, -(-sizes.heads // share.tp))
    return Work(products, 0.0, activation + scores[0], 5)


@cache
def head(sizes: ModelSizes, share: RankShare, program: TrainingProgram) -> tuple[Work, Work]:
    """Return the forward and the backward pass of the head and its loss."""
    products = (MatrixProduct(tokens(sizes, share), -(-sizes.vocabulary // share.tp), sizes.width),)
    logits = float(products[0].rows) * products[0].columns
    # The loss reads the logits, writes them as float32, and reads these for the maximum, the sum and the gradient.
    forward = Work(products, 0.0, logits * (HALF + 4 + 2 * 4), 8)
    added = sizes.table_parameters / share.tp * (program.parameter_bytes + 2 * program.gradient_bytes)
    return forward, Work(_gradients(products), 0.0, logits * (4 + HALF), 8, added)


@cache
def embedding(sizes: ModelSizes, share: RankShare) -> tuple[Work, Work]:
    """Return the forward and the backward pass of the embedding."""
    size = float(tokens(sizes, share)) * sizes.width * HALF
    return Work((), 0.0, 4 * size, 4), Work((), 0.0, 4 * size, 4)


def _gradients(products: tuple[MatrixProduct, ...]) -> tuple[MatrixProduct, ...]:
    return tuple(gradient for product in products for gradient in product.gradients)
