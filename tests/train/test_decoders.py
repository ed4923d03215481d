"""`tpfuse train --model.from` trains models of transformers in every layout, and other commands use its runs."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.command import Commands, full_disk, printed_loss
from tests.support.decoders import decoder, exact
from tests.support.tiers import exhaustive
from tests.support.training import (
    check_same,
    decoder_config,
    looped,
    new_trainer,
    options_of,
    prepared,
    trained_decoder,
)
from tpfuse.cli import run
from tpfuse.commands.shared_model import load_run
from tpfuse.testing.ranks import pool
from tpfuse.train.config import read_toml
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.language_model import Drawing
from tpfuse.train.metrics import read_metrics
from tpfuse.train.options import TrainCommand

TRAINING = (
    "--train.steps 4 --train.batch 4 --model.n-positions 13 --train.eval-every 4 --train.eval-batches 2"
    " --train.log-every 2 --train.save-every 0 --optim.warmup 0"
).split()


def _layout(tp: int, cp: int, dp: int, stage: int, **options: Any) -> TrainCommand:
    return options_of(tp=tp, cp=cp, dp=dp, stage=stage, batch=4, order="random", **options)


# GPT-2 packs q, k and v in a transposed matrix, Phi-3 packs rows, and a Llama has fewer key/value heads than queries.
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("phi3", _layout(1, 2, 1, 1)),
        *exhaustive(
            ("gpt2", _layout(2, 2, 1, 3)),
            ("phi3", _layout(3, 1, 1, 1, recompute="full")),
            ("llama", _layout(2, 2, 1, 2, recompute="full")),
            ("llama_tied", _layout(1, 2, 2, 3)),
            ("qwen3", _layout(2, 1, 2, 2, accumulation=2)),
            ("minicpm3", _layout(2, 2, 1, 2, recompute="full")),
            ("gemma2", _layout(2, 2, 1, 1)),
        ),
    ],
)
def test_every_layout_trains_as_one_rank(family: str, options: TrainCommand) -> None:
    config = decoder_config(family)
    alone = trained_decoder(config, options_of(batch=4, order="random"), 3)
    assert alone[0][-1] < alone[0][0]
    check_same(trained_decoder(config, options, 3), alone, 1e-9)


# No pipeline could cut the second one.
@pytest.mark.parametrize("family", ["llama", "opt_without_norm"])
def test_one_rank_trains_as_the_formula_says(family: str) -> None:
    """The loss and the gradients of one rank are those of transformers' own model."""
    config = decoder_config(family)
    with exact(config.empty(torch.float64)):
        trainer, windows = new_trainer(options_of(batch=4, clip=0.0), config)
        theirs = decoder(family)
        theirs.load_state_dict({name: each.detach() for name, each in trainer.model.named_parameters()}, strict=False)
        if family == "llama":
            theirs.model.rotary_emb = trainer.model.model.rotary_emb  # whose angles are those of float32
        ids, targets = windows.sequences(0, 0, 4, torch.device("cpu"))
        logits = theirs(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        squares = [parameter.grad.square().sum() for parameter in theirs.parameters()]
        result = trainer.train_step(windows, lambda: False)
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert result.grad_norm == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("gpt2", _layout(2, 1, 1, 1), _layout(1, 1, 2, 3)),
        *exhaustive(
            ("phi3", _layout(1, 1, 2, 2), _layout(3, 1, 1, 0)),
            ("minicpm3", _layout(3, 1, 1, 0), _layout(1, 2, 1, 1, pp=2, accumulation=2)),
            ("llama_tied", _layout(1, 1, 1, 0), _layout(1, 2, 1, 1, pp=2, pp_schedule="zero_bubble", accumulation=2)),
            ("phi3", _layout(1, 1, 1, 0, pp=2, accumulation=2), _layout(1, 1, 2, 3, pp=2, accumulation=2)),
            ("bitnet", _layout(2, 1, 1, 1), _layout(1, 2, 2, 3)),
            ("apertus", _layout(2, 1, 1, 1), _layout(1, 1, 1, 1, pp=2, accumulation=2)),
            ("afmoe", _layout(2, 1, 1, 1), _layout(4, 1, 1, 1)),
            ("olmo2", _layout(1, 1, 1, 0), _layout(2, 1, 2, 2)),
            ("mixtral", _layout(2, 1, 1, 1), _layout(1, 1, 2, 3)),
            ("qwen2_moe", _layout(1, 2, 1, 0), _layout(2, 1, 1, 3, pp=2, accumulation=2)),
            ("falcon_h1", _layout(2, 1, 1, 1), _layout(1, 1, 1, 1, pp=2, accumulation=2)),
            ("qwen3_5", _layout(1, 1, 1, 0, pp=2, accumulation=2), _layout(2, 1, 2, 3)),
            ("nemotron_h", _layout(2, 1, 1, 1), _layout(1, 1, 2, 2)),
        ),
    ],
)
def test_a_run_resumes_in_another_layout(
    tmp_path: Path, family: str, before: TrainCommand, after: TrainCommand
) -> None:
    config = decoder_config(family)
    whole = trained_decoder(config, after, 5)
    trained_decoder(config, before, 3, tmp_path)
    found = trained_decoder(config, after, 2, None, tmp_path)
    check_same(found, (whole[0][3:], whole[1][3:], whole[2]), 1e-9)


def _evaluated(config: DecoderConfig, options: TrainCommand) -> float:
    trainer, windows = new_trainer(options, config)
    with mock.patch("tpfuse.drop_in.converted.gather_features", side_effect=AssertionError("whole logits")):
        return trainer.evaluate(windows, 1)


def test_evaluation_holds_no_whole_logits() -> None:
    assert all(5 > loss > 4 for loss in pool(2).run(_evaluated, decoder_config("llama"), _layout(2, 1, 1, 0)))


def _folder(folder: Path, family: str, text: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Write a model and a tokenizer of the characters of `text`, whose vocabulary is smaller than the model's."""
    decoder(family, dtype, **settings).save_pretrained(folder)
    vocabulary = {character: number for number, character in enumerate(["<end>", *sorted(set(text.read_text()))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Write a tiny Llama, which tests must not change."""
    return _folder(tmp_path_factory.mktemp("llama") / "llama", "llama", text)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> Path:
    """Make a finished run, whose folder of the model is gone. Tests must not change it."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(llama, folder / "model")
    flags = ["--model.from", str(folder / "model"), *TRAINING, "--optim.lr", "1e-2", "--data.path", str(text)]
    assert run(["train", *flags, "--out", str(folder / "run")]) == 0
    shutil.rmtree(folder / "model")
    return folder / "run"


def _their_loss(model: Any, tokens: list[int]) -> float:
    """Return the mean loss over windows of 13 tokens, as `tpfuse evaluate` measures it."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, 13):
        window = torch.tensor([tokens[start : start + 14]])
        with torch.no_grad():
            logits = model(input_ids=window[:, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
    return total / count


def test_a_run_is_evaluated_sampled_exported_and_resumed_without_its_folder(
    tuned: Path, text: Path, tmp_path: Path, commands: Commands
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (row["val_loss"] for row in read_metrics(tuned / "metrics.jsonl") if row["val_loss"] is not None)
    assert after < before
    assert read_toml(tuned / "config.toml")["model"].keys() == {"from", "n_positions"}
    with full_disk(5_000):
        assert f"cannot write {tmp_path}/full: " in commands.fail("export", tuned, tmp_path / "full", status=1)
    exported = tmp_path / "exported"
    files = "config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json"
    assert commands.do("export", tuned, exported) == f"{exported}: {files}\n"
    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.eos_token == "<end>" and tokenizer.model_max_length == 64, "the files of the source"
    tokens = tokenizer(text.read_text())["input_ids"]
    said = commands.do("evaluate", tuned, "--data.path", text)
    assert printed_loss(said) == pytest.approx(_their_loss(theirs, tokens), abs=1e-4)
    sample = ("sample", tuned, "--prompt", "the ", "--tokens", "9")
    ids = torch.tensor([tokenizer("the ")["input_ids"]])
    expected = theirs.generate(ids, do_sample=False, max_new_tokens=9)[0].tolist()
    assert commands.do(*sample, "--temperature", "0") == tokenizer.decode(expected) + "\n"
    assert commands.do(*sample, "--seed", "1") == commands.do(*sample, "--seed", "1") != commands.do(*sample)
    made = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    made.post_processor = tokenizers.processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", 0)])
    made.save(str(exported / "tokenizer.json"))
    ids = torch.tensor([AutoTokenizer.from_pretrained(exported)("the ")["input_ids"]])
    after, without = (
        theirs.generate(x, attention_mask=torch.ones_like(x), do_sample=False, max_new_tokens=40)[0].tolist()
        for x in (ids, ids[:, 1:])
    )
    sample = ("sample", exported, "--prompt", "the ", "--tokens", "40", "--temperature", "0")
    assert commands.do(*sample) == tokenizer.decode(after[1:]) + "\n" != tokenizer.decode(without) + "\n"
    assert "the prompt has 80 tokens: expected fewer than" in commands.fail("sample", tuned, "--prompt", "a" * 80)
    copied = shutil.copytree(tuned, tmp_path / "run")
    assert run(["train", "--resume", "--out", str(copied), "--train.steps", "5"]) == 0
    assert (copied / "step-5").is_dir()
    assert "the run's model is a llama of transformers" in commands.fail(
        "train", "--init-from", tuned, "--data.path", text, "--out", tmp_path / "other"
    )


def test_a_pretrained_folder_is_the_baseline_of_a_run(
    llama: Path, tmp_path: Path, text: Path, commands: Commands
) -> None:
    """Its loss is that of the run before the first step, in windows of the same length."""
    train = ["train", "--model.from", str(llama), *TRAINING, "--data.path", str(text), "--optim.lr", "0"]
    assert run([*train, "--optim.min-lr", "0", "--out", str(tmp_path / "run")]) == 0
    data = ("--data.path", text, "--length", "13")
    trained, baseline = (commands.do("evaluate", folder, *data).split(": ")[1] for folder in (tmp_path / "run", llama))
    assert trained == baseline and "in windows of 13)" in baseline
    sample = [
        commands.do("sample", folder, "--prompt", "the ", "--tokens", "5") for folder in (tmp_path / "run", llama)
    ]
    assert sample[0] == sample[1]
    larger = shutil.copytree(llama, tmp_path / "larger")
    tensors = {f"_orig_mod.{name}": x for name, x in load_file(llama / "model.safetensors").items()}
    save_file(tensors | {"mtp.norm.weight": torch.ones(3)}, larger / "model.safetensors")
    assert commands.do("evaluate", larger, *data).split(": ")[1] == baseline
    commands.printed.readouterr()
    assert run(["sample", str(larger), "--prompt", "the ", "--tokens", "1"]) == 0
    warning = f"{larger}: 1 tensors are not the model's: mtp.norm.weight: they are left out"
    assert commands.printed.readouterr().err == f"tpfuse: warning: {warning}\n"
    assert "is no run, which would name its validation text: give --data.path" in commands.fail("evaluate", llama)
    bare = tmp_path / "bare"
    shutil.copytree(llama, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert "has a config.json and no weights" in commands.fail("sample", bare)


def test_an_export_has_the_dtype_of_the_folder(tmp_path: Path, text: Path) -> None:
    stored = torch.bfloat16
    source = _folder(tmp_path / "model", "llama", text, stored)
    found = _trained(source, tmp_path, text, "--optim.lr", "0", "--optim.min-lr", "0")
    expected = load_file(source / "model.safetensors")
    assert all(torch.equal(found[name], weight) and found[name].dtype == stored for name, weight in expected.items())
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == str(stored).partition(".")[2]


def test_samples_end_at_the_token_that_config_json_names(tuned: Path, commands: Commands) -> None:
    model, tokenizer = load_run(tuned, torch.device("cpu"))
    ids, end = torch.from_numpy(tokenizer.encode("the ").astype("int64"))[None], model.config.ends[0]
    drawn = [model.generate(ids, 50, Drawing(50.0, seed=seed))[0].tolist() for seed in range(8)]
    seed = next(seed for seed, tokens in enumerate(drawn) if end in tokens)
    said = commands.do("sample", tuned, "--prompt", "the ", "--tokens", "50", "--temperature", "50", "--seed", seed)
    assert said == tokenizer.decode(drawn[seed][: drawn[seed].index(end)]) + "\n"


def _trained(folder: Path, out: Path, text: Path, *flags: str, world: int = 1) -> dict[str, Tensor]:
    """Return the tensors that `tpfuse export` writes after training, on the ranks of a pool if there are several."""
    words = ["--model.from", str(folder), *TRAINING, "--data.path", str(text), "--out", str(out / "run"), *flags]
    if world > 1:
        pool(world).run(looped, prepared(words, world))
    else:
        assert run(["train", *words]) == 0
    assert run(["export", str(out / "run"), str(out / "exported")]) == 0
    exported: dict[str, Tensor] = load_file(out / "exported" / "model.safetensors")
    return exported


@pytest.mark.parametrize(
    ("family", "world", "flags"),
    [
        ("gpt2", 1, "--train.dtype bfloat16"),
        *exhaustive(
            ("phi3", 4, "--parallel.tp 2 --parallel.cp 2"),
            ("minicpm3", 2, "--parallel.tp 2"),
            ("llama_tied", 2, "--parallel.pp 2 --zero.stage 3"),
        ),
    ],
)
def test_an_export_has_the_names_and_the_bits_of_the_source(
    tmp_path: Path, text: Path, family: str, world: int, flags: str
) -> None:
    """A learning rate of zero changes no weight; the masters of bfloat16 have the precision of the files."""
    source = _folder(tmp_path / "model", family, text)
    zero = ("--optim.lr", "0", "--optim.min-lr", "0")
    found = _trained(source, tmp_path, text, *flags.split(), *zero, world=world)
    expected = load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_folder_without_weights_gives_random_ones(tmp_path: Path, text: Path, llama: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(llama / name, config / name)
    zero = "--optim.lr 0 --optim.min-lr 0 --train.steps 1 --train.eval-every 0".split()
    first = _trained(config, tmp_path / "a", text, *zero)
    other = _trained(config, tmp_path / "c", text, *zero, "--train.seed", "3")["lm_head.weight"]
    deviations = [weight.std().item() for weight in (other, first["lm_head.weight"])]
    assert deviations == pytest.approx([0.02, 0.02], rel=0.1) and deviations[0] != deviations[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--model.n-layer 3 --model.no-bias --init-from /tmp",
            "and its weights: leave out --model.n-layer, --model.no-",
        ),
        ("--model.preset tiny --init-from /tmp", "leave out --model.preset, --init-from"),
        ("--model.n_layer=3 --model.no_bias --init_from /t", "leave out --model.n-layer, --model.no-bias, --init-from"),
        ("--config FILE", "model = 3: expected a table"),
        ("--model.n-positions 65", "n_positions 65: expected 1 to 64, the model's context"),
        ("--parallel.tp 5", "model.layers.0.self_attn: 12 heads cannot be divided among 5 ranks"),
        ("--train.cuda-graph", "--train.cuda-graph is not for --model.from, whose code may compute on the host: leave"),
        ("--train.recompute selective", "--train.recompute selective is not for --model.from, since only"),
        ("--parallel.cp 2 --parallel.cp-balance striped", "--parallel.cp-balance striped is not for --model.from"),
        ("--parallel.pp 3", "--parallel.pp 3: 2 layers cannot be cut into 3 pipeline stages"),
        ("--data.tokenizer bytes", "the model has 101 tokens, the text's tokenizer 256"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    llama: Path, tmp_path: Path, commands: Commands, flags: str, message: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat " * 100)
    (tmp_path / "my.toml").write_text("model = 3")
    flags = flags.replace("FILE", str(tmp_path / "my.toml"))
    said = commands.fail("train", "--model.from", llama, "--data.path", text, "--out", tmp_path / "new", *flags.split())
    assert message in said
    assert not (tmp_path / "new").exists()


def _without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _edited(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: _without(folder, "config.json"), "config.json: cannot be read: No such file"),
        (
            lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
            "it holds adapters: merge them by PEFT's merge_and_unload()",
        ),
        (lambda folder: (folder / "config.json").rename(folder / "model.gguf"), "it holds GGUF: fetch the model"),
        (lambda folder: (shutil.rmtree(folder), folder.touch()), "give the folder that holds the model's config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "get it again, by hf download or git lfs"),
        (lambda folder: _edited(folder, model_type="nothing"), "model_type is 'nothing'"),
        (lambda folder: _edited(folder, model_type="bert", architectures=["BertModel"]), "found no list of layers"),
        (lambda folder: _edited(folder, hidden_size="wide"), "config.json: "),
        (lambda folder: _edited(folder, output_router_logits=True), "tpfuse train adds no loss of routers"),
        (lambda folder: _edited(folder, vocab_size=100), "has shape [101, 48]: the model has [100, 48]"),
        (lambda folder: _edited(folder, num_hidden_layers=3), "tensors are missing: model.layers.2"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "get it again, by hf download or"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors"),
            "the files beside it are parts: get model.safetensors.index.json",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "is a pickle, which can run code",
        ),
        (lambda folder: _without(folder, "tokenizer.json"), "model holds no tokenizer: expected tokenizer.json"),
    ],
)
def test_bad_folders_are_refused_in_one_line(
    llama: Path, text: Path, tmp_path: Path, commands: Commands, change: Any, message: str
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    change(folder)
    said = commands.fail("train", "--model.from", folder, "--data.path", text, "--out", tmp_path / "new")
    assert message in said and "\n" not in said.strip()
    assert not (tmp_path / "new").exists()


def test_a_changed_model_cannot_continue_a_run(tuned: Path, llama: Path, tmp_path: Path, commands: Commands) -> None:
    copied = shutil.copytree(tuned, tmp_path / "run")
    folder = shutil.copytree(llama, tmp_path / "model")
    _edited(folder, rms_norm_eps=0.5)
    said = commands.fail("train", "--resume", "--out", copied, "--model.from", folder)
    assert "--resume with a different model: rms_norm_eps is 1e-06 in the checkpoint and 0.5 in the options" in said
    _edited(folder, rms_norm_eps=1e-6)
    said = commands.fail("train", "--resume", "--out", copied, "--model.from", folder)
    assert f"--resume with --model.from {folder} (was {tuned.parent / 'model'})" in said, "it reads no weights"
