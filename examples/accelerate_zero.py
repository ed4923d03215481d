# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/accelerate_zero.py
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tpfuse import ZeroOptimizer

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8
)
model = LlamaForCausalLM(config)
zero = ZeroOptimizer(model, stage=2, lr=1e-3, weight_decay=0.1)  # of the model as it is, which is not prepared
loader = DataLoader(torch.randint(1000, (32, 33)), batch_size=4, shuffle=True)
optimizer, loader = accelerator.prepare(zero, loader)
for step, ids in enumerate(loader):
    optimizer.zero_grad()
    with zero.no_sync():  # instead of accelerator.accumulate
        accelerator.backward(model(input_ids=ids[:2], labels=ids[:2]).loss / 2)
    accelerator.backward(model(input_ids=ids[2:], labels=ids[2:]).loss / 2)
    norm = zero.clip_grad_norm_(1.0)  # instead of accelerator.clip_grad_norm_
    optimizer.step()
    accelerator.print(f"step {step}: norm {norm:.4f}")
accelerator.end_training()
