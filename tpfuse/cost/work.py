"""What a rank computes in one pass of one micro-batch through a block, the embedding or the head.

All numbers count one tensor- and context-parallel rank. A backward pass computes two products for each product of the
forward pass: the gradient of its input and that of its weight. Activations have 16 bits.
"""

from dataclasses import dataclass
from functools import cache

from tpfuse.cost.layout import Share
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes

HALF = 2  # bytes of an element of an activation


@dataclass(frozen=True)
class Product:
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
    def gradients(self) -> tuple["Product", "Product"]:
        """Return the products that compute the gradients of both factors."""
        return (
            Product(self.rows, self.inner, self.columns, self.count),
            Product(self.inner, self.columns, self.rows, self.count),
        )


@dataclass(frozen=True)
class Work:
    """What a pass computes.

    products: of matrices. attention: the operations of fused attention. elementwise: the bytes that the operators read
    and write which the memory's bandwidth bounds. operators: the number that the host issues. added: the bytes that are
    read and written where gradients of weights are added to those of earlier passes.
    """

    products: tuple[Product, ...]
    attention: float
    elementwise: float
    operators: float
    added: float = 0.0


def tokens(sizes: ModelSizes, share: Share) -> int:
    """Return the tokens of a micro-batch that tensor-parallel ranks have together."""
    return share.micro_batch * sizes.tokens // share.cp


@cache
def block(sizes: ModelSizes, share: Share, program: Program) -> tuple[Work, Work]:
    """Return the forward and the backward pass of a block."""
    tp, rows = share.tp, tokens(sizes, share)
    width, inner = sizes.width, -(-sizes.inner // tp)
    heads, kv_heads = -(-sizes.heads // tp), -(-sizes.kv_heads // tp)
    chunks = tp if program.chunked_products else 1
    products = (
        Product(-(-rows // chunks), (heads + 2 * kv_heads) * sizes.head_size, width, chunks),
        Product(-(-rows // chunks), width, heads * sizes.head_size, chunks),
        Product(-(-rows // chunks), (1 + sizes.gated) * inner, width, chunks),
        Product(-(-rows // chunks), width, inner, chunks),
    )
    operators = program.block_operators + len(products) * (chunks - 1)
    operators_back = program.block_operators + 2 * len(products) * (chunks - 1)
    between = rows * width / (tp if program.sequence_parallel else 1)
    hidden = float(rows) * inner
    # Forward: two norms read and write, two additions read two tensors and write one, the activation reads its inputs.
    forward = between * HALF * (2 * 2 + 2 * 3) + hidden * HALF * (2 + sizes.gated)
    # Backward: a norm reads its input and a gradient and writes one, which an addition adds to the residual's; the
    # activation writes a gradient for each input.
    backward = between * HALF * 2 * (3 + 3) + hidden * HALF * (3 + 2 * sizes.gated)
    added = sizes.block_parameters / tp * (program.parameter_bytes + 2 * program.gradient_bytes)
    if sizes.dropout:
        forward, backward = forward + 2 * between, backward + 2 * between * (1 + 2 * HALF)
    attention = 4.0 * rows * sizes.tokens * heads * sizes.head_size
    if program.fused_attention:  # causal: half of the scores; backward computes five products instead of two
        return (
            Work(products, attention / 2, forward, operators),
            Work(_gradients(products), 2.5 * attention / 2, backward, operators_back, added),
        )
    more, scores = _scores(sizes, share, heads)
    return (
        Work((*products, *more), 0.0, forward + scores[0], operators),
        Work(_gradients((*products, *more)), 0.0, backward + scores[1], operators_back, added),
    )


def _scores(sizes: ModelSizes, share: Share, heads: int) -> tuple[tuple[Product, ...], tuple[float, float]]:
    """Return the products of attention that writes its scores, and the bytes of its other operators, both passes.

    These are softmax and dropout, and copies that put the heads of queries, keys, values and results together. heads:
    those of a rank.
    """
    rows, count = tokens(sizes, share), share.micro_batch * heads
    length, scores = rows * heads // count, float(rows) * sizes.tokens * heads
    dropout = 2 * HALF + 1 if sizes.dropout else 0
    copies = 4.0 * rows * heads * sizes.head_size * 2 * HALF
    products = (
        Product(length, sizes.tokens, sizes.head_size, count),
        Product(length, sizes.head_size, sizes.tokens, count),
    )
    return products, (scores * (2 * HALF + dropout) + copies, scores * (3 * HALF + dropout) + copies)


@cache
def recomputed(sizes: ModelSizes, share: Share, program: Program) -> Work | None:
    """Return what the backward pass of a block computes again, which is None without recomputation."""
    if share.recompute == "none":
        return None
    forward, _ = block(sizes, share, program)
    if share.recompute == "full":
        return forward
    activation = float(tokens(sizes, share)) * -(-sizes.inner // share.tp) * HALF * (2 + sizes.gated)
    if program.fused_attention:
        return Work((), forward.attention, activation, 2)
    products, scores = _scores(sizes, share, -(-sizes.heads // share.tp))
    return Work(products, 0.0, activation + scores[0], 5)


@cache
def head(sizes: ModelSizes, share: Share, program: Program) -> tuple[Work, Work]:
    """Return the forward and the backward pass of the head and its loss."""
    products = (Product(tokens(sizes, share), -(-sizes.vocabulary // share.tp), sizes.width),)
    logits = float(products[0].rows) * products[0].columns
    # The loss reads the logits, writes them as float32, and reads these for the maximum, the sum and the gradient.
    forward = Work(products, 0.0, logits * (HALF + 4 + 2 * 4), 8)
    added = sizes.table_parameters / share.tp * (program.parameter_bytes + 2 * program.gradient_bytes)
    return forward, Work(_gradients(products), 0.0, logits * (4 + HALF), 8, added)


@cache
def embedding(sizes: ModelSizes, share: Share) -> tuple[Work, Work]:
    """Return the forward and the backward pass of the embedding."""
    size = float(tokens(sizes, share)) * sizes.width * HALF
    return Work((), 0.0, 4 * size, 4), Work((), 0.0, 4 * size, 4)


def _gradients(products: tuple[Product, ...]) -> tuple[Product, ...]:
    return tuple(gradient for product in products for gradient in product.gradients)
