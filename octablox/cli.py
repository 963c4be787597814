"""`octablox VERB [key=value ...]`.

Nothing heavy is imported before a verb has work to do: `octablox --help` answers at once.
"""

import contextlib
import dataclasses
import difflib
import functools
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import octablox
from octablox.errors import UserError

if TYPE_CHECKING:
    from octablox.config import Resolved

STARTED = time.monotonic()  # about when the program was launched


def train(args: Sequence[str]) -> int:
    """Trains a model, or resumes the run that `run_name` names."""
    resolved = _load(args)
    _refuse_topology(resolved)
    _check_devices(resolved, _join_hosts(resolved))
    from octablox.train import loop

    with _tile_limits(resolved):
        return loop.train(resolved, started=STARTED)


def show(args: Sequence[str]) -> int:
    """Prints what the settings come to: mesh, parameters, FLOPs and GEMMs; --json for programs."""
    as_json = "--json" in args
    resolved = _load([arg for arg in args if arg != "--json"])
    device_count = _described_devices(resolved) or _check_devices(resolved)
    from octablox import show as report

    with report.described_chip(resolved.config), _tile_limits(resolved):
        report.show(resolved, device_count, as_json=as_json)
    return 0


def compile_step(args: Sequence[str]) -> int:
    """Compiles the train step for TPUs that need not be here; reports memory, time and overlap."""
    flags, keys = _split_flags(args)
    # Before jax is imported: the TPUs are described, not here.
    os.environ["JAX_PLATFORMS"] = "cpu"
    resolved = _load(keys)
    from octablox.aot import command

    with _tile_limits(resolved):
        return command.run(resolved.config, flags)


# Options of `compile` that are no keys of a run: name -> (what follows it, what it does).
COMPILE_FLAGS = {
    "--json": ("FILE", "write the report there, for programs"),
    "--save-hlo": ("FILE", "write the scheduled program's text there"),
    "--timeline": ("FILE", "write there what takes the time, and what waits for what"),
    "--xla": ("OPTION=VALUE", "an option of XLA's; once for each"),
    "--link-gbps": ("NUMBER", "GB/s of the ring that collectives share, instead of the chip's"),
    "--clock-ghz": ("NUMBER", "at which XLA's cycles pass, instead of the chip's"),
}


def _split_flags(args: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Pairs of --name and value, and the key=value arguments."""
    flags, keys, rest = [], [], list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if name not in COMPILE_FLAGS:
            keys.append(arg)
            continue
        if not equals:
            if not rest:
                raise UserError(f"{name}: expected {COMPILE_FLAGS[name][0]} after it, got nothing")
            value = rest.pop(0)
        flags.append((name, value))
    return flags, keys


def _compile_help() -> str:
    verb = VERBS["compile"]
    lines = [
        "octablox compile [key=value ...] [options]",
        "",
        verb.summary,
        "",
        f"  {verb.example}",
    ]
    lines += ["", "Needs libtpu (pip install 'octablox[tpu]'), and no TPU.", "", "options:"]
    for name, (value, text) in COMPILE_FLAGS.items():
        lines.append(f"  {f'{name} {value}':{_KEY_WIDTH}}{text}")
    keys = {
        "compile_topology=NAME:SHAPE": "tpu7x, v6e, v5p or v5e, and the chips along each axis "
        "of a slice: tpu7x:4x4x8, v5e:16x16",
        "compile_topology_num_slices=1": "slices of that shape",
    }
    lines += ["", "keys:"]
    lines += [f"  {key:{_KEY_WIDTH}}{text}" for key, text in keys.items()]
    lines += ["  and every key of a run: octablox train --help lists them", ""]
    lines += ["Exit code 0: it fits. 2: it does not, or cannot be compiled; one line says why."]
    return "\n".join(lines)


def bench(args: Sequence[str]) -> int:
    """Measures grouped matmuls, MoE layers and training steps on this machine."""
    from octablox.bench import command, static

    if "--static" in args:
        options, rest = static.parse(args)
        resolved = _load(rest)
        return static.bench(options, resolved, _check_devices(resolved))

    def prepare(keys: Sequence[str]) -> "Resolved":
        resolved = _load(keys)
        _check_devices(resolved)
        return resolved

    return command.run(args, prepare)


def _bench_help() -> str:
    from octablox.bench import command

    return command.help_text(VERBS["bench"].summary, VERBS["bench"].example)


def convert(args: Sequence[str]) -> int:
    """Reads a Hugging Face checkpoint of DeepSeek-V3's family, or writes one."""
    from octablox.hf import command

    return command.run(args)


def compare(args: Sequence[str]) -> int:
    """Trains one model under several recipes or schedules; reports gap, speed and FP8 health."""
    from octablox.compare import command

    return command.run(args)


def generate(args: Sequence[str]) -> int:
    """Writes text with a converted checkpoint, or with a run's newest one."""
    from octablox import generate as generation

    return generation.run(args)


def _generate_help() -> str:
    from octablox.generate import FLAGS, Options

    verb, defaults = VERBS["generate"], Options()
    lines = ["octablox generate --from DIR [options] [key=value ...]", "", verb.summary, ""]
    lines += [f"  {verb.example}", "", "options:"]
    for name, (value, text) in FLAGS.items():
        default = getattr(defaults, name.replace("-", "_"), "")
        of = f" ({default})" if default != "" else ""
        lines.append(f"  {f'--{name} {value}':{_KEY_WIDTH}}{text}{of}")
    keys = {
        "quantization=fp8_blockwise": "multiply with the experts' FP8 blocks as they are stored",
        "weight_dtype=bfloat16": "hold the parameters in half the memory while they are read",
        "tokenizer_path=FOLDER": "another tokenizer than the one that came with the checkpoint",
    }
    lines += ["", "keys, of those of a run:"]
    lines += [f"  {key:{_KEY_WIDTH}}{text}" for key, text in keys.items()]
    return "\n".join(lines)


def _convert_help() -> str:
    from octablox.hf import command

    return command.help_text(VERBS["convert"].summary)


def calibrate(args: Sequence[str]) -> int:
    """Trains a short run and writes its recipe with the `fixed` ranges that it found."""
    from octablox import calibrate as calibration

    resolved, options = calibration.settings(args)
    _refuse_topology(resolved)
    _check_devices(resolved)
    with _tile_limits(resolved):
        return calibration.run(resolved, options, started=STARTED)


def check(args: Sequence[str]) -> int:
    """Measures every recipe's error on this machine against float64, beside its budget."""
    from octablox import accuracy

    return accuracy.check(args)


def _compare_help() -> str:
    from octablox.compare import plan

    return plan.help_text(VERBS["compare"].summary, VERBS["compare"].example)


def _calibrate_help() -> str:
    from octablox import calibrate

    return calibrate.help_text(VERBS["calibrate"].summary, VERBS["calibrate"].example)


def _check_help() -> str:
    from octablox import accuracy

    return accuracy.help_text(VERBS["check"].summary, VERBS["check"].example)


_KEY_WIDTH = 40  # of a help line: name and default


@dataclasses.dataclass(frozen=True)
class Verb:
    """One of the program's commands: what runs, and an example of it."""

    run: Callable[[Sequence[str]], int]
    example: str
    help: Callable[[], str] | None = None  # instead of the list of all keys

    @property
    def summary(self) -> str:
        """The verb in one line."""
        return (self.run.__doc__ or "").strip()


VERBS = {
    "train": Verb(train, "octablox train model_name=demo quantization=fp8_full steps=200"),
    "show": Verb(show, "octablox show model_name=deepseek3-671b num_cpu_devices=256"),
    "compile": Verb(
        compile_step,
        "octablox compile model_name=deepseek2-16b compile_topology=tpu7x:2x2x2",
        _compile_help,
    ),
    "calibrate": Verb(
        calibrate,
        "octablox calibrate model_name=demo quantization=fp8_full steps=100 --output fixed.yml",
        _calibrate_help,
    ),
    "check": Verb(check, "octablox check --recipe fp8_full --json check.json", _check_help),
    "compare": Verb(
        compare,
        "octablox compare --recipes fp8_full,fp8_blockwise --seeds 3 model_name=demo steps=1000",
        _compare_help,
    ),
    "bench": Verb(
        bench,
        "octablox bench step --recipes bf16,fp8_full model_name=demo num_cpu_devices=8",
        _bench_help,
    ),
    "convert": Verb(convert, "octablox convert --from hf DIR --to octablox DIR", _convert_help),
    "generate": Verb(
        generate, "octablox generate --from DIR --prompt 'Once upon a time'", _generate_help
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 2 after an error that the user can mend."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone, as in `octablox show | head`; Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(args: Sequence[str]) -> int:
    if not args or args[0] in ("--help", "-h", "help"):
        print(_help())
        return 0
    if args[0] == "--version":
        print(f"octablox {octablox.__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in VERBS:
        close = difflib.get_close_matches(name, VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"expected a verb ({', '.join(VERBS)}), got {name!r}{hint}")
    if "--help" in rest or "-h" in rest:
        print((VERBS[name].help or functools.partial(_verb_help, name))())
        return 0
    return VERBS[name].run(rest)


def _help() -> str:
    verbs = "\n".join(f"  {name:10}{verb.summary}" for name, verb in VERBS.items())
    examples = "\n".join(f"  {verb.example}" for verb in VERBS.values())
    return f"""octablox VERB [key=value ...]

FP8 mixture-of-experts training for JAX.

verbs:
{verbs}

examples:
{examples}

octablox VERB --help lists the keys; octablox --version prints the version."""


def _verb_help(name: str) -> str:
    from octablox import config

    verb = VERBS[name]
    lines = [f"octablox {name} [key=value ...]", "", verb.summary, "", f"  {verb.example}", ""]
    lines += [
        "Later sources win: these defaults, the preset of model_name, config=FILE.yml, the config",
        "of the run that run_name resumes, the command line.",
        "",
        *_key_lines(config.Config, ["model_name"]),
        f"    the presets: {', '.join(config.preset_names())}",
        f"  {'config':{_KEY_WIDTH}}  a file of `key: value` lines",
    ]
    for owner in config.OWNERS.values():
        lines += ["", (owner.__doc__ or "").strip().splitlines()[0]]
        lines += _key_lines(owner, owner.model_fields)
    return "\n".join(lines)


def _key_lines(owner, keys) -> list[str]:
    """For each key its name and default, its description, its choices, as wide as the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines = []
    for key in keys:
        field = owner.model_fields[key]
        default = str(field.default).lower() if field.annotation is bool else field.default
        choices = getattr(field.annotation, "__args__", ())
        one_of = f" ({' | '.join(map(str, choices))})" if choices else ""
        text = f"{f'{key}={default}':{_KEY_WIDTH}}  {field.description or ''}{one_of}"
        indent = " " * (_KEY_WIDTH + 4)
        lines += textwrap.wrap(
            text, width, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False
        )
    return lines


def _load(args: Sequence[str]) -> "Resolved":
    from octablox import config

    return config.load(args)


def _refuse_topology(resolved: "Resolved") -> None:
    topology = resolved.config.target.compile_topology
    if topology:
        raise UserError(
            f"compile_topology={topology} is for octablox compile and show; leave it out to train"
        )


def _described_devices(resolved: "Resolved") -> int:
    """Devices of `compile_topology`, on which the mesh must fit; 0 without that key."""
    target = resolved.config.target
    if not target.compile_topology:
        return 0
    from octablox import checks
    from octablox.aot.chips import parse_topology

    topology = parse_topology(target.compile_topology, max(target.compile_topology_num_slices, 1))
    checks.check_devices(resolved.config, topology.devices, topology.slices)
    return topology.devices


def _join_hosts(resolved: "Resolved") -> int:
    """Joins the run's other processes; returns how many there are."""
    from octablox.train import hosts

    processes = hosts.start(resolved.config.hosts)
    devices = resolved.config.mesh.num_cpu_devices
    if devices % processes:
        raise UserError(
            f"num_cpu_devices must be a multiple of the number of processes, {processes}, which "
            f"share them; got {devices}"
        )
    return processes


def _check_devices(resolved: "Resolved", processes: int = 1) -> int:
    """Sets up the devices that the settings ask for, checks against them, and counts them."""
    import jax

    from octablox import checks, mesh

    count, slices = resolved.config.mesh.num_cpu_devices, 1
    if count:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count // processes)
    else:
        count, slices = jax.device_count(), mesh.slice_count(jax.devices())
    checks.check_devices(resolved.config, count, slices)
    return count


def _tile_limits(resolved: "Resolved") -> contextlib.AbstractContextManager[None]:
    """Where the TPU kernels heed `gmm_tiles`, `dlhs_tiles` and `tgmm_tiles`."""
    from octablox import checks
    from octablox.kernels import pallas_tpu, tiles

    limits = checks.tile_limits(resolved.config)
    if limits and pallas_tpu.chip() is None:
        key = f"{next(iter(limits))}_tiles"
        raise UserError(f"{key}: only the TPU kernels have such tiles; leave it out here")
    return tiles.override(**limits)
