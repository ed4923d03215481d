"""A pipeline trains, resumes, evaluates and generates with models of transformers as one rank does."""

import copy
import functools
import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.decoders import FAMILIES, decoder, exact
from tests.support.tiers import exhaustive, pairwise
from tests.support.training import Result, check_same, decoder_config, new_trainer, options_of, trained_decoder
from tpfuse.comm.layout import has_values, local_tensor
from tpfuse.comm.messages.symmetric import SymmetricMessages
from tpfuse.drop_in.decoder_stages import DecoderStages, decoder_parts
from tpfuse.drop_in.stage_proof import prove_stages
from tpfuse.parallel.pipeline.cut import Stage
from tpfuse.plan.memory import memories
from tpfuse.switches import use
from tpfuse.testing.ranks import pool
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import own_stages, pipeline_costs, pipeline_stages
from tpfuse.train.predicted import layout_of, program_of, sizes_of, stage_blocks
from tpfuse.train.rank_model import pipeline_logits
from tpfuse.zero.gradient_buckets import GradientBuckets

BATCH = 24  # suits dp 1 and 2 with 4, 6, 8 and 12 micro-batches
ONE_RANK = options_of(batch=BATCH, order="random")
Layout = tuple[int, int, int, int]  # tp, cp, dp, pp
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def _config(family: str, layers: int = 4, **settings: Any) -> DecoderConfig:
    """Describe a model of these layers. Most layers of Gemma 2 and 3 attend to 5 tokens, the others to all."""
    if family in ("gemma2", "gemma3"):
        settings["layer_types"] = KINDS * (layers // 4)
    return decoder_config(family, num_hidden_layers=layers, **settings)


def _options(layout: Layout, schedule: str = "1f1b", **more: Any) -> TrainCommand:
    tp, cp, dp, pp = layout
    return options_of(2 * pp, batch=BATCH, tp=tp, cp=cp, dp=dp, pp=pp, pp_schedule=schedule, order="random", **more)


@functools.cache
def _one_rank(family: str, layers: int) -> Result:
    """Return what one rank finds in two steps. Its gradients are clipped: norms exceed `clip`, which is 0.5."""
    found = trained_decoder(_config(family, layers), ONE_RANK, 2)
    assert min(found[1]) > 0.5
    return found


def _check(family: str, options: TrainCommand) -> None:
    """Compare two steps with those of one rank. Four pipeline ranks have 8 layers, for two stages of each."""
    layers = 2 * max(2, options.parallel.pp)
    found = trained_decoder(_config(family, layers), options, 2)
    check_same(found, _one_rank(family, layers), 1e-9)


def _for_families(names: list[str], rows: list[Any]) -> tuple[list[str], list[Any]]:
    """Give each row a family, one after another: GPT-2 first, without those of the next test."""
    families = ["gpt2", *sorted(set(FAMILIES) - {"gpt2", "gemma2", "gemma3", "neox", "phi3"})]
    of_rows = zip(itertools.cycle(families), rows, strict=False)
    return ["family", *names], [pytest.param(family, *row.values, marks=row.marks) for family, row in of_rows]


# The first row has an embedding that both ends of the pipeline share, and that tensor-parallel ranks shard.
# Other tests have gpipe.
@pytest.mark.parametrize(
    *_for_families(
        *pairwise(
            layout=[(2, 1, 1, 2), (1, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 2)],
            schedule=["1f1b", "interleaved_1f1b", "zbv", "zero_bubble"],
            stage=[1, 0, 2, 3],
            recompute=["none", "full"],
        )
    )
)
def test_every_schedule_and_layout_trains_as_one_rank(
    family: str, layout: Layout, schedule: str, stage: int, recompute: str
) -> None:
    _check(family, _options(layout, schedule, stage=stage, recompute=recompute))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *exhaustive(
            ("gemma2", _options((1, 1, 2, 2), "zbv", stage=2)),
            ("gemma3", _options((2, 2, 1, 2), "interleaved_1f1b", stage=3)),
            ("phi3", _options((1, 2, 2, 2), stage=3)),
            ("neox", _options((1, 1, 1, 2), pp_layers="3,1")),
            ("llama_tied", _options((1, 1, 2, 2), offload="host", stage=1)),
            ("falcon", _options((1, 1, 1, 2), "zbv")),
            ("bloom", _options((1, 1, 2, 2), "interleaved_1f1b", stage=1)),
            ("opt", _options((1, 1, 1, 2), "zero_bubble")),
            ("llama4", _options((1, 1, 1, 2))),
        ),
    ],
)
def test_layers_of_several_kinds_and_more_dimensions_train_as_one_rank(family: str, options: TrainCommand) -> None:
    _check(family, options)


DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 8}


@pytest.mark.exhaustive
def test_frequencies_that_depend_on_the_length_are_those_of_the_text_alone() -> None:
    """Texts of more than 8 tokens change the frequencies; the padding behind a text must not.

    A cache would keep keys with the frequencies of shorter texts, so there is none on one rank either.
    """
    config = _config("llama", **DYNAMIC)
    texts = []
    for options in (_options((1, 1, 1, 2)), _options((1, 1, 1, 2), "zbv")):
        texts.append(pool(2).run(_first_logits, config, options))
    alone = pool(1).run(_first_logits, config, ONE_RANK)[0]
    for found in (logits for ranks in texts for logits in ranks):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)


def _first_logits(config: DecoderConfig, options: TrainCommand) -> torch.Tensor:
    """Return the logits after 5 tokens, which padding to 20 follows in a pipeline."""
    from tpfuse.train.batches import MicroBatch

    ids = torch.arange(5).expand(2, 5)
    with exact(config.empty(torch.float64)):
        trainer, _ = new_trainer(options, config)
        if trainer.runner is None:
            with torch.no_grad():
                return trainer.model(input_ids=ids).logits[:, -1]  # type: ignore[no-any-return]
        padded = nn.functional.pad(ids, (0, 15))
        return pipeline_logits(trainer.language_model, trainer.runner, MicroBatch(padded, length=5))


@pytest.mark.exhaustive
def test_dropout_follows_from_seed_and_step_alone(tmp_path: Path) -> None:
    """Layers that are computed again draw the same masks, and stages draw different ones."""
    config = _config("gpt2", attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2)
    whole = trained_decoder(config, _options((1, 1, 1, 2), "zbv"), 3)
    assert abs(whole[0][0] / _one_rank("gpt2", 4)[0][0] - 1) > 1e-4
    trained_decoder(config, _options((1, 1, 1, 2), "zbv"), 2, tmp_path)
    resumed = trained_decoder(config, _options((1, 1, 1, 2), "zbv", recompute="full"), 1, None, tmp_path)
    check_same(resumed, (whole[0][2:], whole[1][2:], whole[2]))


def _seeds(config: DecoderConfig, options: TrainCommand) -> list[int]:
    """Return the seeds of the passes of a step."""
    trainer, windows = new_trainer(options, config)
    assert trainer.runner is not None
    compute, seeds = trainer.runner._compute, []

    def seeded(*arguments: Any) -> torch.Tensor:
        y = compute(*arguments)
        seeds.append(torch.initial_seed())
        return y

    trainer.runner._compute = seeded
    trainer.train_step(windows, lambda: False)
    return seeds


@pytest.mark.exhaustive
def test_stages_and_micro_batches_draw_different_masks() -> None:
    seeds = pool(2).run(_seeds, _config("gpt2", resid_pdrop=0.2), _options((1, 1, 1, 2), "zbv"))
    assert len({seed for rank in seeds for seed in rank}) == sum(map(len, seeds)) == 4 * 4


def _held(config: DecoderConfig, options: TrainCommand) -> tuple[dict[str, tuple[int, ...]], int, int, set[int]]:
    """Train a step. Return shapes of parameters, bytes of slots and of buckets, and sizes of all live parameters."""
    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, nn.Parameter)}
    with use(implementation="direct"):
        trainer, windows = new_trainer(options, config)
        trainer.train_step(windows, lambda: False)
    assert trainer.runner is not None and isinstance(trainer.engine, GradientBuckets)
    messages = trainer.runner._messages
    assert isinstance(messages, SymmetricMessages)
    held = sum(bucket.values.nbytes for bucket in trainer.engine.buckets)
    shapes = {name: tuple(local_tensor(parameter).shape) for name, parameter in trainer.model.named_parameters()}
    gc.collect()
    live = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and id(each) not in before]
    sizes = {each.numel() for each in live if has_values(each)}
    return shapes, messages._slots.local.nbytes, held, sizes


@pytest.mark.parametrize(
    ("family", "schedule", "dp", "pp"),
    exhaustive(("gemma3", "1f1b", 1, 4), ("gpt2", "zbv", 1, 2), ("llama", "zero_bubble", 2, 2)),
)
def test_ranks_hold_their_own_stages_and_what_is_counted(family: str, schedule: str, dp: int, pp: int) -> None:
    config = replace(_config(family, vocab_size=997), n_positions=63)  # messages that do not fit the smallest slot
    options = _options((1, 1, dp, pp), schedule, stage=1, micro_batch=3)
    sizes_of_model, dtype = sizes_of("toy", config, options.train.dtype), getattr(torch, options.train.dtype)
    formula = memories(
        sizes_of_model, layout_of(options), program_of(options, config.n_head), stage_blocks(options, config)
    )
    assert bool(config.tied) == sizes_of_model.tied == (family != "llama")
    for index, (shapes, slots, held, sizes) in enumerate(pool(pp * dp).run(_held, config, options)):
        rank = index // dp
        part = config.outlined(None, dtype, own_stages(options.parallel, config, rank))
        assert {name: tuple(parameter.shape) for name, parameter in part.named_parameters()} == shapes
        assert (997 * 48 in sizes) == (rank == 0 or (rank == pp - 1 and schedule != "zbv"))
        assert formula[rank].parameters == pytest.approx(held, rel=0.01) and formula[rank].buffers == slots


def test_the_cut_counts_embeddings_head_and_attention() -> None:
    """A head as expensive as two layers leaves fewer layers to the last stage."""
    config = _config("llama", 8, vocab_size=101)
    costs = pipeline_costs(_options((1, 1, 1, 2)).parallel, config)
    model: Any = config.empty(torch.float32)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    table, attention = 101 * 48, 12 * 7 * 48
    assert [(cost.flops, cost.parameters) for cost in costs] == [
        (4 * (6 * layer + attention), 4 * layer + table),
        (4 * (6 * layer + attention) + 6 * (table + 48), 4 * layer + table + 48),
    ]
    large = _config("llama", 8, vocab_size=2 * layer // 48)
    assert pipeline_stages(_options((1, 1, 1, 2)).parallel, large) == [
        Stage(0, range(5), True, False),
        Stage(1, range(5, 8), False, True),
    ]


def test_models_that_a_pipeline_cannot_cut_are_refused() -> None:
    model = decoder("llama")
    model.model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"a pipeline cannot place model\.extra\.weight: it is in no layer, embedding"):
        decoder_parts(model)
    model = decoder("llama")
    model.model.config.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="a pipeline cannot cut layers that share keys and values"):
        decoder_parts(model)
    model = decoder("llama")
    model.model.last = model.model.norm
    del model.model.norm
    with pytest.raises(ValueError, match="a pipeline cannot cut model: it has no last norm, norm, ln_f"):
        decoder_parts(model)
    with pytest.raises(
        ValueError, match="a pipeline cuts models with one decoder whose attention tpfuse knows: found 2"
    ):
        decoder_parts(nn.ModuleList([decoder("llama"), decoder("gpt2")]))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("nanochat", r"the output of its stages would differ by .* of its largest value"),
        ("llama", "its forward does not run each layer once"),
        ("longcat", "its num_hidden_layers is 2, and it has 1 layers"),
        ("falcon_h1", ""),
        ("falcon", ""),
        ("bloom", ""),
        ("opt", ""),
        ("llama4", ""),
    ],
)
def test_stages_are_tried(family: str, reason: str) -> None:
    model = decoder(family)
    if family == "llama":
        model.model.layers = _Twice(model.model.layers)
    if not reason:
        prove_stages(model)
        return
    refusal = f"a pipeline cannot cut {type(model).__name__}: {reason}; use a layout without pp"
    with pytest.raises(ValueError, match=refusal):
        prove_stages(model)


class _Twice(nn.ModuleList):
    """Layers of which a decoder runs each twice, as Dory's."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return [*found, *found] if isinstance(index, slice) else found


class _Layer(nn.Module):
    """A layer as in Bloom: it returns a tuple, and the decoder reads an attribute of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention_type = kind
        self.self_attn = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.self_attn.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, mask: float) -> tuple[torch.Tensor, None]:
        return x + mask * self.self_attn.get_submodule("q_proj")(x), None


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
        self.layers = nn.ModuleList(_Layer(kind) for kind in ("full", "sliding") * 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids) * 2.0
        masks = {"full": hidden.shape[1], "sliding": 0.5}
        for layer in self.layers:
            hidden = layer(x=hidden, mask=masks[layer.attention_type])[0]
        return self.norm(hidden).view(-1, *hidden.shape[-2:])  # type: ignore[no-any-return]


def test_decoders_whose_layers_return_tuples_and_have_attributes_are_cut() -> None:
    torch.manual_seed(0)
    whole, ids = _Decoder(), torch.arange(6).view(2, 3)
    x = None
    for stage in (
        Stage(0, range(1), True, False),
        Stage(1, range(1, 5), False, False),
        Stage(2, range(5, 6), False, True),
    ):
        model = copy.deepcopy(whole)
        stages = DecoderStages(model, [stage])
        names = [name for name, _ in model.named_parameters()]
        assert {int(name.split(".")[1]) for name in names if name.startswith("layers.")} == set(stage.layers)
        assert ("embed_tokens.weight" in names, "norm.weight" in names) == (stage.first, stage.last)
        with stages.only(stage, x, (2, 3)) as running:
            y = model(ids)
            x = y if stage.last else running.output
    assert torch.equal(x, whole(ids))
