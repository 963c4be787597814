"""`octablox convert`: a Hugging Face checkpoint in, and out again."""

import typing
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from octablox.errors import UserError
from octablox.hf import convert, plans
from octablox.hf.convert import Dtype
from octablox.train.checkpoint_files import size

DIRECTIONS = {("hf", "octablox"), ("octablox", "hf")}
DTYPES = typing.get_args(Dtype)
_DTYPE_HELP = {
    "keep": "every weight as it is stored; FP8 blocks stay FP8 (the default)",
    "bfloat16": "floats, FP8 blocks dequantized",
    "float32": "the same in float32",
    "fp8": "DeepSeek's FP8 layout: e4m3 with a float32 scale for each 128x128 block",
    "fp8_ue8m0": "the same with scales that are powers of two",
}
USAGE = "octablox convert --from hf DIR --to octablox DIR, or --from octablox DIR --to hf DIR"


def help_text(summary: str) -> str:
    """What `octablox convert --help` prints."""
    lines = [
        "octablox convert --from hf DIR --to octablox DIR [--dtype NAME]",
        "octablox convert --from octablox DIR --to hf DIR [--dtype NAME]",
        "",
        summary,
        "",
        "An octablox DIR is a folder that a conversion wrote, or (to convert from) a run's folder,",
        "whose newest checkpoint is taken. A conversion that was cut short goes on where it was",
        "when the same command is run again.",
        "",
        "--dtype:",
        *(f"  {name:12}{text}" for name, text in _DTYPE_HELP.items()),
        "",
        "To train from it: octablox train load_parameters_path=DIR ...",
    ]
    return "\n".join(lines)


def run(args: Sequence[str]) -> int:
    """Converts as the arguments say; returns the exit code.

    Raises:
      UserError: whatever the user can mend, before anything is written where that is possible.
    """
    source, target, to, dtype = _parse(list(args))
    console = Console()

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if to == "octablox":
        plan, unknown = plans.plan_import(source, target, dtype)
        if unknown:
            note(f"keys of config.json that octablox does not know: {', '.join(unknown)}")
        if not (source / "tokenizer.json").is_file():
            note(f"no tokenizer.json in {source}: give tokenizer_path=, or tokens are bytes")
    else:
        plan = plans.plan_export(source, target, dtype)
    note(f"{source}: all tensors are there; writing {size(plan.nbytes)} to {target}")
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=plan.nbytes)
        skipped = convert.run(plan, lambda done: bar.advance(task, done))
    if skipped:
        note(f"{skipped} of {len(plan.files)} files were whole already")
    if to == "octablox":
        note(f"to train from it: octablox train load_parameters_path={target}")
    else:
        note(f"{target} is a Hugging Face checkpoint of {len(plan.files)} files")
    return 0


def _parse(args: list[str]) -> tuple[Path, Path, str, Dtype]:
    given: dict[str, list[str]] = {}
    takes = {"--from": 2, "--to": 2, "--dtype": 1}
    while args:
        name, equals, value = args.pop(0).partition("=")
        if name not in takes:
            raise UserError(f"expected {USAGE}, with --dtype NAME if wanted; got {name!r}")
        values = [value] if equals else []
        while len(values) < takes[name] and args and not args[0].startswith("--"):
            values.append(args.pop(0))
        if len(values) != takes[name]:
            follows = "hf or octablox and a folder" if takes[name] == 2 else "one value"
            raise UserError(f"{name}: expected {follows} after it; write {USAGE}")
        given[name] = values
    for name in ("--from", "--to"):
        if name not in given:
            raise UserError(f"expected {name}; write {USAGE}")
    (source_kind, source), (target_kind, target) = given["--from"], given["--to"]
    if (source_kind, target_kind) not in DIRECTIONS:
        raise UserError(
            f"expected --from and --to of hf and octablox, got {source_kind} and {target_kind}; "
            f"write {USAGE}"
        )
    (dtype,) = given.get("--dtype", ["keep"])
    if dtype not in DTYPES:
        raise UserError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return Path(source), Path(target), target_kind, typing.cast(Dtype, dtype)
