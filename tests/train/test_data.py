"""Tokenizers, token files, texts and batches."""

import hashlib
import json
import pickle
import resource
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor

from tpfuse.errors import UserError
from tpfuse.train import batches
from tpfuse.train.batches import Mixture, Windows, permuted, unigram_loss
from tpfuse.train.corpus import characters, find_text
from tpfuse.train.data import RunData, Sources, kept_tokens, listed, read_data, store
from tpfuse.train.options import DataOptions, Order
from tpfuse.train.token_file import DamagedTokens, TokenFiles, open_token_files, token_paths, write_token_file
from tpfuse.train.token_layout import HEADER_BYTES, VERSIONS
from tpfuse.train.tokenizer import ByteTokenizer, CharTokenizer, FileTokenizer, Tokenizer, build_tokenizer, from_json

TEXT = "To be, or not to be:\nthat is the question. Ünïcödé ☃\n"


def open_token_file(path: Path) -> TokenFiles:
    return open_token_files((path,), ByteTokenizer())


def write_shard(path: Path, tokens: np.ndarray, magic: int = 20240520, dtype: str = "<u2") -> Path:
    """Write a token file as llm.c's scripts do, without a JSON file."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, VERSIONS.get(magic, 1), len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    return path


def write_shards(folder: Path, tokens: np.ndarray, cuts: list[int]) -> tuple[Path, ...]:
    parts = np.split(tokens, cuts)
    return tuple(write_shard(folder / f"web_train_{i:06}.bin", part) for i, part in enumerate(parts))


def file_tokenizer() -> FileTokenizer:
    model = tokenizers.models.WordLevel({"be": 0, "not": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return FileTokenizer(tokenizer.to_str())


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer.of_text(TEXT)])
def test_text_is_the_same_after_encoding_and_after_json(tokenizer: ByteTokenizer | CharTokenizer) -> None:
    again = from_json(json.loads(json.dumps(tokenizer.as_json())))
    tokens = again.encode(TEXT)
    assert tokens.dtype == np.uint16
    assert tokens.max() < tokenizer.vocab_size
    assert again.decode(tokens.tolist()) == TEXT


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "text"),
    [
        (ByteTokenizer(), [104, 105, 300], "hi\ufffd"),
        (CharTokenizer.of_text("hi"), [0, 1, 2], "hi\ufffd"),
        (file_tokenizer(), [0, 1, 300], "be not"),
    ],
)
def test_tokens_that_only_the_model_has_do_not_end_a_run(tokenizer: Tokenizer, tokens: list[int], text: str) -> None:
    """A model from a folder may have more tokens than the tokenizer, and draws all of them at first."""
    assert tokenizer.decode(tokens) == text


def test_chars_are_numbered_in_sorted_order() -> None:
    assert CharTokenizer.of_text("hello").encode("hello").tolist() == [1, 0, 2, 2, 3]
    with pytest.raises(UserError, match="'z'"):
        CharTokenizer.of_text("hello").encode("jazz".replace("j", "h").replace("a", "e"))


def test_a_tokenizer_file_of_the_library_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(file_tokenizer().as_json()["json"])
    tokenizer = build_tokenizer(str(path))
    for again in (from_json(tokenizer.as_json()), pickle.loads(pickle.dumps(tokenizer))):
        assert again.encode("be not be x").tolist() == [0, 1, 0, 2]
    path.write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer of the tokenizers library"):
        build_tokenizer(str(path))
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        build_tokenizer(str(tmp_path / "missing.json"))
    with pytest.raises(UserError, match=r"bytes, chars, gpt2, a FILE\.json"):
        build_tokenizer("words")


def test_token_file_is_llm_c_format(tmp_path: Path) -> None:
    written = write_token_file(tmp_path, [ByteTokenizer().encode(TEXT)], ByteTokenizer(), "test")
    raw = (tmp_path / "tokens.bin").read_bytes()
    header = np.frombuffer(raw[:1024], dtype="<i4")
    assert header[:3].tolist() == [20240520, 1, len(TEXT.encode())]
    assert not header[3:].any()
    assert np.frombuffer(raw[1024:], dtype="<u2").astype(np.uint8).tobytes() == TEXT.encode()
    assert written.sha256 == hashlib.sha256(raw).hexdigest()
    assert open_token_file(tmp_path / "tokens.bin").sha256 == written.sha256
    assert written.open()[3:9].tobytes() == raw[1024 + 6 : 1024 + 18]


def test_a_vocabulary_above_16_bits_has_tokens_of_32_bits(tmp_path: Path) -> None:
    vocabulary = {f"w{index}": index for index in range(70_000)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    large = FileTokenizer(tokenizer.to_str())
    tokens = large.encode("w3 w65536 w69999 w65535")
    expected = [3, 65_536, 69_999, 65_535]
    assert tokens.tolist() == expected and tokens.dtype == np.uint32
    written = write_token_file(tmp_path, [tokens], large, "test")
    assert (tmp_path / "tokens.bin").read_bytes()[:8] == np.array([20240801, 7], "<i4").tobytes()
    assert written.open()[:].tolist() == expected
    other = write_shard(tmp_path / "llama3.bin", tokens[:3], magic=20240801, dtype="<u4")
    assert open_token_files((other,), large).open()[1:3].tolist() == expected[1:3]
    with pytest.raises(UserError, match="token 69999 at 2 is outside the vocabulary of 256"):
        open_token_file(other)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:10], "not a token file"),
        (lambda raw: b"", "not a token file"),
        (lambda raw: np.int32(7).tobytes() + raw[4:], "found magic 7, expected magic 20240520 or 20240801"),
        (lambda raw: raw[:4] + np.int32(9).tobytes() + raw[8:], "version 9, expected 1"),
        (lambda raw: raw[:-2], "bytes, but"),
        (lambda raw: raw[:-2] + np.uint16(300).tobytes(), "token 300 at .* outside the vocabulary of 256"),
        (lambda raw: raw[:-2] + np.uint16(5).tobytes(), "SHA-256"),
    ],
)
def test_damaged_token_files_are_named(tmp_path: Path, damage: object, message: str) -> None:
    write_token_file(tmp_path, [ByteTokenizer().encode(TEXT)], ByteTokenizer(), "test")
    path = tmp_path / "tokens.bin"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        open_token_file(path)


def test_a_token_file_needs_its_json(tmp_path: Path) -> None:
    write_token_file(tmp_path, [ByteTokenizer().encode(TEXT)], ByteTokenizer(), "test")
    (tmp_path / "tokens.json").write_text("{}")
    with pytest.raises(UserError, match="not what `tpfuse prepare` writes"):
        open_token_file(tmp_path / "tokens.bin")
    (tmp_path / "tokens.json").unlink()
    with pytest.raises(UserError, match=r"has no tokens.json .*, and --data.tokenizer bytes is for texts: pass --data"):
        read_data(DataOptions(path=tmp_path / "tokens.bin"), tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        read_data(DataOptions(path=tmp_path / "absent.bin"), tmp_path)


def test_the_end_of_the_tokens_is_for_validation(tmp_path: Path) -> None:
    tokens = np.arange(100, dtype=np.uint16)
    files = write_token_file(tmp_path, [tokens], ByteTokenizer(), "test")
    (train,), (val,) = (opened.sources for opened in RunData(Sources((files,)), None).open(0.1))
    assert (train[:].tolist(), val[:].tolist()) == (tokens[:90].tolist(), tokens[90:].tolist())


def test_token_files_are_one_sequence(tmp_path: Path) -> None:
    """Batches do not depend on where the tokens were split. A file may be empty, or shorter than a window."""
    tokens = np.random.default_rng(0).integers(0, 256, 600).astype(np.uint16)
    files = open_token_files(write_shards(tmp_path, tokens, [100, 100, 107, 400]), ByteTokenizer())
    assert [layout.count for layout in files.layouts] == [100, 0, 7, 293, 200] and files.count == 600
    sequence = pickle.loads(pickle.dumps(files)).open()
    assert len(sequence) == 600
    for start, stop in ((0, 600), (99, 108), (100, 107), (0, 0), (599, 600), (590, 700)):
        assert sequence[start:stop].tolist() == tokens[start:stop].tolist()
    part = sequence.part(95, 450).part(2, 30)
    assert len(part) == 28 and part[1:20].tolist() == tokens[98:117].tolist()
    whole, cut = (Windows(x, 32, 3, "train", 40).sequences(1, 0, 40, torch.device("cpu")) for x in (tokens, sequence))
    assert torch.equal(whole[0], cut[0]) and torch.equal(whole[1], cut[1])


def test_paths_name_files_folders_and_patterns(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, np.arange(300), [100, 200])
    (tmp_path / ".hidden.bin").write_bytes(b"")
    pattern = tmp_path / "web_train_*.bin"
    assert token_paths(tmp_path) == token_paths(pattern) == shards
    assert token_paths(shards[1]) == (shards[1],)
    assert token_paths(tmp_path / "absent.bin") == (tmp_path / "absent.bin",), "what is wrong is said when it is opened"
    (tmp_path / "text").mkdir()
    assert token_paths(tmp_path / "text") is None and token_paths(tmp_path / "text.txt") is None
    with pytest.raises(UserError, match=r"no file matches .*web_test_\*\.bin"):
        token_paths(tmp_path / "web_test_*.bin")
    bracket = write_shard(tmp_path / "text" / "a[1].bin", np.arange(3))
    assert token_paths(bracket) == (bracket,), "the name of a file is no pattern"
    with pytest.raises(UserError, match=r"web_train_000000.bin holds tokens, and .*text does not: name one kind"):
        token_paths(tmp_path)
    shutil.rmtree(tmp_path / "text")
    for name in ("web_train_000001.json", "tokenizer.json", "meta.pkl"):
        (tmp_path / name).write_text("{}")
    assert token_paths(tmp_path) == token_paths(tmp_path / "*") == shards, "what tells of tokens may stand beside them"
    for name in ("web_train_readme.md", "web_train.json"):
        (tmp_path / name).write_text("text")
        for both in (tmp_path, tmp_path / "web_train*", tmp_path / "**"):
            with pytest.raises(UserError, match=rf"000000.bin holds tokens, and .*{name} does not: name one kind"):
                token_paths(both)
        (tmp_path / name).unlink()
    write_shard(tmp_path / "web_val_000000.bin", np.arange(9))
    assert token_paths(pattern) == shards
    with pytest.raises(UserError, match=r"web_val_000000.bin beside web_train_000000.bin: .*--data.val-path"):
        token_paths(tmp_path)


def test_files_without_a_tokenizer_get_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpfuse.train.tokenizer._gpt2", file_tokenizer)
    write_shards(tmp_path, np.arange(300) % 3, [100, 200])
    for name in ("bytes", "chars"):
        with pytest.raises(UserError, match=r"web_train_000000.json beside it.*--data.tokenizer gpt2"):
            read_data(DataOptions(path=tmp_path, tokenizer=name), tmp_path)
    data = read_data(DataOptions(path=tmp_path, tokenizer="gpt2"), tmp_path)
    files = data.train
    assert (files.tokenizer.vocab_size, files.count, data.val) == (3, 300, None)
    assert files.source == f"3 files, {tmp_path / 'web_train_000000.bin'} to web_train_000002.bin"


def test_either_all_files_or_none_name_a_tokenizer(tmp_path: Path) -> None:
    tokens = np.arange(9, dtype=np.uint16)
    write_token_file(tmp_path, [tokens], ByteTokenizer(), "test", "a")
    write_token_file(tmp_path, [tokens], ByteTokenizer(), "test", "b")
    both = token_paths(tmp_path)
    assert both is not None and open_token_files(both, ByteTokenizer()).count == 18
    write_token_file(tmp_path, [tokens[:3]], CharTokenizer("abc"), "test", "b")
    with pytest.raises(UserError, match=r"b.bin has another tokenizer than .*a.bin"):
        open_token_files(both, ByteTokenizer())
    (tmp_path / "b.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*b.json, which names the tokenizer"):
        open_token_files(both, ByteTokenizer())


def test_other_token_files_have_another_digest(tmp_path: Path) -> None:
    """The digest reads the header, the first and last blocks and two between them, but not every token."""
    tokens = np.random.default_rng(1).integers(0, 256, 50_000).astype(np.uint16)

    def digest(tokens: np.ndarray, cuts: list[int]) -> str:
        return open_token_files(write_shards(tmp_path, tokens, cuts), ByteTokenizer()).sha256

    known = digest(tokens, [20_000])
    assert digest(tokens, [20_000]) == known
    changed = [tokens.copy() for _ in range(3)]
    for place, other in zip((0, 19_999, 49_999), changed, strict=True):
        other[place] ^= 1
    other_order = np.concatenate([tokens[30_000:], tokens[:30_000]])
    digests = [digest(other, [20_000]) for other in changed] + [digest(other_order, [20_000]), digest(tokens, [20_001])]
    assert len({known, *digests}) == 6
    assert digest(tokens, []) != known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[: HEADER_BYTES + 100], "has become shorter: expected 500 tokens, found 50"),
        (lambda raw: raw[:HEADER_BYTES] + b"\xff" * 1000, "token 65535 at .* is outside the vocabulary of 256"),
    ],
)
def test_files_that_change_while_they_are_read_are_found(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = write_shard(tmp_path / "a.bin", np.arange(500) % 256)
    windows = Windows(open_token_file(path).open(), 128, 0, "train", 4)
    windows.sequences(0, 0, 4, torch.device("cpu"))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DamagedTokens, match=message):
        windows.sequences(0, 0, 4, torch.device("cpu"))


def test_the_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """The usual limit is 1024 files, and a data set may have more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    paths = write_shards(tmp_path, np.arange(240), [2 * i for i in range(1, 120)])
    enough_for_some = len(list(Path("/proc/self/fd").iterdir())) + 50
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough_for_some, limits[1]))
        assert open_token_files(paths, ByteTokenizer()).open()[238:].tolist() == [238, 239]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_validation_may_have_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abc" * 10)
    (tmp_path / "val.txt").write_text("abd")
    staging, folder = tmp_path / "staging", tmp_path / "data"
    read = read_data(DataOptions(tmp_path / "train.txt", tmp_path / "val.txt", tokenizer="chars"), staging)
    data = store(folder, read, staging)
    assert not any(staging.iterdir()), "the files are moved"
    assert data.train.tokenizer.vocab_size == 4, "characters of both texts"
    assert [len(part.sources[0]) for part in data.open(0.1)] == [30, 3], "no token is kept back"
    assert data.open(0.1)[1].sources[0][:].tolist() == [0, 1, 3]
    files = (folder / "tokens.bin", folder / "validation.bin")
    (tmp_path / "config.toml").write_text(f"[data]\nval_path = '{tmp_path / 'val.txt'}'\n")
    resumed = read_data(DataOptions(val_path=tmp_path / "val.txt"), staging, tmp_path)
    for again in (resumed, read_data(DataOptions(*files), staging)):
        assert store(tmp_path / "nothing", again, staging).digests() == data.digests()
    assert data.val is not None and data.digests() == {"sha256": data.train.sha256, "val_sha256": data.val.sha256}
    assert not (tmp_path / "nothing").exists()
    mixed = read_data(DataOptions(folder / "tokens.bin", tmp_path / "val.txt"), staging).val
    assert mixed is not None and mixed.open().sources[0][:].tolist() == [0, 1, 3]
    with pytest.raises(UserError, match=r"validation.bin has tokens of another tokenizer than the training data's"):
        read_data(DataOptions(tmp_path / "train.txt", folder / "validation.bin"), staging)


def test_the_default_text_is_the_standard_library() -> None:
    text = find_text(None)
    assert len(text.paths) > 300 and not any("test" in path.parts for path in text.paths)
    (collections,) = (path for path in text.paths if path.match("collections/__init__.py"))
    text.paths = [collections]
    assert "class OrderedDict" in "".join(characters([text]))


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_batches_depend_on_seed_and_step_alone(order: Order) -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    windows = Windows(tokens, 16, 3, "train", 12, order)
    ids, targets = windows.sequences(7, 0, 12, torch.device("cpu"))
    assert ids.dtype == torch.int64
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert torch.equal(targets, ids + 1)
    others = [Windows(tokens, 16, 3, "train", 12, order) for _ in range(3)]
    parts = [other.sequences(7, 4 * i, 4 * i + 4, torch.device("cpu"))[0] for i, other in enumerate(others)]
    assert torch.equal(torch.cat(parts), ids)
    assert not torch.equal(windows.sequences(8, 0, 12, torch.device("cpu"))[0], ids)
    for other in (Windows(tokens, 16, 4, "train", 12, order), Windows(tokens, 16, 3, "val", 12, order)):
        assert not torch.equal(other.sequences(7, 0, 12, torch.device("cpu"))[0], ids)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 64, 1000, 4097])
def test_a_shuffled_order_is_a_permutation(size: int) -> None:
    first, second = (permuted(bytes([key]) * 64, np.arange(size), size) for key in (1, 2))
    assert sorted(first) == sorted(second) == list(range(size))
    assert size < 5 or first.tolist() != second.tolist() != list(range(size))
    parts = [permuted(bytes([1]) * 64, np.arange(place, min(place + 7, size)), size) for place in range(0, size, 7)]
    assert np.concatenate(parts).tolist() == first.tolist()


def test_a_shuffled_order_is_even_and_needs_no_memory() -> None:
    """Each of 10 places has each of 10 values equally often: chi-squared of 9 degrees is above 34 in 1 of 10,000."""
    keys = [hashlib.blake2b(f"{key}".encode()).digest() for key in range(2000)]
    found = np.stack([permuted(key, np.arange(10), 10) for key in keys])
    for place in range(10):
        counts = np.bincount(found[:, place], minlength=10)
        assert ((counts - 200) ** 2 / 200).sum() < 34
    successors = (np.diff(found, axis=1) == 1).mean()
    assert successors == pytest.approx(0.1, abs=0.01), "neighbours are neighbours no more often than by chance"
    tracemalloc.start()
    far = permuted(keys[0], np.array([0, 10**13 - 1]), 10**13)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert len({*far.tolist()}) == 2 and far.min() >= 0 and far.max() < 10**13


def _shuffled(tokens: np.ndarray, batch: int, numbers: range, ahead: int = 0) -> Tensor:
    windows = Windows(tokens, 16, 3, "train", batch, "shuffled")
    windows.ahead = ahead
    return torch.cat([windows.sequences(number, 0, batch, torch.device("cpu"))[1] for number in numbers])


def test_an_epoch_reads_each_token_once() -> None:
    """62 windows of 16 tokens fit into 1000, of which 7 are left over; a batch of 31 takes two steps to an epoch."""
    epochs = [_shuffled(np.arange(1000), 31, range(step, step + 2)).view(-1) for step in (0, 2, 4, 6)]
    for epoch in epochs:
        first = int(epoch.min())
        assert sorted(epoch.tolist()) == list(range(first, first + 62 * 16)) and 1 <= first <= 8
    assert len({int(epoch.min()) for epoch in epochs}) > 1, "the windows are cut elsewhere"
    assert len({tuple((epoch - epoch.min()).tolist()) for epoch in epochs}) == 4, "each epoch has an order of its own"


def test_an_order_continues_with_another_batch_and_over_the_end_of_an_epoch() -> None:
    tokens = np.arange(1000)
    whole = _shuffled(tokens, 12, range(11))
    assert torch.equal(whole[4 * 12 :], _shuffled(tokens, 28, range(4, 7), ahead=4 * 12 - 4 * 28))
    assert torch.equal(whole, torch.cat([_shuffled(tokens, 1, range(row, row + 1)) for row in range(132)]))


def _sources_drawn(windows: Windows, numbers: range) -> Tensor:
    return torch.cat([windows.sequences(number, 0, windows.batch, torch.device("cpu"))[1] for number in numbers])


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_a_mixture_has_exact_shares_and_each_source_an_order_of_its_own(order: Order) -> None:
    """The sources have 62, 10 and 5 windows; of 20 sequences 10, 6 and 4 are from each."""
    tokens = tuple(np.arange(start, start + 16 * count + 1) for start, count in ((0, 62), (2000, 10), (3000, 5)))
    mixture = Mixture(tokens, (5, 3, 2))
    windows = Windows(mixture, 16, 3, "train", 20, order)
    drawn = _sources_drawn(windows, range(30))
    sources = torch.bucketize(drawn[:, 0].contiguous(), torch.tensor([1999, 2999]))
    blocks = sources.view(-1, 10)
    assert {tuple(block.bincount().tolist()) for block in blocks} == {(5, 3, 2)}
    assert len({tuple(block.tolist()) for block in blocks}) > 20, "each block has an order of its own"
    if order == "shuffled":
        for source, count in enumerate((62, 10, 5)):
            own = drawn[sources == source]
            for first in range(0, len(own) - count + 1, count):
                epoch = own[first : first + count].flatten()
                assert len(epoch.unique()) == 16 * count, "an epoch reads each token of the source once"
    again = Windows(mixture, 16, 3, "train", 20, order)
    parts = [again.sequences(7, row, row + 4, torch.device("cpu"))[1] for row in (16, 0, 4, 8, 12)]
    assert torch.equal(torch.cat([*parts[1:], parts[0]]), drawn[140:160]), "a function of the step and the row alone"
    again.ahead, again.batch = 20 * 20 - 10 * 40, 40
    if order == "shuffled":
        assert torch.equal(_sources_drawn(again, range(10, 12)), drawn[400:480]), "another batch continues"


def test_weights_of_sources_are_rounded_to_a_thousandth(tmp_path: Path) -> None:
    sources = tmp_path / "sources.toml"
    for text, shares in {
        "a = 0.7\n'b/*.txt' = 0.3": (7, 3),
        "a = 1\nb = 1\nc = 1": (334, 333, 333),
        "a = 997\nb = 1.4\nc = 1.6": (997, 1, 2),
    }.items():
        sources.write_text(text)
        assert listed(sources)[1] == shares
    for text, said in {
        "": r"sources.toml is empty: expected lines of sources and their weights",
        "a = 0": r"sources.toml: a = 0: expected lines of sources and their weights, such as 'web/\*.jsonl' = 0.7",
        "a = 'x'": "a = x: expected lines",
        "a = inf": "a = inf: expected lines",
        "a = true": "a = True: expected lines",
        "[a]": "expected lines of sources",
        "a = 1\nb = 0.0004": "b is 0.0004 of all weights: expected at least 0.001",
        "a =": "sources.toml",
    }.items():
        sources.write_text(text)
        with pytest.raises(UserError, match=said):
            listed(sources)
    sources.write_text("'other.toml' = 1")
    (tmp_path / "other.toml").write_text("a = 1")
    with pytest.raises(UserError, match=r"other.toml is a list of sources: give one of the sources in it"):
        find_text(tmp_path / "other.toml")


def test_every_window_can_be_drawn() -> None:
    tokens = np.arange(20, dtype=np.uint16)
    windows = Windows(tokens, 16, 0, "train", 64)
    starts = windows.sequences(0, 0, 64, torch.device("cpu"))[0][:, 0]
    assert set(starts.tolist()) == {0, 1, 2, 3}, "the last window ends with the last token"


def test_a_resumed_run_uses_the_tokens_in_its_folder(tmp_path: Path) -> None:
    """It does so even if its text has changed or is missing."""
    run, text = tmp_path / "run", tmp_path / "text"
    kept = write_token_file(run / "data", [np.zeros(9, np.uint16)], ByteTokenizer(), "test").paths[0]
    (run / "config.toml").write_text(f"[data]\npath = '{text}'\n")
    text.mkdir()
    assert kept_tokens(run, DataOptions(path=text)) == (kept, None)
    shard = write_shard(text / "a.bin", np.zeros(9))
    assert kept_tokens(run, DataOptions(path=text)) == (kept, None)
    assert kept_tokens(run, DataOptions(path=shard)) == (None, None), "its digest will be compared"
    with pytest.raises(UserError, match=r"was trained on .*text, not on other.txt"):
        kept_tokens(run, DataOptions(path=Path("other.txt")))
    with pytest.raises(UserError, match=r"was validated on the end of its training data, not on other.txt"):
        kept_tokens(run, DataOptions(path=text, val_path=Path("other.txt")))
    shard.unlink()
    kept.unlink()
    with pytest.raises(UserError, match=r"tokens\.bin is missing, the run's tokens: put it back, or begin a new run"):
        read_data(DataOptions(path=text), tmp_path, run)
    (run / "config.toml").write_text("")
    assert kept_tokens(run, DataOptions()) == (kept, None), "the default text"


def test_unigram_loss_is_that_of_counted_tokens() -> None:
    train = np.array([0] * 6 + [1] * 2, dtype=np.uint16)
    expected = -0.5 * (np.log(7 / 11) + np.log(3 / 11))
    val = Mixture((np.array([0, 1], dtype=np.uint16),))
    assert unigram_loss(Mixture((train,)), val, 3) == pytest.approx(expected)
    thirds = Mixture((train[:1], train[6:]), (2, 1))  # 2 of 3 tokens are 0, of 3 tokens that all sources have
    assert unigram_loss(thirds, val, 3) == pytest.approx(-0.5 * (np.log(3 / 6) + np.log(2 / 6)))


def test_unigram_loss_counts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """np.bincount converts its argument to int64, which would be 80 GB for 10 billion tokens."""
    tokens = np.random.default_rng(0).integers(0, 50, 400_000).astype(np.uint16)
    train, val = Mixture((tokens,)), Mixture((tokens[:1000],))
    whole = unigram_loss(train, val, 50)
    monkeypatch.setattr(batches, "_CHUNK", 1000)
    tracemalloc.start()
    assert unigram_loss(train, val, 50) == whole
    assert tracemalloc.get_traced_memory()[1] < 400_000
    tracemalloc.stop()
