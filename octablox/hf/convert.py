"""Converts a checkpoint, file by file and chunk by chunk, in either direction.

Everything is checked before anything is written: `plan_import` and `plan_export` read headers
only (and compare what a checkpoint holds twice). `run` then writes the plan's files, each whole or
not at all, and leaves out those that an earlier run has finished.

A chunk is some rows of one tensor in Hugging Face's layout; both sides give arrays in that layout.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from octablox import fp8_blocks
from octablox.errors import UserError
from octablox.hf.layout import Entry
from octablox.train.checkpoint_files import size
from octablox.weights.tensor_files import (
    NAMES,
    NewTensorFile,
    Tensor,
    disk_is_full,
)

# Bytes of a chunk, about.
CHUNK = 64 << 20
# What weights become: as they are, floats, or e4m3 with scales (powers of two: fp8_ue8m0).
Dtype = Literal["keep", "bfloat16", "float32", "fp8", "fp8_ue8m0"]
_FLOATS = {"bfloat16": "BF16", "float32": "F32"}
MANIFEST = "conversion.json"


class Matrix(NamedTuple):
    """A tensor in Hugging Face's layout, and its scales where it is in FP8 blocks.

    The arrays lie over files: they are read and written in parts.
    """

    values: Any
    scale: Any | None


@runtime_checkable
class Source(Protocol):
    """Where tensors come from."""

    def matrix(self, entry: Entry) -> Matrix:
        """The tensor."""
        ...

    def dtype(self, entry: Entry) -> np.dtype:
        """Of its values."""
        ...

    def release(self) -> None:
        """Gives memory back."""
        ...


@dataclasses.dataclass(frozen=True)
class File:
    """One file to be written.

    Attributes:
      path: of the file.
      tensors: name -> dtype and shape, scales included.
      entries: what goes into it.
    """

    path: Path
    tensors: dict[str, Tensor]
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion that is checked.

    Attributes:
      source: where tensors come from.
      files: to be written.
      destination: gives the arrays of a new file in Hugging Face's layout.
      fingerprint: what makes it this conversion; an unfinished one goes on only if it is equal.
      folder: that everything goes into.
      finish: writes what is small, at the end: that makes the folder a checkpoint.
    """

    source: Source
    files: tuple[File, ...]
    destination: Callable[[NewTensorFile, Entry], Matrix]
    fingerprint: Mapping[str, Any]
    folder: Path
    finish: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """Bytes of all files' tensors."""
        return sum(file_bytes(file) for file in self.files)


def file_bytes(file: File) -> int:
    """Bytes of a file's tensors."""
    return sum(tensor.nbytes for tensor in file.tensors.values())


def wanted(entry: Entry, found: np.dtype, dtype: Dtype) -> tuple[str, bool]:
    """The format's dtype that a tensor gets, and whether it has scales."""
    is_fp8 = found == fp8_blocks.E4M3
    if dtype in ("fp8", "fp8_ue8m0"):
        if entry.row.fp8:
            return NAMES[fp8_blocks.E4M3], True
        # DeepSeek's own files: the rest in bfloat16, the router's bias in float32.
        return ("F32" if entry.ours.endswith(".bias") else "BF16"), False
    if dtype == "keep":
        return NAMES[found], is_fp8
    return ("F32" if entry.ours.endswith(".bias") else _FLOATS[dtype]), False


def run(plan: Plan, progress: Callable[[int], None]) -> int:
    """Writes the plan's files; returns how many of them were there already.

    Args:
      plan: to be carried out.
      progress: is told bytes as they are done.

    Raises:
      UserError: the folder holds something else, or the disk is full.
    """
    try:
        done = _begin(plan)
        for file in plan.files:
            if file.path.name in done:
                progress(file_bytes(file))
                continue
            _write(file, plan, progress)
        plan.finish()
        (plan.folder / MANIFEST).unlink()
        return len(done)
    except OSError as error:
        if not disk_is_full(error):
            raise UserError(f"cannot write {plan.folder}: {error.strerror}") from error
        raise UserError(
            f"disk full: {plan.folder} needs {size(plan.nbytes)} in all; free some space "
            "and run the same command again, which goes on from the files that are whole"
        ) from error


def _begin(plan: Plan) -> set[str]:
    """Makes the folder, and names the files that are whole in it."""
    manifest = plan.folder / MANIFEST
    plan.folder.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in plan.folder.iterdir()}
    if there and MANIFEST not in there:
        raise UserError(
            f"expected a new or empty folder, got {plan.folder}, which has {len(there)} files; "
            "give another one"
        )
    if there and json.loads(manifest.read_text()) != plan.fingerprint:
        raise UserError(
            f"{plan.folder} holds an unfinished conversion of other files, or with other options; "
            "give another folder, or delete it"
        )
    temporary = manifest.with_name(f".{MANIFEST}")
    temporary.write_text(json.dumps(plan.fingerprint))
    temporary.replace(manifest)
    for file in plan.files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
    return {file.path.name for file in plan.files if file.path.exists()}


def _write(file: File, plan: Plan, progress: Callable[[int], None]) -> None:
    power_of_two = plan.fingerprint["dtype"] == "fp8_ue8m0"
    with NewTensorFile(file.path, file.tensors) as new:

        def release() -> None:
            plan.source.release()
            new.release()

        since = 0
        for entry in file.entries:
            source, target = plan.source.matrix(entry), plan.destination(new, entry)
            for done in copy(source, target, power_of_two, release):
                progress(done)
                since += done
                if since >= CHUNK:
                    release()
                    since = 0
        plan.source.release()


def copy(
    source: Matrix, target: Matrix, power_of_two: bool, release: Callable[[], None]
) -> Iterator[int]:
    """Copies a tensor in chunks of rows, changing its dtype where they differ; yields bytes."""
    shape = target.values.shape
    row_bytes = math.prod(shape[1:]) * target.values.dtype.itemsize
    # Whole blocks.
    step = max(CHUNK // row_bytes // fp8_blocks.BLOCK, 1) * fp8_blocks.BLOCK
    for first in range(0, shape[0], step):
        rows = slice(first, min(first + step, shape[0]))
        blocks = slice(first // fp8_blocks.BLOCK, -(-rows.stop // fp8_blocks.BLOCK))
        values = _read(source.values[rows], release)
        scale = None if source.scale is None else np.asarray(source.scale[blocks])
        anew = power_of_two and scale is not None and not fp8_blocks.powers_of_two(scale)
        if scale is not None and (target.scale is None or anew):
            values, scale = fp8_blocks.dequantize(values, scale), None
        if scale is None and target.scale is not None:
            values, scale = fp8_blocks.quantize(values, power_of_two)
        _assign(target.values[rows], values, release)
        if target.scale is not None:
            target.scale[blocks] = scale
        yield (rows.stop - first) * row_bytes


def _read(values: Any, release: Callable[[], None]) -> np.ndarray:
    """An array of its own with these values."""
    pieces = _pieces(values)
    if len(pieces) == 1:
        return np.asarray(values)
    copied = np.empty(values.shape, values.dtype)
    _assign(copied, values, release, pieces)
    return copied


def _assign(
    target: np.ndarray,
    values: np.ndarray,
    release: Callable[[], None],
    pieces: list[tuple[slice, ...]] | None = None,
) -> None:
    """`target[...] = values`: equal dtypes as integers, which NumPy copies much faster."""
    if target.dtype == values.dtype:
        bits = np.dtype(f"u{target.dtype.itemsize}")
        target, values = target.view(bits), values.view(bits)
    pieces = pieces or _pieces(target)
    for piece in pieces:
        target[piece] = values[piece]
        if len(pieces) > 1:
            release()


def _pieces(array: Any) -> list[tuple[slice, ...]]:
    """Indices of a matrix's columns, in parts whose bytes, and those between, are a chunk or less.

    The system maps more of a file than is touched: a few rows of a transposed matrix would bring
    all of it into memory.
    """
    strides: tuple[int, ...] = getattr(array, "strides", ())
    if len(strides) < 2 or strides[1] < strides[0]:
        return [(slice(None),) * array.ndim]
    step = max(CHUNK // strides[1], 1)
    return [(slice(None), slice(first, first + step)) for first in range(0, array.shape[1], step)]


def copy_files(names: list[Path], folder: Path) -> None:
    """Small files, as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(name, folder / name.name)
