# python examples/huggingface.py
import tempfile

import torch

from tpfuse import GPT
from tpfuse.models.gpt import GPTConfig
from tpfuse.models.huggingface import load_pretrained, save_pretrained
from tpfuse.parallel.initialize import initialize

model = GPT(GPTConfig(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=4))
initialize(model, seed=0)
with tempfile.TemporaryDirectory() as folder:
    save_pretrained(model, folder)  # transformers' GPT2LMHeadModel.from_pretrained reads this
    again = load_pretrained(folder)  # and this reads what transformers writes
ids = torch.arange(8).unsqueeze(0)
assert torch.equal(again(ids), model(ids))
print(again(ids).shape)  # logits [1, 8, 100]
