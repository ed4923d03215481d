"""The tiny models of all families of transformers, converted: exact, left alone or refused in one line."""

import pytest
import torch

from benchmarks.families import families, sweep, tiny
from tests.support.decoders import exact
from tests.support.meshes import mesh_of
from tpfuse.drop_in.context_proof import prove_context
from tpfuse.drop_in.huggingface import register
from tpfuse.drop_in.parallelize import parallelize
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import on_ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(8))
def test_every_family_of_transformers_is_exact_left_alone_or_refused_in_one_line(part: int) -> None:
    wrong = {}
    for name, modes in sweep(families()[part::8]).items():
        wrong |= {(name, mode): text for mode, (what, text) in modes.items() if what in ("wrong", "error")}
    assert not wrong


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("lfm2", "Lfm2ForCausalLM cannot be sharded .* meet outside of attention.*without cp"),
        ("llama4_text", "its attention mask is neither causal nor a sliding window"),
        ("deepseek_v4", "compressor of DeepseekV4Attention is no projection or norm"),
    ],
    ids=["convolutions", "chunked masks", "tokens that are compressed"],
)
def test_a_context_is_refused_to_families_that_attend_in_other_ways(family: str, message: str) -> None:
    register()
    with pytest.raises(ValueError, match=message):
        prove_context(tiny(family))


@on_ranks(2)
def test_a_context_takes_the_window_from_the_mask() -> None:
    plain, model = tiny("olmoe"), tiny("olmoe")  # its attention is given a window that its mask has not
    ids = integers(1, 2, 13, low=3, high=101, dtype=torch.int64)  # neither 2 nor 4 divides the length
    parallelize(model, mesh_of(1, 1, 2))
    with exact(plain):
        found, expected = model(input_ids=ids, labels=ids).loss, plain(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
