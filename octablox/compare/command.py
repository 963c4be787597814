"""`octablox compare`: trains what is missing, writes the report, and says the verdict."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from octablox.compare import figures, page, plan, results, runner
from octablox.errors import UserError
from octablox.train.metrics import plain, write_atomically

REPORT, TABLE = "report.html", "compare.json"


def run(args: Sequence[str]) -> int:
    """Returns the exit code: 0 if every variant passes, 1 if not, 130 if it was interrupted.

    Raises:
      UserError: whatever the user can mend.
    """
    planned = plan.make(args)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width that a table must fit
    code = 0
    try:
        if not planned.options.report_only:
            runner.train_all(planned, console)
    except runner.Interrupted:
        code = 130
    found = results.read(planned)
    if not any(result.train.size for variant in found.variants for result in variant.runs):
        if code:
            return code
        raise UserError(f"compare: {planned.folder} has no runs yet; leave --report-only out")
    _write(found)
    _show(found, console)
    if code:
        console.print("interrupted; the same command goes on from here", highlight=False)
        return code
    return 0 if found.passed else 1


def _write(found: results.Results) -> None:
    """report.html, a PNG for each picture, compare.json."""
    folder = found.plan.folder
    pictures = figures.draw(found)
    for picture in pictures:
        write_atomically(folder / f"{picture.name}.png", picture.wide)
    write_atomically(folder / REPORT, page.render(found, pictures).encode())
    table = [{key: plain(value) for key, value in row.items()} for row in results.rows(found)]
    content = {
        "command": found.plan.command,
        "rows": table,
        "schedules": list(found.schedules),
        "evaluations": results.curves(found),
    }
    write_atomically(folder / TABLE, json.dumps(content, indent=1, allow_nan=False).encode())


def _show(found: results.Results, console: Console) -> None:
    head, lines = page.table(results.rows(found))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    for text in found.schedules:
        console.print(text, highlight=False, soft_wrap=True)
    for verdict in found.verdicts:
        style = "green" if verdict.passed else "bold red"
        console.print(verdict.line, style=style, markup=False, highlight=False, soft_wrap=True)
    path = found.plan.folder / REPORT
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)
