"""Texts from files, folders and patterns, or from the Python standard library of this machine, as tokens.

A text is read in parts and never held whole (`tpfuse.train.text_file`). Its documents are the files of a folder or of a
pattern, the lines of JSON lines, the rows of a table. A single text file is one text, to which nothing is added. Around
each document stand the tokens that its tokenizer has for that (`Tokenizer.begins`, `Tokenizer.end_of_text`). If it has
none, as bytes and chars, a document ends in a line break, which is added where it is missing.
"""

import dataclasses
import hashlib
import itertools
import json
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tpfuse.errors import UserError, hub_hint, of_disk
from tpfuse.train.file_patterns import folders_of, is_pattern, matches
from tpfuse.train.messages import warn
from tpfuse.train.text_file import Piece, TextFile
from tpfuse.train.token_file import Progress
from tpfuse.train.tokenizer import Tokenizer, Tokens, document_start

STANDARD_LIBRARY = "the source of the Python standard library"
_BATCH = 1 << 20  # characters in one call of the tokenizer
_NAMED = 5  # files that a warning names
_QUIET = 2.0  # seconds before progress is shown


@dataclasses.dataclass
class Corpus:
    """The text of some files. source: its description. field: the field of records with the text.

    several: whether each file is a document of its own, and one that cannot be read is left out. left_out: why, for
    each such file of the last reading. empty: the number of empty documents in the last reading.
    """

    source: str
    paths: list[Path]
    field: str = "text"
    several: bool = True
    left_out: list[str] = dataclasses.field(default_factory=list)
    empty: int = 0

    @property
    def documents(self) -> bool:
        """Return whether it is known where documents end. Raise UserError if the one file cannot be opened."""
        return self.several or not TextFile(self.paths[0], self.field).is_text

    def identity(self, tokenizer: Tokenizer) -> str:
        """Return a digest of the files' names, sizes and last changes, and of the tokenizer."""
        status = [(str(path), *_status(path)) for path in self.paths]
        described = json.dumps([self.field, self.several, status, tokenizer.as_json()])
        return hashlib.sha256(described.encode()).hexdigest()

    def pieces(self, doing: str = "reading") -> Iterator[Piece]:
        """Yield all documents in order, without empty ones. doing: what the progress bar says.

        Raise UserError for a file that cannot be read, or, of several, that cannot be read to its end.
        """
        self.left_out, self.empty, done, begun, documents = [], 0, 0, False, self.documents
        sizes = [_status(path)[0] for path in self.paths]
        tqdm.set_lock(threading.RLock())  # its own has a semaphore, which would outlive a rank that exits at once
        with tqdm(desc=doing, total=sum(sizes), unit="B", unit_scale=True, delay=_QUIET, disable=None) as bar:
            for path, size in zip(self.paths, sizes, strict=True):
                for text, ends in self._of_file(path, bar, done):
                    piece = Piece(text, ends and documents)
                    if piece.text or (piece.ends and begun):
                        yield piece
                        begun = not piece.ends
                    else:
                        self.empty += 1
                done += size
                bar.update(done - bar.n)

    def _of_file(self, path: Path, bar: "tqdm[object]", done: int) -> Iterator[Piece]:
        begun = False
        try:
            file = TextFile(path, self.field)
            for piece in file.pieces():
                bar.update(max(0, done + file.position() - bar.n))
                begun = True
                yield piece
        except UserError as error:
            if begun or not self.several:
                raise
            self.left_out.append(str(error))


def _status(path: Path) -> tuple[int, int]:
    """Return a file's size in bytes, and when its contents or its permissions changed last; zeros if it has none."""
    try:
        status = path.stat()
        return status.st_size, status.st_ctime_ns
    except OSError:
        return 0, 0


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(folders):
            yield path


def _folder(root: Path) -> list[Path]:
    files = [file for folder in folders_of(root) for file in folder.iterdir() if not file.is_dir()]
    return sorted(file for file in files if not file.name.startswith("."))


def find_text(path: Path | None, field: str = "text") -> Corpus:
    """Return the text of a file, of all files below a folder, or of those that match a pattern, in order of names.

    path: None for the source of the Python standard library. Hidden files of a folder are left out. Raise UserError if
    there is no such file, and for a list of sources.
    """
    try:
        if path is None:
            corpus = Corpus(STANDARD_LIBRARY, list(_standard_library()))
            if not corpus.paths:
                raise UserError("this Python has no source of its standard library: give a text with --data.path")
            return corpus
        if path.is_dir():
            return Corpus(str(path), _folder(path), field)
        if is_pattern(path):
            return Corpus(str(path), matches(path), field)
        if not path.exists():
            hint = hub_hint(str(path), f"--repo-type dataset {path}")
            raise UserError(f"{path} does not exist: expected a file, a folder or a pattern in quotes{hint}")
        if path.suffix == ".toml":
            raise UserError(f"{path} is a list of sources: give one of the sources in it")
    except OSError as error:
        raise UserError(f"cannot read {of_disk(error)}") from None
    return Corpus(str(path), [path], field, several=False)


def characters(corpora: Iterable[Corpus]) -> Iterator[str]:
    """Yield the texts with what chars and bytes add to them."""
    for corpus in corpora:
        yield from (piece.text for piece in _ended(corpus.pieces("counting characters")))


def encoded(corpus: Corpus, tokenizer: Tokenizer, progress: Progress | None = None) -> Iterator[Tokens]:
    """Yield the tokens of all documents in parts, and warn of what is left out. Raise UserError.

    progress: the first `progress.pieces` pieces of the text are left out, and those that follow are counted in it.
    """
    begins = np.array(tokenizer.begins, dtype=np.int64)
    last = [] if tokenizer.end_of_text in (None, *tokenizer.begins) else [tokenizer.end_of_text]
    ends = np.array(last, dtype=np.int64)
    pieces = corpus.pieces("encoding")
    if document_start(tokenizer) is None:
        pieces = _ended(pieces)
    first = corpus.documents
    cut = _cut(pieces, tokenizer)
    for piece in itertools.islice(cut, 0 if progress is None else progress.pieces):
        first = piece.ends
    for batch in _batches(cut):
        parts: list[Tokens] = []
        for piece, tokens in zip(batch, tokenizer.encode_all([piece.text for piece in batch]), strict=True):
            parts += [begins.astype(tokens.dtype)] if first else []
            parts += [tokens, ends.astype(tokens.dtype)] if piece.ends else [tokens]
            first = piece.ends
        if progress is not None:
            progress.pieces += len(batch)
        yield np.concatenate(parts)
    if left_out := corpus.left_out:
        first_ones = "; ".join(left_out[:_NAMED])
        more = f"; and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        warn(f"{len(left_out)} of {len(corpus.paths)} files of {corpus.source} are left out: {first_ones}{more}")
    if corpus.empty and not corpus.several:
        warn(f"{corpus.empty} documents of {corpus.source} have no text")


def _ended(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces, with a line break at the end of each document that has none."""
    last = ""
    for text, ends in pieces:
        last = text[-1:] or last
        yield Piece(text + "\n" if ends and last != "\n" else text, ends)


def _cut(pieces: Iterator[Piece], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield pieces whose tokens are, one after another, those of their whole document."""
    held = ""
    for text, ends in pieces:
        held += text
        place = len(held) if ends else tokenizer.cut(held)
        if place:
            yield Piece(held[:place], ends)
            held = held[place:]
    if held:
        yield Piece(held, False)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces that have about `_BATCH` characters."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
