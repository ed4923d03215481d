"""Initial weights: the same bits in every layout, and their distributions."""

import pytest
import torch

from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import gather_whole
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.parallel.initialize import draw, initialize
from tpfuse.testing.ranks import on_ranks

CONFIG = GPTConfig(vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=12)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (3, torch.float32), *exhaustive((4, torch.float64))])
@on_ranks("world")
def test_weights_have_the_same_bits_in_every_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(torch.distributed.get_rank())
    alone, model = GPT(CONFIG, dtype=dtype), parallelize_gpt(GPT(CONFIG, dtype=dtype), tensor_mesh())
    for each in (alone, model):
        initialize(each, 3)
    for (name, parameter), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(gather_whole(parameter), whole), name


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
