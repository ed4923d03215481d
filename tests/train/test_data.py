"""Tokenizers, token files, texts and batches."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from tpfuse.train.batches import Windows, unigram_loss, window_starts
from tpfuse.train.corpus import read_text
from tpfuse.train.errors import UserError
from tpfuse.train.token_file import HEADER_BYTES, MAGIC, open_token_file, write_token_file
from tpfuse.train.tokenizer import ByteTokenizer, CharTokenizer, FileTokenizer, build_tokenizer, from_json

TEXT = "To be, or not to be:\nthat is the question. Ünïcödé ☃\n"


def file_tokenizer() -> FileTokenizer:
    model = tokenizers.models.WordLevel({"be": 0, "not": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return FileTokenizer(tokenizer.to_str())


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer.of_text(TEXT)])
def test_text_survives_tokens_and_json(tokenizer: ByteTokenizer | CharTokenizer) -> None:
    again = from_json(json.loads(json.dumps(tokenizer.as_json())))
    tokens = again.encode(TEXT)
    assert tokens.dtype == np.uint16
    assert tokens.max() < tokenizer.vocab_size
    assert again.decode(tokens.tolist()) == TEXT


def test_chars_are_numbered_in_sorted_order() -> None:
    assert CharTokenizer.of_text("hello").encode("hello").tolist() == [1, 0, 2, 2, 3]
    with pytest.raises(UserError, match="'z'"):
        CharTokenizer.of_text("hello").encode("jazz".replace("j", "h").replace("a", "e"))


def test_a_file_of_the_tokenizers_library(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(file_tokenizer().as_json()["json"])
    tokenizer = build_tokenizer(str(path), "")
    assert from_json(tokenizer.as_json()).encode("be not be x").tolist() == [0, 1, 0, 2]
    path.write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer of the tokenizers library"):
        build_tokenizer(str(path), "")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        build_tokenizer(str(tmp_path / "missing.json"), "")
    with pytest.raises(UserError, match=r"bytes, chars, gpt2 or a FILE\.json"):
        build_tokenizer("words", "")


def test_token_file_is_llm_c_format(tmp_path: Path) -> None:
    written = write_token_file(tmp_path, ByteTokenizer().encode(TEXT), ByteTokenizer(), "test")
    raw = (tmp_path / "tokens.bin").read_bytes()
    header = np.frombuffer(raw[:1024], dtype="<i4")
    assert header[:3].tolist() == [20240520, 1, len(TEXT.encode())]
    assert not header[3:].any()
    assert np.frombuffer(raw[1024:], dtype="<u2").astype(np.uint8).tobytes() == TEXT.encode()
    assert written.sha256 == hashlib.sha256(raw).hexdigest()
    assert isinstance(open_token_file(tmp_path / "tokens.bin").tokens, np.memmap)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:10], "not a token file"),
        (lambda raw: b"", "not a token file"),
        (lambda raw: np.int32(7).tobytes() + raw[4:], "found magic 7, expected magic 20240520"),
        (lambda raw: raw[:4] + np.int32(9).tobytes() + raw[8:], "version 9, expected 1"),
        (lambda raw: raw[:-2], "bytes, but"),
        (lambda raw: raw[:-2] + np.uint16(300).tobytes(), "token 300 at .* outside the vocabulary of 256"),
        (lambda raw: raw[:-2] + np.uint16(5).tobytes(), "SHA-256"),
    ],
)
def test_damaged_token_files_are_named(tmp_path: Path, damage: object, message: str) -> None:
    write_token_file(tmp_path, ByteTokenizer().encode(TEXT), ByteTokenizer(), "test")
    path = tmp_path / "tokens.bin"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        open_token_file(path)


def test_a_token_file_needs_its_json(tmp_path: Path) -> None:
    write_token_file(tmp_path, ByteTokenizer().encode(TEXT), ByteTokenizer(), "test")
    (tmp_path / "tokens.json").write_text("{}")
    with pytest.raises(UserError, match="not what `tpfuse prepare` writes"):
        open_token_file(tmp_path / "tokens.bin")
    (tmp_path / "tokens.json").unlink()
    with pytest.raises(UserError, match="which tells the tokenizer"):
        open_token_file(tmp_path / "tokens.bin")
    with pytest.raises(UserError, match="cannot read"):
        open_token_file(tmp_path / "absent.bin")


def test_split_keeps_the_end_for_validation(tmp_path: Path) -> None:
    file = write_token_file(tmp_path, np.arange(100, dtype=np.uint16), ByteTokenizer(), "test")
    train, val = file.split(0.1)
    assert (train[-1], val[0], len(val)) == (89, 90, 10)


def test_folder_is_read_in_order_without_binaries(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("first ")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / "d.latin1").write_bytes(b"\xe9")
    (tmp_path / ".hidden").write_text("no")
    assert read_text(tmp_path)[0] == "first second"
    with pytest.raises(UserError, match="does not exist"):
        read_text(tmp_path / "absent")
    with pytest.raises(UserError, match="not UTF-8"):
        read_text(tmp_path / "c.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no UTF-8 text files"):
        read_text(tmp_path / "empty")


def test_the_default_text_is_the_standard_library() -> None:
    text, _ = read_text(None)
    assert len(text) > 2_000_000
    assert "class OrderedDict" in text


def test_batches_depend_on_seed_and_step_alone() -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    windows = Windows(tokens, 16, 3, "train", 12)
    ids, targets = windows.sequences(7, 0, 12, torch.device("cpu"))
    assert ids.dtype == torch.int64
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert torch.equal(targets, ids + 1)
    parts = [Windows(tokens, 16, 3, "train", 12).sequences(7, i, i + 4, torch.device("cpu"))[0] for i in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), ids)
    assert not torch.equal(windows.sequences(8, 0, 12, torch.device("cpu"))[0], ids)
    assert window_starts(3, "train", 7, 12, 100).tolist() != window_starts(4, "train", 7, 12, 100).tolist()
    assert window_starts(3, "train", 7, 12, 100).tolist() != window_starts(3, "val", 7, 12, 100).tolist()


def test_every_window_can_be_drawn() -> None:
    tokens = np.arange(20, dtype=np.uint16)
    windows = Windows(tokens, 16, 0, "train", 64)
    starts = windows.sequences(0, 0, 64, torch.device("cpu"))[0][:, 0]
    assert set(starts.tolist()) == {0, 1, 2, 3}, "the last window ends with the last token"


def test_unigram_loss() -> None:
    train = np.array([0] * 6 + [1] * 2, dtype=np.uint16)
    expected = -0.5 * (np.log(7 / 11) + np.log(3 / 11))
    assert unigram_loss(train, np.array([0, 1], dtype=np.uint16), 3) == pytest.approx(expected)


def test_header_constants() -> None:
    assert (MAGIC, HEADER_BYTES) == (20240520, 256 * 4)
