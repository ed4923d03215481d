# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/context_parallel.py
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import tpfuse

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("cp", "tp"))
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8
)
model = LlamaForCausalLM(config)
tpfuse.parallelize(model, mesh)
ids = torch.randint(1000, (1, 512))  # whole sequences on every rank, which takes its half of the tokens
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
print(f"rank {dist.get_rank()}: loss {loss.item():.4f}, attention {model.config._attn_implementation}")
dist.destroy_process_group()
