"""The sizes of a model of transformers, for the model of cost (`tpfuse.plan`)."""

import json
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import nn

from tpfuse.drop_in.huggingface import causal_model, register
from tpfuse.drop_in.kept_activations import kept_by_blocks
from tpfuse.drop_in.structure import decoder_layers, has_latents
from tpfuse.drop_in.weights import empty_model
from tpfuse.errors import UserError
from tpfuse.plan.sizes import ModelSizes
from tpfuse.train.decoder_config import DecoderConfig, count_parameters

EXACT = 0.01  # the share by which a model's parameters may differ from the formula's


@lru_cache(maxsize=8)
def _kept_by_blocks(settings: str, tokens: int, dtype: str) -> tuple[float, float]:
    """Return `ModelSizes.kept` of the model with this config.json."""
    register()
    return kept_by_blocks(empty_model(causal_model, json.loads(settings), getattr(torch, dtype)), tokens)


def sizes_of_decoder(name: str, config: DecoderConfig, dtype: str) -> ModelSizes:
    """Return the sizes of a model of transformers. Raise UserError as `LanguageModel.sizes` does.

    What its configuration leaves open is found in the parameters of the model, which is made without memory.
    """
    model = config.empty(torch.float32)
    theirs: Any = model.config
    convolves = any(isinstance(module, nn.Conv1d) for module in model.modules())
    if convolves or has_latents(model):
        held = "convolutions and recurrences" if convolves else "latents, which each rank computes whole"
        raise UserError(
            f"{name}: the blocks of {theirs.model_type} have {held}: tpfuse does not know the memory and times of such"
            " blocks"
        )
    block, *following = ([tuple(each.shape) for each in module.parameters()] for module in decoder_layers(model))
    for number, other in enumerate(following, 1):
        if other != block:
            raise UserError(
                f"{name}: block {number} of {theirs.model_type} has other weights than block 0, as where only some"
                " blocks are mixtures of experts: tpfuse does not know the memory and times of such models"
            )
    parameters, weights = (sum(prod(shape) for shape in block if len(shape) >= least) for least in (1, 2))
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()  # type: ignore[operator]
    inner = [getattr(theirs, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim")]
    plain = ModelSizes(
        name, config.n_layer, config.n_embd, config.n_head,
        kv_heads=getattr(theirs, "num_key_value_heads", None) or config.n_head,
        head_size=getattr(theirs, "head_dim", None) or config.n_embd // config.n_head,
        inner=4 * config.n_embd, gated=False, vocabulary=config.vocab_size,
        tokens=config.n_positions, positions=sum(len(table) for table in tables if len(table) != config.vocab_size),
        tied=head is None or any(head.weight is table for table in tables), biases=False,
        norm_bias=any(isinstance(module, nn.LayerNorm) for module in model.modules()), dropout=config.drops,
        kept=_kept_by_blocks(json.dumps(config.settings), config.n_positions, dtype),
    )  # fmt: skip
    dense = [replace(plain, inner=size) for size in inner if size] + [plain]
    attention = replace(plain, inner=0).block_weights
    stacks = [shape for shape in block if len(shape) == 3]  # of experts, whose gate and up count as one matrix
    stacked = tuple((rows, columns) for experts, rows, columns in stacks for _ in range(experts))
    rest = weights - attention - sum(map(prod, stacked))
    others = [replace(plain, other_matrices=(*stacked, (rest, 1)))] if rest > 0 else []
    for sizes in (*(replace(each, gated=gated) for each in dense for gated in (False, True)), *others):
        if sizes.block_weights == weights:
            extra = {biases: parameters - replace(sizes, biases=biases).block_parameters for biases in (False, True)}
            biases = min(extra, key=lambda each: (extra[each] < 0, abs(extra[each])))
            found = replace(sizes, biases=biases, more_norms=max(0, extra[biases]))
            counted = count_parameters(model)
            if abs(found.parameters / counted - 1) <= EXACT:
                return found
            raise UserError(
                f"{name}: {theirs.model_type} has {counted:,} parameters, and {found.parameters:,} if it had"
                " nothing but equal blocks, a norm, embeddings and a head: tpfuse does not know the memory and times of"
                " such models"
            )
    raise UserError(
        f"{name}: a block of {theirs.model_type} has {weights:,} weights, and attention alone would have"
        f" {attention:,}: tpfuse does not know the memory and times of such blocks"
    )
