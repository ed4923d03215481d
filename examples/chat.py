# OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/chat.py
import tempfile

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from tpfuse import ParallelTrainer

# A model of the hub has a tokenizer with a template; generation marks the assistant's tokens in it.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokens = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<|user|>", "<|assistant|>", "<|end|>"]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokens, additional_special_tokens=special, pad_token="<|end|>", chat_template=TEMPLATE
)

capitals = {"Peru": "Lima", "Norway": "Oslo", "Kenya": "Nairobi", "Japan": "Tokyo"}
chats = [
    [{"role": "user", "content": f"Capital of {country}?"}, {"role": "assistant", "content": capital}]
    for country, capital in capitals.items()
]


def example(messages: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return the tokens of a chat. The loss is over the assistant's alone."""
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, spoken = found["input_ids"], found["assistant_masks"]
    return {"input_ids": ids, "labels": [token if own else -100 for token, own in zip(ids, spoken, strict=True)]}


arguments = TrainingArguments(
    f"{tempfile.gettempdir()}/tpfuse_chat", per_device_train_batch_size=4, max_steps=40, learning_rate=1e-2,
    save_strategy="no", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
torch.manual_seed(0)  # the same weights on all ranks
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
examples = [example(messages) for messages in chats]
trainer = ParallelTrainer(
    LlamaForCausalLM(config), arguments, DataCollatorForSeq2Seq(tokenizer), train_dataset=examples, tp=2
)
trainer.train()
asked = tokenizer.apply_chat_template(chats[0][:1], add_generation_prompt=True, return_dict=True, return_tensors="pt")
answer = trainer.model.generate(**asked, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.pad_token_id)
if trainer.is_world_process_zero():
    print("trained on", tokenizer.decode([token for token in examples[0]["labels"] if token != -100]))
    print(chats[0][0]["content"], tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
trainer.end()
