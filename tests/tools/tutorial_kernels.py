"""The kernels that Triton's tutorials teach, written anew: kernels that are not tpfuse's, with what they compute.

`emulated_cases` runs them as they are compiled. Each case returns launches, which run in order, and pairs of a result
and what it must be.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfuse.kernels.launch import Launch, cdiv

Case = tuple[list[Launch], list[tuple[Tensor, Tensor]]]


@triton.jit
def vector_add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


def add() -> Case:
    x, y = torch.randn(7700), torch.randn(7700)
    out = torch.empty(7700)
    given = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "n": 7700, "BLOCK": 1024}
    return [Launch(vector_add, (8,), given, 4, 1)], [(out, x + y)]


@triton.jit
def softmax_rows(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Programs take row after row."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=-float("inf"))
        e = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + row * columns + offsets, e / tl.sum(e, 0), mask=mask)


def softmax() -> Case:
    x = torch.randn(77, 112)
    out = torch.empty_like(x)
    given = {"x_ptr": x, "out_ptr": out, "rows": 77, "columns": 112, "BLOCK": 128, "STAGES": 3}
    return [Launch(softmax_rows, (5,), given, 4, 3)], [(out, x.softmax(1))]


@triton.jit
def product_tile(a_ptr, b_ptr, out_ptr, tile, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Compute tile number `tile` of leaky_relu(a b), two rows of tiles at a time."""
    wide, first = 2 * tl.cdiv(n, N), tile // (2 * tl.cdiv(n, N)) * 2
    height = min(tl.cdiv(m, M) - first, 2)
    rows = (first + tile % wide % height) * M + tl.arange(0, M)
    columns = tile % wide // height * N + tl.arange(0, N)
    depth = tl.arange(0, K)
    a_ptrs = a_ptr + (rows % m)[:, None] * k + depth[None, :]
    b_ptrs = b_ptr + depth[:, None] * n + (columns % n)[None, :]
    acc = tl.zeros((M, N), tl.float32)
    for done in range(0, k, K):
        a = tl.load(a_ptrs, mask=depth[None, :] < k - done, other=0.0)
        b = tl.load(b_ptrs, mask=depth[:, None] < k - done, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += K
        b_ptrs += K * n
    out = tl.where(acc >= 0, acc, 0.01 * acc)
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], out, mask=mask)


@triton.jit
def grouped(a_ptr, b_ptr, out_ptr, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    product_tile(a_ptr, b_ptr, out_ptr, tl.program_id(0), m, n, k, M, N, K)


@triton.jit
def persistent(a_ptr, b_ptr, out_ptr, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, M) * tl.cdiv(n, N), tl.num_programs(0), flatten=True):
        product_tile(a_ptr, b_ptr, out_ptr, tile, m, n, k, M, N, K)


def matmul(kernel: Any, dtype: torch.dtype, programs: int | None = None) -> Case:
    m, n, k = 144, 80, 96
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    out = torch.empty(m, n)
    sizes = {"m": m, "n": n, "k": k, "M": 32, "N": 32, "K": 32}
    grid = (programs or cdiv(m, 32) * cdiv(n, 32),)
    launch = Launch(kernel, grid, {"a_ptr": a, "b_ptr": b, "out_ptr": out} | sizes, 4, 3)
    return [launch], [(out, torch.nn.functional.leaky_relu(a.float() @ b.float()))]


@triton.jit
def norm_forward(x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)
    mean = tl.sum(total) / columns
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0)
        centred = tl.where(at < columns, x - mean, 0.0)
        total += centred * centred
    rstd = 1 / tl.sqrt(tl.sum(total) / columns + 1e-5)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < columns
        x = tl.load(x_ptr + row * columns + at, mask=mask)
        weight, bias = tl.load(weight_ptr + at, mask=mask), tl.load(bias_ptr + at, mask=mask)
        tl.store(out_ptr + row * columns + at, (x - mean) * rstd * weight + bias, mask=mask)


@triton.jit
def norm_backward(
    dx_ptr, grad_ptr, dweight_ptr, dbias_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, lock_ptr, columns,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx of a row, and add its parts of the other gradients to those of its group, which a lock protects."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    group = row % GROUPS
    mask = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=mask, other=0)
    grad = tl.load(grad_ptr + row * columns + at, mask=mask, other=0)
    weight = tl.load(weight_ptr + at, mask=mask, other=0)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    normal = tl.where(mask, (x - mean) * rstd, 0.0)
    weighted = tl.where(mask, weight * grad, 0.0)
    first, second = tl.sum(normal * weighted) / columns, tl.sum(weighted) / columns
    tl.store(dx_ptr + row * columns + at, (weighted - (normal * first + second)) * rstd, mask=mask)
    dweight, dbias = grad * normal, grad
    while tl.atomic_cas(lock_ptr + group, 0, 1) == 1:
        pass
    if tl.load(lock_ptr + GROUPS + group) == 0:
        tl.atomic_xchg(lock_ptr + GROUPS + group, 1)
    else:
        dweight += tl.load(dweight_ptr + group * columns + at, mask=mask)
        dbias += tl.load(dbias_ptr + group * columns + at, mask=mask)
    tl.store(dweight_ptr + group * columns + at, dweight, mask=mask)
    tl.store(dbias_ptr + group * columns + at, dbias, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + group, 0)


@triton.jit
def sum_groups(parts_ptr, out_ptr, columns, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    parts = tl.load(parts_ptr + tl.arange(0, GROUPS)[:, None] * columns + at[None, :], mask=mask[None, :], other=0.0)
    tl.store(out_ptr + at, tl.sum(parts, 0), mask=mask)


def layer_norm() -> Case:
    rows, c = 20, 300
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((rows, c), (c,), (c,)))
    expected, grad = torch.nn.functional.layer_norm(x, (c,), weight, bias), torch.randn(rows, c)
    expected.backward(grad)
    mean, rstd, out, dx = torch.empty(rows), torch.empty(rows), torch.empty(rows, c), torch.empty(rows, c)
    parts, sums = torch.empty(2, 4, c), torch.empty(2, c)
    given = {"x_ptr": x.detach(), "weight_ptr": weight.detach(), "mean_ptr": mean, "rstd_ptr": rstd, "columns": c}
    forward = given | {"bias_ptr": bias.detach(), "out_ptr": out, "BLOCK": 128}
    backward = {"dx_ptr": dx, "grad_ptr": grad, "dweight_ptr": parts[0], "dbias_ptr": parts[1]}
    backward |= {"lock_ptr": torch.zeros(8, dtype=torch.int32), "GROUPS": 4, "BLOCK": 512}
    launches = [Launch(norm_forward, (rows,), forward, 4, 1), Launch(norm_backward, (rows,), given | backward, 4, 1)]
    for of, result in zip(parts, sums, strict=True):
        summed = {"parts_ptr": of, "out_ptr": result, "columns": c, "GROUPS": 4, "BLOCK": 128}
        launches.append(Launch(sum_groups, (cdiv(c, 128),), summed, 4, 1))
    wanted = [expected.detach(), x.grad, weight.grad, bias.grad]
    return launches, list(zip([out, dx, *sums], wanted, strict=True))


@triton.jit
def attention_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, length, scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute the attention of M queries of a head, with the softmax of all keys so far."""
    base = tl.program_id(1) * length * D
    rows, dims = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    q_at = rows[:, None] * D + dims[None, :]
    inside = rows[:, None] < length
    q = tl.load(q_ptr + base + q_at, mask=inside, other=0.0)
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * M, length) if CAUSAL else length
    for start in range(0, end, N):
        keys = start + tl.arange(0, N)
        kv_at = keys[:, None] * D + dims[None, :]
        k = tl.load(k_ptr + base + kv_at, mask=keys[:, None] < length, other=0.0)
        seen = keys[None, :] < length
        if CAUSAL:
            seen = seen & (rows[:, None] >= keys[None, :])
        scores = tl.where(seen, tl.dot(q, tl.trans(k)) * (scale * 1.44269504), -1e30)
        larger = tl.maximum(top, tl.max(scores, 1))
        p, shrink = tl.exp2(scores - larger[:, None]), tl.exp2(top - larger)
        total, top = total * shrink + tl.sum(p, 1), larger
        v = tl.load(v_ptr + base + kv_at, mask=keys[:, None] < length, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    tl.store(out_ptr + base + q_at, acc / total[:, None], mask=inside)
    tl.store(lse_ptr + tl.program_id(1) * length + rows, top + tl.log2(total), mask=rows < length)


def attention(causal: bool) -> Case:
    heads, length, d = 2, 150, 64
    q, k, v = (torch.randn(heads, length, d).half() for _ in range(3))
    out, lse = torch.empty(heads, length, d), torch.empty(heads, length)
    given = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse, "length": length, "scale": d**-0.5}
    given |= {"D": d, "M": 64, "N": 32, "CAUSAL": causal}
    scores = q.double() @ k.double().mT * d**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) @ v.double()).float()
    lse_expected = (scores.logsumexp(-1) / torch.tensor(2.0).log()).float()
    return [Launch(attention_rows, (cdiv(length, 64), heads), given, 4, 3)], [(out, expected), (lse, lse_expected)]


# name -> (case, the largest error that half-precision operands leave)
CASES: dict[str, tuple[Callable[[], Case], float]] = {
    "vector add": (add, 0.0),
    "softmax": (softmax, 1e-6),
    "grouped matmul": (lambda: matmul(grouped, torch.float16), 1e-4),
    "persistent matmul": (lambda: matmul(persistent, torch.bfloat16, programs=4), 1e-4),
    "layer norm": (layer_norm, 1e-4),
    "attention": (lambda: attention(causal=False), 2e-3),
    "causal attention": (lambda: attention(causal=True), 2e-3),
}
