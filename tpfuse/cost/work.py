"""What a rank computes in one pass of one micro-batch through a block, the embedding or the head.

Numbers count one tensor- and context-parallel rank. A forward pass computes Y = X W; the backward pass computes two
products of the same number of operations, X's gradient and W's gradient.
"""

from dataclasses import dataclass
from functools import cache

from tpfuse.cost.layout import Layout
from tpfuse.cost.program import Program
from tpfuse.cost.sizes import ModelSizes

_HALF = 2  # bytes of an element of an activation


@dataclass(frozen=True)
class Product:
    """A product of matrices [rows, inner] x [inner, columns], `count` times. summed: whether tensor-parallel ranks
    add their results up; gathered: whether they share the rows of its left side before it (sequence parallelism)."""

    rows: int
    columns: int
    inner: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Return the operations of all of them."""
        return 2.0 * self.rows * self.columns * self.inner * self.count


@dataclass(frozen=True)
class Work:
    """What one pass computes.

    products: of matrices. attention_flops: of fused attention. elementwise_bytes: that operators read and write which
    the memory's bandwidth bounds. operators: that the host issues.
    """

    products: tuple[Product, ...]
    attention_flops: float
    elementwise_bytes: float
    operators: float


@dataclass(frozen=True)
class Passes:
    """The work of a forward and of a backward pass, without recomputation."""

    forward: Work
    backward: Work


def rank_tokens(sizes: ModelSizes, layout: Layout) -> int:
    """Return the tokens of a micro-batch that a context-parallel rank has."""
    return layout.micro_batch * sizes.tokens // layout.cp


@cache
def _block(sizes: ModelSizes, tp: int, cp: int, micro_batch: int, program: Program) -> Passes:
    rows = micro_batch * sizes.tokens // cp
    width, inner = sizes.width, -(-sizes.inner // tp)
    heads, kv_heads = -(-sizes.heads // tp), -(-sizes.kv_heads // tp)
    both = (1 + sizes.gated) * inner
    forward = [
        Product(rows, (heads + 2 * kv_heads) * sizes.head_size, width),
        Product(rows, width, heads * sizes.head_size),
        Product(rows, both, width),
        Product(rows, width, inner),
    ]
    backward = [p for each in forward for p in _gradients(each)]
    flops = 4.0 * rows * sizes.tokens * heads * sizes.head_size
    shared = rows / (tp if program.sequence_parallel else 1)
    masks = 1 if sizes.dropout else 0
    # Two norms and two additions of residuals, and the activation; a norm reads and writes, an addition reads twice.
    once = shared * width * (2 * 2 * _HALF + 2 * (3 * _HALF + masks)) + rows * _HALF * (both + inner)
    again = shared * width * (2 * 4 * _HALF + 2 * (2 * _HALF + masks)) + rows * _HALF * (2 * both + inner)
    if program.fused_attention:
        return Passes(
            Work(tuple(forward), flops / 2, once, program.block_operators),
            Work(tuple(backward), 2.5 * flops / 2, again, program.block_operators),
        )
    scores = float(rows) * sizes.tokens * heads
    count = micro_batch * heads
    length = sizes.tokens // cp
    first, second = (
        Product(length, sizes.tokens, sizes.head_size, count),
        Product(length, sizes.head_size, sizes.tokens, count),
    )
    once += scores * (4 * _HALF + masks * (1 + 2 * _HALF))
    again += scores * (5 * _HALF + masks * (1 + 2 * _HALF))
    return Passes(
        Work((*forward, first, second), 0.0, once, program.block_operators),
        Work((*backward, *_gradients(first), *_gradients(second)), 0.0, again, program.block_operators),
    )


def block(sizes: ModelSizes, layout: Layout, program: Program) -> Passes:
    """Return the passes of a block."""
    return _block(sizes, layout.tp, layout.cp, layout.micro_batch, program)


@cache
def _head(sizes: ModelSizes, tp: int, rows: int) -> Passes:
    columns = -(-sizes.vocabulary // tp)
    product = Product(rows, columns, sizes.width)
    logits = float(rows) * columns
    # The loss reads 16-bit logits, writes them as float32, and reads them for the maximum, the sum and the gradient.
    return Passes(
        Work((product,), 0.0, logits * 14, 6),
        Work(tuple(_gradients(product)), 0.0, logits * 10, 6),
    )


def head(sizes: ModelSizes, layout: Layout) -> Passes:
    """Return the passes of the head and its loss."""
    return _head(sizes, layout.tp, rank_tokens(sizes, layout))


def embedding(sizes: ModelSizes, layout: Layout) -> Passes:
    """Return the passes of the embedding."""
    size = float(rank_tokens(sizes, layout)) * sizes.width * _HALF
    return Passes(Work((), 0.0, 3 * size, 4), Work((), 0.0, 3 * size, 4))


def _gradients(product: Product) -> list[Product]:
    rows, columns, inner, count = product.rows, product.columns, product.inner, product.count
    return [Product(rows, inner, columns, count), Product(inner, columns, rows, count)]
