"""`octablox calibrate`: a run that finds `fixed` calibrations, and a recipe that holds them.

Fixed scales cost no pass over an operand and no maximum over devices, but somebody has to know
the range. This trains as `octablox train` does, reads from the run's health the largest magnitude
that each operand ever had, and writes the recipe with ranges a margin beyond, for
`octablox train quantization=FILE.yml`.

Where weights have a scale for each channel, dlhs's gradients take over those scales before they
are cast (see `fp8`), and so do drhs's from activations: their range is then another one at every
step. So gradients can be fixed only where the operand beside them is.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import yaml

from octablox import config as configs
from octablox.config import Config, Resolved
from octablox.errors import UserError
from octablox.fp8 import Recipe, recipe_from_config
from octablox.health import OPERANDS
from octablox.options import Parser
from octablox.train.metrics import METRICS_FILE, read_metrics, write_atomically

# The operand whose scale a gradient takes over, where it has one for each channel or row.
_BESIDE = {"dlhs_grad": "weight", "drhs_grad": "act"}
_MEASUREMENTS = 20  # of a run, unless eval_interval says otherwise


@dataclasses.dataclass(frozen=True)
class Options:
    """Which operands get a range, how far beyond what was seen, and where the recipe goes."""

    operands: tuple[str, ...]
    margin: float
    output: Path | None

    def require(self, recipe: Recipe) -> None:
        """Raises UserError where the recipe cannot have these ranges."""
        if not 1 <= self.margin < math.inf:
            raise UserError(f"--margin: expected 1 or more, got {self.margin:g}")
        for operand in self.operands:
            if operand not in OPERANDS:
                raise UserError(
                    f"--operands: expected some of {', '.join(OPERANDS)}, got {operand!r}"
                )
        if not any(getattr(recipe, operand) for operand in self.operands):
            raise UserError(
                f"calibrate: the recipe {recipe.name} casts none of {', '.join(self.operands)}; "
                "write quantization=fp8_full"
            )
        for gradient, operand in _BESIDE.items():
            casts = getattr(recipe, operand)
            if gradient in self.operands and casts and operand not in self.operands:
                raise UserError(
                    f"--operands: {gradient} takes over the scales of {operand}, whose range must "
                    f"be fixed too; add {operand}, or leave {gradient} out"
                )


def parser() -> Parser:
    """Of the options, which may stand anywhere among the settings."""
    made = Parser("calibrate")
    made.add_argument(
        "--operands",
        default=",".join(OPERANDS),
        help="which get a fixed range, with commas between (default: %(default)s)",
    )
    made.add_argument(
        "--margin",
        type=float,
        default=4.0,
        help="range over the largest magnitude seen; FP8 has room for it (default: %(default)g)",
    )
    made.add_argument(
        "--output", type=Path, metavar="FILE.yml", help="the recipe (default: in the run's folder)"
    )
    made.add_argument("keys", nargs="*", help="")
    return made


def help_text(summary: str, example: str) -> str:
    """What `octablox calibrate --help` prints."""
    after = ["keys: every key of a run; octablox train --help lists them."]
    return parser().help_text("[key=value ...] [options]", summary, example, after)


def settings(args: Sequence[str]) -> tuple[Resolved, Options]:
    """The run's settings and the options.

    Raises:
      UserError: an option, a setting or a combination that cannot work.
    """
    given = parser().parse_intermixed_args(list(args))
    keys = dict(key.partition("=")[::2] for key in given.keys)
    asked = configs.load(given.keys).config
    extra = {
        "run_name": f"calibrate-{asked.model_name}",
        "eval_interval": str(max(asked.run.steps // _MEASUREMENTS, 1)),
        "eval_steps": "1",
        "enable_checkpointing": "false",
    }
    resolved = configs.load(
        [*given.keys, *(f"{key}={value}" for key, value in extra.items() if key not in keys)]
    )
    if not asked.moe.fp8_health:
        raise UserError("calibrate reads a run's health: expected fp8_health=true, got false")
    operands = tuple(name.strip() for name in given.operands.split(",") if name.strip())
    options = Options(operands, given.margin, given.output)
    options.require(recipe_from_config(resolved.config.quantization))
    return resolved, options


def run(resolved: Resolved, options: Options, started: float) -> int:
    """Trains, and writes the recipe; returns the exit code.

    Raises:
      UserError: whatever the user can mend.
    """
    from octablox.train import loop

    config = resolved.config
    code = loop.train(resolved, started=started)
    if code:
        return code
    folder = Path(config.run.base_output_directory) / config.run.run_name
    recipe = calibrated(config, options, largest(read_metrics(folder / METRICS_FILE)))
    path = options.output or folder / f"{recipe.name}.yml"
    content = recipe.model_dump(mode="json", exclude={"column_parts"}, exclude_none=True)
    write_atomically(path, yaml.safe_dump(content, sort_keys=False).encode())
    for operand in options.operands:
        if cast := getattr(recipe, operand):
            print(f"{operand}: {cast.calibration}")
    print(f"octablox train quantization={path}")
    return 0


def largest(rows: Sequence[dict]) -> dict[str, float]:
    """Operand -> the largest magnitude in a run's health, over layers, GEMMs and steps."""
    found: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if row["kind"] == "health" and key.endswith(".amax"):
                operand = key.rsplit(".", 2)[1]
                found[operand] = max(found.get(operand, 0.0), math.inf if value is None else value)
    return found


def calibrated(config: Config, options: Options, seen: dict[str, float]) -> Recipe:
    """The config's recipe with the range of each chosen operand that it casts."""
    recipe = recipe_from_config(config.quantization)
    casts = {}
    for operand in options.operands:
        cast = getattr(recipe, operand)
        if cast is None:
            continue
        amax = seen.get(operand, 0.0)
        if not 0 < amax < math.inf:
            raise UserError(
                f"calibrate: the largest magnitude of {operand} must be a number above 0, got "
                f"{amax:g}; give more steps="
            )
        reach = f"{options.margin * amax:.3g}"
        casts[operand] = cast.model_copy(update={"calibration": f"fixed,-{reach},{reach}"})
    return recipe.model_copy(update={**casts, "name": f"{recipe.name}-calibrated"})
