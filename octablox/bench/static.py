"""`octablox bench gmm --static`: compiles tiles for a chip that is not here, and ranks them.

M rows, K contracted, N output columns, E experts; see `kernels.static_gmm` for what is read.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octablox import checks, fp8, show
from octablox.config import Resolved, dump
from octablox.errors import UserError
from octablox.kernels import static_gmm, tiles
from octablox.kernels.chips import CHIPS, chip_of_topology
from octablox.kernels.static_schedule import TOPOLOGIES, CompileError
from octablox.options import Parser

# The products' names in `octablox show`, as the kernels have them.
_KERNELS: dict[str, static_gmm.Product] = {"out": "gmm", "dlhs": "dlhs", "drhs": "tgmm"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What is not a setting of the model.

    Attributes:
      chip: None: that of `compile_topology`, else tpu7x.
      gemms: of which GEMMs; all if empty.
      products: of which products.
      candidates: how many tiles of each to compile, the best by the model first.
      json: file to write the rows to.
    """

    chip: str | None
    gemms: tuple[str, ...]
    products: tuple[str, ...]
    candidates: int
    json: Path | None


def parse(args: Sequence[str]) -> tuple[Options, list[str]]:
    """Options, and the arguments that are settings."""
    parser = Parser("bench")
    parser.add_argument("what", choices=["gmm"])
    parser.add_argument("--static", action="store_true", required=True)
    parser.add_argument("--chip", choices=TOPOLOGIES)
    parser.add_argument("--gemm", nargs="*", default=[], choices=["gate_up", "gate", "up", "down"])
    parser.add_argument(
        "--product", nargs="*", default=list(tiles.PRODUCTS), choices=tiles.PRODUCTS
    )
    parser.add_argument("--candidates", type=int, default=3)
    parser.add_argument("--json", type=Path)
    words = [arg for arg in args if arg.startswith("--") or "=" not in arg]
    got = parser.parse_args(words)
    if got.candidates < 1:
        raise UserError(f"--candidates: expected at least 1, got {got.candidates}")
    options = Options(got.chip, tuple(got.gemm), tuple(got.product), got.candidates, got.json)
    return options, [arg for arg in args if arg not in words]


def bench(options: Options, resolved: Resolved, device_count: int) -> int:
    """Compiles, prints each row when it is there, then the table by product and rank."""
    rows: list[dict[str, Any]] = []
    found = cases(options, resolved, device_count)
    for number, (gemm, case) in enumerate(found, 1):
        rows.append({"gemm": gemm, **_measure(case)})
        last = rows[-1].get("routed", rows[-1].get("error"))
        print(f"{number}/{len(found)} {gemm} {case.product} {case.tile}: {last}", file=sys.stderr)
        rows.sort(key=lambda row: (row["gemm"], row["product"], row.get("cycles", float("inf"))))
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    _print(rows)
    return 0


def cases(
    options: Options, resolved: Resolved, device_count: int
) -> list[tuple[str, static_gmm.Case]]:
    """The GEMMs' names and the cases to compile, each with its tile."""
    config = resolved.config
    described = chip_of_topology(str(dump(config).get("compile_topology", "")))
    chip = options.chip or (described.name if described else "tpu7x")
    kind = _type(fp8.recipe_from_config(config.quantization))
    found = []
    for gemm in show.gemms(config, checks.resolve_mesh_shape(config, device_count)):
        product = _KERNELS[gemm.product]
        if product not in options.products or (options.gemms and gemm.gemm not in options.gemms):
            continue
        whole = static_gmm.Case(chip, product, kind, gemm.busy, gemm.K, gemm.N, gemm.E)
        try:
            ranked = tiles.ranked(whole.call)
        except ValueError as error:
            raise UserError(f"{gemm.gemm} {gemm.product}: {error}") from None
        found += [
            (gemm.gemm, dataclasses.replace(whole, tile=tile))
            for tile in ranked[: options.candidates]
        ]
    if not found:
        raise UserError("bench gmm: the model has no such GEMM; see octablox show")
    return found


def _type(recipe: fp8.Recipe) -> str:
    """The case's type that a recipe comes to."""
    casts = [cast for cast in (recipe.act, recipe.weight) if cast]
    if not casts:
        return "bf16"
    if any(cast.tile[1] is not None for cast in casts):
        raise UserError(
            f"bench gmm: expected a recipe without blocks along K, got {recipe.name}; "
            f"write quantization=fp8_full"
        )
    return "int8" if all(cast.dtype == "int8" for cast in casts) else "fp8"


def _measure(case: static_gmm.Case) -> dict[str, Any]:
    row: dict[str, Any] = {"chip": case.chip}
    row |= {"product": case.product, "type": case.type, "tile": str(case.tile)}
    row |= {"M": case.rows, "K": case.k, "N": case.n, "E": case.experts}
    try:
        return row | static_gmm.measure(case)
    except CompileError as error:
        return row | {"error": str(error)[:160]}


_COLUMNS = (
    *("gemm", "product", "type", *"EMKN", "tile", "step", "hbm", "equal", "routed", "skewed"),
    *("cycles", "code", "seconds"),
)


def _print(rows: list[dict[str, Any]]) -> None:
    chip = CHIPS[rows[0]["chip"]]
    title = f"{chip.name}, by the cycles of a call with routed rows; HBM gives {chip.hbm} B a cycle"
    table = Table(title=title, title_justify="left", box=None)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("gemm", "product") else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "–")) for column in _COLUMNS))
    for error in sorted({row["error"] for row in rows if "error" in row}):
        table.caption = f"{table.caption or ''}not compiled: {error}\n"
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
