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
    bars: Sequence[tuple[str, dict[str, float]]],
    title: str,
) -> None:
    """Writes the rows, and draws `bars` (label, name -> TFLOP/s), where there is a path.

    Raises:
      UserError: a path that cannot be written.
    """
    if json_path:
        write_atomically(json_path, json.dumps(rows, indent=1).encode() + b"\n")
    if plot_path:
        write_atomically(plot_path, _plot(bars, title))


def _plot(bars, title) -> bytes:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for _, values in bars for name in values))
    height = 1.5 + 0.16 * len(bars) * (len(names) + 1)
    figure = Figure(figsize=(9, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    thick = 0.85 / len(names)
    for number, name in enumerate(names):
        at = [row - 0.425 + (number + 0.5) * thick for row in range(len(bars))]
        drawn = axes.barh(at, [values.get(name, 0) for _, values in bars], thick, label=name)
        axes.bar_label(drawn, fmt="{:.3g}", padding=3, fontsize=6)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
