"""The two directions of a conversion, checked and planned."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from octablox import config as configs
from octablox import fp8_blocks
from octablox.hf import architecture, convert, layout
from octablox.hf.architecture import Architecture
from octablox.hf.checkpoint import INDEX, HfCheckpoint
from octablox.hf.convert import Dtype, File, Matrix, Plan
from octablox.hf.layout import Entry
from octablox.settings import ARCHITECTURE_KEYS
from octablox.train.metrics import write_atomically
from octablox.train.pretrained import open_parameters
from octablox.weights import folder as weights
from octablox.weights.folder import Parameters
from octablox.weights.tensor_files import NAMES, NewTensorFile, Tensor

SHARD_BYTES = 5 * 10**9  # of a file of a Hugging Face checkpoint, at most
# Files beside the weights that are kept.
_BESIDE = ("*.json", "*.txt", "*.model", "*.py", "LICENSE*", "*.jinja")


def plan_import(source: Path, target: Path, dtype: Dtype) -> tuple[Plan, tuple[str, ...]]:
    """From a Hugging Face checkpoint to a folder of parameters; and the config's unknown keys.

    Raises:
      UserError: an architecture or a checkpoint that does not fit, with all that is wrong.
    """
    built = architecture.read(source / "config.json")
    checkpoint = HfCheckpoint(source)
    entries = layout.entries(built.model, built.moe)
    checkpoint.require(entries, built.fp8)
    by_file: dict[str, list[Entry]] = {}
    for entry in entries:
        if not entry.copy:
            by_file.setdefault(_file_name(entry.ours), []).append(entry)
    files = []
    for name, group in by_file.items():
        tensors: dict[str, Tensor] = {}
        for entry in group:
            if entry.ours not in tensors:
                shapes = layout.parameter_shape(entry), layout.scale_shape(entry)
                tensors |= _tensors(checkpoint, entry, entry.ours, weights.SCALE, shapes, dtype)
        files.append(File(target / weights.WEIGHTS / name, tensors, tuple(group)))

    def finish() -> None:
        beside = {path for pattern in _BESIDE for path in source.glob(pattern)}
        convert.copy_files(sorted(beside - {source / INDEX}), target / weights.THEIRS)
        (target / weights.CONFIG).write_text(_settings(built))
        listed = {file.path.name: list(file.tensors) for file in files}
        write_atomically(target / weights.COMPLETE, json.dumps(listed, indent=1).encode())

    of_files = {file.path.name: _stamp(file.path) for file in checkpoint.files}
    fingerprint = {"files": of_files, "dtype": dtype}
    plan = Plan(checkpoint, tuple(files), _ours, fingerprint, target, finish)
    return plan, built.unknown


def plan_export(source: Path, target: Path, dtype: Dtype) -> Plan:
    """From a folder of parameters, or the newest checkpoint of a run, to Hugging Face's layout.

    Raises:
      UserError: neither of the two, or one that is damaged.
    """
    parameters, origin = open_parameters(source), _origin(source)
    settings = configs.read(source / weights.CONFIG)
    entries = layout.entries(settings.model, settings.moe)
    ours = _OurSource(parameters)
    all_tensors = [
        _tensors(ours, entry, entry.theirs, layout.SCALE, (entry.shape, None), dtype)
        for entry in entries
    ]
    groups = _shards([sum(t.nbytes for t in tensors.values()) for tensors in all_tensors])
    files = []
    for n, group in enumerate(groups, 1):
        name = f"model-{n:05}-of-{len(groups):05}.safetensors"
        tensors = {name: t for at in group for name, t in all_tensors[at].items()}
        files.append(File(target / name, tensors, tuple(entries[at] for at in group)))
    dtypes = {tensor.dtype for file in files for tensor in file.tensors.values()}

    def finish() -> None:
        there = origin / weights.THEIRS if origin else None
        convert.copy_files(sorted(there.iterdir()) if there and there.is_dir() else [], target)
        total = sum(convert.file_bytes(file) for file in files)
        weight_map = {name: file.path.name for file in files for name in file.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        built = Architecture(
            settings.model,
            settings.moe,
            fp8=NAMES[fp8_blocks.E4M3] in dtypes,
            power_of_two=dtype == "fp8_ue8m0"
            or (dtype == "keep" and _powers_of_two(ours, entries)),
        )
        float_dtype = "bfloat16" if "BF16" in dtypes else "float32"
        _write_config(target / "config.json", architecture.to_json(built, float_dtype), dtype)

    fingerprint = {"files": _stamps(source), "dtype": dtype}
    return Plan(ours, tuple(files), _theirs, fingerprint, target, finish)


def _powers_of_two(source: "_OurSource", entries: Sequence[Entry]) -> bool:
    """Whether there are scales, all of them powers of two."""
    scales = [source.matrix(entry).scale for entry in entries]
    known = [scale for scale in scales if scale is not None]
    return bool(known) and all(fp8_blocks.powers_of_two(np.asarray(scale)) for scale in known)


def _origin(source: Path) -> Path | None:
    """The converted folder that the parameters are from, if any."""
    if (source / weights.COMPLETE).exists():
        return source
    start = configs.read(source / weights.CONFIG).run.load_parameters_path
    return Path(start) if start else None


class _OurSource:
    """Parameters as a `convert.Source`."""

    def __init__(self, parameters: Parameters):
        self._parameters = parameters
        self.release = parameters.release

    def matrix(self, entry: Entry) -> Matrix:
        scale = self._parameters.scale(entry.ours)
        values = entry.view(self._parameters.array(entry.ours))
        return Matrix(values, None if scale is None else entry.view(scale))

    def dtype(self, entry: Entry) -> np.dtype:
        dtype = self._parameters.array(entry.ours).dtype
        return np.dtype(getattr(dtype, "numpy_dtype", dtype))


def _tensors(source, entry, name, suffix, shapes, dtype: Dtype) -> dict[str, Tensor]:
    """A new file's tensor of this name, and its scales', of these shapes."""
    kind, has_scale = convert.wanted(entry, source.dtype(entry), dtype)
    tensors = {name: Tensor(kind, shapes[0])}
    if has_scale:
        found = source.matrix(entry).scale
        of_scale = "F32" if found is None else NAMES[found.dtype]
        tensors[name + suffix] = Tensor(of_scale, shapes[1] or fp8_blocks.grid(entry.shape))
    return tensors


def _ours(new: NewTensorFile, entry: Entry) -> Matrix:
    scale = entry.ours + weights.SCALE
    has_scale = scale in new.tensors
    values = entry.view(new.array(entry.ours))
    return Matrix(values, entry.view(new.array(scale)) if has_scale else None)


def _theirs(new: NewTensorFile, entry: Entry) -> Matrix:
    scale = entry.theirs + layout.SCALE
    return Matrix(new.array(entry.theirs), new.array(scale) if scale in new.tensors else None)


def _shards(sizes: list[int]) -> list[list[int]]:
    """Numbers of tensors, in order, in groups of at most `SHARD_BYTES` or of one tensor."""
    groups: list[list[int]] = [[]]
    total = 0
    for at, size in enumerate(sizes):
        if groups[-1] and total + size > SHARD_BYTES:
            groups.append([])
            total = 0
        groups[-1].append(at)
        total += size
    return groups


def _file_name(ours: str) -> str:
    """The file of a parameter: a layer's, or `top`."""
    kind, *rest = ours.split(".")
    if kind == "mtp":
        return "mtp.safetensors"
    return f"{kind}.{rest[0]}.safetensors" if rest else "top.safetensors"


def _settings(built: Architecture) -> str:
    settings = built.model.model_dump() | built.moe.model_dump()
    kept = {"model_name": "custom", **{key: settings[key] for key in ARCHITECTURE_KEYS}}
    return yaml.safe_dump(kept, sort_keys=False)


def _write_config(path: Path, config: dict[str, Any], dtype: Dtype) -> None:
    """config.json; what the original says and octablox does not know stays as it was."""
    if path.exists():
        original = json.loads(path.read_text())
        names = {key: original[key] for key in ("architectures", "model_type") if key in original}
        for key in ("rope_parameters", "dtype"):
            original.pop(key, None)
        if "max_position_embeddings" in original:
            config.pop("max_position_embeddings")
        quantized = original.pop("quantization_config", None)
        if dtype == "keep" and quantized and "quantization_config" in config:
            config["quantization_config"] = quantized
        config = {**original, **config, **names}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _stamp(path: Path) -> list[int]:
    """What changes when a file does: its size and its time, ns."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _stamps(source: Path) -> dict[str, list[int]]:
    """Of all that parameters may be read from."""
    parts = [source / weights.WEIGHTS, source / "checkpoints"]
    files = [path for part in parts if part.is_dir() for path in part.glob("**/*")]
    return {str(path.relative_to(source)): _stamp(path) for path in sorted(files) if path.is_file()}
