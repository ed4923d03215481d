"""Every kind of file that users have is read rightly, or refused in one line that says what to do."""

import bz2
import csv
import fcntl
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import tokenizers

from tests.support.tiers import exhaustive
from tests.support.training import prepared
from tpfuse.checkpoint.untrusted import Unreadable, read_pickle
from tpfuse.errors import UserError
from tpfuse.train import corpus, token_file
from tpfuse.train.corpus import encoded, find_text
from tpfuse.train.data import encode_text, read_data
from tpfuse.train.options import DataOptions
from tpfuse.train.token_file import open_token_files, token_paths, write_token_file
from tpfuse.train.tokenizer import ByteTokenizer, CharTokenizer, FileTokenizer, Tokens, build_tokenizer, from_json

DOCUMENTS = ["one", "zwei,\nü ☃\r\n", 'a "quoted" {"text": 3}\t\\n', "x" * 3000]
RECORDS = [{"id": index, "text": document, "more": None} for index, document in enumerate(DOCUMENTS)]


def _parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns or {"id": list(range(4)), "text": DOCUMENTS}), sink)
    return sink.getvalue()


def _table(delimiter: str) -> bytes:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, ["id", "text", "more"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(RECORDS)
    return sink.getvalue().encode()


LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
CONTENTS: dict[str, bytes] = {
    "a.jsonl": LINES.encode(),
    "utf16.ndjson": ("\n" + LINES).encode("utf-16"),
    "marked.JSONL": LINES.encode("utf-8-sig"),
    "lines.json": LINES.encode(),
    "array.json": json.dumps(RECORDS, indent=2).encode(),
    "texts.json": json.dumps(DOCUMENTS).encode(),
    "table.csv": _table(","),
    "table.tsv": _table("\t"),
    "semicolons.csv": _table(";"),
    "rows.parquet": _parquet(),
    "rows": _parquet(),
    "categories.parquet": _parquet(text=pyarrow.array(DOCUMENTS).dictionary_encode()),
}
_zstd = partial(pyarrow.compress, codec="zstd", asbytes=True)
_gzip = partial(gzip.compress, mtime=0)  # the bytes are names of tests, which both processes must collect alike
PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": _gzip,
    ".zst": lambda data: b"".join(_zstd(data[at : at + 500]) for at in range(0, len(data), 500)),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def documents(path: Path, field: str = "text") -> list[str]:
    """Return the documents, of which the last one may not be known to end."""
    found = [""]
    for text, ends in find_text(path, field).pieces():
        found[-1] += text
        found += [""] * ends
    return found if found[-1] else found[:-1]


def words(*specials: str, template: str = "", **truncation: int) -> FileTokenizer:
    """Return a tokenizer of whole words, with a post-processor if there is a template."""
    names = [*specials, "?", "be", "not", "to", "or"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(specials))
    if template:
        pairs = [(name, names.index(name)) for name in specials]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=pairs)
    if truncation:
        tokenizer.enable_truncation(truncation["most"])
        tokenizer.enable_padding(length=truncation["most"])
    return FileTokenizer(tokenizer.to_str())


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        *((name, "") for name in CONTENTS),
        ("a.jsonl", ".gz"),
        ("a.jsonl", ".zst"),
        ("rows.parquet", ".gz"),
        *exhaustive(*((name, packed) for name in CONTENTS for packed in PACKED if name != "rows")),
    ],
)
def test_records_are_documents(tmp_path: Path, name: str, packed: str) -> None:
    path = tmp_path / (name + packed)
    path.write_bytes(PACKED.get(packed, bytes)(CONTENTS[name]))
    assert documents(path) == DOCUMENTS


@pytest.mark.parametrize("packed", ["", *PACKED])
def test_text_is_decompressed_and_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: str) -> None:
    monkeypatch.setattr("tpfuse.train.text_file._PART", 1000)
    text = "".join(DOCUMENTS)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path = tmp_path / f"a.txt{packed}"
        path.write_bytes(PACKED.get(packed, bytes)(text.encode(encoding)))
        assert documents(path) == [text]
        assert sum(1 for _ in find_text(path).pieces()) > 3, "it is read in parts"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", "déjà".encode("latin-1"), r"not UTF-8 text: found byte 0xe9; .*iconv -f LATIN1 -t UTF-8 .*a.txt > "),
        ("a.png", b"\x89PNG\0\0", "not UTF-8 text: it has zero bytes, as binary files do: expected text, records, or"),
        ("a.txt", "déjà".encode("utf-16-le"), "if it is UTF-16LE, convert it: iconv -f UTF-16LE -t UTF-8 .*a.txt > "),
        ("a.txt", "déjà".encode("utf-16-be"), "iconv -f UTF-16BE -t"),
        ("a.txt.gz", _gzip(b"d\xe9j\xe0"), "decompress it, then iconv -f LATIN1 -t UTF-8"),
        ("a.txt.gz", _gzip(_gzip(b"text")), "it is compressed twice: gunzip it"),
        ("a.tar.gz", _gzip(b"a.txt".ljust(257, b"\0") + b"ustar\0" + b"0" * 99), "a tar archive: unpack it"),
        ("a.arrow", b"\xff" * 4 + bytes(90), "Arrow stream: write it as Parquet, as to_parquet of datasets does"),
        ("a.idx", b"MMIDIDX\0\0" + bytes(40), "Megatron's index: give the .bin beside it"),
        ("a.npz", b"PK\x03\x04\0\0", "it is a zip archive: unpack it"),
        ("a.txt", b"text\0", "it has zero bytes"),
        ("a.txt.gz", _gzip(b"text" * 100)[:-9], "a.txt.gz is damaged or cut off"),
        ("a.txt.zst", _zstd(b"text" * 100)[:-3], "damaged or cut off: Truncated compressed stream: get it"),
        ("a.jsonl", b'{"content": "x", "n": 1}\n', r"line 1 has no field 'text': .*by --data.field: content"),
        ("a.jsonl", b'{"n": 1}\n', "no field 'text': none of its fields holds text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line 2: 'text' is 3: expected text, as jq -c '.text |= tost"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"line 2: expected JSON \(.*\): .*jq -cR 'fromjson\?' leaves out"),
        (
            "a.jsonl",
            b'{"text": "x \\ud83d y"}\n',
            r"line 1: the text has half of a surrogate pair.*: complete or delete its escape \\ud83d",
        ),
        ("a.json", b'["x", "\\udd00 y"]', "entry 1: the text has half of a surrogate pair"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS: .* git lfs pull"),
        ("a.jsonl", b'["x"]\n', r"line 1: expected a record with a field 'text', found \['x'\]"),
        ("a.json", b'{\n"text": "x"\n}', "line 1: expected JSON"),
        ("a.csv", b"a,b\nx,y\n", "first line names no columns 'text' between ',': choose .* by --data.field: a, b"),
        ("a.csv", b"id;body\n1;x\n", "names no columns 'text' between ';': choose .*: id, body"),
        ("a.csv", b"text,text\na,b\n", "first line names 2 columns 'text' between ',': rename all but one"),
        ("a.csv", b"id,text\n1,to be, or not\n", "line 2: expected 2 values between ',', in quotes if they contain it"),
        ("a.csv", b"id,text\n1,x\n2\n", "line 3: expected 2 values"),
        ("a.csv", b'text\n"x', "line 1: unexpected end of data"),
        ("a.parquet", _parquet(content=["x"], n=[1]), "no column 'text' of text: .*--data.field: content"),
        ("a.parquet", _parquet(text=[["x"], ["y"]]), r"no column 'text' of text \('text' is list<.*\): none of its"),
        ("a.parquet", _parquet(text=[b"x"]), r"\('text' is binary\)"),
        ("a.parquet", _parquet()[:-5], "cannot be read as Parquet"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        documents(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("a.json", '{"data": [{"text": "x"}, {"text": "y"}]}', ["x", "y"]),
        ("a.json", '{"id": "1", "data": {"title": "t", "text": "x"}}', ["x"]),
        ("a.json", '{"data": {"title": "t", "text": "x"}}', ["x"]),
        ("a b.jsonl", '{"my data": [[{"it\'s": "x"}]]}\n{"my data": [[{"it\'s": "y"}], []]}\n', ["x", "y"]),
        ("a.json", '[{"data": {"text": "x"}}, {"data": {"text": "y"}}]', ["x", "y"]),
        ("a.jsonl", '{"text": ["x", "y"]}\n{"text": ["z"]}\n', ["x", "y", "z"]),
        ("a.jsonl", '{"text": {"de": "x"}}\n', ["x"]),
        ("a.jsonl", '{"text": "x"}\n{"text": 3}\n', ["x", "3"]),
        ("a.json", '[{"text": 3}]', ["3"]),
    ],
)
def test_the_command_of_a_hint_makes_a_file_that_is_read_right(
    tmp_path: Path, name: str, data: str, texts: list[str]
) -> None:
    (tmp_path / name).write_text(data)
    with pytest.raises(UserError) as caught:
        documents(tmp_path / name)
    (command, target) = re.findall(r"(jq -c .* > ('[^']+'|\S+))", str(caught.value))[0]
    subprocess.run(["sh", "-c", command], check=True)
    assert documents(Path(shlex.split(target)[0])) == texts


CHATS: dict[str, bytes] = {
    "messages.jsonl": b'{"id": "1", "messages": [{"role": "user", "content": "x"}]}\n',
    "conversations.json": b'[{"conversations": [{"from": "human", "value": "x", "weight": null}]}]',
    "chosen.jsonl": b'{"prompt": "x", "chosen": [{"role": "user", "content": "x"}]}\n',
    "list.jsonl": b'[{"role": "user", "content": "x"}]\n',
    "rows.parquet": _parquet(id=["1"], messages=[[{"role": "user", "content": "x"}]]),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CHATS[name])
    holds = "the record" if name == "list.jsonl" else r"field '(messages|conversations|chosen)'"
    said = f"{holds} holds a chat, .* chat template by transformers, and train by ParallelTrainer, as examples/chat.py"
    with pytest.raises(UserError, match=said):
        documents(tmp_path / name)


def test_a_column_that_a_hint_names_is_read_right(tmp_path: Path) -> None:
    """Between semicolons, in a file with commas in its texts."""
    (tmp_path / "a.csv").write_text('id;body\n1;one, two\n2;"a; b"\n')
    with pytest.raises(UserError, match=r"--data\.field: id, body"):
        documents(tmp_path / "a.csv")
    assert documents(tmp_path / "a.csv", "body") == ["one, two", "a; b"]


@pytest.mark.parametrize(("name", "data"), [("a.parquet", _parquet()), ("a.txt.zst", _zstd(b"text"))])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"needs the package pyarrow.*pip install 'tpfuse\[data\]'"):
        documents(tmp_path / name)


def test_a_folder_names_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.jsonl").write_text('{"text": "first"}\n{"text": ""}\n{"text": null}\n{"text": "and"}\n')
    (tmp_path / "c.png").write_bytes(b"\0\1")
    (tmp_path / "d.latin1").write_bytes(b"\xe9")
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty").write_text("")
    text = find_text(tmp_path)
    tokens = np.concatenate(list(encoded(text, ByteTokenizer())))
    assert bytes(tokens.tolist()) == b"first\nand\nsecond\n", "documents end in line breaks"
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(
        r"3 of 6 files of .* are left out: .*c.png is not UTF-8 .*d.latin1 .*package.json, line 1 has", said
    )
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "a" / "z.jsonl").write_text('{"text": "x"}\n{"tex')
    with pytest.raises(UserError, match=r"z.jsonl, line 2: expected JSON"):
        list(encoded(find_text(tmp_path), ByteTokenizer()))
    (tmp_path / "a" / "z.jsonl").unlink()
    with pytest.raises(UserError, match=r"holds no text: .*not UTF-8"):
        encode_text(tmp_path / "out", find_text(tmp_path), ByteTokenizer())
    assert not any((tmp_path / "out").iterdir())
    with pytest.raises(UserError, match="hf download --repo-type dataset karpathy/fineweb-edu --local-dir"):
        find_text(Path("karpathy/fineweb-edu"))


def test_a_pattern_names_files_of_text(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "c.md"):
        (tmp_path / name).write_text('{"text": "x"}')
    assert token_paths(tmp_path / "*") is None
    assert documents(tmp_path / "[ab].*") == ["x", '{"text": "x"}']


def test_files_below_a_folder_are_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of links too, once each where a link leads back, and those of hidden folders are not."""
    monkeypatch.chdir(tmp_path)
    names = ("corp/top.txt", "corp/a/one.txt", "corp/a/b/two.txt", "corp/a/b/two.md", "corp/.git/no.txt", "far/far.txt")
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("corp/link").symlink_to("../far")
    Path("corp/a/back").symlink_to("..")
    Path("far/back").symlink_to("../corp")
    Path("corp/gone").symlink_to("nowhere")
    texts = ["corp/a/b/two.txt", "corp/a/one.txt", "corp/link/far.txt", "corp/top.txt"]
    assert list(map(str, find_text(Path("corp")).paths)) == ["corp/a/b/two.md", *texts[:2], "corp/gone", *texts[2:]]
    for pattern, found in {
        "corp/**/*.txt": texts,
        "**/corp/**/t*.txt": [texts[0], texts[3]],
        "cor?/**": sorted(["corp/a/b/two.md", *texts, "corp/a/back", "corp/link/back", "corp/gone"]),
        "corp/**/b": ["corp/a/b"],
        "corp/*/*.txt": ["corp/a/one.txt", "corp/link/far.txt"],
    }.items():
        assert list(map(str, find_text(Path(pattern)).paths)) == found, pattern
    with mock.patch.object(Path, "iterdir", side_effect=PermissionError(13, "Permission denied", "corp/a")):
        for path in ("corp", "corp/**/*.txt"):
            with pytest.raises(UserError, match="cannot read corp/a: Permission denied"):
                find_text(Path(path))


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (words("<|endoftext|>"), [4, 2, 0, 3, 0]),
        (words("</s>", "<s>", template="<s> $A"), [1, 5, 3, 0, 1, 4, 0]),
        (words("[CLS]", "[SEP]", template="[CLS] $A [SEP]"), [0, 5, 3, 1, 0, 4, 1]),
        (words("</s>", template="</s> $A"), [0, 4, 2, 0, 3]),
        (words(), [3, 1, 2]),
    ],
)
def test_documents_stand_between_the_tokens_of_their_tokenizer(
    tmp_path: Path, tokenizer: FileTokenizer, expected: list[int]
) -> None:
    """A single text gets none, since it is not known where its documents end."""
    (tmp_path / "a.jsonl").write_text('{"text": "to be"}\n{"text": "not"}\n')
    (tmp_path / "a.txt").write_text("to be\nnot\n")
    files = encode_text(tmp_path / "out", find_text(tmp_path / "a.jsonl"), tokenizer)
    assert files.open()[:].tolist() == expected
    described = json.loads((tmp_path / "out" / "tokens.json").read_text())
    assert described["document_start"] == (expected[0] if tokenizer.begins else tokenizer.end_of_text)
    plain = np.concatenate(list(encoded(find_text(tmp_path / "a.txt"), tokenizer)))
    assert plain.tolist() == tokenizer.encode("to be not").tolist()


def test_truncation_and_padding_do_not_cut_the_text() -> None:
    text = "to be or not to be " * 50
    assert words(most=8).encode(text).tolist() == words().encode(text).tolist()
    assert len(words(most=8).encode("be")) == 1
    again = words(most=8)
    assert again.as_json()["json"].count('"max_length":8') == 1, "runs keep the tokenizer's file as it is"


def test_no_character_is_left_out_without_a_word() -> None:
    """A BPE without a token for unknown characters leaves them out; other models of the library raise an Exception."""
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for tokenizer in (bare, byte_level):
        tokenizer.train_from_iterator(["to be é"], tokenizers.trainers.BpeTrainer(vocab_size=20, show_progress=False))
        its = FileTokenizer(tokenizer.to_str())
        assert len(its.encode("be to é"))
        with pytest.raises(
            UserError, match=r"knows no '.' and has no token for unknown .*: train it with an unk_token"
        ):
            its.encode("to bê")  # of whose last two bytes the tokenizer knows one
    with pytest.raises(UserError, match=r"cannot encode the text: WordLevel error: Missing .*: write the tokenizer"):
        FileTokenizer(words().as_json()["json"].replace('"?":0', '"a":0')).encode("who")
    for tokenizer in (words(), CharTokenizer("ab")):
        with pytest.raises(UserError, match=r"is not UTF-8: convert it|'.udcff' is not among the 2 of the text: leave"):
            tokenizer.encode("b\udcff")


def test_numbers_of_tokens_may_have_gaps() -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"be": 0, "?": 1, "to": 70_000}, unk_token="?"))
    its = FileTokenizer(tokenizer.to_str())
    assert (its.encode("to").tolist(), its.vocab_size) == ([70_000], 70_001)


def test_a_folder_names_its_tokenizer(tmp_path: Path) -> None:
    """tokenizer.model is read by sentencepiece itself, since a conversion may cut its texts otherwise."""
    source = tmp_path / "text.txt"
    source.write_text("to be or not to be, that is the  question\n" * 50)
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(UserError, match=r"model holds no tokenizer: expected tokenizer.json or tokenizer.model"):
        build_tokenizer(str(folder))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UserError, match=r"import Qwen2Tokenizer; Qwen2Tokenizer.from_pretrained\('.*model'\)"):
        build_tokenizer(str(folder))
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"tokenizer.model: expected a sentencepiece model, found an empty file: get"):
        build_tokenizer(str(folder))
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\n")
    with pytest.raises(UserError, match=r"tokenizer.model: expected a sentencepiece model; that of Llama 3"):
        build_tokenizer(str(folder))
    sentencepiece.SentencePieceTrainer.train(
        input=str(source), model_prefix=str(folder / "tokenizer"), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    tokenizer = build_tokenizer(str(folder))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for again in (
        tokenizer,
        from_json(json.loads(json.dumps(tokenizer.as_json()))),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert again.encode("to be  not").tolist() == theirs.encode("to be  not")
        assert (again.begins, again.end_of_text, again.vocab_size) == ((1,), 2, theirs.vocab_size())
        assert again.decode([*theirs.encode("to be"), 70]) == "to be"
    for text, message in (
        ("version https://git-lfs", "git lfs pull"),
        ('{"a', "tokenizers library: .*: write the tok"),
    ):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=message):
            build_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text(words().as_json()["json"])
    assert build_tokenizer(str(folder)).encode("to be").tolist() == [3, 1]
    with pytest.raises(UserError, match=r"hf download Qwen/Qwen3-0.6B tokenizer.json --local-dir"):
        build_tokenizer("Qwen/Qwen3-0.6B")


def byte_level(text: str) -> FileTokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return FileTokenizer(tokenizer.to_str())


def with_prefix(text: str) -> FileTokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return FileTokenizer(tokenizer.to_str())


@pytest.mark.parametrize("kind", [byte_level, with_prefix])
def test_a_text_in_parts_has_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[str], FileTokenizer]
) -> None:
    """The lines end in spaces, blank lines and words, whose tokens depend on what follows."""
    generator = np.random.default_rng(0)
    parts = ["def f(x):", "\n", "\n\n", " ", "\n    ", "word", "héllo", ".", "\r\n", "\t", "  \n"]
    text = "".join(parts[i] for i in generator.integers(0, len(parts), 20_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    tokenizer = kind(text)
    monkeypatch.setattr("tpfuse.train.text_file._PART", 700)
    monkeypatch.setattr(corpus, "_BATCH", 2000)
    found = list(encoded(find_text(tmp_path / "a.txt"), tokenizer))
    assert np.concatenate(found).tolist() == tokenizer.encode(text).tolist()
    assert len(found) > 10 or kind is with_prefix


def test_a_long_text_is_encoded_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpfuse.train.text_file._PART", 10_000)
    monkeypatch.setattr(corpus, "_BATCH", 10_000)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as lines, (tmp_path / "a.txt").open("w") as text:
        for index in range(20_000):
            lines.write(json.dumps({"text": f"{index} " * 20}) + "\n")
            text.write(f"{index} " * 20 + "\n")
    for name in ("a.jsonl.gz", "a.txt"):
        tracemalloc.start()
        files = encode_text(tmp_path / name.replace(".", "-"), find_text(tmp_path / name), ByteTokenizer())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert files.count > 2_000_000 and peak < 600_000


def test_an_interrupted_prepare_leaves_no_file_that_looks_whole(tmp_path: Path) -> None:
    def interrupted() -> Any:
        yield np.zeros(9, np.uint16)
        assert [path.name for path in tmp_path.iterdir()] == [".staging-tokens.bin"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_file(tmp_path, interrupted(), ByteTokenizer(), "test")
    assert not any(tmp_path.iterdir())
    (tmp_path / ".staging-tokens.bin").write_bytes(b"x" * 5000)  # of a process that was killed
    assert write_token_file(tmp_path, [np.zeros(9, np.uint16)], ByteTokenizer(), "test").open()[:].tolist() == [0] * 9


def test_a_run_that_is_terminated_while_it_reads_leaves_no_tokens(tmp_path: Path) -> None:
    """They are on the disk of its folder, which may not be that of the folder above. Those of a killed run go too."""
    out = tmp_path / "run"

    def terminated(data: DataOptions, staging: Path, kept: object) -> None:
        place = out if out.exists() else tmp_path
        assert sorted(place.glob(".tpfuse-tokens-*")) == sorted([staging, *place.glob("*-busy")])
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal was ignored")

    def terminate() -> None:
        with mock.patch("tpfuse.train.setup.read_data", terminated), pytest.raises(KeyboardInterrupt):
            prepared(["--out", out], 1)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        for name in ("killed", "busy"):
            (tmp_path / f".tpfuse-tokens-{name}").mkdir()
            (tmp_path / f".tpfuse-tokens-{name}" / "tokens.bin").write_text("much")
        busy = os.open(tmp_path / ".tpfuse-tokens-busy", os.O_RDONLY)
        fcntl.flock(busy, fcntl.LOCK_EX)
        terminate()
        assert [path.name for path in tmp_path.iterdir()] == [".tpfuse-tokens-busy"]
        os.close(busy)
        (out / ".tpfuse-tokens-killed").mkdir(parents=True)
        terminate()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(out.iterdir())
    out.rmdir()
    out.symlink_to("nowhere")
    with pytest.raises(UserError, match="run exists: it holds no run: choose another --out"):
        prepared(["--out", out], 1)


class Bracketed(ByteTokenizer):
    """Bytes, with a token before and one after each document."""

    begins, end_of_text = (1,), 2


def test_an_interrupted_prepare_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the pieces are encoded a second time at most, and the tokens are those of an undisturbed prepare."""
    monkeypatch.setattr(token_file, "_SAVE_EVERY", 0.0)
    monkeypatch.setattr(corpus, "_BATCH", 100)
    text, tokenizer = tmp_path / "a.jsonl", Bracketed()
    text.write_text("".join(json.dumps({"text": f"{index} " * 20}) + "\n" for index in range(50)))
    whole = encode_text(tmp_path / "whole", find_text(text), tokenizer).open()[:].tolist()
    calls: list[int] = []

    class Interrupted(Bracketed):
        def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
            calls.append(len(texts))
            if len(calls) == 12:
                raise KeyboardInterrupt
            return super().encode_all(texts)

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        encode_text(out, find_text(text), Interrupted(), continues=True)
    assert not (out / "tokens.bin").exists() and not (out / "tokens.json").exists()
    done = sum(calls[:10])
    calls[:] = [0] * 20
    assert encode_text(out, find_text(text), Interrupted(), continues=True).open()[:].tolist() == whole
    assert sum(calls) <= 50 - done
    assert sorted(path.name for path in out.iterdir()) == ["tokens.bin", "tokens.json"]
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        encode_text(tmp_path / "other", find_text(text), Interrupted(), continues=True)
    text.write_text(text.read_text() + '{"text": "more"}\n')  # then it begins anew
    calls[:] = [0] * 20
    encode_text(tmp_path / "other", find_text(text), Interrupted(), continues=True)
    assert sum(calls) == 51


def _megatron(folder: Path, tokens: np.ndarray, lengths: list[int], code: int, dtype: str) -> Path:
    path = folder / "meg_text_document.bin"
    path.write_bytes(tokens.astype(dtype).tobytes())
    width = np.dtype(dtype).itemsize
    places = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * width
    numbers = np.array([len(lengths), len(lengths) + 1], "<u8").tobytes()
    index = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([code]) + numbers
    index += np.array(lengths, "<i4").tobytes() + places.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return path


def _numpy(folder: Path, tokens: np.ndarray, dtype: str, *shape: int) -> Path:
    np.save(folder / "a.npy", tokens.astype(dtype).reshape(shape or -1))
    return folder / "a.npy"


def _nanogpt(folder: Path, tokens: np.ndarray) -> Path:
    (folder / "train.bin").write_bytes(tokens.astype("<u2").tobytes())
    return folder / "train.bin"


@pytest.mark.parametrize(
    "make",
    [
        _nanogpt,
        lambda folder, tokens: _numpy(folder, tokens, "<u2"),
        lambda folder, tokens: _numpy(folder, tokens, "<i4", 100, 5),
        lambda folder, tokens: _numpy(folder, tokens, "<i8"),
        lambda folder, tokens: _megatron(folder, tokens, [100, 0, 150, 250], 8, "<u2"),
        lambda folder, tokens: _megatron(folder, tokens, [500], 4, "<i4"),
    ],
)
def test_files_of_tokens_are_read_in_place(tmp_path: Path, make: Callable[[Path, np.ndarray], Path]) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 500)
    path = make(tmp_path, tokens)
    for named in (path, tmp_path, tmp_path / "*"):
        paths = token_paths(named)
        assert paths == (path,)
        files = open_token_files(paths, ByteTokenizer())
        assert files.open()[:].tolist() == tokens.tolist()
        assert files.open().part(100, 300)[3:9].tolist() == tokens[103:109].tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f, t: _numpy(f, t, "<f4"), "expected little-endian integers in C order, found <f4"),
        (lambda f, t: _numpy(f, t, ">u2"), "found >u2"),
        (
            lambda f, t: _numpy(f, -t, "<i4"),
            r"token 4294967295, or -1, at .* is outside the vocabulary of 256: it is damaged, or",
        ),
        (lambda f, t: _bytes(f, t.astype("<u4").tobytes()), "every second of its uint16 is 0, as in tokens of 32 bits"),
        (lambda f, t: _bytes(f, b"version https://git-lfs.github.com/spec/v1\nsize 9\n"), "git lfs pull"),
        (lambda f, t: _nanogpt(f, t + 60_000), "is outside the vocabulary of 256"),
        (lambda f, t: _cut(_nanogpt(f, t)), "it has 999 bytes, and uint16 need an even number"),
        (lambda f, t: _cut(_numpy(f, t, "<u2")), "bytes, but an array of shape"),
        (lambda f, t: _cut(_megatron(f, t, [500], 4, "<i4")), "1999 bytes, but meg_text_document.idx says 2000"),
        (lambda f, t: _megatron(f, t, [250, 251], 4, "<i4"), "2000 bytes, but meg_text_document.idx says 2004"),
        (lambda f, t: _megatron(f, t, [500], 7, "<f4"), "dtype 7: expected version 1 and integers"),
        (lambda f, t: _zip(_nanogpt(f, t)), "a zip archive, such as torch saves"),
    ],
)
def test_other_files_of_tokens_are_refused(tmp_path: Path, make: Any, message: str) -> None:
    path = make(tmp_path, np.arange(500) % 256 + 1 - (np.arange(500) % 256 == 255))
    with pytest.raises(UserError, match=message):
        open_token_files((path,), ByteTokenizer())


def _bytes(folder: Path, data: bytes) -> Path:
    (folder / "a.bin").write_bytes(data)
    return folder / "a.bin"


def _cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-1])
    return path


def _zip(path: Path) -> Path:
    path.write_bytes(b"PK\x03\x04" + path.read_bytes())
    return path


def test_nanogpt_names_its_characters(tmp_path: Path) -> None:
    """The names are those that its prepare.py for Shakespeare's characters writes."""
    text = "to be or not to be\n" * 40
    letters = sorted(set(text))
    for name, part in (("train.bin", text[:700]), ("val.bin", text[700:])):
        (tmp_path / name).write_bytes(np.array([letters.index(c) for c in part], "<u2").tobytes())
    itos = dict(enumerate(letters))
    meta = {"vocab_size": len(letters), "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    data = read_data(DataOptions(tmp_path / "train.bin", tmp_path / "val.bin"), tmp_path / "none")
    assert data.val is not None and data.val.count == len(text) - 700
    assert data.train.tokenizer.decode(data.train.files[0].open()[:].tolist()) == text[:700]
    with pytest.raises(UserError, match=r"holds val.bin beside train.bin"):
        read_data(DataOptions(tmp_path), tmp_path / "none")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "b", 1: "a"}}))
    with pytest.raises(UserError, match=r"meta.pkl: expected single characters in sorted order"):
        read_data(DataOptions(tmp_path / "train.bin"), tmp_path / "none")
    (tmp_path / "meta.pkl").unlink()
    with pytest.raises(UserError, match=r"--data\.tokenizer gpt2"):
        read_data(DataOptions(tmp_path / "train.bin"), tmp_path / "none")
    many = words(*(f"w{index}" for index in range(70_000)))
    with pytest.raises(UserError, match=r"read as uint16, but its tokenizer has 70005 tokens: .*NAME.npy"):
        open_token_files((tmp_path / "train.bin",), many)


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("the pickle ran code",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps({"itos": _Runs()}), "found the instruction STACK_GLOBAL"),
        (pickle.dumps({"itos": _Runs()}, 0), "found the instruction"),
        (b"\x80\x02K\x01r\xff\xff\xff\x7f.", "found the instruction LONG_BINPUT"),
        (b"\x80\x04}", "expected a pickle, found data that the parser rejects"),
        (pickle.dumps([1]), "expected dict"),
    ],
)
def test_a_pickle_holds_plain_containers_alone(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "meta.pkl").write_bytes(data)
    with pytest.raises(Unreadable, match=message):
        read_pickle(tmp_path / "meta.pkl", {"itos": dict})
    many = {"itos": {str(key): [1.5, (True, None)] for key in range(1000)}}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(many, protocol))
        assert read_pickle(tmp_path / "meta.pkl", {"itos": dict}) == many
