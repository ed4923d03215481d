# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/tp_plan.py
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from tpfuse.drop_in.huggingface import register

dist.init_process_group("gloo")
register()  # from now on transformers knows the styles
plan = {f"model.layers.*.self_attn.{name}_proj": "tpfuse_colwise" for name in "qkv"}
plan |= {f"model.layers.*.mlp.{name}_proj": "tpfuse_colwise" for name in ("gate", "up")}
plan |= {f"model.layers.*.{name}_proj": "tpfuse_rowwise" for name in ("self_attn.o", "mlp.down")}
config = LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8
)
torch.manual_seed(0)
folder = f"{tempfile.gettempdir()}/tpfuse_llama"
LlamaForCausalLM(config).save_pretrained(folder)  # the first rank writes
dist.barrier()
parallel = DistributedConfig(tp_plan=plan, tp_size=dist.get_world_size())
model = LlamaForCausalLM.from_pretrained(folder, distributed_config=parallel)
ids = torch.randint(1000, (2, 33))
print(f"rank {dist.get_rank()}: loss {model(input_ids=ids, labels=ids).loss.item():.4f}")
dist.destroy_process_group()
