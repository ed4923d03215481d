"""The sources of an option's value, and the errors for unknown options."""

from pathlib import Path

import pytest
import tomli_w

import tpfuse.models
from tpfuse.errors import UserError
from tpfuse.models.gpt import GPTConfig
from tpfuse.train.config import PRESETS, load_preset, overlaid, parse_prepare, parse_train, resolved
from tpfuse.train.options import TrainCommand


def test_flags_override_the_file_which_overrides_the_preset_and_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[model]\npreset = "gpt2-350m"\nn-layer = 3\n[optim]\nlr = 1\n[train]\nseed = 7\n')
    options = parse_train(["--config", str(file), "--train.seed", "8", "--model.no-bias"])
    assert options.model.preset == "gpt2-350m"
    assert (options.model.n_layer, options.model.n_embd, options.model.bias) == (3, 1024, False)
    assert (options.optim.lr, options.optim.min_lr, options.optim.warmup) == (1.0, 0.1, 760)
    assert options.train.seed == 8
    assert parse_train(["--config", str(file), "--model.preset", "tiny"]).model.n_embd == 128
    assert parse_train([]).model.preset == "tiny"


def test_resolved_options_give_the_same_run_again(tmp_path: Path) -> None:
    lengths = "--optim.warmup 375e6tokens --optim.decay-steps 700"
    options = parse_train(f"--model.n-embd 64 --data.path a/b.txt --optim.beta2 0.5 {lengths}".split())
    assert (options.optim.warmup, options.optim.decay_steps) == ("375e6tokens", 700)
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(resolved(options)))
    again = parse_train(["--config", str(file)])
    assert resolved(again) == resolved(options)
    assert parse_train(["--config", str(file), "--optim.warmup", "3"]).optim.warmup == 3
    assert resolved(parse_train(["--kernels", "torch"]))["kernels"] == "torch"


def test_an_option_that_is_not_set_stays_so(tmp_path: Path) -> None:
    file, resume = tmp_path / "config.toml", ["--resume", "--out", str(tmp_path)]
    document = resolved(parse_train(["--model.preset", "gpt2-124m"]))
    file.write_text(tomli_w.dumps(document))
    assert parse_train(["--config", str(file)]).train.micro_batch is None
    assert resolved(parse_train(resume)) == document


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete_and_can_be_built(name: str) -> None:
    folder = Path(next(iter(tpfuse.models.__path__)))
    assert {path.stem for path in folder.glob("*.toml")} == set(PRESETS)
    options = overlaid(TrainCommand(), load_preset(name), name)
    model = options.model
    GPTConfig(256, model.n_positions, model.n_embd, model.n_layer, model.n_head).check()
    assert set(load_preset(name)["model"]) == {"n_layer", "n_head", "n_embd", "n_positions", "bias", "dropout"}
    assert options.train.batch % (options.train.micro_batch or 1) == 0


def test_resuming_needs_the_folder() -> None:
    for words in (["--resume"], ["--resume", "auto"]):
        with pytest.raises(UserError, match="--resume needs --out"):
            parse_train(words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[train]\nstepz = 3", r"train.stepz is not known; did you mean steps\?"),
        ("[trian]\nsteps = 3", r"trian is not known; did you mean train\?"),
        ("resume = true", "resume is not known"),
        ("[train]\nsteps = 'x'", "train.steps = 'x': expected int"),
        ("[train]\nsteps = true", "expected int"),
        ("[optim]\nwarmup = 1.5", r"optim.warmup = 1.5: expected int \| str"),
        ("[train]\ndtype = 'int8'", "expected one of float32, bfloat16"),
        ("[data]\npath = 3", "expected a path"),
        ("[model]\nbias = 1", "expected bool"),
        ("[model]\npreset = 'gpt9'", "gpt9"),
        ("train = 3", "expected a table"),
        ("[train", "expected TOML, found text that the parser rejects"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "my.toml"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        parse_train(["--config", str(file)])


def test_resume_takes_the_configuration_of_the_run(tmp_path: Path) -> None:
    options = parse_train(["--model.n-layer", "2", "--train.steps", "77"])
    (tmp_path / "config.toml").write_text(tomli_w.dumps(resolved(options)))
    again = parse_train(["--resume", "--out", str(tmp_path), "--train.steps", "99"])
    assert (again.model.n_layer, again.train.steps, again.resume) == (2, 99, "yes")
    assert (again.optim.decay_steps, again.data.order) == (77, "shuffled")
    assert parse_train(["--resume", "--out", str(tmp_path), "--train.batch", "8"]).optim.decay_steps is None
    (tmp_path / "config.toml").write_text("[train]\nsteps = 77\n[optim]\ndecay_steps = 77\n")
    assert parse_train(["--resume", "--out", str(tmp_path)]).optim.decay_steps == 77


def test_prepare_takes_flags_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[data]\ntokenizer = 'chars'\npath = '~/t.txt'\n")
    options = parse_prepare(["--out", str(tmp_path / "x"), "--config", str(file), "--data.path", "t.txt"])
    assert (options.data.tokenizer, options.data.path, options.out) == ("chars", Path("t.txt"), tmp_path / "x")
    assert parse_prepare(["--out", "x", "--config", str(file)]).data.path == Path.home() / "t.txt"
    for arguments in ([], ["--config", str(file)], ["--out"]):
        with pytest.raises(UserError, match=r"^--out FOLDER is needed"):
            parse_prepare(arguments)
