"""Every reader of a changed file reports in one line what is wrong, without waiting, filling memory or trusting it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tpfuse import cli
from tpfuse.train.checkpoint import open_checkpoint
from tpfuse.train.config import read_toml
from tpfuse.train.errors import UserError
from tpfuse.train.manifest import CheckpointError, Shard, encode
from tpfuse.train.metrics import read_metrics
from tpfuse.train.saved_state import saved_state
from tpfuse.train.token_file import open_token_files
from tpfuse.train.untrusted import EACH, Unreadable, check, read_bytes, read_json, read_text

FLAGS = [
    *("--model.n-layer", "1", "--model.n-embd", "32", "--model.n-head", "4", "--model.n-positions", "16"),
    *("--train.steps", "2", "--train.batch", "4", "--train.eval-every", "0", "--data.tokenizer", "chars"),
]
Make = Callable[[Path], object]


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(16 * 2**30)


def _folder_in_its_place(path: Path) -> None:
    path.mkdir()


STRANGE: list[tuple[Make, str]] = [
    (os.mkfifo, "expected a regular file, found a pipe"),
    (lambda path: path.symlink_to("/dev/zero"), "expected a regular file, found a device"),
    (_folder_in_its_place, "expected a regular file, found a folder"),
    (_sparse, "expected at most 268435456 bytes, found 17179869184"),
]
BROKEN: list[tuple[bytes, str]] = [
    (b"\xff", "expected UTF-8, found byte 0xff at 0"),
    (b"[" * 50_000, "nested too deeply"),
    (b"1" * 5_001, "the parser rejects"),
    (b"{", "the parser rejects"),
]


@pytest.mark.parametrize(("make", "message"), STRANGE, ids=["pipe", "device", "folder", "sparse"])
def test_only_regular_files_of_a_plausible_size_are_read(tmp_path: Path, make: Make, message: str) -> None:
    path = tmp_path / "step-1" / "manifest.json"
    path.parent.mkdir()
    make(path)
    with pytest.raises(Unreadable, match=message):
        read_bytes(path)
    with pytest.raises(CheckpointError, match=f"manifest.json: expected a manifest, found {message}"):
        open_checkpoint(path.parent)
    with pytest.raises(UserError, match=message):
        read_toml(path)


@pytest.mark.parametrize(("data", "message"), BROKEN, ids=["utf8", "deep", "digits", "cut"])
def test_text_that_parsers_reject_is_one_short_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(Unreadable, match=message) as caught:
        read_json(path, dict)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
    path.write_bytes(b"a = " + data)
    with pytest.raises(UserError) as refused:
        read_toml(path)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("value", "schema", "message"),
    [
        ([1, "2"], [int], "entry 1 of the document is '2': expected int"),
        ({"a": True}, {"a": int}, "'a' of the document is True: expected int"),
        ({"a": {}}, {"a": {"b": int}}, "'a' of the document has no 'b'"),
        ({"a": 1, "b": "x"}, {EACH: int}, "'b' of the document is 'x': expected int"),
        ("x" * 5000, int, r"… \(5002 characters\): expected int"),
    ],
)
def test_a_schema_names_the_place_of_an_error(value: object, schema: Any, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        check(value, schema)


def test_values_that_have_the_schema_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": [1, 2], "y": 1, "more": null}')
    assert read_json(tmp_path / "a.json", {"x": [int], "y": float}) == {"x": [1, 2], "y": 1, "more": None}
    (tmp_path / "a.txt").write_text("ä")
    assert read_text(tmp_path / "a.txt") == "ä"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("a small text for a small model\n" * 40)
    assert cli.run(["train", *FLAGS, "--data.path", str(folder / "text.txt"), "--out", str(folder / "r")]) == 0
    return folder / "r"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def _rewrite(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest of the last step and gives it the right SHA-256."""
    path = run / "step-2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    change(manifest)
    path.write_bytes(encode(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["state"].pop("updates"), "state has no 'updates'"),
        (lambda m: m["state"]["model"].update(wheels=4), "wheels"),
        (lambda m: m["state"]["model"].update(n_layer="x" * 10_000), "'n_layer' of the model is 'x"),
        (lambda m: m.update(state=5), "'state' of the manifest is 5: expected dict"),
        (lambda m: next(iter(m["tensors"].values()))["slices"][0].update(key=0), "'key' of .* is 0: expected str"),
        (lambda m: m["files"].update({"../x.safetensors": {"size": 1, "sha256": ""}}), "'../x.safetensors'"),
    ],
)
def test_a_manifest_with_wrong_values_is_a_damaged_checkpoint(
    run: Path, change: Callable[[dict[str, Any]], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _rewrite(run, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        saved_state(open_checkpoint(run / "step-2"))
    assert len(str(caught.value)) < 700
    capsys.readouterr()
    assert cli.run(["sample", str(run)]) == 3
    assert capsys.readouterr().err.count("\n") <= 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "chars"}', "the tokenizer has no 'characters'"),
        ("[]", r"the document is \[\]: expected dict"),
        ('{"kind": "tokenizers", "json": 5}', "'json' of the tokenizer is 5: expected str"),
        ('{"kind": "tokenizers", "json": "{}"}', "is not a tokenizer of the tokenizers library"),
        ('{"kind": "chars", "characters": "ab"}', "a vocabulary of 2 tokens: expected the .* of the model"),
        ('{"kind": "wings"}', "tokenizer kind 'wings' is not known"),
    ],
)
def test_a_tokenizer_with_wrong_values_is_one_line(
    run: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "tokenizer.json").write_text(text)
    assert cli.run(["sample", str(run)]) == 2
    error = capsys.readouterr().err
    assert "tokenizer.json" in error and error.count("\n") == 1
    assert re.search(message, error)
    beside = run / "data" / "tokens.json"
    beside.write_text(json.dumps({"sha256": "", "tokenizer": json.loads(text)}))
    if "vocabulary" not in message:
        with pytest.raises(UserError, match=r"tokens\.json"):
            open_token_files((run / "data" / "tokens.bin",), pytest.fail)


def test_metrics_with_wrong_values_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n5\n{"a": 1}\n\xff\n{"step": 2}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: expected a regular file, found a folder"):
        read_metrics(path)


def test_a_file_that_changed_after_it_was_verified_is_not_loaded(run: Path) -> None:
    checkpoint = open_checkpoint(run / "step-2")
    checkpoint.verify()
    file = run / "step-2" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="SHA-256"):
        open_checkpoint(run / "step-2").load(_shards(run))


def _shards(run: Path) -> Any:
    entry = json.loads((run / "step-2" / "manifest.json").read_text())["tensors"]
    name, described = next((name, e) for name, e in entry.items() if e["dtype"] == "F32")
    shape = tuple(described["shape"])
    return {name: [Shard(shape, tuple((0, n) for n in shape), torch.empty(shape), False)]}
