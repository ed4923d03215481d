# python examples/compiled_gemm.py
import torch

from tpfuse import gemm

w = torch.nn.Parameter(torch.randn(256, 64))
mlp = torch.compile(lambda x: gemm(x, w, activation="gelu_tanh"), fullgraph=True, backend="aot_eager")
mlp(torch.randn(8, 64)).sum().backward()  # by Triton on a GPU, by torch on a CPU, or as tpfuse.use says
print(w.grad.shape)
