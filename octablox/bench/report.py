"""What every benchmark leaves: its rows as JSON, and a picture of them."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octablox.train.metrics import write_atomically


def write(
    rows: Sequence[dict[str, Any]],
    json_path: Path | None,
    plot_path: Path | None,
    bars: Sequence[tuple[str, float]],
    title: str,
    unit: str,
) -> None:
    """Writes the rows, and `bars` (label, value in `unit`), where there is a path. UserError."""
    if json_path:
        write_atomically(json_path, json.dumps(rows, indent=1).encode() + b"\n")
    if plot_path:
        write_atomically(plot_path, _plot(bars, title, unit))


def _plot(bars, title, unit) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.25 * len(bars)), dpi=120, layout="constrained")
    axes = figure.subplots()
    labels, values = zip(*bars, strict=True)
    drawn = axes.barh(range(len(bars)), values, color="#2f6db5")
    axes.bar_label(drawn, fmt="{:.3g}", padding=3, fontsize=8)
    axes.set_yticks(range(len(bars)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
