"""torchtitan's models compute with tpfuse's products what they compute with its own, and a report names the layers.

`pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3` is all that these tests need more.
"""

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import pool

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytestmark = pytest.mark.exhaustive  # each rank imports torchtitan for 5 s

TARGET = "tpfuse.torchtitan.linear"


def _config(sequence_parallel: bool) -> Any:
    """Return a Llama of two layers, the first with a packed projection of queries, keys and values."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    rope = llama3.ComplexRoPE.Config(dim=6, max_seq_len=32)
    sizes = {"n_layers": 1, "dim": 24, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 20, "rope": rope}
    layers = [llama3._build_llama3_layers(fuse_qkv=fuse, attn_backend="flex", **sizes)[0] for fuse in (True, False)]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    embeddings = llama3.Embedding.Config(num_embeddings=30, embedding_dim=24, param_init=llama3._EMBEDDING_INIT)
    config = llama3.Llama3Model.Config(
        dim=24, vocab_size=30, tok_embeddings=embeddings, layers=layers,
        norm=llama3.RMSNorm.Config(normalized_shape=24, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(in_features=24, out_features=30, param_init=llama3._output_linear_init(24)),
    )  # fmt: skip
    set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    return config


def _overridden(config: Any) -> Any:
    """Let torchtitan apply the override to a configuration in which the model's is nested; return the model's."""
    from torchtitan.config.configurable import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Root(Configurable.Config):
        model: Any

    apply_overrides(OverrideConfig(imports=[TARGET]), Root(model=config))
    return config  # the trainer has kept this object


def _computed(config: Any, tp: int, checked: bool) -> dict[str, Tensor]:
    """Return the logits and all gradients on this rank. checked: with torchtitan's check of types."""
    import spmd_types
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed import spmd_types as titans
    from torchtitan.distributed.utils import get_spmd_context

    world = dist.get_world_size()
    sizes = {"dp_replicate": 1, "dp_shard": world // tp, "cp": 1, "tp": tp, "pp": 1, "ep": 1, "world_size": world}
    ids, labels = (integers(1, 3, 16, low=0, high=30, dtype=torch.int64) for _ in range(2))
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims = parallel_dims.ParallelDims(**sizes)
        model = config.build()
        model.parallelize(dims)
    with get_spmd_context(parallel_dims=dims, spmd_typechecking=checked)():
        with spmd_types.no_typecheck():
            torch.manual_seed(dist.get_rank())
            model.init_states()
            model.double()
        tokens, _, _ = titans.annotate_input_spmd_types(dims, ids, labels, {})
        with mock.patch.object(Tensor, "float", Tensor.double):  # rotations in float32 would cut off more than rounding
            logits = model(tokens)
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def _both(sequence_parallel: bool, tp: int, checked: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    own = _computed(_config(sequence_parallel), tp, checked)
    fused = _computed(_overridden(_config(sequence_parallel)), tp, checked)
    from tpfuse.torchtitan import _warn_of_one_rank

    return own, fused, bool(_warn_of_one_rank.cache_info().currsize)


@pytest.mark.parametrize(
    ("sequence_parallel", "tp", "checked"), [(True, 2, False), (True, 2, True), (False, 2, True), (True, 1, False)]
)
def test_a_model_computes_what_torchtitans_does(sequence_parallel: bool, tp: int, checked: bool) -> None:
    for own, fused, warned in pool(2).run(_both, sequence_parallel, tp, checked):
        assert list(own) == list(fused) and warned == (tp == 1)
        for name, expected in own.items():
            error = (fused[name] - expected).abs().max() / expected.abs().max()
            assert error <= 1e-13, f"{name}: {error:.1e}"


def _said(config: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level("INFO"):
        _overridden(config)
    return [record.getMessage() for record in caplog.records if "Override" not in record.getMessage()][:-1]


def test_it_says_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import ScaledBiasRowwiseLinear

    class Other(FeedForward):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(FeedForward.Config):
            pass

    config = _config(sequence_parallel=True)
    layer = config.layers[1]
    layer.feed_forward.w2.bias = True
    for holder, name, kind in (
        (layer.attention, "wo", ScaledBiasRowwiseLinear),
        (layer.feed_forward, "w1", ScaledBiasRowwiseLinear),
        (config.layers[0], "feed_forward", Other),
    ):
        held = getattr(holder, name)
        settings = {field.name: getattr(held, field.name) for field in dataclasses.fields(held)}
        setattr(holder, name, kind.Config(**settings))
    whole = "torchtitan's own: column-parallel on a whole input, or in a class that tpfuse does not know"
    assert _said(config, caplog) == [
        f"{TARGET} took 5 of 12 linear layers:",
        f"  lm_head (1): {whole}",
        "  layers.*.attention.qkv_linear.wqkv (1): all_gather_linear",
        "  layers.*.attention.wo (1): linear_reduce_scatter",
        f"  layers.*.feed_forward.w1 (1): {whole}",
        "  layers.*.feed_forward.w2 (1): linear_reduce_scatter",
        f"  layers.*.feed_forward.w3 (2): {whole}",
        "  layers.*.attention.qkv_linear.wq (1): all_gather_linear",
        "  layers.*.attention.qkv_linear.wkv (1): all_gather_linear",
        "  layers.*.attention.wo (1): torchtitan's own: a ScaledBiasRowwiseLinear",
        "  layers.*.feed_forward.w1 (1): torchtitan's own: a ScaledBiasRowwiseLinear",
        "  layers.*.feed_forward.w2 (1): torchtitan's own: row-parallel with a bias or another output",
    ]


def test_it_refuses_what_it_does_not_know() -> None:
    from torchtitan.distributed import utils

    import tpfuse.torchtitan as titan

    expected = "expected torchtitan 0.3 with 'spmd_types'"
    with mock.patch.object(titan, "__version__", "0.4.0"), pytest.raises(ValueError, match=f"0.4.0 .* {expected}"):
        _overridden(_config(True))
    with contextlib.ExitStack() as stack:
        stack.callback(utils.set_spmd_backend, utils.get_spmd_backend())
        utils.set_spmd_backend("full_dtensor")
        with pytest.raises(ValueError, match=f"'full_dtensor': {expected}"):
            _overridden(_config(True))
