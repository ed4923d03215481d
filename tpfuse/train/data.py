"""The training and validation tokens of a run, which --data.path and --data.val-path name."""

import functools
from dataclasses import dataclass
from pathlib import Path

from tpfuse.train.config import read_toml
from tpfuse.train.corpus import Corpus, characters, encoded, find_text
from tpfuse.train.errors import UserError
from tpfuse.train.options import DataOptions
from tpfuse.train.token_file import (
    FileTokens,
    TokenFiles,
    open_token_files,
    token_paths,
    write_token_file,
)
from tpfuse.train.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class RunData:
    """The token files of a run. val: the files of --data.val-path; None if the end of `train` is for validation."""

    train: TokenFiles
    val: TokenFiles | None

    def open(self, val_fraction: float) -> tuple[FileTokens, FileTokens]:
        """Returns the (training, validation) tokens. Without `val`, the last `val_fraction` of `train` validates.

        Raises OSError.
        """
        tokens = self.train.open()
        if self.val is not None:
            return tokens, self.val.open()
        training_end = len(tokens) - int(len(tokens) * val_fraction)
        return tokens.part(0, training_end), tokens.part(training_end, len(tokens))

    def digests(self) -> dict[str, str | None]:
        """Returns the digests that a checkpoint stores, so that a run cannot continue with other data."""
        return {"sha256": self.train.sha256, "val_sha256": None if self.val is None else self.val.sha256}


def read_data(data: DataOptions, staging: Path, kept: tuple[Path | None, Path | None] = (None, None)) -> RunData:
    """Returns the data that the options name. Texts are encoded to tokens.bin and validation.bin in folder `staging`.

    kept: the token files that the run wrote from its texts and continues with (`kept_tokens`). Under the tokenizer
    chars, the vocabulary is that of both texts. Raises UserError, and OSError if the folder cannot be written.
    """
    if data.val_path is not None and data.val_fraction != DataOptions.val_fraction:
        raise UserError("--data.val-fraction and --data.val-path were both given: give one of them")
    train_files = _files(data.path, kept[0])
    val_files = _files(data.val_path, kept[1])
    train_text = None if train_files is not None else find_text(data.path, data.field)
    val_text = None if data.val_path is None or val_files is not None else find_text(data.val_path, data.field)
    if train_text is None:
        assert train_files is not None
        train = open_token_files(train_files, functools.partial(_named, data.tokenizer, train_files[0]))
    else:
        texts = [text for text in (train_text, val_text) if text is not None]
        train = encode_text(staging, train_text, build_tokenizer(data.tokenizer, characters(texts)))
    val = None
    if val_text is not None:
        val = encode_text(staging, val_text, train.tokenizer, "validation")
    elif val_files is not None:
        val = open_files_of(train.tokenizer, val_files)
    return RunData(train, val)


def encode_text(folder: Path, text: Corpus, tokenizer: Tokenizer, name: str = "tokens") -> TokenFiles:
    """Writes the tokens of a text to folder/NAME.bin and returns them. Raises UserError and OSError."""
    files = write_token_file(folder, encoded(text, tokenizer), tokenizer, text.source, name)
    if not files.count:
        why = f": {text.left_out[0]}" if text.left_out else ""
        for path in (folder / f"{name}.bin", folder / f"{name}.json"):
            path.unlink()
        raise UserError(f"{text.source} holds no text{why}")
    return files


def _files(path: Path | None, kept: Path | None) -> tuple[Path, ...] | None:
    if kept is not None:
        return (kept,)
    return None if path is None else token_paths(path)


def check_named(name: str, path: Path) -> None:
    """Raises UserError if --data.tokenizer names no tokenizer for a token file that has no JSON file beside it."""
    if name in ("bytes", "chars"):  # bytes is the default, and chars takes its vocabulary from a text
        raise UserError(
            f"{path} has no {path.with_suffix('.json').name} beside it, which would name the tokenizer: pass"
            " --data.tokenizer gpt2 if its tokens are GPT-2's (as in llm.c's files), or else the tokenizer's FILE.json"
        )


def _named(name: str, path: Path) -> Tokenizer:
    check_named(name, path)
    return build_tokenizer(name)


def open_files_of(tokenizer: Tokenizer, paths: tuple[Path, ...]) -> TokenFiles:
    """Returns the token files, whose tokenizer must be `tokenizer`. A file without a JSON file names none.

    Raises UserError if they name another tokenizer.
    """
    files = open_token_files(paths, lambda: tokenizer)
    if files.tokenizer.as_json() != tokenizer.as_json():
        raise UserError(f"{paths[0]} has tokens of another tokenizer than the training data's")
    return files


def store(folder: Path, data: RunData, staging: Path) -> RunData:
    """Moves the token files that `read_data` has written to `staging` to `folder`, and returns the data of the run.

    Raises OSError.
    """

    def moved(files: TokenFiles) -> TokenFiles:
        return files.moved(folder) if files.paths[0].parent == staging else files

    return RunData(moved(data.train), None if data.val is None else moved(data.val))


def kept_tokens(folder: Path, data: DataOptions) -> tuple[Path | None, Path | None]:
    """Returns the files in a run's folder with the tokens of its (training, validation) text, or None without a text.

    Raises UserError if the options name a text that is not the run's.
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
