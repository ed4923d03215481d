# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/run_clm.py
import math
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tpfuse import ParallelTrainer

arguments = TrainingArguments(
    f"{tempfile.gettempdir()}/tpfuse_clm", per_device_train_batch_size=8, max_steps=20, learning_rate=1e-2,
    eval_strategy="steps", eval_steps=10, save_steps=10, load_best_model_at_end=True, use_cpu=True,
)  # fmt: skip
ids = torch.tensor(list(Path("README.md").read_bytes()))
blocks = [{"input_ids": block, "labels": block} for block in ids[: len(ids) // 64 * 64].view(-1, 64)]
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(0)  # the same weights on all ranks
trainer = ParallelTrainer(
    LlamaForCausalLM(config), arguments, train_dataset=blocks[8:], eval_dataset=blocks[:8], tp=2, zero_stage=2
)
Path(arguments.output_dir).mkdir(exist_ok=True)
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))  # of any layout
trainer.save_model()  # whole weights, for from_pretrained
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"perplexity {math.exp(metrics['eval_loss']):.1f}")
trainer.end()
