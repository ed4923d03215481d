"""The training and validation tokens of a run, which --data.path and --data.val-path name.

Each names one source, or a TOML file with several sources and their weights.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tpfuse.errors import UserError
from tpfuse.train.batches import Mixture
from tpfuse.train.config import read_toml
from tpfuse.train.corpus import Corpus, characters, encoded, find_text
from tpfuse.train.messages import say
from tpfuse.train.options import DataOptions
from tpfuse.train.token_file import (
    Progress,
    TokenFiles,
    open_token_files,
    stated_tokenizer,
    token_paths,
    write_token_file,
)
from tpfuse.train.token_layout import token_layout
from tpfuse.train.tokenizer import Tokenizer, build_tokenizer

_BLOCK = 1000  # successive sequences among which weights are exact


def percent(share: float) -> str:
    """Return a share in percent, with three digits."""
    return f"{100 * share:.3g}%"


@dataclass(frozen=True)
class Sources:
    """Token files that are read side by side. shares: as of a `Mixture`."""

    files: tuple[TokenFiles, ...]
    shares: tuple[int, ...] = (1,)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of all sources."""
        return self.files[0].tokenizer

    @property
    def count(self) -> int:
        """Return the number of tokens of all sources."""
        return sum(files.count for files in self.files)

    @property
    def source(self) -> str:
        """Return a description."""
        if len(self.files) == 1:
            return self.files[0].source
        parts = zip(self.shares, self.files, strict=True)
        return " and ".join(f"{percent(share / sum(self.shares))} {files.source}" for share, files in parts)

    @property
    def sha256(self) -> str:
        """Return the digest of the one source, or a digest of the digests and shares of all."""
        if len(self.files) == 1:
            return self.files[0].sha256
        parts = zip(self.shares, self.files, strict=True)
        return hashlib.sha256(" ".join(f"{share} {files.sha256}" for share, files in parts).encode()).hexdigest()

    def open(self) -> Mixture:
        """Open the files and return their tokens. Each process must open the files itself. Raise OSError."""
        return Mixture(tuple(files.open() for files in self.files), self.shares)


@dataclass(frozen=True)
class RunData:
    """The sources of a run. val: those of --data.val-path; None if the end of each source in `train` validates."""

    train: Sources
    val: Sources | None

    def open(self, val_fraction: float) -> tuple[Mixture, Mixture]:
        """Return the (training, validation) tokens. Without `val`, the last `val_fraction` of each source validates.

        Raise OSError.
        """
        if self.val is not None:
            return self.train.open(), self.val.open()
        train, val = [], []
        for tokens in (files.open() for files in self.train.files):
            training_end = len(tokens) - int(len(tokens) * val_fraction)
            train.append(tokens.part(0, training_end))
            val.append(tokens.part(training_end, len(tokens)))
        return Mixture(tuple(train), self.train.shares), Mixture(tuple(val), self.train.shares)

    def digests(self) -> dict[str, str | None]:
        """Return the digests that a checkpoint stores, so that a run cannot continue with other data."""
        return {"sha256": self.train.sha256, "val_sha256": None if self.val is None else self.val.sha256}


class _Text(NamedTuple):
    """A source of text. name: that of the token file that is written for it."""

    corpus: Corpus
    name: str

    def tokens(self, staging: Path, tokenizer: Tokenizer) -> TokenFiles:
        return encode_text(staging, self.corpus, tokenizer, self.name)


class _Files(NamedTuple):
    """A source of token files. kept_of: the source whose tokens they must be, if the run has kept them."""

    paths: tuple[Path, ...]
    kept_of: str | None = None

    def tokens(self, staging: Path, tokenizer: Tokenizer) -> TokenFiles:
        files = open_token_files(self.paths, tokenizer)
        if self.kept_of not in (None, files.source):
            raise UserError(
                f"--resume with different data: {self.paths[0]} has the tokens of {files.source}, not of {self.kept_of}"
            )
        return files


def listed(path: Path | None) -> tuple[list[Path | None], tuple[int, ...]]:
    """Return the sources that a path names, and their shares: those of a TOML file of sources, or the path itself.

    The shares are the weights, rounded to 1/1000 of all. Raise UserError for a file that is no list of sources, for a
    weight that is not positive, and for one that is rounded to 0.
    """
    if path is None or path.suffix != ".toml":
        return [path], (1,)
    table = read_toml(path)
    for name, weight in table.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not 0 < weight < math.inf:
            raise UserError(
                f"{path}: {name} = {weight}: expected lines of sources and their weights, such as 'web/*.jsonl' = 0.7"
            )
    if not table:
        raise UserError(f"{path} is empty: expected lines of sources and their weights, such as 'web/*.jsonl' = 0.7")
    exact = {name: _BLOCK * weight / sum(table.values()) for name, weight in table.items()}
    shares = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: shares[name] - exact[name])[: _BLOCK - sum(shares.values())]:
        shares[name] += 1
    for name, share in shares.items():
        if not share:
            raise UserError(f"{path}: {name} is {exact[name] / _BLOCK:.1g} of all weights: expected at least 0.001")
    divisor = math.gcd(*shares.values())
    return [Path(name) for name in table], tuple(share // divisor for share in shares.values())


def read_data(data: DataOptions, staging: Path, run: Path | None = None) -> RunData:
    """Return the data that the options name. Texts are encoded to token files in folder `staging`.

    run: the folder of a run that continues with the token files that it wrote from its texts (`kept_tokens`). Under the
    tokenizer chars, the vocabulary is that of all texts. Raise UserError, and OSError if a folder cannot be written.
    """
    kept, val_kept = (None, None) if run is None else kept_tokens(run, data)
    (paths, shares), (val_paths, val_shares) = listed(data.path), listed(data.val_path)
    found, val_found = _found(paths, data.field, kept, "tokens"), []
    if data.val_path is not None:
        val_found = _found(val_paths, data.field, val_kept, "validation")
    files = next((each.paths for each in found if isinstance(each, _Files)), None)
    texts = (each.corpus for each in (*found, *val_found) if isinstance(each, _Text))
    tokenizer = _stated(files, data.tokenizer) if files else build_tokenizer(data.tokenizer, characters(texts))
    train, val = (tuple(each.tokens(staging, tokenizer) for each in part) for part in (found, val_found))
    return RunData(Sources(train, shares), Sources(val, val_shares) if val else None)


def read_sources(path: Path, field: str, staging: Path, tokenizer: Tokenizer) -> Sources:
    """Return the tokens of the sources that a path names. Raise UserError and OSError."""
    paths, shares = listed(path)
    return Sources(tuple(each.tokens(staging, tokenizer) for each in _found(paths, field, None, "tokens")), shares)


def _found(paths: Sequence[Path | None], field: str, kept: Path | None, name: str) -> list[_Text | _Files]:
    """Find the sources of a list. kept: as for `read_data`; the files of several sources stand beside it."""
    found: list[_Text | _Files] = []
    several = len(paths) > 1
    for index, path in enumerate(paths):
        own = f"{name}-{index + 1}" if several else name
        copy = None if kept is None else kept.with_name(f"{own}.bin")
        files = None if path is None or (copy is not None and copy.exists()) else token_paths(path)
        if files is None and copy is not None:
            if not copy.exists():
                raise UserError(f"{copy} is missing, the run's tokens: put it back, or begin a new run by --init-from")
            found.append(_Files((copy,), str(path) if several else None))
        else:
            found.append(_Files(files) if files else _Text(find_text(path, field), own))
    return found


def _stated(paths: tuple[Path, ...], name: str) -> Tokenizer:
    """Return the tokenizer of token files, which is called `name` unless a file beside them states another one."""
    token_layout(paths[0])
    stated = stated_tokenizer(paths)
    if stated is None:
        check_named(name, paths[0])
    return stated or build_tokenizer(name)


def encode_text(
    folder: Path, text: Corpus, tokenizer: Tokenizer, name: str = "tokens", continues: bool = False
) -> TokenFiles:
    """Write the tokens of a text to folder/NAME.bin and return them. Raise UserError and OSError.

    continues: keep what is encoded if the process is interrupted, and begin with what another one has kept.
    """
    progress = Progress(folder, name, text.identity(tokenizer)) if continues else None
    if progress is not None and progress.tokens:
        say(f"continuing after {progress.tokens:,} tokens, which an interrupted run has written to {folder}")
    files = write_token_file(folder, encoded(text, tokenizer, progress), tokenizer, text.source, name, progress)
    if not files.count:
        why = f": {text.left_out[0]}" if text.left_out else ""
        for path in (folder / f"{name}.bin", folder / f"{name}.json"):
            path.unlink()
        raise UserError(f"{text.source} holds no text{why}")
    return files


def check_named(name: str, path: Path) -> None:
    """Raise UserError unless --data.tokenizer can name the tokenizer of a token file without a JSON file."""
    if name in ("bytes", "chars"):  # bytes is the default, and chars takes its vocabulary from a text
        raise UserError(
            f"{path} has no {path.with_suffix('.json').name} beside it, which would name the tokenizer, and"
            f" --data.tokenizer {name} is for texts: pass --data.tokenizer gpt2 if its tokens are GPT-2's (as in"
            " llm.c's files), or else the tokenizer's FILE.json; Megatron's NAME.bin needs NAME.idx too"
        )


def store(folder: Path, data: RunData, staging: Path) -> RunData:
    """Move the token files that `read_data` has written to `staging` to `folder`, and return the data of the run.

    Raise OSError.
    """

    def moved(sources: Sources) -> Sources:
        files = (each.moved(folder) if each.paths[0].parent == staging else each for each in sources.files)
        return replace(sources, files=tuple(files))

    return RunData(moved(data.train), None if data.val is None else moved(data.val))


def kept_tokens(folder: Path, data: DataOptions) -> tuple[Path | None, Path | None]:
    """Return the files in a run's folder with the tokens of its (training, validation) text, or None without a text.

    Raise UserError if the options name a text that is not the run's.
    """
    before = read_toml(folder / "config.toml").get("data", {})
    train, val = folder / "data" / "tokens.bin", folder / "data" / "validation.bin"
    if data.path is not None:
        trained = f"{folder} was trained on {before.get('path', 'its default text')}"
        train_file = _kept(train, before.get("path"), data.path, trained)
    else:
        train_file = train
    if data.val_path is None:
        return train_file, None
    validated = f"{folder} was validated on {before.get('val_path', 'the end of its training data')}"
    return train_file, _kept(val, before.get("val_path"), data.val_path, validated)


def _kept(file: Path, before: str | None, now: Path, used: str) -> Path | None:
    same = before is not None and Path(before).absolute() == now.absolute()
    if same and file.exists():
        return file
    if token_paths(now) is not None:
        return None
    if not same:
        raise UserError(f"--resume with different data: {used}, not on {now}")
    return file
