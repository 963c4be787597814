"""The project's own results: gathers what was measured, and writes the tables that show it.

    python -m benchmarks.results [--compare FOLDER]

`make results` runs everything that leaves its JSON in docs/results/, and this last. Tables stand
between `<!-- NAME table: begin -->` and `<!-- NAME table: end -->`, in README.md and in
docs/results/README.md, and come from the JSON alone. What was not measured is left as it is.
"""

import argparse
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from octablox.bench import gmm
from octablox.compare.page import table as compare_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", RESULTS / "README.md")


def gather(folder: Path) -> None:
    """Copies the report of `octablox compare`, and of its pictures those that the page shows."""
    target = RESULTS / "compare"
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for name in ("report.html", "compare.json", "gap.png", "eval_loss.png"):
        shutil.copy(folder / name, target)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table; the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def compare_markdown(content: dict) -> str:
    """Every variant, its verdict, and whether schedules gave the same numbers."""
    notes = [row["verdict"] for row in content["rows"] if row["verdict"]] + content["schedules"]
    listed = "\n".join(f"- {note}" for note in notes)
    pictures = "![gap to bf16](compare/gap.png)\n\n![eval loss](compare/eval_loss.png)"
    table = markdown(*compare_table(content["rows"]))
    return f"{table}\n\n{listed}\n\n{pictures}\n\n`{content['command']}`"


def compare_summary(content: dict) -> str:
    """What matters most of every variant."""
    head, lines = compare_table(content["rows"])
    some = [head.index(name) for name in ("variant", "eval loss, nats", "gap to bf16", "verdict")]
    return markdown([head[n] for n in some], [[line[n] for n in some] for line in lines])


def check_markdown(rows: list[dict]) -> str:
    """The error of every recipe's products beside its budget, by backend."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["backend"], row["recipe"]), []).append(row)
    lines = []
    for (backend, recipe), products in groups.items():
        if products[0]["error"] is None:
            continue  # a backend of another platform
        cells = [f"{row['error']:.2%} of {row['budget']:.2%}" for row in products]
        lines.append([backend, recipe, *cells])
    return markdown(["backend", "recipe", "out", "dlhs", "drhs"], lines)


def gmm_markdown(rows: list[dict]) -> str:
    """Geometric means over all shapes and splits, in octablox's time."""

    def mean(key, recipe, **only):
        found = [
            row[key]
            for row in rows
            if row["recipe"] == recipe and all(row[name] == value for name, value in only.items())
        ]
        return gmm.geometric_mean(found)

    lines = []
    for rival, word in (("ragged_dot", "`lax.ragged_dot`"), ("qwix", "`qwix.ragged_dot`")):
        cells = [f"{mean(f'{rival}_ratio', recipe):.1f}×" for recipe in gmm.RECIPE_NAMES]
        lines.append([f"{word} takes, of our time", *cells])
    for shape, direction in itertools.product(("E8", "E8 wide"), gmm.DIRECTIONS):
        only = {"shape": shape, "direction": direction}
        cells = [f"{mean('dense_ratio', recipe, **only):.2f}×" for recipe in gmm.RECIPE_NAMES]
        lines.append([f"ours, of a dense matmul of the same FLOPs, {shape}: {direction}", *cells])
    return markdown(["`python -m benchmarks.gmm`, geometric means", *gmm.RECIPE_NAMES], lines)


def step_markdown(rows: list[dict]) -> str:
    """CPU-seconds and memory of a step, ours and MaxText's as recorded."""
    head = ["program", "recipe", "schedule", "CPU-s a step", "s to the first step", "peak MiB"]
    lines = [
        [
            *(row["program"], row["recipe"], row["schedule"], f"{row['cpu_seconds']:.2f}"),
            f"{row['seconds_to_first_step']:.0f}",
            "–" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)


def static_markdown(rows: list[dict]) -> str:
    """Shares of the matrix units' limit, read from TPU schedules."""
    columns = ("rows", "product", "type", "kernel", "step", "equal", "routed", "skewed", "allowed")

    def cell(value):
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [[cell(row.get(column, "–")) for column in columns] for row in rows]
    return markdown(list(columns), lines)


# Table -> its JSON in docs/results/, and what makes it.
TABLES: dict[str, tuple[str, Callable]] = {
    "compare": ("compare/compare.json", compare_markdown),
    "gap": ("compare/compare.json", compare_summary),
    "check": ("check.json", check_markdown),
    "gmm": ("gmm.json", gmm_markdown),
    "step": ("step.json", step_markdown),
    "static": ("tpu_static.json", static_markdown),
}


def with_tables(text: str, results: Path) -> str:
    """`text` with each of its tables as the JSON has it, where there is that JSON."""
    for name, (file, make) in TABLES.items():
        begin, end = f"<!-- {name} table: begin -->\n", f"<!-- {name} table: end -->"
        if begin not in text or not (results / file).is_file():
            continue
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"error: expected {end!r} after its begin, got none")
        made = make(json.loads((results / file).read_text()))
        text = f"{before}{begin}{made}\n{end}{after}"
    return text


def main(argv: list[str] | None = None) -> None:
    """Gathers, then writes the tables of every page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="of octablox compare")
    args = parser.parse_args(argv)
    if args.compare:
        gather(args.compare)
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), RESULTS))


if __name__ == "__main__":
    main()
