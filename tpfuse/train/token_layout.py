"""The place of the tokens in llm.c's shards, NumPy's arrays, Megatron's pairs and nanoGPT's files.

| file | its tokens |
|---|---|
| NAME.bin of llm.c, modded-nanogpt and `tpfuse prepare` | uint16 or uint32 after 256 int32 |
| NAME.npy | integers of 1, 2, 4 or 8 bytes in C order after NumPy's header, which may have any shape |
| NAME.bin beside NAME.idx | those of Megatron's indexed dataset, without a header, of the dtype in NAME.idx |
| other NAME.bin | uint16 without a header, as nanoGPT writes them |

The header of llm.c has a magic, a version, the number of tokens, then zeros. With the magic 20240520 and the version 1
tokens are uint16; with 20240801 and 7, which llm.c uses for Llama 3, they are uint32 (github.com/karpathy/llm.c,
dev/data/data_common.py). The number is an int32, whose next 4 bytes are 0; tpfuse reads and writes all 8 as one number,
for files of more than 2^31 tokens.

NAME.idx begins with the 9 bytes MMIDIDX, 0, 0, the version 1 as uint64, the dtype's code as uint8, and the numbers of
sequences and of documents as uint64. Then come the lengths of the sequences as int32 and their places in NAME.bin, in
bytes, as int64 (github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpfuse.checkpoint.untrusted import Unreadable, check_fetched, check_regular, reading
from tpfuse.errors import UserError

HEADER_BYTES = 1024
VERSIONS = {20240520: 1, 20240801: 7}  # by magic, as the dtypes below
DTYPES: dict[int, np.dtype[np.unsignedinteger[Any]]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
SUFFIXES = (".bin", ".npy")
_NUMPY = b"\x93NUMPY"
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # bytes of a token, by the dtype's code; 6 and 7 are floats
_SAVE = ": write the tokens by numpy.save as NAME.npy"
_PART = 1 << 20  # sequences of NAME.idx in one read


@dataclass(frozen=True)
class TokenLayout:
    """The place of the tokens in a file: `count` of them, little-endian, of `width` bytes each, from `offset` on.

    head: the first bytes of the file, or of NAME.idx, which identify it. headerless: whether nothing but its name says
    that the file holds tokens.
    """

    path: Path
    offset: int
    width: int
    count: int
    head: bytes
    headerless: bool = False


def token_layout(path: Path) -> TokenLayout:
    """Return the layout of a token file, checked against the file's length. Raise UserError."""
    with reading(path):
        size = check_regular(path)
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        check_fetched(head)
        if head.startswith(_NUMPY):
            return _of_numpy(path, size)
        index = path.with_suffix(".idx")
        if index.is_file():
            return _of_megatron(path, size, index)
    header = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4")
    if len(head) < HEADER_BYTES or header[0] not in VERSIONS:
        return _without_header(path, size, head, header)
    magic, version = header[:2].tolist()
    count = int.from_bytes(head[8:16], "little")
    if version != VERSIONS[magic]:
        raise UserError(f"{path}: version {version}, expected {VERSIONS[magic]} ({DTYPES[magic]} tokens)")
    width = DTYPES[magic].itemsize
    if size != HEADER_BYTES + width * count:
        raise UserError(f"{path}: {size} bytes, but {count} tokens need {HEADER_BYTES + width * count}")
    return TokenLayout(path, HEADER_BYTES, width, count, head)


def _without_header(path: Path, size: int, head: bytes, header: "np.ndarray[Any, Any]") -> TokenLayout:
    """Return the layout of nanoGPT's files, unless a file of another kind is recognised."""
    expected = f"expected magic {' or '.join(map(str, VERSIONS))}"
    found = f"magic {header[0]}" if len(header) else "an empty file" if not head else f"{size} bytes"
    padded = len(head) == HEADER_BYTES and not any(head[HEADER_BYTES // 4 :])
    if path.suffix != ".bin" or path.with_suffix(".json").exists() or padded or len(header) == 0:
        raise UserError(f"{path} is not a token file: found {found}, {expected}{_SAVE if head else ''}")
    for magic, kind in ((b"PK\x03\x04", "a zip archive, such as torch saves"), (b"LITPKDS", "a file of lit-gpt")):
        if head.startswith(magic):
            raise UserError(f"{path} is not a token file but {kind}: make one from the text with `tpfuse prepare`")
    if size % 2:
        raise UserError(f"{path} is not a token file: it has {size} bytes, and uint16 need an even number{_SAVE}")
    if len(head) >= 16 and not np.frombuffer(head[: len(head) // 4 * 4], "<u2")[1::2].any():
        raise UserError(f"{path} has no header, and every second of its uint16 is 0, as in tokens of 32 bits{_SAVE}")
    return TokenLayout(path, 0, 2, size // 2, b"", headerless=True)


def _of_numpy(path: Path, size: int) -> TokenLayout:
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = read(file)
        except (ValueError, KeyError, SyntaxError) as error:
            raise Unreadable(f"expected NumPy's header, found one that it rejects: {str(error)[:200]}") from None
        offset = file.tell()
        file.seek(0)
        head = file.read(offset)
    if dtype.kind not in "iu" or dtype.byteorder == ">" or (fortran and len(shape) > 1):
        order = " in Fortran order" if fortran else ""
        raise Unreadable(f"expected little-endian integers in C order, found {dtype.str}{order}")
    count = int(np.prod(shape, dtype=object))
    if size != offset + count * dtype.itemsize:
        raise Unreadable(f"{size} bytes, but an array of shape {shape} needs {offset + count * dtype.itemsize}")
    return TokenLayout(path, offset, dtype.itemsize, count, head)


def _of_megatron(path: Path, size: int, index: Path) -> TokenLayout:
    with index.open("rb") as file:
        head = file.read(34)
        if not head.startswith(_MEGATRON) or len(head) < 34:
            raise Unreadable(f"{index.name} beside it is not Megatron's index: found {head[:9]!r}")
        version, sequences = (int.from_bytes(head[at : at + 8], "little") for at in (9, 18))
        width = _MEGATRON_WIDTHS.get(head[17])
        if version != 1 or width is None:
            raise Unreadable(f"{index.name}: version {version} and dtype {head[17]}: expected version 1 and integers")
        end = 0
        for start in range(0, sequences, _PART):
            count = min(_PART, sequences - start)
            file.seek(34 + 4 * start)
            lengths = np.frombuffer(file.read(4 * count), "<i4").astype(np.int64) * width
            file.seek(34 + 4 * sequences + 8 * start)
            places = np.frombuffer(file.read(8 * count), "<i8")
            ends = end + np.cumsum(lengths)
            if len(lengths) != count or not np.array_equal(places, ends - lengths):
                raise Unreadable(f"{index.name}: its sequences do not follow each other from byte 0 on")
            end = int(ends[-1])
    if end != size:
        raise Unreadable(f"{size} bytes, but {index.name} says {end}")
    return TokenLayout(path, 0, width, size // width, head)
