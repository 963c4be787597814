"""The configuration of one command: every owner's settings, from every source, checked.

A key's value comes from the last of these that names it: the owner's default, the preset of
`model_name`, the file of `config=FILE.yml`, the config.yml of the run that is resumed, the command
line. All of them are text until pydantic reads them by the owner's types, so a value means the same
wherever it is written. What fits no single owner's types is in `octablox.checks`.
"""

import dataclasses
import difflib
import importlib.resources
import pathlib
import typing
from collections.abc import Sequence
from typing import Any

import pydantic
import yaml

from octablox import checks, maxtext
from octablox.errors import UserError
from octablox.settings import (
    ARCHITECTURE_KEYS,
    KEYS,
    OWNERS,
    Config,
    Value,
    difference,
    dump,
    of_a_run,
)

__all__ = ["KEYS", "OWNERS", "Config", "Resolved", "Value", "difference", "dump", "load"]
__all__ += ["preset", "preset_names", "read", "write"]


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A config, and for each of its keys where the value comes from.

    Attributes:
      config: the settings.
      sources: key -> "default", "preset NAME", "config FILE", "run folder" or "command line".
      resuming: whether the run folder has a checkpoint, so that its config.yml was read.
    """

    config: Config
    sources: dict[str, str]
    resuming: bool = False


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The keys that one source names, as text."""

    source: str
    values: dict[str, str]


def load(args: Sequence[str]) -> Resolved:
    """Resolves `key=value` arguments to a checked config.

    What depends on how many devices there are is checked only where `num_cpu_devices` says it;
    `checks.check_devices` does it once the devices are known.

    Raises:
      UserError: an argument, a key, a value or a combination of values that cannot work.
    """
    given = _parse(args)
    layers = []
    if "config" in given.values:
        path = given.values.pop("config")
        layers.append(_Layer(f"config {path}", _read_file(pathlib.Path(path))))
    saved = _saved_run([*layers, given])
    if saved is not None:
        layers.append(saved)
    layers.append(given)
    path, _ = _lookup("load_parameters_path", layers)
    if path and saved is None:
        layers.insert(0, _of_parameters(pathlib.Path(path)))
    name, source = _lookup("model_name", layers)
    layers.insert(0, _Layer(f"preset {name}", preset(name)))
    values, sources = _merge(layers)
    values["model_name"], sources["model_name"] = name, source
    config = _build(values, sources)
    checks.check(config)
    if config.mesh.num_cpu_devices:
        checks.check_devices(config, config.mesh.num_cpu_devices)
    return Resolved(config, sources, resuming=saved is not None)


def preset_names() -> list[str]:
    """The names that `model_name` can have."""
    folder = importlib.resources.files("octablox.presets")
    return sorted(f.name.removesuffix(".yml") for f in folder.iterdir() if f.name.endswith(".yml"))


def preset(name: str) -> dict[str, str]:
    """The keys of a preset, as text."""
    if name not in preset_names():
        maxtext.accepts("model_name", name)
        names = ", ".join(preset_names())
        raise UserError(f"model_name: expected one of {names}, got {name!r}{_nearest(name, names)}")
    text = (importlib.resources.files("octablox.presets") / f"{name}.yml").read_text()
    return _read_yaml(text, f"preset {name}")


def write(config: Config, path: pathlib.Path) -> None:
    """Writes the config as flat YAML, which `config=FILE` and a resumed run read back.

    Without the keys of a launch: a resumed run may have other processes.
    """
    path.write_text(yaml.safe_dump(of_a_run(dump(config)), sort_keys=False))


def read(path: pathlib.Path) -> Config:
    """Reads what `write` wrote.

    Raises:
      UserError: the file cannot be read, or is no config.
    """
    values, sources = _merge([_Layer(f"config {path}", _read_file(path))])
    return _build(values, sources)


def _parse(args: Sequence[str]) -> _Layer:
    values: dict[str, str] = {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals:
            raise UserError(f"expected key=value, got {arg!r}{_hint_for_bare(arg)}")
        if key in values:
            raise UserError(f"{key} is given twice: {values[key]!r} and {value!r}; keep one")
        values[key] = value
    return _Layer("command line", values)


def _hint_for_bare(arg: str) -> str:
    if arg.endswith((".yml", ".yaml")):
        return f"; write config={arg}, or leave MaxText's base.yml out"
    bare = arg.lstrip("-")
    if bare in KEYS:
        return f"; write {bare}=VALUE"
    return ""


def _read_file(path: pathlib.Path) -> dict[str, str]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"config: cannot read {str(path)!r}: {reason}") from error
    return _read_yaml(text, str(path))


def _read_yaml(text: str, name: str) -> dict[str, str]:
    """Flat YAML, every value as the text that stands in the file (BaseLoader types nothing)."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{name}{where} is not YAML: expected lines of `key: value`") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{name}: expected lines of `key: value`, got a {root.id}")
    values: dict[str, str] = {}
    for key, value in root.value:
        line = f"{name} line {key.start_mark.line + 1}"
        if not isinstance(value, yaml.ScalarNode):
            raise UserError(f"{line}: {key.value}: expected one value, got a {value.id}")
        if key.value in values:
            raise UserError(f"{line}: {key.value} is given twice; keep one")
        values[key.value] = value.value
    return values


def _saved_run(layers: Sequence[_Layer]) -> _Layer | None:
    """The config.yml of the named run, where it has a checkpoint to resume from."""
    run_name, _ = _lookup("run_name", layers)
    base, _ = _lookup("base_output_directory", layers)
    folder = pathlib.Path(base) / run_name
    checkpoints = folder / "checkpoints"
    if not run_name or not (folder / "config.yml").is_file() or not checkpoints.is_dir():
        return None
    if not any(step.name.isdigit() for step in checkpoints.iterdir()):
        return None
    values = _read_file(folder / "config.yml")
    name, source = _lookup("model_name", layers)
    if source != "default" and name != values.get("model_name"):
        raise UserError(
            f"run {run_name} has checkpoints of model_name={values.get('model_name')}, got "
            f"model_name={name}; leave model_name out to resume it, or choose another run_name"
        )
    # A run folder that was moved is still that run.
    values |= {"run_name": run_name, "base_output_directory": base}
    return _Layer("run folder", values)


def _of_parameters(folder: pathlib.Path) -> _Layer:
    """What the parameters in a folder (a converted one, or a run's) are made for."""
    if (folder / "config.json").is_file():
        raise UserError(
            f"load_parameters_path: {folder} is a Hugging Face checkpoint; convert it first: "
            f"octablox convert --from hf {folder} --to octablox NEW_FOLDER"
        )
    if not (folder / "config.yml").is_file():
        raise UserError(
            "load_parameters_path: expected a folder that octablox convert has finished, or a "
            f"run's folder, got {folder}"
        )
    values = _read_file(folder / "config.yml")
    keys = ("model_name", *ARCHITECTURE_KEYS, "tokenizer_path")
    kept = {key: values[key] for key in keys if key in values}
    tokenizer = folder / "hf" / "tokenizer.json"
    if tokenizer.is_file():
        kept["tokenizer_path"] = str(tokenizer)
    return _Layer(f"parameters {folder}", kept)


def _lookup(key: str, layers: Sequence[_Layer]) -> tuple[str, str]:
    """The value and the source of `key` before anything is typed."""
    for layer in reversed(layers):
        if key in layer.values:
            return layer.values[key], layer.source
    owner = OWNERS[KEYS[key]] if key in KEYS else Config
    return str(owner.model_fields[key].default), "default"


def _merge(layers: Sequence[_Layer]) -> tuple[dict[str, str], dict[str, str]]:
    """Values and sources by key; a later layer wins."""
    values: dict[str, str] = {}
    sources = dict.fromkeys(["model_name", *KEYS], "default")
    for layer in layers:
        where = "" if layer.source == "command line" else f"{layer.source}: "
        for key, value in layer.values.items():
            if _accepts_maxtext(key, value, where):
                continue
            if key not in KEYS and key != "model_name":
                known = ["config", *sources]
                raise UserError(f"{where}unknown key {key!r}{_nearest(key.lstrip('-'), known)}")
            values[key], sources[key] = value, layer.source
    return values, sources


def _accepts_maxtext(key: str, value: str, where: str) -> bool:
    try:
        return maxtext.accepts(key, value)
    except UserError as error:
        raise UserError(f"{where}{error}") from None


def _nearest(word: str, known: Sequence[str] | str) -> str:
    candidates = known.split(", ") if isinstance(known, str) else known
    close = difflib.get_close_matches(word, candidates, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _build(values: dict[str, str], sources: dict[str, str]) -> Config:
    owners = {}
    for name, owner in OWNERS.items():
        mine = {key: value for key, value in values.items() if KEYS.get(key) == name}
        try:
            owners[name] = owner.model_validate(mine)
        except pydantic.ValidationError as error:
            raise UserError(_explain(error, owner, sources)) from None
    model_name = values.get("model_name", Config.model_fields["model_name"].default)
    return Config.model_validate({"model_name": model_name, **owners})


# pydantic's name of an error -> what was expected; {} are the error's own numbers
_EXPECTED = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}


def _explain(
    error: pydantic.ValidationError, owner: type[pydantic.BaseModel], sources: dict[str, str]
) -> str:
    """The first of pydantic's errors as one line."""
    first = error.errors()[0]
    key, got = str(first["loc"][0]), first["input"]
    hint = ""
    if first["type"] == "literal_error":
        allowed = ", ".join(map(str, typing.get_args(owner.model_fields[key].annotation)))
        expected, hint = f"one of {allowed}", _nearest(str(got).lower(), allowed)
    elif first["type"].startswith("int_"):
        expected, hint = "a whole number", _whole(str(got), key)
    elif first["type"] in _EXPECTED:
        expected = _EXPECTED[first["type"]].format(**first.get("ctx", {}))
    else:
        expected = first["msg"]
    source = sources[key]
    where = "" if source == "command line" else f" ({source})"
    return f"{key}: expected {expected}, got {got!r}{where}{hint}"


def _whole(got: str, key: str) -> str:
    """What a float that is whole is called, as in steps=1e3."""
    try:
        number: Any = float(got)
        return f"; write {key}={int(number)}" if number.is_integer() else ""
    except (ValueError, OverflowError):
        return ""
