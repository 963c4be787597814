"""`octablox check`: does FP8 on this machine come out as it should?

Every recipe's three products on every backend, against float64, on data that shows mistakes. Not
checked is speed; `octablox bench` measures that.

M rows, K contracted, N output columns, E experts.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax import numpy as jnp
from rich.console import Console
from rich.table import Table

from octablox import kernels
from octablox.fp8 import RECIPES, Recipe
from octablox.gmm import gmm
from octablox.options import Parser

PRODUCTS = ("out", "dlhs", "drhs")
M, K, N, E = 512, 384, 256, 6
_OUTPUT_ROUNDING = 2.0**-8  # of bfloat16, relative
# Rows of each expert; those past their sum are nobody's and hold NaN.
LAYOUTS = {
    "ragged": [37, 0, 201, 1, 128, 89],
    "one holds all": [0, 0, M, 0, 0, 0],
    "half empty": [0, 150, 0, 106, 0, 200],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of operands in bfloat16: x [M, K], w [E, K, N], dout [M, N], and rows by expert.

    Attributes:
      of_integers: whether integers are measured on it. They have one step for all magnitudes:
        outliers cost them more than their budget, which says nothing of the machine.
    """

    name: str
    of_integers: bool
    x: np.ndarray
    w: np.ndarray
    dout: np.ndarray
    sizes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      error: relative Frobenius error of the worst case; None where the backend refuses.
      budget: what the recipe allows, and the rounding of the output.
      case: the worst one.
      note: why the backend refuses, or what else is wrong.
    """

    recipe: str
    backend: str
    product: str
    error: float | None
    budget: float
    case: str
    note: str

    @property
    def passed(self) -> bool:
        """Within its budget, or refused by name."""
        return self.error is None or (self.error <= self.budget and not self.note)


def cases() -> list[Case]:
    """Magnitudes that are spread, with outliers, tiny, huge; and experts without rows."""
    made = []
    for name, layout in LAYOUTS.items():
        made.append(_case(f"spread, {name}", layout))
    ragged = LAYOUTS["ragged"]
    made.append(_case("outliers", ragged, outliers=30.0))
    made.append(_case("tiny", ragged, scale=1e-12))
    made.append(_case("huge", ragged, scale=1e12))
    return made


def _case(name: str, layout: Sequence[int], scale: float = 1.0, outliers: float = 1.0) -> Case:
    rng = np.random.default_rng(0)
    x = _spread(rng, M, K, orders=(1, 0.5)) * scale
    w = _spread(rng, E, K, N, orders=(1, 0, 0.5))
    dout = _spread(rng, M, N, orders=(1, 0.3)) * 1e-4 * scale
    for a in (x, w, dout):
        a[..., rng.random(a.shape[-1]) < 0.01] *= outliers
    used = sum(layout)
    x[used:], dout[used:] = np.nan, np.nan
    x, w, dout = (np.asarray(jnp.asarray(a, jnp.bfloat16)) for a in (x, w, dout))
    return Case(name, outliers == 1, x, w, dout, np.array(layout, np.int32))


def _spread(rng, *shape, orders):
    """Gaussians whose magnitudes differ by e^order from index to index of each dim."""
    value = rng.normal(size=shape)
    for dim, order in enumerate(orders):
        along = [1] * len(shape)
        along[dim] = shape[dim]
        value = value * np.exp(order * rng.normal(size=along))
    return value


def expected(case: Case) -> dict[str, np.ndarray]:
    """out, dlhs and drhs in float64."""
    x, w, dout = (np.asarray(a, np.float64) for a in (case.x, case.w, case.dout))
    out, dlhs, drhs = np.zeros((M, N)), np.zeros((M, K)), np.zeros((E, K, N))
    end = 0
    for expert, size in enumerate(case.sizes):
        rows, end = slice(end, end + size), end + size
        out[rows] = x[rows] @ w[expert]
        dlhs[rows] = dout[rows] @ w[expert].T
        drhs[expert] = x[rows].T @ dout[rows]
    return dict(zip(PRODUCTS, (out, dlhs, drhs), strict=True))


@functools.partial(jax.jit, static_argnames=("recipe", "backend"))
def _run(x, w, dout, sizes, recipe, backend):
    out, pull = jax.vjp(lambda x, w: gmm(x, w, sizes, recipe=recipe, backend=backend), x, w)
    return out, *pull(dout)


def rows_of(recipe: Recipe, backend: str, given: Sequence[Case]) -> list[Row]:
    """The three products of one recipe on one backend, each with its worst case."""
    worst: dict[str, tuple[float, Row]] = {}
    integers = recipe.act is not None and recipe.act.dtype == "int8"
    for case in (case for case in given if case.of_integers or not integers):
        arrays = (jnp.asarray(a) for a in (case.x, case.w, case.dout, case.sizes))
        try:
            got = _run(*arrays, recipe=recipe, backend=backend)
        except ValueError as refusal:
            note = str(refusal).partition(": ")[2]
            return [Row(recipe.name, backend, "all", None, 0.0, "", note)]
        dead = np.arange(M) >= case.sizes.sum()
        for (product, value), array in zip(expected(case).items(), got, strict=True):
            array = np.asarray(array, np.float64)
            error = float(np.linalg.norm(array - value) / np.linalg.norm(value))
            error = error if np.isfinite(error) else np.inf
            touched = product != "drhs" and array[dead].any()
            row = Row(
                recipe.name,
                backend,
                product,
                error,
                recipe.budget(product) + _OUTPUT_ROUNDING,
                case.name,
                "rows of no expert are not zero" if touched else "",
            )
            badness = np.inf if touched else error
            if product not in worst or badness > worst[product][0]:
                worst[product] = badness, row
    return [row for _, row in worst.values()]


def parser() -> Parser:
    """Of the command's options."""
    made = Parser("check")
    made.add_argument(
        "--recipe", action="append", choices=list(RECIPES), help="only this; once for each"
    )
    made.add_argument("--backend", action="append", choices=list(kernels.BACKENDS), help="likewise")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    return made


def help_text(summary: str, example: str) -> str:
    """What `octablox check --help` prints."""
    after = ["Exit code 0: all within their budgets. 1: one is not. 2: an error, in one line."]
    return parser().help_text("[options]", summary, example, after)


def check(args: Sequence[str]) -> int:
    """Measures and prints; returns 0 if all is within its budget, else 1. UserError."""
    options = parser().parse_args(list(args))
    console, started = Console(), time.monotonic()
    if not console.is_terminal:
        console.width = 160
    device = jax.devices()[0]
    console.print(f"{device.platform}: {device.device_kind}, jax {jax.__version__}")
    found: list[Row] = []
    with console.status("") as status:
        for recipe, backend in _pairs(options):
            status.update(f"{recipe.name} on {backend}")
            found += rows_of(recipe, backend, cases())
    console.print(_table(found))
    wrong = [row for row in found if not row.passed]
    for row in wrong:
        said = row.note or f"more than {row.budget:.2%}"
        console.print(
            f"FAIL {row.recipe} {row.product} on {row.backend} ({row.case}): "
            f"error {row.error:.2%}, {said}",
            style="bold red",
        )
    measured = sum(row.error is not None for row in found)
    console.print(
        f"{measured - len(wrong)} of {measured} products within their budget, "
        f"{time.monotonic() - started:.0f} s",
        highlight=False,
    )
    if options.json:
        content = [dataclasses.asdict(row) | {"passed": row.passed} for row in found]
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if wrong else 0


def _pairs(options) -> Iterator[tuple[Recipe, str]]:
    for backend in options.backend or kernels.BACKENDS:
        for name in options.recipe or RECIPES:
            yield RECIPES[name], backend


def _table(found: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("backend")
    table.add_column("recipe")
    for product in PRODUCTS:
        table.add_column(f"{product}: error / budget", justify="right")
    table.add_column("")
    groups: dict[tuple[str, str], list[Row]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for row in found:
        if row.error is None:
            refused.setdefault((row.backend, row.note), []).append(row.recipe)
        else:
            groups.setdefault((row.backend, row.recipe), []).append(row)
    for (backend, note), recipes in refused.items():
        table.add_row(backend, ", ".join(recipes), "–", "–", "–", note, style="dim")
    for (backend, recipe), rows in groups.items():
        cells = [
            f"[{'green' if row.passed else 'bold red'}]{row.error:.2%}[/] / {row.budget:.2%}"
            for row in rows
        ]
        table.add_row(backend, recipe, *cells, "")
    return table
