# python examples/compiled_kernel.py
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tpfuse.explore.ptx import Kernel


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    tl.store(out + place, tl.load(x + place, inside) + tl.load(y + place, inside), inside)


types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
compiled = triton.compile(ASTSource(add, types, {"BLOCK": 128}), target=GPUTarget("cuda", 80, 32))
kernel = Kernel(compiled.asm["ptx"], compiled.metadata.shared)
x, y, out = torch.randn(300), torch.randn(300), torch.zeros(300)
kernel.run((3,), [x, y, out, 300, None, None])  # in the order of the parameters; the last two are Triton's own
print("the same" if torch.equal(out, x + y) else "not the same")
