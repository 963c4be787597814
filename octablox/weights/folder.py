"""A model's parameters in a folder, without optimizer or data: what a fine-tuning starts from.

    config.yml        the model's settings, as keys of the command line
    complete.json     written last: file -> its tensors
    weights/          a safetensors file for each layer, and one for the rest
    hf/               what beside its weights a Hugging Face checkpoint came with

A parameter is stored for each layer by itself, in the layout that it is trained in:
`moe_layers.3.experts.gate_up` [E, D, 2, F]. One that is held in FP8 blocks is e4m3, with its
scales beside it in `moe_layers.3.experts.gate_up.scale`, see `fp8_blocks`.
"""

import json
import re
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from octablox import fp8_blocks
from octablox.errors import UserError
from octablox.weights.tensor_files import TensorFile

CONFIG = "config.yml"
COMPLETE = "complete.json"
WEIGHTS = "weights"
THEIRS = "hf"
SCALE = ".scale"
_OF_A_LAYER = re.compile(r"^(mtp\.layers|dense_layers|moe_layers)\.(\d+)\.(.+)$")
_STACK = re.compile(r"^(mtp\.layers|dense_layers|moe_layers)\.(.+)$")


@runtime_checkable
class Parameters(Protocol):
    """Parameters that are read when they are needed, layer by layer."""

    def array(self, name: str) -> Any:
        """One layer's parameter as it is stored; indexed and transposed as NumPy's arrays are.

        Raises:
          UserError: there is none of this name.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether there is a parameter of this name."""
        ...

    def scale(self, name: str) -> Any | None:
        """The scales of a parameter in FP8 blocks, or None of another one."""
        ...

    def release(self) -> None:
        """Gives the memory of what was read back."""
        ...


class Weights:
    """The parameters of a folder that a conversion has finished; see `Parameters`.

    Raises:
      UserError: it is no such folder, or not finished.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            files = json.loads((folder / COMPLETE).read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"expected a folder that octablox convert has finished, got {folder}, which has no "
                f"readable {COMPLETE}: {error}; convert it anew"
            ) from error
        self._file_of = {name: file for file, names in files.items() for name in names}
        self._files: dict[str, TensorFile] = {}

    def array(self, name: str) -> np.ndarray:
        """See `Parameters`."""
        file = self._file_of.get(name)
        if file is None:
            raise UserError(f"{self.folder} has no parameter {name}; convert it anew")
        if file not in self._files:
            self._files[file] = TensorFile(self.folder / WEIGHTS / file)
        return self._files[file].array(name)

    def has(self, name: str) -> bool:
        """See `Parameters`."""
        return name in self._file_of

    def scale(self, name: str) -> np.ndarray | None:
        """See `Parameters`."""
        return self.array(name + SCALE) if name + SCALE in self._file_of else None

    def release(self) -> None:
        """See `Parameters`."""
        for file in self._files.values():
            file.release()


def stack_of(name: str) -> tuple[str, int | None]:
    """The parameter of the train state that a layer's is part of, and the layer; None: all of it.

    "moe_layers.3.experts.down" is ("moe_layers.experts.down", 3).
    """
    match = _OF_A_LAYER.match(name)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else (name, None)


def read(
    parameters: Parameters, path: str, index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    """A part of a parameter of the train state, FP8 blocks dequantized.

    Args:
      parameters: where from.
      path: the parameter, "moe_layers.experts.down", whose first dim is layers.
      index: a slice of each dim, with a start and a stop or without both.
      dtype: of the result.

    Raises:
      UserError: there is no such parameter.
    """
    stack = _STACK.match(path)
    if stack is None:
        return _part(parameters, path, index, dtype)
    layers = range(index[0].start or 0, index[0].stop)
    names = [f"{stack[1]}.{n}.{stack[2]}" for n in layers]
    return np.stack([_part(parameters, name, index[1:], dtype) for name in names])


def has(parameters: Parameters, path: str) -> bool:
    """Whether there is such a parameter of the train state."""
    return parameters.has(_first(path))


def shape(parameters: Parameters, path: str) -> tuple[int, ...]:
    """Of a parameter of the train state, without the dim of layers; UserError as `read`."""
    return tuple(parameters.array(_first(path)).shape)


def _first(path):
    """Its first layer's name, or its own."""
    stack = _STACK.match(path)
    return f"{stack[1]}.0.{stack[2]}" if stack else path


def _part(parameters, name, index, dtype):
    array, scale = parameters.array(name), parameters.scale(name)
    part = np.asarray(array[index])
    if scale is not None:
        part = part.astype(np.float32) * fp8_blocks.of_elements(scale, array.shape, index)
    return part.astype(dtype)
