"""Which runs a comparison consists of.

A *variant* is what is compared: a recipe under a schedule, or any other settings. Each variant is
trained once for each seed, by an ordinary `octablox train`; runs of one seed begin with the same
weights and read the same batches in the same order.
"""

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from octablox import config as configs
from octablox.config import Config
from octablox.errors import UserError
from octablox.fp8 import RECIPES
from octablox.options import Parser

SCHEDULES = ("sequential", "batch_split")
REFERENCE = "bf16"
# What two launches of the same comparison may say differently: it changes no number.
_FREE = {"base_output_directory", "jax_cache_dir", "enable_tensorboard"}
_FREE |= {"checkpoint_period", "max_num_checkpoints_to_keep", "enable_checkpointing"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What is no setting of a run.

    Attributes:
      recipes: names or YAML files, without the reference.
      schedules: of `SCHEDULES`; empty: as the settings say.
      seeds: of initial weights and of the data's order.
      threshold: the largest gap to bf16 that passes, percent of the eval loss.
      variants: further ones, name -> settings.
      report_only: train nothing.
      keep_checkpoints: also of runs that are finished.
    """

    recipes: tuple[str, ...]
    schedules: tuple[str, ...]
    seeds: tuple[int, ...]
    threshold: float
    variants: dict[str, tuple[str, ...]]
    report_only: bool
    keep_checkpoints: bool


@dataclasses.dataclass(frozen=True)
class Variant:
    """One thing to compare.

    Attributes:
      name: also of its run folders, followed by the seed.
      keys: its settings, as key=value.
      reference: the variant that it is compared with; None of a reference itself.
    """

    name: str
    keys: tuple[str, ...]
    reference: str | None


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: its config as resolved, and the arguments of `octablox` that train it."""

    variant: Variant
    seed: int
    config: Config
    args: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.config.run.run_name

    @property
    def folder(self) -> Path:
        """Where it leaves its metrics."""
        return Path(self.config.run.base_output_directory) / self.name


@dataclasses.dataclass(frozen=True)
class Plan:
    """All of a comparison.

    Attributes:
      folder: of the report; the run folders are in it.
      command: the line that starts it again.
      runs: in the order in which they are trained: every variant of the first seed, then the next
        seed, so that a first picture is there early.
    """

    folder: Path
    command: str
    options: Options
    variants: tuple[Variant, ...]
    runs: tuple[Run, ...]

    def of(self, variant: Variant) -> list[Run]:
        """The variant's runs, by seed."""
        return [run for run in self.runs if run.variant == variant]


def parser() -> Parser:
    """Of the options, which may stand anywhere among the settings."""
    made = Parser("compare")
    made.add_argument(
        "--recipes",
        default="fp8_full,fp8_blockwise",
        help=f"to compare with bf16, with commas between: {','.join(list(RECIPES)[1:])}, or YAML "
        "files; all: all of these (default: %(default)s)",
    )
    made.add_argument(
        "--schedules",
        default="",
        help="sequential,batch_split: trains each recipe under both, on the same micro-batches",
    )
    made.add_argument(
        "--seeds",
        default="3",
        help="how many, or which with commas between (default: %(default)s)",
    )
    made.add_argument(
        "--threshold",
        type=float,
        default=0.3,
        help="the largest mean gap to bf16 that passes, percent of the eval loss (default: "
        "%(default)s)",
    )
    made.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="TEXT",
        help="'NAME key=value ...': one more thing to compare, by its settings; once for each",
    )
    made.add_argument(
        "--report-only", action="store_true", help="train nothing: show the runs that are there"
    )
    made.add_argument(
        "--keep-checkpoints", action="store_true", help="of finished runs too (default: deleted)"
    )
    made.add_argument("keys", nargs="*")
    return made


def help_text(summary: str, example: str) -> str:
    """What `octablox compare --help` prints."""
    after = [
        "keys: every key of a run, of all runs alike (octablox train --help lists them).",
        "run_name=NAME names the comparison's folder, where report.html, compare.json, the",
        "pictures and the run folders are; the same command again resumes it.",
        "",
        "Exit code 0: every variant passes. 1: one does not. 2: an error, in one line.",
    ]
    return parser().help_text("[key=value ...] [options]", summary, example, after)


def make(args: Sequence[str]) -> Plan:
    """Resolves the command line, every run's settings included.

    Raises:
      UserError: an option, a setting or a combination that cannot work.
    """
    given = parser().parse_intermixed_args(list(args))
    options = _options(given)
    settings = dict(key.partition("=")[::2] for key in given.keys)
    for key in ("quantization", "init_weights_seed", "data_shuffle_seed"):
        if key in settings:
            raise UserError(
                f"{key}: compare sets it by run; write --recipes, --seeds or --variant instead"
            )
    base = Path(settings.pop("base_output_directory", "runs"))
    base_config = configs.load(given.keys).config  # a mistake in them shows before anything else
    folder = base / (settings.pop("run_name", "") or f"compare-{base_config.model_name}")
    common = tuple(key for key in given.keys if key.partition("=")[0] in settings)
    if "max_num_checkpoints_to_keep" not in settings:
        common += ("max_num_checkpoints_to_keep=1",)
    variants = _variants(options, "batch_split_factor" in settings)
    runs = tuple(_run(v, seed, common, folder) for seed in options.seeds for v in variants)
    command = shlex.join(["octablox", "compare", *args])
    return Plan(folder, command, options, variants, runs)


def _options(given: argparse.Namespace) -> Options:
    recipes = _split(given.recipes)
    if recipes == ["all"]:
        recipes = [name for name in RECIPES if name != REFERENCE]
    schedules = _split(given.schedules)
    for name in schedules:
        if name not in SCHEDULES:
            raise UserError(f"--schedules: expected some of {', '.join(SCHEDULES)}, got {name!r}")
    if not 0 < given.threshold < 100:
        raise UserError(f"--threshold: expected percent, 0 to 100, got {given.threshold:g}")
    variants: dict[str, tuple[str, ...]] = {}
    for text in given.variant:
        name, *keys = shlex.split(text) or [""]
        if not name or "=" in name or "/" in name or not keys:
            raise UserError(f"--variant: expected 'NAME key=value ...', got {text!r}")
        variants[name] = tuple(keys)
    return Options(
        tuple(name for name in recipes if name != REFERENCE),
        tuple(schedules),
        _seeds(given.seeds),
        given.threshold,
        variants,
        given.report_only,
        given.keep_checkpoints,
    )


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _seeds(text: str) -> tuple[int, ...]:
    try:
        numbers = [int(part) for part in _split(text)]
    except ValueError:
        numbers = []
    if "," not in text and numbers and numbers[0] > 0:
        return tuple(range(numbers[0]))
    if not numbers or min(numbers) < 0 or "," not in text:
        raise UserError(f"--seeds: expected how many, such as 3, or which, as 0,1,2; got {text!r}")
    return tuple(numbers)


def _variants(options: Options, factor_given: bool) -> tuple[Variant, ...]:
    """Recipes x schedules, the references first, then the further ones."""
    schedules = options.schedules or ("",)
    # Two schedules give the same numbers where they cut a batch into the same micro-batches.
    same = () if factor_given or len(schedules) < 2 else ("batch_split_factor=2",)
    made = []
    for recipe in (REFERENCE, *options.recipes):
        for schedule in schedules:
            short = Path(recipe).stem if recipe.endswith((".yml", ".yaml")) else recipe
            name = f"{short}-{schedule}" if len(schedules) > 1 else short
            keys = (f"quantization={recipe}",)
            if schedule:
                keys += (
                    f"use_batch_split_schedule={str(schedule == 'batch_split').lower()}",
                    *same,
                )
            reference = f"{REFERENCE}-{schedule}" if len(schedules) > 1 else REFERENCE
            made.append(Variant(name, keys, None if recipe == REFERENCE else reference))
    made += [Variant(name, keys, made[0].name) for name, keys in options.variants.items()]
    names = [variant.name for variant in made]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"compare: two variants are called {min(twice)}; give each its own name")
    return tuple(made)


def _run(variant: Variant, seed: int, common: tuple[str, ...], folder: Path) -> Run:
    own = {key.partition("=")[0] for key in variant.keys}
    keys = [key for key in common if key.partition("=")[0] not in own]
    args = [*keys, *variant.keys, f"init_weights_seed={seed}", f"data_shuffle_seed={seed}"]
    try:
        config = configs.load(args).config
    except UserError as error:
        raise UserError(f"{variant.name}: {error}") from None
    name = f"{variant.name}-seed{seed}"
    where = {"run_name": name, "base_output_directory": str(folder)}
    config = config.model_copy(update={"run": config.run.model_copy(update=where)})
    args += [f"{key}={value}" for key, value in where.items()]
    return Run(variant, seed, config, ("train", *args))


def require_same(run: Run) -> None:
    """Raises UserError where the run's folder is of other settings."""
    path = run.folder / "config.yml"
    if not path.is_file():
        return
    changed = configs.difference(configs.read(path), run.config)
    listed = [f"{key}: {a} there, {b} here" for key, (a, b) in changed.items() if key not in _FREE]
    if listed:
        raise UserError(
            f"{run.folder} was trained with other settings ({', '.join(listed)}); say the same "
            "again, or choose another run_name"
        )
