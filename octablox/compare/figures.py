"""The pictures of a comparison, each drawn twice: wide, and for the width of a phone."""

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from octablox.compare.results import Results, VariantResult
from octablox.health import OPERANDS
from octablox.moe.experts import GEMMS
from octablox.train.report import smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by eyes of every kind (Okabe and Ito, 2008); the reference is black.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_OPERAND_COLOURS = dict(zip(OPERANDS, _COLOURS, strict=False))
_DASHES = dict(zip(GEMMS, ("-", "--"), strict=True))
# figure -> title of its panel, label and scale of its axis
_HEALTH_PANELS = {
    "amax": ("largest magnitude", "absmax of the operand", "log"),
    "sqnr_db": ("signal to noise of the cast", "SQNR, dB", "linear"),
    "saturated": ("saturated", "% of nonzero elements", "linear"),
    "flushed": ("flushed to zero", "% of nonzero elements", "linear"),
}
_WIDE_INCHES, _NARROW_INCHES = 10.5, 4.6
_DPI = 120


@dataclasses.dataclass(frozen=True)
class Picture:
    """One figure: PNGs for a wide and for a narrow page.

    Attributes:
      name: of its file.
      title: what it shows; also stands in the picture.
      caption: how to read it.
    """

    name: str
    title: str
    caption: str
    wide: bytes
    narrow: bytes


def draw(results: Results) -> list[Picture]:
    """Every picture for which there are numbers."""
    return [picture for picture in _all(results) if picture]


def _all(results: Results) -> Iterator[Picture | None]:
    some = [result for result in results.variants if any(run.train.size for run in result.runs)]
    colours = _colours(results)
    if not some:
        return
    yield _twice(
        "train_loss",
        "Training loss",
        "Mean over the seeds, smoothed over 5% of the run; the band reaches from the lowest to the "
        "highest seed. The second panel is the last third of the run.",
        lambda figure, wide: _losses(figure, wide, some, colours, "train"),
    )
    if any(run.eval.size for result in some for run in result.runs):
        yield _twice(
            "eval_loss",
            "Loss on held-out text",
            "Mean over the seeds; the band reaches from the lowest to the highest seed. The second "
            "panel is the last third of the run.",
            lambda figure, wide: _losses(figure, wide, some, colours, "eval"),
        )
    compared = [result for result in some if result.gaps]
    if compared:
        yield _twice(
            "gap",
            "Gap to bf16 in eval loss",
            "Percent of the reference's eval loss at the same step and seed: mean over the seeds "
            "with its 95% interval, each seed as a thin line, and the threshold. The scale is that "
            "of the run's second half; what lies outside is cut off.",
            lambda figure, wide: _gaps(
                figure, wide, compared, colours, results.plan.options.threshold
            ),
        )
    done = [result for result in some if result.median("tokens_per_second")]
    if done:
        yield _twice(
            "cost",
            "Speed and memory",
            "Median over the seeds; each dot is a run. On CPU peak memory is the process's, and "
            "higher where it had to compile.",
            lambda figure, wide: _costs(figure, wide, done, colours),
        )
    for result in (result for result in some if result.casts):
        name = result.variant.name
        yield _twice(
            f"health-{name}",
            f"FP8 health of {name}",
            "One step at each evaluation, median over the seeds; the line is the median layer, the "
            "band reaches over all layers.",
            lambda figure, wide, result=result: _health(figure, wide, result),
        )
        yield _twice(
            f"layers-{name}",
            f"Signal to noise by layer, {name}",
            "Decibels, median over the run; lower is worse. A cast below its type's limit is "
            "marked with a cross.",
            lambda figure, wide, result=result: _layers(figure, wide, result),
        )


def _twice(name, title, caption, draw_into: Callable) -> Picture:
    # The object API: pyplot costs a second more, and would look for a display.
    from matplotlib.figure import Figure

    pictures = []
    for wide in (True, False):
        figure = Figure(dpi=_DPI, layout="constrained")
        draw_into(figure, wide)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        # Not in a small palette: it loses the thin line of a rare colour.
        png = io.BytesIO()
        figure.savefig(png, format="png", pil_kwargs={"optimize": True})
        pictures.append(png.getvalue())
    return Picture(name, title, caption, *pictures)


def _colours(results: Results) -> dict[str, str]:
    """By variant: the references black and grey, the others in turn."""
    greys, others = iter(("#000000", "#888888")), iter(_COLOURS * 4)
    return {
        result.variant.name: next(others if result.reference else greys)
        for result in results.variants
    }


def _grid(figure: "Figure", panels: int, wide: bool, columns: int, height: float) -> list["Axes"]:
    """`panels` axes: in so many columns on a wide page, one below the other on a narrow one."""
    columns = min(columns, panels) if wide else 1
    lines = -(-panels // columns)
    figure.set_size_inches(_WIDE_INCHES if wide else _NARROW_INCHES, height * lines + 0.5)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for unused in axes[panels:]:
        unused.remove()
    return list(axes[:panels])


def _dress(axes: "Axes", title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def _by_seed(result: VariantResult, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [n], and losses [seeds, n] as far as the shortest run goes."""
    curves = [getattr(run, kind) for run in result.runs if getattr(run, kind).size]
    points = min(curve.shape[1] for curve in curves)
    losses = np.stack([curve[1, :points] for curve in curves])
    if kind == "train":
        losses = np.stack([smoothed(curve) for curve in losses])
    return curves[0][0, :points], losses


def _losses(figure, wide, results: Sequence[VariantResult], colours, kind) -> None:
    whole, late = _grid(figure, 2, wide, 2, 3.6)
    results = [r for r in results if any(getattr(run, kind).size for run in r.runs)]
    end = max(run.run.config.run.steps for result in results for run in result.runs)
    late_values = []
    for result in results:
        steps, losses = _by_seed(result, kind)
        colour, mean = colours[result.variant.name], losses.mean(0)
        style = {"color": colour, "linewidth": 1.4, "label": result.variant.name}
        if kind == "eval" or len(steps) == 1:
            style |= {"marker": "o", "markersize": 3}
        for axes in (whole, late):
            axes.plot(steps, mean, **style)
            axes.fill_between(steps, losses.min(0), losses.max(0), color=colour, alpha=0.07, lw=0)
        late_values += losses[:, steps >= end * 2 / 3].ravel().tolist()
    kind = "smoothed training" if kind == "train" else "eval"
    _dress(whole, "whole run", "step", f"{kind} loss, nats per token")
    _dress(late, "last third", "step", f"{kind} loss, nats per token")
    late.set_xlim(end * 2 // 3, end)
    late.locator_params(axis="x", integer=True)
    if late_values:
        low, high = min(late_values), max(late_values)
        room = 0.05 * (high - low) + 1e-3
        late.set_ylim(low - room, high + room)
    whole.legend(frameon=False, fontsize=8)


def _gaps(figure, wide, results: Sequence[VariantResult], colours, threshold) -> None:
    panels = _grid(figure, len(results), wide, 3, 2.9)
    end = max(run.run.config.run.steps for result in results for run in result.runs)
    reach = 2 * threshold
    for result in results:
        later = [gap for step, gap in result.gaps.items() if step >= end / 2]
        reach = max([reach, *(abs(g) for gap in later for g in gap.by_seed.values())])
    for axes, result in zip(panels, results, strict=True):
        colour, steps = colours[result.variant.name], list(result.gaps)
        gaps = list(result.gaps.values())
        mean = np.array([gap.mean for gap in gaps])
        half = np.array([math.nan if gap.half is None else gap.half for gap in gaps])
        for seed in gaps[-1].by_seed:
            label = "each seed" if seed == next(iter(gaps[-1].by_seed)) else None
            values = [gap.by_seed.get(seed, math.nan) for gap in gaps]
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.6, label=label)
        axes.fill_between(
            steps, mean - half, mean + half, color=colour, alpha=0.15, lw=0, label="95% interval"
        )
        axes.plot(steps, mean, color=colour, linewidth=1.8, marker="o", markersize=3, label="mean")
        axes.axhline(0, color="#000000", linewidth=0.8)
        axes.axhline(threshold, color="#b00020", ls="--", lw=1.2, label=f"threshold {threshold:g}%")
        axes.set_ylim(-1.15 * reach, 1.15 * reach)
        final = f": {result.final_gap}" if result.final_gap else ""
        _dress(axes, f"{result.variant.name}{final}", "step", "gap, % of eval loss")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")


def _costs(figure, wide, results: Sequence[VariantResult], colours) -> None:
    panels = _grid(figure, 2, wide, 2, 0.32 * len(results) + 1.3)
    names = [result.variant.name for result in results]
    for axes, key, title, unit in (
        (panels[0], "tokens_per_second", "speed", 1),
        (panels[1], "peak_memory_bytes", "peak memory", 2**30),
    ):
        for place, result in enumerate(results):
            colour = colours[result.variant.name]
            median = result.median(key)
            if median is None:
                continue
            axes.barh(place, median / unit, color=colour, alpha=0.75, height=0.6)
            dots = [run.summary[key] / unit for run in result.runs if run.summary]
            axes.plot(dots, [place] * len(dots), "o", color="#000000", markersize=2.5)
            text = f"{median:,.0f}" if unit == 1 else f"{median / unit:.2f}"
            axes.text(0, place, f" {text}", va="center", color="#ffffff", fontsize=8)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        _dress(axes, title, "tokens per second" if unit == 1 else "GiB", "")
        axes.set_xlim(left=0)


def _health(figure, wide, result: VariantResult) -> None:
    panels = _grid(figure, len(_HEALTH_PANELS), wide, 2, 2.8)
    layers = list(dict.fromkeys(cast.rsplit(".", 2)[0] for cast in result.casts))
    for axes, (name, (title, label, scale)) in zip(panels, _HEALTH_PANELS.items(), strict=True):
        unit = 100 if name in ("saturated", "flushed") else 1
        for gemm in GEMMS:
            for operand in OPERANDS:
                casts = [f"{layer}.{gemm}.{operand}" for layer in layers]
                curves = [result.casts[c][name] for c in casts if c in result.casts]
                if not curves:
                    continue
                points = min(curve.shape[1] for curve in curves)
                values = unit * np.stack([curve[1, :points] for curve in curves])
                values[~np.isfinite(values)] = np.nan
                steps, colour = curves[0][0, :points], _OPERAND_COLOURS[operand]
                axes.plot(
                    steps,
                    np.median(values, axis=0),
                    color=colour,
                    linestyle=_DASHES[gemm],
                    linewidth=1.3,
                    marker="o" if points == 1 else "",
                    label=f"{gemm} {operand}",
                )
                axes.fill_between(
                    steps, values.min(0), values.max(0), color=colour, alpha=0.1, lw=0
                )
        axes.set_yscale(scale)
        if unit == 100:
            axes.set_ylim(0, max(axes.get_ylim()[1], 0.01))
        _dress(axes, title, "step", label)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4 if wide else 2,
        frameon=False,
        fontsize=8,
    )


def _layers(figure, wide, result: VariantResult) -> None:
    layers = list(dict.fromkeys(cast.rsplit(".", 2)[0] for cast in result.casts))
    names = [
        f"{gemm}.{operand}"
        for gemm in GEMMS
        for operand in OPERANDS
        if any(cast.endswith(f".{gemm}.{operand}") for cast in result.casts)
    ]
    height = 0.34 * len(layers) + (1.7 if wide else 2.1)
    figure.set_size_inches(_WIDE_INCHES if wide else _NARROW_INCHES, height)
    axes = figure.subplots()
    values = np.full((len(layers), len(names)), np.nan)
    for (row, column), _ in np.ndenumerate(values):
        cast = f"{layers[row]}.{names[column]}"
        if cast in result.casts:
            values[row, column] = result.typical(cast, "sqnr_db")
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, cmap="viridis", aspect="auto", vmin=min(15, shown.min()))
    middle = (image.norm.vmin + image.norm.vmax) / 2
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            broken = value < result.noise_limit(names[column].rpartition(".")[2])
            colour = "#ffffff" if value < middle else "#000000"
            text = f"{'× ' if broken else ''}{value:.0f}"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=0 if wide else 60, fontsize=7.5)
    if not wide:
        for label in axes.get_xticklabels():
            label.set_ha("right")
            label.set_rotation_mode("anchor")
    axes.set_yticks(range(len(layers)), layers, fontsize=8)
    axes.set_xlabel("cast: GEMM and operand")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="SQNR, dB")
