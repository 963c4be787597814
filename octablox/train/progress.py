"""The live display of a run: what it does, how far it is, how healthy FP8 is.

On a terminal, lines that refresh in place; elsewhere (CI, a pipe), one plain line for each event.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_OPERANDS = {"weights": "weight", "activations": "act", "gradients": "grad"}


class Progress:
    """Context manager that shows a run from `first_step` (steps done before) to `total_steps`.

    `note` says what goes on now, `update` and `eval` what came out. Nothing here raises for a
    metric that is absent or None.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        bigram_nats: float,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total = total_steps
        self._step = first_step
        self._bigram = bigram_nats
        self._console = console or Console()
        self._clock = clock
        self._train: dict[str, Any] = {}
        self._eval_loss: float | None = None
        self._note = ""
        self._note_since = clock()
        self._timed_from: tuple[int, float] | None = None  # step and time of the first update
        self._ends_at: float | None = None  # by the clock
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._note = ""
        if self._live:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Says what goes on (“compiling the train step…”), until the next note or number."""
        self._note, self._note_since = text, self._clock()
        self._show(text)

    def update(self, train_metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a logged step: a row of kind "train"."""
        if self._note and not self._live:
            self._show(f"{self._note} took {self._clock() - self._note_since:.1f} s")
        self._note = ""
        self._train = dict(train_metrics)
        self._step = train_metrics["step"]
        self._ends_at = self._estimated_end()
        health = " ".join(
            f"{name} {saturated}/{flushed}" for name, saturated, flushed in self._health()
        )
        fp8 = f"  fp8 saturated/flushed: {health}" if health else ""
        self._show(f"step {self._step}/{self._total}  {self._numbers()}{fp8}")

    def eval(self, eval_loss: float, step: int) -> None:
        """Takes the loss of the held-out split after `step` steps, in nats a token."""
        self._note = ""
        self._eval_loss = eval_loss
        self._show(f"step {step}/{self._total}  {self._eval_text()}")

    def _show(self, line: str) -> None:
        """Prints `line` where lines stay; refreshes the display where it lives."""
        if self._live:
            self._live.refresh()
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _numbers(self) -> str:
        loss, speed = self._train.get("loss"), self._train.get("tokens_per_second")
        parts = []
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        if speed is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if self._ends_at is not None:
            remaining = max(0, round(self._ends_at - self._clock()))
            parts.append(f"ETA {timedelta(seconds=remaining)}")
        return "  ".join(parts)

    def _eval_text(self) -> str:
        return f"eval loss {self._eval_loss:.4f} (bigram {self._bigram:.4f})"

    def _estimated_end(self) -> float | None:
        """By the pace since the first update, evaluations and checkpoints included."""
        now = self._clock()
        if self._timed_from is None:  # what came before it was mostly compilation
            self._timed_from = (self._step, now)
        step, since = self._timed_from
        pace: float | None
        if self._step > step:
            pace = (now - since) / (self._step - step)
        else:
            pace = self._train.get("step_seconds")
        return None if pace is None else now + (self._total - self._step) * pace

    def _health(self) -> list[tuple[str, str, str]]:
        """(operand, saturated, flushed) in percent; empty where the recipe has no FP8."""
        rows = []
        for name, key in _OPERANDS.items():
            saturated = self._train.get(f"{key}_saturated")
            flushed = self._train.get(f"{key}_flushed")
            if saturated is not None and flushed is not None:
                rows.append((name, f"{100 * saturated:.3f}%", f"{100 * flushed:.3f}%"))
        return rows

    def _render(self) -> RenderableType:
        """What the terminal shows now."""
        lines: list[RenderableType] = [self._bar()]
        if self._train:
            lines.append(Text(self._numbers()))
        if self._eval_loss is not None:
            lines.append(Text(self._eval_text(), self._eval_style()))
        if health := self._health():
            lines.append(_health_table(health))
        if self._note:
            elapsed = self._clock() - self._note_since
            self._spinner.update(text=Text(f"{self._note} {elapsed:.0f} s", "cyan"))
            lines.append(self._spinner)
        return Group(*lines)

    def _eval_style(self) -> str:
        """Green once the model knows more than pairs of tokens."""
        return "green" if self._eval_loss is not None and self._eval_loss < self._bigram else ""

    def _bar(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text(f"step {self._step}/{self._total}", "bold"),
            ProgressBar(self._total, self._step, width=40),
            Text(f"{100 * self._step // self._total}%"),
        )
        return row


def _health_table(rows: list[tuple[str, str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("FP8 health")
    table.add_column("saturated", justify="right")
    table.add_column("flushed to zero", justify="right")
    for row in rows:
        table.add_row(*row)
    return table
