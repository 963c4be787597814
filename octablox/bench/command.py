"""`octablox bench gmm | moe | step`: options, tables, files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octablox.bench.report import write
from octablox.config import Resolved
from octablox.errors import UserError
from octablox.fp8 import RECIPES
from octablox.options import Parser

WHAT = ("gmm", "moe", "step")
_RECIPES = "bf16,fp8_full,fp8_blockwise"


def parser(what: str) -> Parser:
    """Of the options of `bench moe` and `bench step`, which may stand among the settings."""
    made = Parser(f"bench {what}")
    made.add_argument(
        "--recipes", default=_RECIPES, help="with commas between (default: %(default)s)"
    )
    made.add_argument(
        "--seconds", type=float, default=10.0, help="to spend on a table row (default: %(default)g)"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    made.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rows there")
    made.add_argument("keys", nargs="*", help="")
    return made


def run(args: Sequence[str], prepare: Callable[[Sequence[str]], Resolved]) -> int:
    """Runs one benchmark; `prepare` loads the settings and sets up their devices. UserError."""
    what, *rest = args or [""]
    if what not in WHAT:
        raise UserError(f"bench: expected {', '.join(WHAT[:-1])} or {WHAT[-1]}, got {what!r}")
    if what == "gmm":
        from octablox.bench import gmm

        return gmm.main(rest)
    given = parser(what).parse_intermixed_args(rest)
    recipes = [name.strip() for name in given.recipes.split(",") if name.strip()]
    for name in recipes:
        if name not in RECIPES:
            raise UserError(f"--recipes: expected some of {', '.join(RECIPES)}, got {name!r}")
    config = prepare(given.keys).config
    if config.quantization.quantization:
        raise UserError("quantization: write --recipes instead")
    rows: list[dict[str, Any]] = []
    if what == "moe":
        from octablox.bench import moe

        for recipe in recipes:
            rows += moe.measure(config, recipe, given.seconds)
    else:
        from octablox.bench import step

        rows = step.measure(given.keys, recipes, given.seconds)
    _print(rows, what)
    write(rows, given.json, given.plot, list(map(_bars, rows)), f"octablox bench {what}")
    return 0


def help_text(summary: str, example: str) -> str:
    """What `octablox bench --help` prints."""
    from octablox.bench import gmm

    lines = ["octablox bench gmm [options]", "octablox bench moe | step [key=value ...] [options]"]
    lines += ["octablox bench gmm --static [key=value ...] [options]", "", summary, ""]
    lines += [f"  {example}", ""]
    lines += ["options of gmm:", *gmm.parser().option_lines(), ""]
    lines += ["options of moe and step:", *parser("step").option_lines(), ""]
    lines += [
        "With --static: ranks tiles of the TPU kernels by compiled schedules, for the GMMs of"
    ]
    lines += ["the settings; needs the extra `tpu`, no TPU. Options: --chip, --gemm, --product,"]
    lines += ["--candidates, --json; docs/tpu_kernels.md."]
    return "\n".join(lines)


def _bars(row):
    """TFLOP/s of every contender: the row's own, and those of times beside it."""
    work = row["tflops"] * row.get("octablox_ms", row.get("step_ms"))
    others = {key.removesuffix("_ms"): work / ms for key, ms in row.items() if key.endswith("_ms")}
    return f"{row['recipe']} {row.get('direction', '')}".strip(), others


def _print(rows, what) -> None:
    table = Table(title=f"octablox bench {what}", title_justify="left", box=None)
    for column in rows[0]:
        table.add_column(
            column.replace("_", " "), justify="left" if column == "recipe" else "right"
        )
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        console.width = 180
    console.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
