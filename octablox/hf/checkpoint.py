"""A Hugging Face checkpoint that is there: its tensors, wherever they lie, and what is wrong."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from octablox import fp8_blocks
from octablox.errors import UserError
from octablox.hf import layout
from octablox.hf.convert import CHUNK, Matrix
from octablox.hf.layout import MTP_COPIES, Entry
from octablox.weights.tensor_files import DTYPES, NAMES, Tensor, TensorFile

INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16")
_SCALES = ("F32", "BF16", "F8_E8M0")
_MANY = 40  # names that an error lists of one kind


class HfCheckpoint:
    """The tensors of a folder's safetensors files; a `convert.Source`.

    Raises:
      UserError: no such files, or files that are missing or damaged.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file_of: dict[str, TensorFile] = {}
        self._files = [TensorFile(path) for path in _files(folder)]
        for file in self._files:
            for name in file.tensors:
                if name in self._file_of:
                    raise UserError(
                        f"{folder}: {name} is in {self._file_of[name].path.name} and in "
                        f"{file.path.name}; remove the file that is not of this checkpoint"
                    )
                self._file_of[name] = file

    @property
    def files(self) -> list[TensorFile]:
        """All of its files."""
        return self._files

    def tensor(self, name: str) -> Tensor | None:
        """A tensor's dtype and shape; None if there is none."""
        file = self._file_of.get(name)
        return file.tensors[name] if file else None

    def array(self, name: str) -> np.ndarray:
        """A tensor, read when touched."""
        return self._file_of[name].array(name)

    def matrix(self, entry: Entry) -> Matrix:
        """See `convert.Source`."""
        scale = entry.theirs + layout.SCALE
        has_scale = self.dtype(entry) == fp8_blocks.E4M3
        return Matrix(self.array(entry.theirs), self.array(scale) if has_scale else None)

    def dtype(self, entry: Entry) -> np.dtype:
        """See `convert.Source`."""
        tensor = self.tensor(entry.theirs)
        assert tensor is not None
        return DTYPES[tensor.dtype]

    def release(self) -> None:
        """See `convert.Source`."""
        for file in self._files:
            file.release()

    def require(self, entries: list[Entry], fp8: bool) -> None:
        """Raises a UserError with all that is missing, unexpected, misshapen or of another dtype.

        Args:
          entries: what there must be.
          fp8: whether config.json says that weights are in FP8 blocks.
        """
        wrong: dict[str, list[str]] = {}
        expected = set()
        for entry in entries:
            expected.add(entry.theirs)
            tensor = self.tensor(entry.theirs)
            if tensor is None:
                wrong.setdefault("missing", []).append(entry.theirs)
                continue
            if tensor.shape != entry.shape:
                _misshapen(wrong, entry.theirs, entry.shape, tensor.shape)
            if tensor.dtype == NAMES[fp8_blocks.E4M3] and entry.row.fp8 and fp8:
                expected.add(entry.theirs + layout.SCALE)
                self._require_scale(entry, wrong)
            elif tensor.dtype not in _FLOATS:
                wrong.setdefault("of an unsupported dtype", []).append(
                    f"{entry.theirs} {tensor.dtype}"
                )
        extra = [n for n in self._file_of if n not in expected and not n.endswith(layout.DERIVED)]
        if extra:
            wrong["unexpected"] = extra
        self._require_equal_dtypes(entries, wrong)
        if not wrong:
            self._require_copies(entries, wrong)
        if wrong:
            named = [f"{len(names)} {kind}: {_list(names)}" for kind, names in wrong.items()]
            raise UserError(
                f"{self._folder} is not the checkpoint of its config.json: {'; '.join(named)}"
            )

    def _require_scale(self, entry, wrong):
        name, shape = entry.theirs + layout.SCALE, fp8_blocks.grid(entry.shape)
        scale = self.tensor(name)
        if scale is None:
            wrong.setdefault("missing", []).append(name)
        elif scale.shape != shape:
            _misshapen(wrong, name, shape, scale.shape)
        elif scale.dtype not in _SCALES:
            wrong.setdefault("of an unsupported dtype", []).append(f"{name} {scale.dtype}")

    def _require_equal_dtypes(self, entries, wrong):
        """Tensors that become one parameter have one dtype."""
        first: dict[str, tuple[str, str]] = {}
        for entry in entries:
            tensor = self.tensor(entry.theirs)
            if tensor is None or entry.copy:
                continue
            name, dtype = first.setdefault(entry.ours, (entry.theirs, tensor.dtype))
            if tensor.dtype != dtype:
                text = f"{entry.theirs} {tensor.dtype}, {name} {dtype}"
                wrong.setdefault("of another dtype than their neighbours", []).append(text)

    def _require_copies(self, entries, wrong):
        """What is there twice must be equal: here it is one parameter."""
        for entry in entries:
            if not entry.copy:
                continue
            original = next(o for c, o in MTP_COPIES.items() if entry.theirs.endswith(c))
            if not self._equal(entry.theirs, original):
                text = f"{entry.theirs} and {original}, which octablox shares"
                wrong.setdefault("unequal", []).append(text)

    def _equal(self, a, b):
        if self.tensor(a) != self.tensor(b):
            return False
        left, right = self.array(a), self.array(b)
        step = max(CHUNK // max(left[:1].nbytes, 1), 1)
        for first in range(0, len(left), step):
            rows = slice(first, first + step)
            if left[rows].tobytes() != right[rows].tobytes():
                return False
            self.release()
        return True


def _files(folder: Path) -> list[Path]:
    """The checkpoint's files: those that its index names, or all there are."""
    index = folder / INDEX
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise UserError(f"expected a folder with safetensors files, found none in {folder}")
        return found
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{index} is no index of a checkpoint: {error!r}; copy it anew") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing)} files that {INDEX} names: {_list(missing)}; fetch them"
        )
    return [folder / name for name in names]


def _misshapen(wrong, name, expected, got):
    text = f"{name} expected {list(expected)}, got {list(got)}"
    wrong.setdefault("misshapen", []).append(text)


def _list(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return ", ".join(names[:_MANY]) + more
