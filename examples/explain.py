# python examples/explain.py
import torch

import tpfuse
from tpfuse import ColumnParallelLinear, RowParallelLinear

mlp = torch.nn.Sequential(ColumnParallelLinear(512, 2048, activation="gelu"), RowParallelLinear(2048, 512))
with tpfuse.autotune(seconds=20):  # the first step, on every rank
    mlp(torch.randn(4, 512)).sum().backward()
tpfuse.explain(mlp)  # a line for each layer: shapes, operator, implementation, reason
