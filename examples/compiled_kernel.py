# python examples/compiled_kernel.py
import torch
import triton
import triton.language as tl

from tpfuse.explore.ptx import compiled


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    tl.store(out + place, tl.load(x + place, inside) + tl.load(y + place, inside), inside)


x, y, out = torch.randn(300), torch.randn(300), torch.zeros(300)
with compiled():
    add[(3,)](x, y, out, 300, BLOCK=128)
print("the same" if torch.equal(out, x + y) else "not the same")
