"""Write a safetensors file in one pass and constant memory.

The format (https://github.com/huggingface/safetensors) has three parts: 8 bytes with the length of the header,
little-endian; the header, a JSON object {name: {dtype, shape, data_offsets}} padded with spaces to a multiple of 8; the
tensors' bytes, row-major, little-endian, without gaps. The safetensors library itself can write a file only from bytes
that are in memory all at once, and it neither hashes nor syncs.
"""

import json
import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from tpfuse.checkpoint.durable import DurableFile

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 4 * 2**20


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor on any device as uint8 tensors of about CHUNK_BYTES on the CPU."""
    rows = tensor.detach()
    rows = rows.view(-1) if rows.is_contiguous() else rows
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    for piece in torch.split(rows, max(1, CHUNK_BYTES // row_bytes)):
        yield piece.cpu().contiguous().view(-1).view(torch.uint8)


def write_safetensors(file: DurableFile, tensors: dict[str, Tensor]) -> None:
    """Write tensors, which must not be empty, of the dtypes in DTYPES. Raise OSError."""
    assert sys.byteorder == "little"
    # Tensors with large elements come first, so that every tensor starts at a multiple of its element size, which
    # readers require.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        for chunk in _chunks(tensors[name]):
            file.write(chunk.numpy().data)
