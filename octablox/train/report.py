"""What a run shows at its end: loss.png, summary.json and the table on the terminal."""

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octablox.train.metrics import METRICS_FILE, plain, read_metrics, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

_BLUE, _ORANGE, _GREY = "#2f6db5", "#d9601a", "#666666"


def plot_loss(folder: str | os.PathLike, title: str, bigram_nats: float) -> Path:
    """Draws <folder>/loss.png from <folder>/metrics.jsonl and returns its path. UserError.

    Training loss thin and smoothed, evaluations as points, and the bigram entropy, below which a
    model has learnt more than pairs of tokens.
    """
    # The object API: pyplot costs a second more, and would look for a display.
    from matplotlib.figure import Figure

    rows = read_metrics(Path(folder) / METRICS_FILE)
    train = _curve(rows, "train", "loss")
    evaluated = _curve(rows, "eval", "eval_loss")
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    if train.size:
        steps, loss = train
        axes.plot(steps, loss, color=_BLUE, alpha=0.3, linewidth=0.9)
        marker = "o" if loss.size == 1 else ""  # a line of one point shows nothing
        label = "train (smoothed)"
        axes.plot(steps, smoothed(loss), color=_BLUE, marker=marker, linewidth=1.8, label=label)
    if evaluated.size:
        label = f"eval, last {evaluated[1, -1]:.3f}"
        axes.plot(*evaluated, color=_ORANGE, marker="o", markersize=5, linewidth=1.2, label=label)
    label = f"bigram entropy, {bigram_nats:.3f}"
    axes.axhline(bigram_nats, color=_GREY, linestyle="--", linewidth=1.2, label=label)
    _dress(axes, title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path = Path(folder) / "loss.png"
    write_atomically(path, picture.getvalue())
    return path


def _curve(rows: list[dict[str, Any]], kind: str, key: str) -> np.ndarray:
    """[2, points] of steps and finite values, or an empty array."""
    points = [
        (row["step"], row[key])
        for row in rows
        if row.get("kind") == kind and row.get(key) is not None
    ]
    return np.array(points, np.float64).T


def smoothed(loss: np.ndarray) -> np.ndarray:
    """[n] centred running mean over about 5% of the run, narrower towards both ends."""
    half = len(loss) // 40
    total = np.concatenate([[0.0], np.cumsum(loss)])
    at = np.arange(len(loss))
    # As wide on the left as on the right, or the ends would bend towards the middle.
    reach = np.minimum(half, np.minimum(at, at[::-1]))
    return (total[at + reach + 1] - total[at - reach]) / (2 * reach + 1)


def _dress(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.legend(frameon=False, loc="upper right")


def write_summary(folder: str | os.PathLike, summary: Mapping[str, Any]) -> Path:
    """Writes <folder>/summary.json (flat) and returns its path. UserError."""
    path = Path(folder) / "summary.json"
    values = {key: plain(value) for key, value in summary.items()}
    write_atomically(path, json.dumps(values, indent=2, allow_nan=False).encode() + b"\n")
    return path


def summary_table(summary: Mapping[str, Any]) -> "Table":
    """The summary for people: a row for each key, with units."""
    from rich.table import Table

    table = Table(title=f"run {summary['run_name']}" if "run_name" in summary else None)
    table.add_column("what", style="bold")
    table.add_column("value", justify="right")
    for key, value in summary.items():
        if key != "run_name":
            table.add_row(key.removesuffix("_bytes").replace("_", " "), shown(key, plain(value)))
    return table


def shown(key: str, value: Any) -> str:
    """`value` with the unit that `key` implies: "1.25 GiB", "2.414 nats", "73.2 s", "1,024"."""
    if value is None:
        return "–"
    if key.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if key.endswith(("_loss", "_nats")):
        return f"{value:.4f} nats"
    if key.startswith("seconds_") or key.endswith("_seconds"):
        return f"{value:.1f} s"
    if key == "tokens_per_second":
        return f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
