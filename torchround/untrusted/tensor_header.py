"""Headers of safetensors files. A reader that trusted a header could allocate its lengths or read outside the file."""

import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

from torchround.untrusted.strict_json import parse_json

LENGTH_BYTES = 8


class TensorEntry(NamedTuple):
    """One tensor of a header; its bytes are `[begin, end)` behind the header."""

    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensor_header(
    file: BinaryIO, most_header_bytes: int, item_bytes: Mapping[str, int]
) -> tuple[int, dict[str, TensorEntry]]:
    """Find where the tensors begin in the file, and each tensor's entry in the order of the header.

    `item_bytes` gives the size of an element of each known dtype; lengths of other dtypes cannot be checked. Raises
    `EOFError` if the file or `most_header_bytes` ends before the header or its tensors do, otherwise `ValueError`.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    # Checked before the header is read: a forged length must not be allocated.
    if not 0 < header_bytes <= min(size_bytes - LENGTH_BYTES, most_header_bytes):
        raise EOFError(f"truncated: its header would take {header_bytes} of {size_bytes} bytes")
    start = LENGTH_BYTES + header_bytes
    try:
        content = parse_json(file.read(header_bytes))
        content.pop("__metadata__", None)
        entries = {name: _entry(name, fields, item_bytes) for name, fields in content.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a header of tensors: {error}") from error
    end = start + max((entry.end for entry in entries.values()), default=0)
    if end > size_bytes:
        raise EOFError(f"truncated: its tensors end at byte {end}, the file has {size_bytes}")
    return start, entries


def _entry(name: str, fields: Any, item_bytes: Mapping[str, int]) -> TensorEntry:
    begin, end = fields["data_offsets"]
    shape, dtype_name = tuple(fields["shape"]), str(fields["dtype"])
    numbers = (begin, end, *shape)
    # PyTorch has at most 64 dimensions, and the product of more sizes takes time that grows with their square.
    if len(shape) > 64 or any(type(number) is not int or number < 0 for number in numbers) or end < begin:
        raise ValueError(f"{name} has shape {shape[:64]} at bytes {begin} to {end}")
    if dtype_name in item_bytes and end - begin != math.prod(shape) * item_bytes[dtype_name]:
        raise ValueError(f"{name} takes {end - begin} bytes, but its shape {shape} in {dtype_name} does not")
    return TensorEntry(dtype_name, shape, begin, end)
