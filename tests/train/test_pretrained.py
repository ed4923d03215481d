"""`--init-from` starts a run from given weights, and `tpfuse export` writes the weights of a run."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.command import Commands, full_disk
from tests.support.tiers import exhaustive
from tests.support.training import new_trainer, options_of
from tpfuse.cli import run
from tpfuse.comm.layout import gather_whole, local_tensor
from tpfuse.commands.export import export
from tpfuse.commands.sample import BETWEEN
from tpfuse.commands.shared_model import load_run
from tpfuse.models.generate import generate
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.huggingface import load_pretrained, save_pretrained
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import pool
from tpfuse.train.batches import Windows
from tpfuse.train.config import read_toml
from tpfuse.train.initial_weights import load_weights
from tpfuse.train.metrics import read_metrics
from tpfuse.train.tokenizer import FileTokenizer

CONFIG = GPTConfig(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4)
TRAINING = (
    "--train.steps 4 --train.batch 8 --train.eval-every 4 --train.eval-batches 2 --train.log-every 4"
    " --train.save-every 0 --optim.warmup 0"
).split()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Write a tokenizer file whose tokens are the words of the text and a token that ends a text."""
    vocabulary = {word: number for number, word in enumerate(["<|endoftext|>", *sorted(set(text.read_text().split()))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("words") / "words.json"
    made.save(str(path))
    return path


def _trained(folder: Path, text: Path, *flags: str) -> Path:
    shape = "--model.n-layer 2 --model.n-embd 32 --model.n-head 4 --model.n-positions 16 --model.no-bias".split()
    steps = "--train.steps 24 --train.eval-every 24 --optim.lr 1e-2".split()
    assert run(["train", "--data.path", str(text), *shape, *TRAINING, *steps, *flags, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def chars(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Make a finished run on the characters of the text."""
    return _trained(tmp_path_factory.mktemp("chars") / "run", text, "--data.tokenizer", "chars")


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory, text: Path, words: Path) -> Path:
    """Make a finished run on the words of the text."""
    return _trained(tmp_path_factory.mktemp("worded") / "run", text, "--data.tokenizer", str(words))


def _val_losses(folder: Path) -> list[float]:
    return [row["val_loss"] for row in read_metrics(folder / "metrics.jsonl") if row["val_loss"] is not None]


def test_a_run_starts_from_the_weights_of_another_run(chars: Path, text: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "run"
    shutil.copytree(chars, source)
    flags = [*TRAINING, "--data.path", str(text), "--model.dropout", "0.1", "--out", str(out)]
    assert run(["train", "--init-from", str(source), *flags]) == 0
    before, after = _val_losses(source), _val_losses(out)
    assert after[0] == before[-1] < before[0] - 0.3, "not one step is lost"
    assert after[1] < after[0]
    options = read_toml(out / "config.toml")
    assert options["init_from"] == str(source)
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16, "bias": False, "dropout": 0.1}
    assert {name: options["model"][name] for name in shape} == shape
    state = json.loads((out / "step-4" / "manifest.json").read_text())["state"]
    assert (state["step"], state["updates"]) == (4, 4), "a fresh optimizer"
    shutil.rmtree(source)
    assert run(["train", "--resume", "--out", str(out), "--train.steps", "5"]) == 0, "from its own checkpoint"
    assert (out / "step-5").is_dir()


@pytest.mark.exhaustive
def test_resuming_without_a_checkpoint_starts_from_the_source_again(chars: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = [*TRAINING, "--train.dtype", "bfloat16", "--data.path", str(text), "--out", str(out)]
    assert run(["train", "--init-from", str(chars), *flags]) == 0
    first = _val_losses(out)
    assert first[0] == pytest.approx(_val_losses(chars)[-1], rel=1e-2), "the parameters are the masters, rounded"
    shutil.rmtree(out / "step-4")
    (out / "metrics.jsonl").unlink()
    assert run(["train", "--resume", "--out", str(out)]) == 0
    assert _val_losses(out) == first


def test_a_run_on_other_text_keeps_the_tokenizer_of_its_source(chars: Path, tmp_path: Path, commands: Commands) -> None:
    """The context is cut too, as nanoGPT's crop_block_size does."""
    other = tmp_path / "other.txt"
    other.write_text("a cat was at the door " * 40)
    train = ("train", *TRAINING, "--init-from", chars, "--data.path", other, "--model.n-positions", "8")
    commands.do(*train, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_text() == (chars / "tokenizer.json").read_text()
    (model, _), (whole, _) = (load_run(folder, torch.device("cpu")) for folder in (tmp_path / "run", chars))
    assert model.config.n_positions == 8 and whole.config.n_positions == 16
    ours, theirs = model.module.transformer.wpe.weight, whole.module.transformer.wpe.weight
    change = (ours - theirs[:8]).abs().mean()
    assert change < 0.2 * theirs.std(), "those of the first positions, a few small steps later"
    chosen = (*train, "--out", tmp_path / "chosen", "--data.tokenizer", "chars")
    assert "tokens, the text's tokenizer" in commands.fail(*chosen)
    known = json.loads((chars / "tokenizer.json").read_text())["characters"]
    other.write_text(known.upper() * 20)
    expected = "is not the one that the model was trained with: leave --data.tokenizer out"
    assert expected in commands.fail(*chosen)
    assert not (tmp_path / "chosen").exists()


def test_bad_sources_are_one_line(chars: Path, tmp_path: Path, commands: Commands) -> None:
    save_pretrained(_model(), tmp_path / "small")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle").mkdir()
    shutil.copy(tmp_path / "small" / "config.json", tmp_path / "pickle")
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    shutil.copytree(chars, tmp_path / "bare", ignore=shutil.ignore_patterns("step-*"))
    layers = "n_layer is 2 in the source and 3 in the options, bias is False in the source and True"
    cases = {
        f"{chars} --model.n-layer 3 --model.bias": layers,
        f"{chars} --model.n-positions 17": "n_positions is 16 in the source and 17 in the options",
        f"{chars} --model.preset tiny": "n_layer is 2 in the source and 4 in the options",
        f"{chars} --train.dtype float64": "with --train.dtype float64: the run was trained in float32",
        f"{tmp_path}/small": "the model has 61 tokens, the text's tokenizer 256",
        f"{tmp_path}/empty": "expected the folder of a `tpfuse train` run, or of a Hugging Face GPT-2",
        f"{tmp_path}/pickle": "pytorch_model.bin is a pickle",
        f"{tmp_path}/llama": "model_type is 'llama', expected 'gpt2'; --model.from takes other models",
        f"{tmp_path}/bare": "holds no checkpoint",
    }
    text = tmp_path / "text.txt"
    text.write_text("a text that is too long for nothing " * 40)
    for flags, message in cases.items():
        train = ("train", *TRAINING, "--data.path", text, "--out", commands.out, "--init-from", *flags.split())
        assert message in commands.fail(*train)
        assert not commands.out.exists()


def _model() -> GPT:
    model = GPT(CONFIG)
    initialize(model, 7)
    return model


def _windows(length: int, batch: int) -> Windows:
    return Windows((np.arange(1000) * 7 % 61).astype(np.uint16), length, 1, "val", batch)


def _taken(folder: Path, tp: int, cp: int, stage: int, dtype: str, length: int) -> tuple[float, dict[str, Tensor]]:
    """Return (loss, whole parameters) of a trainer that has loaded the weights in the folder over NaNs."""
    dp = dist.get_world_size() // (tp * cp)
    options = options_of(batch=4 * dp, dtype=dtype, tp=tp, dp=dp, cp=cp, stage=stage)
    config = GPTConfig(61, length, 32, 2, 4)
    trainer, _ = new_trainer(options, config)
    for parameter in trainer.model.parameters():
        local_tensor(parameter).fill_(float("nan"))
    load_weights(folder, config, trainer.shards())
    trainer.optimizer.publish()
    loss = trainer.evaluate(_windows(length, 4 * dp), 1)
    return loss, {name: gather_whole(parameter).clone() for name, parameter in trainer.model.named_parameters()}


def _expected(folder: Path, length: int, batch: int) -> float:
    model, windows = load_pretrained(folder), _windows(length, batch)
    with torch.no_grad():
        return float(model(*windows.sequences(0, 0, batch, torch.device("cpu")), loss_weight=1.0)) / (batch * length)


@pytest.mark.parametrize(
    ("world", "tp", "cp", "stage", "dtype", "length"),
    [
        (2, 2, 1, 0, "float32", 16),
        (2, 1, 1, 3, "bfloat16", 8),
        *exhaustive((1, 1, 1, 0, "float64", 16), (4, 2, 2, 2, "float32", 8), (3, 1, 1, 3, "float32", 16)),
    ],
)
def test_every_layout_loads_a_hugging_face_folder(
    tmp_path: Path, world: int, tp: int, cp: int, stage: int, dtype: str, length: int
) -> None:
    save_pretrained(_model(), tmp_path)
    wanted = {name: parameter.detach() for name, parameter in _model().named_parameters()}
    wanted["transformer.wpe.weight"] = wanted["transformer.wpe.weight"][:length]
    expected = _expected(tmp_path, length, 4 * world // (tp * cp))
    for loss, weights in pool(world).run(_taken, tmp_path, tp, cp, stage, dtype, length):
        assert loss == pytest.approx(expected, rel=2e-3 if dtype == "bfloat16" else 1e-6)
        for name, weight in wanted.items():
            assert torch.equal(weights[name], weight.to(weights[name].dtype)), name


def test_masters_have_the_precision_of_the_file(tmp_path: Path) -> None:
    save_pretrained(_model(), tmp_path)
    trainer, _ = new_trainer(options_of(batch=4, dtype="bfloat16"), CONFIG)
    load_weights(tmp_path, CONFIG, trainer.shards())
    (shard,) = trainer.shards()["model.transformer.wte.weight"]
    assert shard.tensor.dtype == torch.float32
    assert torch.equal(shard.tensor, load_file(tmp_path / "model.safetensors")["transformer.wte.weight"])


def test_an_exported_model_can_be_loaded_again(worded: Path, text: Path, tmp_path: Path, commands: Commands) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    folder, out = tmp_path / "exported", tmp_path / "run"
    files = "config.json, model.safetensors, tokenizer.json, tokenizer_config.json"
    assert files in commands.do("export", worded, folder)
    theirs, found = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values())
    model, tokenizer = load_run(worded, torch.device("cpu"))
    ids = integers(1, 2, 16, low=0, high=model.config.vocab_size - 1, dtype=torch.int64)
    assert (theirs.eval()(ids).logits - model.module(ids)).abs().max() < 1e-5
    words = "the cat sat on a mat"
    their_tokenizer = AutoTokenizer.from_pretrained(folder)
    assert their_tokenizer(words)["input_ids"] == tokenizer.encode(words).tolist()
    assert their_tokenizer.eos_token_id == their_tokenizer.bos_token_id == tokenizer.end_of_text == 0
    assert theirs.config.eos_token_id == theirs.config.bos_token_id == 0
    more = {"mtp.norm.weight": torch.ones(3)}
    save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors")
    commands.printed.readouterr()
    assert run(["train", *TRAINING, "--init-from", str(folder), "--data.path", str(text), "--out", str(out)]) == 0
    warning = f"tpfuse: warning: {folder}: 1 tensors are not the model's: mtp.norm.weight: they are left out\n"
    assert commands.printed.readouterr().err.count(warning) == 1
    assert _val_losses(out)[0] == pytest.approx(_val_losses(worded)[-1], rel=1e-6)
    assert "exists and is not empty: choose a new folder" in commands.fail("export", worded, folder)


def test_export_names_the_tokenizer_that_it_cannot_write(chars: Path, tmp_path: Path, commands: Commands) -> None:
    with full_disk(20_000):
        assert "cannot write" in (said := commands.fail("export", chars, tmp_path / "new", status=1))
    assert "model.safetensors.unfinished" in said and "File too large" in said and not any((tmp_path / "new").iterdir())
    out = commands.do("export", chars, tmp_path / "new")
    assert "(no tokenizer: Hugging Face has none for chars)" in out
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_names_the_tokens_that_begin_and_end_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<▁s>": 1, "</s>": 2}, unk_token="a"))
    made.decoder = tokenizers.decoders.Metaspace()  # which writes a space for the underscore
    made.post_processor = tokenizers.processors.TemplateProcessing("<▁s> $A", special_tokens=[("<▁s>", 1)])
    run = SimpleNamespace(config=CONFIG, module=_model()), FileTokenizer(made.to_str())
    monkeypatch.setattr("tpfuse.commands.export.load_run", lambda *_: run)
    export(tmp_path, tmp_path / "new")
    settings, theirs = (
        json.loads((tmp_path / "new" / "config.json").read_text()),
        AutoTokenizer.from_pretrained(tmp_path / "new"),
    )
    assert settings["bos_token_id"] == theirs.bos_token_id == 1 and theirs("a").input_ids == [1, 0]
    assert settings["eos_token_id"] == theirs.eos_token_id == 2 and len(theirs) == 3


def test_samples_end_at_the_token_that_ends_a_text(
    worded: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_run(worded, torch.device("cpu"))
    prompt = torch.from_numpy(tokenizer.encode("the cat").astype("int64")).unsqueeze(0)
    free = [generate(model.module, prompt, 60, temperature=5.0, seed=seed)[0].tolist() for seed in range(4)]
    assert tokenizer.end_of_text == 0 and any(0 in ids for ids in free)
    sample = ("sample", worded, "--temperature", "5", "--tokens", "60", "--prompt", "the cat")
    samples = commands.do(*sample, "--samples", "4").removesuffix("\n").split(BETWEEN)
    assert samples == [tokenizer.decode(ids[: ids.index(0)] if 0 in ids else ids) for ids in free]
    seed = next(seed for seed, ids in enumerate(free) if 0 in ids[:50])
    calls, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda *args, **options: calls.append(0) or forward(*args, **options))
    commands.do(*sample, "--seed", str(seed))
    assert len(calls) == free[seed].index(0) - 1, "nothing is computed after the end"
