"""Every reader of a changed file reports in one line what is wrong, without waiting, filling memory or trusting it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Commands
from tpfuse.checkpoint.checkpoint import Checkpoint
from tpfuse.checkpoint.manifest import CheckpointError, encode
from tpfuse.checkpoint.untrusted import EACH, Unreadable, check, read_bytes, read_json, read_text
from tpfuse.errors import UserError
from tpfuse.train.config import read_toml
from tpfuse.train.metrics import read_metrics
from tpfuse.train.saved_state import saved_state
from tpfuse.train.token_file import open_token_files
from tpfuse.train.tokenizer import ByteTokenizer

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
        Checkpoint(path.parent)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["state"].pop("updates"), "state has no 'updates'"),
        (lambda m: m["state"]["model"].update(wheels=4), "wheels"),
        (lambda m: m["state"]["model"].update(n_layer="x" * 10_000), "'n_layer' of the model is 'x"),
    ],
)
def test_a_manifest_with_wrong_values_is_a_damaged_checkpoint(
    copied: Path, change: Callable[[dict[str, Any]], object], message: str, commands: Commands
) -> None:
    """The manifest has the right SHA-256."""
    shutil.rmtree(copied / "step-10")
    path = copied / "step-12" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    change(manifest)
    path.write_bytes(encode(manifest))
    with pytest.raises(CheckpointError, match=message) as caught:
        saved_state(Checkpoint(path.parent))
    assert len(str(caught.value)) < 700
    commands.fail("sample", copied, status=3)


@pytest.mark.parametrize(
    ("document", "message"),
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
    copied: Path, document: str, message: str, commands: Commands
) -> None:
    (copied / "tokenizer.json").write_text(document)
    error = commands.fail("sample", copied)
    assert "tokenizer.json" in error and re.search(message, error)
    beside = copied / "data" / "tokens.json"
    beside.write_text(json.dumps({"sha256": "", "tokenizer": json.loads(document)}))
    if "vocabulary" not in message:
        with pytest.raises(UserError, match=r"tokens\.json"):
            open_token_files((copied / "data" / "tokens.bin",), ByteTokenizer())


def test_metrics_with_wrong_values_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n5\n{"a": 1}\n\xff\n{"step": 2}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl: expected a regular file, found a folder"):
        read_metrics(path)
