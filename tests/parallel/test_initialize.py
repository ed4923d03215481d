"""Initial weights: the same bits in every layout, and their distributions."""

import pytest
import torch

from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import gather_whole
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.parallel.initialize import draw, initialize
from tpfuse.testing.ranks import pool

CONFIG = GPTConfig(vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=12)


def _weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    model = GPT(CONFIG, device_mesh=tensor_mesh(), dtype=dtype)
    initialize(model, 3)
    return {name: gather_whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (3, torch.float32), *exhaustive((4, torch.float64))])
def test_weights_have_the_same_bits_in_every_layout(world: int, dtype: torch.dtype) -> None:
    alone = GPT(CONFIG, dtype=dtype)
    initialize(alone, 3)
    for weights in pool(world).run(_weights, dtype):
        for name, parameter in alone.named_parameters():
            assert torch.equal(weights[name], parameter), name


def test_weights_have_the_right_distributions() -> None:
    model = GPT(CONFIG)
    initialize(model, 3)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            assert torch.equal(parameter, torch.full_like(parameter, float(".ln_" in name and "weight" in name)))
        else:
            std = 0.01 if "c_proj" in name else 0.02
            assert abs(parameter.std() / std - 1) < 0.1 and abs(parameter.mean()) < 0.1 * std, name


def test_weights_depend_on_seed_and_name() -> None:
    shape = torch.Size([63, 9])
    draws = [draw(seed, name, shape, 0.0, 1.0) for seed in (1, 2) for name in ("a", "b")]
    assert torch.equal(draws[0], draw(1, "a", shape, 0.0, 1.0))
    assert len({tuple(x.flatten().tolist()) for x in draws}) == 4
