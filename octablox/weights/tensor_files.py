"""Files of the safetensors format, read and written through memory maps.

A file is 8 bytes that say how long its header is, the header (JSON: name -> dtype, shape and the
bytes' place), and the tensors' bytes. The maps are dropped chunk by chunk, so that a tensor larger
than the memory passes through; the package `safetensors` writes only what it has as a whole.
"""

import errno
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from octablox.errors import UserError

# The format's name of a dtype -> NumPy's.
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100 << 20  # bytes; the format's own limit


class Tensor(NamedTuple):
    """What a header says of a tensor.

    Attributes:
      dtype: the format's name, such as "BF16"; it may be one that is not in `DTYPES`.
      shape: sizes of its dims.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class TensorFile:
    """A file that is there: its header, and its tensors as arrays that are read when touched.

    Attributes:
      path: of the file.
      tensors: name -> dtype and shape, in the header's order.

    Raises:
      UserError: the file cannot be read, is none of the format, or is cut short.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header, begin = _header(self._map)
            self.tensors, self._places = _parse(header, begin, len(self._map))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"expected a safetensors file, got {path}: {error}; copy it anew"
            ) from error

    def array(self, name: str) -> np.ndarray:
        """The tensor as a read-only array over the file."""
        dtype, shape = self.tensors[name]
        return np.ndarray(shape, DTYPES[dtype], self._map, self._places[name])

    def release(self) -> None:
        """Gives the memory of all that was read back; arrays read it anew when touched."""
        self._map.madvise(mmap.MADV_DONTNEED)


class NewTensorFile:
    """A file that is being written: it has its name only when it is whole.

    Use as a context; on an error nothing is left.

    Args:
      path: of the file to be.
      tensors: name -> dtype and shape.

    Raises:
      OSError: the disk has no room for it.

    Attributes:
      tensors: as given.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]):
        self._path, self.tensors = path, tensors
        self._temporary = path.with_name(f".{path.name}.part")
        header, self._places, size = _layout(tensors)
        with self._temporary.open("w+b") as file:
            try:
                # All of it now: a disk that is full later would end the program with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError:
                self._temporary.unlink()
                raise
            file.write(header)
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)

    def array(self, name: str) -> np.ndarray:
        """The tensor as an array over the file; what is assigned to it is written."""
        dtype, shape = self.tensors[name]
        return np.ndarray(shape, DTYPES[dtype], self._map, self._places[name])

    def release(self) -> None:
        """Gives the memory of all that was written back; the file keeps it."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def __enter__(self) -> "NewTensorFile":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self._temporary.unlink(missing_ok=True)
            return
        self._map.flush()
        self._temporary.replace(self._path)


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a whole file of arrays that are in memory."""
    tensors = {name: Tensor(NAMES[a.dtype], a.shape) for name, a in arrays.items()}
    with NewTensorFile(path, tensors) as file:
        for name, array in arrays.items():
            file.array(name)[...] = array


def disk_is_full(error: OSError) -> bool:
    """Whether that is what the error says."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _header(data: mmap.mmap) -> tuple[dict, int]:
    """The header, and where the tensors' bytes begin."""
    (length,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (0,)
    if not 0 < length <= min(len(data) - 8, _MAX_HEADER):
        raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
    return json.loads(data[8 : 8 + length]), 8 + length


def _parse(header: dict, begin: int, size: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    tensors, places = {}, {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= size - begin:
            raise ValueError(f"{name} ends at byte {begin + end} of {size}: it is cut short")
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]))
        if entry["dtype"] in DTYPES and tensors[name].nbytes != end - start:
            raise ValueError(f"{name} has {end - start} bytes, not {tensors[name].nbytes}")
        places[name] = begin + start
    return tensors, places


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The first bytes of a file, where each tensor begins, and the file's size."""
    starts, end = {}, 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, tensor in _widest_first(tensors):
        starts[name], end = end, end + tensor.nbytes
        place = [starts[name], end]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    places = {name: begin + start for name, start in starts.items()}
    return struct.pack("<Q", len(text)) + text, places, begin + end


def _widest_first(tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """As the format has them, so that every tensor is aligned to its elements."""
    return sorted(tensors.items(), key=lambda item: -DTYPES[item[1].dtype].itemsize)
