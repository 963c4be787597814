"""What the runs of a comparison came to: curves, gaps with their intervals, verdicts.

The *gap* of a run is 100 * (eval loss / eval loss of the reference - 1), at the same step, with the
same seed: percent. Over the seeds it has a mean, and Student's interval at 95%.
"""

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from octablox import config as configs
from octablox.compare.plan import Plan, Run, Variant
from octablox.fp8 import recipe_from_config
from octablox.health import OPERANDS
from octablox.train.metrics import METRICS_FILE, read_metrics

CONFIDENCE = 0.95
# A cast whose noise is beyond this many times its type's rounding error is broken: twice what a
# recipe's budget allows on the tests' data, since int8 depends on how a run's gradients are spread.
NOISE_BUDGET = 3.0


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What one run has left so far.

    Attributes:
      train, eval: [2, points] steps and losses in nats a token; empty if there are none.
      health: rows of kind "health", in the order of their steps.
      summary: of a finished run, else None.
      failure: why it has no end, where its numbers went wrong.
    """

    run: Run
    train: np.ndarray
    eval: np.ndarray
    tokens_per_second: float | None
    health: list[dict[str, Any]]
    summary: dict[str, Any] | None
    failure: str

    @property
    def finished(self) -> bool:
        """Whether it has all its steps."""
        return self.summary is not None

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train: finished, or failed."""
        return self.finished or bool(self.failure)


def read_run(run: Run) -> RunResult:
    """Reads the run's folder, which need not exist."""
    path = run.folder / METRICS_FILE
    rows = read_metrics(path) if path.is_file() else []
    of_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("train", "eval")}
    train, evaluated = of_kind["train"], of_kind["eval"]
    speeds = [row["tokens_per_second"] for row in train[1:] if row.get("tokens_per_second")]
    return RunResult(
        run,
        _curve(train, "loss"),
        _curve(evaluated, "eval_loss"),
        float(statistics.median(speeds)) if speeds else None,
        [row for row in rows if row["kind"] == "health"],
        _summary(run),
        _failure(train[-1:] + evaluated[-1:]),
    )


def _curve(rows, key):
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return np.array(points, np.float64).reshape(-1, 2).T


def _summary(run):
    path = run.folder / "summary.json"
    if not path.is_file():
        return None
    summary = json.loads(path.read_text())
    return summary if summary["steps"] >= run.config.run.steps else None


def _failure(rows):
    """Of the last row of each kind, the one whose number is none."""
    for row in rows:
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in row and row[key] is None:
                return f"stopped at step {row['step']}: its {key.replace('_', ' ')} is not finite"
    return ""


@dataclasses.dataclass(frozen=True)
class Gap:
    """Over the seeds, percent of the reference's eval loss.

    Attributes:
      mean: of the gaps.
      half: half the width of the interval; None for a single seed, which has none.
      by_seed: seed -> gap.
    """

    mean: float
    half: float | None
    by_seed: dict[int, float]

    def __str__(self) -> str:
        interval = "" if self.half is None else f" ± {self.half:.2f}"
        return f"{self.mean:+.2f}{interval}%"


def gap_of(by_seed: dict[int, float]) -> Gap:
    """The mean and its interval."""
    values = list(by_seed.values())
    half = None
    if len(values) > 1:
        from scipy.special import stdtrit  # half a second, and of use only here

        quantile = stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
        half = float(quantile * statistics.stdev(values) / math.sqrt(len(values)))
    return Gap(statistics.fmean(values), half, by_seed)


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """A variant's runs beside its reference's."""

    variant: Variant
    runs: tuple[RunResult, ...]
    reference: "VariantResult | None"

    @functools.cached_property
    def gaps(self) -> dict[int, Gap]:
        """Step -> gap, where every seed of this variant that got so far has an evaluation."""
        if self.reference is None:
            return {}
        others = {result.run.seed: dict(result.eval.T) for result in self.reference.runs}
        found: dict[int, dict[int, float]] = {}
        for result in self.runs:
            other = others.get(result.run.seed, {})
            for step, loss in result.eval.T:
                if step in other:
                    gap = 100 * (float(loss) / float(other[step]) - 1)
                    found.setdefault(int(step), {})[result.run.seed] = gap
        most = max(map(len, found.values()), default=0)
        return {step: gap_of(of) for step, of in sorted(found.items()) if len(of) == most}

    @property
    def final_gap(self) -> Gap | None:
        """After the last step; None where a run is not there yet."""
        steps = self.runs[0].run.config.run.steps
        gap = self.gaps.get(steps)
        return gap if gap and len(gap.by_seed) == len(self.runs) else None

    @property
    def final_losses(self) -> list[float]:
        """Eval losses of the finished runs."""
        return [float(result.eval[1, -1]) for result in self.runs if result.finished]

    def median(self, key: str) -> float | None:
        """Of a number in the finished runs' summaries."""
        values = [r.summary[key] for r in self.runs if r.summary and r.summary[key] is not None]
        return float(statistics.median(values)) if values else None

    @functools.cached_property
    def casts(self) -> dict[str, dict[str, np.ndarray]]:
        """Cast -> figure -> [2, steps] of steps and medians over the seeds; see `health.FIGURES`.

        A figure that was not finite is infinite: of noise there was none, or of the absmax no end.
        """
        found: dict[str, dict[str, dict[int, list[float]]]] = {}
        for result in self.runs:
            for row in result.health:
                for key, value in row.items():
                    cast, dot, figure = key.rpartition(".")
                    if dot:
                        points = found.setdefault(cast, {}).setdefault(figure, {})
                        points.setdefault(row["step"], []).append(
                            math.inf if value is None else value
                        )
        return {
            cast: {
                figure: np.array([(s, float(np.median(of))) for s, of in sorted(points.items())]).T
                for figure, points in figures.items()
            }
            for cast, figures in found.items()
        }

    def noise_limit(self, operand: str) -> float:
        """The lowest SQNR in decibels that a cast of `operand` may have."""
        cast = getattr(recipe_from_config(self.runs[0].run.config.quantization), operand)
        return -20 * math.log10(NOISE_BUDGET * cast.error)

    def typical(self, cast: str, figure: str) -> float:
        """The median over the run of one cast's figure."""
        return float(np.median(self.casts[cast][figure][1]))

    def losses_by_layer(self) -> list[tuple[str, float, str]]:
        """(layer, noise in percent of the signal, its worst cast), the layer that loses most first.

        A layer's noise is that of all its casts together: they add in quadrature.
        """
        power: dict[str, list[tuple[float, str]]] = {}
        for cast in self.casts:
            noise = 10 ** (-self.typical(cast, "sqnr_db") / 10)
            power.setdefault(cast.rsplit(".", 2)[0], []).append((noise, cast))
        rows = [
            (layer, 100 * math.sqrt(sum(noise for noise, _ in casts)), max(casts)[1])
            for layer, casts in power.items()
        ]
        return sorted(rows, key=lambda row: -row[1])


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a variant is as good as its reference, and why not."""

    result: VariantResult
    threshold: float
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """No reason speaks against it."""
        return not self.reasons

    @property
    def line(self) -> str:
        """The verdict as a sentence."""
        name, gap = self.result.variant.name, self.result.final_gap
        seeds = len(self.result.runs)
        of = f"{seeds} seeds, {CONFIDENCE:.0%} interval" if seeds > 1 else "1 seed, no interval"
        measured = f"eval-loss gap to {self.result.variant.reference} {gap} ({of})" if gap else ""
        said = [measured] if measured else []
        if not self.reasons:
            said += [f"at most {self.threshold:g}%"]
        return f"{name}: {'pass' if self.passed else 'FAIL'}: " + "; ".join([*said, *self.reasons])


def verdict_of(result: VariantResult, threshold: float) -> Verdict:
    """Judges a variant: all runs finite, the mean gap within the threshold, and no cast broken."""
    reasons = [f"{r.run.name} {r.failure}{_where(r)}" for r in result.runs if r.failure]
    missing = [r.run.name for r in result.runs if not r.ended]
    if missing:
        reasons.append(f"not trained to the end: {', '.join(missing)}")
    gap = result.final_gap
    if gap and gap.mean > threshold:
        reasons.append(f"more than {threshold:g}%")
    reasons += _broken_casts(result)
    return Verdict(result, threshold, tuple(reasons))


def _broken_casts(result):
    """Casts whose noise is beyond their budget: the worst, and how many more."""
    below = []
    for cast in result.casts:
        limit = result.noise_limit(cast.rsplit(".", 1)[1])
        found = result.typical(cast, "sqnr_db")
        if found < limit:
            below.append((found - limit, cast, found, limit))
    if not below:
        return []
    _, cast, found, limit = min(below)
    more = f" (one of {len(below)} casts below their limit)" if len(below) > 1 else ""
    found = round(found, 1) + 0.0  # never -0.0
    return [f"{cast} has an SQNR of {found:.1f} dB, its type allows {limit:.1f} dB{more}"]


def _where(result):
    """The first cast whose weights, or else activations, were not finite in the last health row."""
    if not result.health:
        return ""
    last = result.health[-1]
    broken = [
        key.removesuffix(".amax") for key, v in last.items() if key.endswith(".amax") and v is None
    ]
    for operand in OPERANDS:
        for cast in broken:
            if cast.endswith(f".{operand}"):
                return f", first in {cast}"
    return ""


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a report shows."""

    plan: Plan
    variants: tuple[VariantResult, ...]
    verdicts: tuple[Verdict, ...]
    schedules: tuple[str, ...]  # a sentence for each pair that differs in the schedule alone

    @property
    def passed(self) -> bool:
        """Whether every variant passed."""
        return all(verdict.passed for verdict in self.verdicts)


def read(plan: Plan) -> Results:
    """Reads what is there of all runs."""
    found: dict[str, VariantResult] = {}
    for variant in plan.variants:  # references come first
        runs = tuple(read_run(run) for run in plan.of(variant))
        reference = found[variant.reference] if variant.reference else None
        found[variant.name] = VariantResult(variant, runs, reference)
    results = tuple(found.values())
    verdicts = tuple(
        verdict_of(result, plan.options.threshold) for result in results if result.reference
    )
    return Results(plan, results, verdicts, tuple(_same_numbers(results)))


def _same_numbers(results: Sequence[VariantResult]):
    """For each pair of variants that differ in the schedule alone, whether losses are equal."""
    for i, a in enumerate(results):
        for b in results[i + 1 :]:
            pairs = list(zip(a.runs, b.runs, strict=True))
            changed = configs.difference(a.runs[0].run.config, b.runs[0].run.config)
            if set(changed) != {"use_batch_split_schedule", "run_name"}:
                continue
            count, differing = 0, 0
            for left, right in pairs:
                for one, other in ((left.train, right.train), (left.eval, right.eval)):
                    points = min(one.shape[1], other.shape[1])
                    count += points
                    differing += int((one[:, :points] != other[:, :points]).any(0).sum())
            names = f"{a.variant.name} and {b.variant.name}"
            if not count:
                yield f"{names}: nothing to compare yet"
            elif differing:
                yield f"{names}: {differing} of {count} logged losses differ"
            else:
                yield f"{names}: all {count} logged losses are equal to the last bit"


def rows(results: Results) -> list[dict[str, Any]]:
    """The table of the report, a flat object for each variant."""
    verdicts = {verdict.result.variant.name: verdict for verdict in results.verdicts}
    return [_row(result, verdicts.get(result.variant.name)) for result in results.variants]


def _row(result: VariantResult, verdict: Verdict | None) -> dict[str, Any]:
    losses, gap = result.final_losses, result.final_gap
    casts = {
        f"{figure}_{word}": pick(values)
        for figure, word, pick in (
            ("saturated", "max", max),
            ("flushed", "max", max),
            ("sqnr_db", "min", min),
        )
        if (values := [result.typical(cast, figure) for cast in result.casts])
    }
    config = result.runs[0].run.config
    return {
        "variant": result.variant.name,
        "recipe": recipe_from_config(config.quantization).name,
        "schedule": SCHEDULE_NAMES[config.schedule.use_batch_split_schedule],
        "reference": result.variant.reference,
        "steps": config.run.steps,
        "seeds": len(result.runs),
        "finished": len(losses),
        "eval_loss": statistics.fmean(losses) if losses else None,
        "eval_loss_min": min(losses, default=None),
        "eval_loss_max": max(losses, default=None),
        "gap_percent": gap.mean if gap else None,
        "gap_half_interval": gap.half if gap else None,
        "threshold_percent": verdict.threshold if verdict else None,
        "passed": verdict.passed if verdict else None,
        "verdict": verdict.line if verdict else "",
        "tokens_per_second": result.median("tokens_per_second"),
        "peak_memory_bytes": result.median("peak_memory_bytes"),
        "worst_layer": result.losses_by_layer()[0][0] if result.casts else None,
        **casts,
    }


SCHEDULE_NAMES = {False: "sequential", True: "batch_split"}


def curves(results: Results) -> list[dict[str, Any]]:
    """Every evaluation, a flat object for each."""
    return [
        {"variant": r.variant.name, "seed": run.run.seed, "step": int(step), "eval_loss": loss}
        for r in results.variants
        for run in r.runs
        for step, loss in run.eval.T.tolist()
    ]
