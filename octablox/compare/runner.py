"""Trains the runs of a comparison, one after the other, and shows how far they are.

Each is a process of its own: it has all of the machine's memory, its peak memory is its own, and
when it fails the others go on. Compiled programs are shared through `jax_cache_dir`. A run that is
finished is left alone, one that was interrupted is resumed from its checkpoint.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from octablox.compare.plan import Plan, Run, require_same
from octablox.compare.results import RunResult, read_run
from octablox.errors import UserError

OUTPUT_FILE = "output.txt"  # of a run: what its process printed
_REFRESH_SECONDS = 1.0


class Interrupted(Exception):
    """The user stopped the comparison; what was trained is saved."""


def train_all(plan: Plan, console: Console) -> None:
    """Trains what is not there yet.

    Raises:
      UserError: a run's folder is of other settings, or a run failed but not for its numbers.
      Interrupted: on SIGINT or SIGTERM, once the run at hand has saved.
    """
    for run in plan.runs:
        require_same(run)
    with _Display(plan, console) as display:
        for run in plan.runs:
            if not read_run(run).ended:
                display.begins(run)
                _train(run, display)
            if not plan.options.keep_checkpoints and read_run(run).finished:
                shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
            display.ended(run)


def _train(run: Run, display: "_Display") -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / OUTPUT_FILE
    command = [sys.executable, "-m", "octablox", *run.args]
    with path.open("ab") as output:
        # In a session of its own, or the terminal's Ctrl-C would reach it a second time.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        with _signals_to(process) as forwarded:
            while True:
                try:
                    process.wait(_REFRESH_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    display.refresh()
    if forwarded:
        raise Interrupted
    if process.returncode and not read_run(run).ended:
        last = path.read_text(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        raise UserError(f"{run.name} ended with {process.returncode} ({path}): {last[0]}")


@contextmanager
def _signals_to(process: subprocess.Popen) -> Iterator[list[int]]:
    """While entered, SIGINT and SIGTERM go to `process`; yields those that came."""
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)
        process.send_signal(number)

    previous = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Display:
    """On a terminal a table that lives; elsewhere a line when a run begins and when it ends."""

    def __init__(self, plan: Plan, console: Console):
        self._plan, self._console = plan, console
        self._results = {run.name: read_run(run) for run in plan.runs}
        self._now: Run | None = None
        self._live: Live | None = None

    def __enter__(self) -> "_Display":
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._now = None
        if self._live:
            self._live.refresh()
            self._live.stop()

    def begins(self, run: Run) -> None:
        """`run` is the one that trains."""
        self._now = run
        self._line(f"{run.name}: training ({run.folder / OUTPUT_FILE})")

    def refresh(self) -> None:
        """Reads what the run at hand has logged."""
        if self._now and self._live:
            self._results[self._now.name] = read_run(self._now)
            self._live.refresh()

    def ended(self, run: Run) -> None:
        """`run` has ended, or had before."""
        self._results[run.name] = result = read_run(run)
        if self._live:
            self._live.refresh()
        self._line("  ".join([f"{run.name}:", *_cells(result)]))

    def _line(self, text: str) -> None:
        if not self._live:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("variant")
        table.add_column("seed", justify="right")
        for name in ("step", "loss", "eval loss", "gap", "tokens/s"):
            table.add_column(name, justify="right")
        for run in self._plan.runs:
            result = self._results[run.name]
            reference = run.variant.reference
            other = self._results.get(f"{reference}-seed{run.seed}") if reference else None
            style = "cyan" if run is self._now else "" if result.train.size else "dim"
            cells = _cells(result)
            cells.insert(3, _gap_now(result, other))
            table.add_row(run.variant.name, str(run.seed), *cells, style=style)
        return table


def _cells(result: RunResult) -> list[str]:
    """Step, loss, eval loss and tokens a second of a run."""
    steps = result.run.config.run.steps
    if result.failure:
        return [result.failure, "", "", ""]
    if not result.train.size:
        return [f"0/{steps}", "–", "–", "–"]
    step, loss = result.train[:, -1]
    evaluated = f"eval {result.eval[1, -1]:.4f}" if result.eval.size else "–"
    speed = f"{result.tokens_per_second:,.0f} tokens/s" if result.tokens_per_second else "–"
    return [f"{step:.0f}/{steps}", f"loss {loss:.4f}", evaluated, speed]


def _gap_now(result: RunResult, other: RunResult | None) -> str:
    """Between the newest evaluations of the same step."""
    if other is None or not result.eval.size or not other.eval.size:
        return ""
    theirs = dict(other.eval.T)
    step, loss = result.eval[:, -1]
    return f"{100 * (loss / theirs[step] - 1):+.2f}%" if step in theirs else ""
