"""DeepSeek-V3 on a pod of TPUs, compiled here: ways to schedule a step, in bf16 and in FP8.

    python -m benchmarks.pod_scale [--json FILE] [--way WAY] [--recipe RECIPE] [key=value ...]

Each way is the full train step, compiled by libtpu in a process of its own (minutes each), and
read as `octablox compile` reads it. `plain` ways have no schedule of octablox's: JAX's autodiff of
a scan over layers under `jax.checkpoint`. A way that does not fit the chip says so in place of its
figures.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
from jax import lax
from rich.console import Console
from rich.table import Table

from octablox.aot.compiler import compile_report
from octablox.config import load
from octablox.errors import UserError
from octablox.model import transformer

SHARED = (
    "model_name=deepseek3-671b",
    "compile_topology=tpu7x:4x4x8",
    "ici_fsdp_parallelism=-1",
    "ici_expert_parallelism=16",
    "per_device_batch_size=2",
    "max_target_length=2048",
    "ragged_buffer_factor=1.25",
    "shard_exp_on_fsdp=true",
    "use_ring_of_experts=false",
    "grad_dtype=bfloat16",
    "fp8_health=false",
    "remat_policy=full",
)
RECIPES = {
    "bf16": (),
    "fp8": ("quantization=fp8_full", "fp8_dispatch=true", "fp8_dispatch_grad=true"),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step is scheduled: the keys, and what a plain one keeps (None: not plain)."""

    keys: tuple[str, ...]
    plain: str | None = None


_SPLIT = "use_batch_split_schedule=true"
WAYS = {
    "no split": Way(()),
    "plain, no split": Way((), "nothing"),
    "plain, split": Way((_SPLIT,), "nothing"),
    "plain, split, kept rows": Way((_SPLIT,), "rows"),
    "batch split": Way((_SPLIT,)),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. Milliseconds are modelled, of one device and step.

    Attributes:
      fits: whether the chip's memory holds it; `missing` says what is missing, else empty.
      expert_overlap, fsdp_overlap: fraction of the bytes of that axis under a matrix product.
      expert_gb, fsdp_gb: GB received over collectives of that axis.
      gathered_gb: of those, by all-gathers: tokens, and weights.
    """

    way: str
    recipe: str
    fits: bool
    missing: str
    compute_ms: float | None = None
    exposed_ms: float | None = None
    step_ms: float | None = None
    expert_overlap: float | None = None
    fsdp_overlap: float | None = None
    expert_gb: float | None = None
    fsdp_gb: float | None = None
    gathered_gb: float | None = None
    peak_gib: float | None = None
    cpu_minutes: float | None = None


def plain_layers(keep: str):
    """A `run_layers` by autodiff alone, that recomputes all but what `keep` names."""
    policies = jax.checkpoint_policies
    policy = (
        policies.nothing_saveable if keep == "nothing" else policies.save_only_these_names(keep)
    )

    def run(layer, shards, contexts, carries):
        steps = layer.order(1).forward
        order = [turn for step in steps for turn in (*step.communication, *step.compute)]

        def body(carries, shards):
            weights, carries = {}, list(carries)
            for group in layer.groups:
                of = {name: shards[name] for name in group.shards}
                weights |= group.gather(group.prepare(of))
            for turn in order:
                stage, m = layer.stages[turn.stage], turn.micro_batch
                read = {name: weights[name] for name in stage.weights}
                out = stage.fn(read, contexts[m], carries[m])
                if stage.name == "dispatch":
                    named = lambda a: jax.ad_checkpoint.checkpoint_name(a, "rows")  # noqa: E731
                    out = jax.tree.map(named, out)
                carries[m] = out
            return carries, None

        return lax.scan(jax.checkpoint(body, policy=policy), list(carries), shards)[0]

    return run


def keys_of(way: str, recipe: str, more: list[str]) -> list[str]:
    return [*SHARED, *RECIPES[recipe], *WAYS[way].keys, *more]


def report_of(way: str, recipe: str, more: list[str], note) -> dict:
    """`octablox compile`'s report as JSON's types, in this process."""
    plain = WAYS[way].plain
    if plain:
        transformer.run_layers = plain_layers(plain)
    return compile_report(load(keys_of(way, recipe, more)).config, note=note).to_json()


def row_of(way: str, recipe: str, report: dict) -> Row:
    def over(axis, kind=""):
        chosen = [c for c in report["collectives"] if c["axes"].startswith(axis)]
        chosen = [c for c in chosen if kind in c["kind"]]
        total = sum(c["bytes"] for c in chosen)
        return total, sum(c["overlapped_bytes"] for c in chosen) / max(total, 1)

    seconds = report["modelled_seconds"]
    (expert, expert_overlap), (fsdp, fsdp_overlap) = over("expert"), over("fsdp")
    return Row(
        *(way, recipe, True, ""),
        *(1e3 * seconds[name] for name in ("compute", "exposed", "step")),
        *(expert_overlap, fsdp_overlap, expert / 1e9, fsdp / 1e9),
        gathered_gb=over("", "all-gather")[0] / 1e9,
        peak_gib=report["memory_bytes"]["peak"] / 2**30,
        cpu_minutes=report["compile"]["cpu_seconds"] / 60,
    )


def measure(way: str, recipe: str, more: list[str], reports: Path | None) -> Row:
    """In a process of its own, for its memory's and its patches' sake."""
    with tempfile.TemporaryDirectory() as folder:
        path = (
            reports or Path(folder)
        ) / f"{way.replace(', ', '-').replace(' ', '_')}-{recipe}.json"
        command = [sys.executable, "-m", "benchmarks.pod_scale", "--here", way, recipe, str(path)]
        done = subprocess.run(
            [*command, *more],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        if done.returncode:
            return Row(way, recipe, False, done.stdout.strip().splitlines()[-1])
        return row_of(way, recipe, json.loads(path.read_text()))


def table_of(rows: list[Row]) -> Table:
    table = Table("way", "recipe", title=" ".join(SHARED), title_justify="left")
    columns = "compute ms", "exposed ms", "step ms", "expert %", "fsdp %", "expert GB", "fsdp GB"
    for column in (*columns, "gathered GB", "peak GiB", "CPU-min"):
        table.add_column(column, justify="right")
    for row in rows:
        if not row.fits:
            table.add_row(row.way, row.recipe, row.missing)
            continue
        table.add_row(
            *(row.way, row.recipe),
            *(f"{ms:.0f}" for ms in (row.compute_ms, row.exposed_ms, row.step_ms)),
            *(f"{100 * part:.0f}" for part in (row.expert_overlap, row.fsdp_overlap)),
            *(f"{gb:.1f}" for gb in (row.expert_gb, row.fsdp_gb, row.gathered_gb)),
            *(f"{row.peak_gib:.1f}", f"{row.cpu_minutes:.1f}"),
        )
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pod_scale", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as a list")
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="keep each way's report")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this way")
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="only this recipe")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of octablox compile")
    args = parser.parse_args(argv)
    if args.here:
        way, recipe, path = args.here
        try:
            report = report_of(way, recipe, args.keys, lambda text: print(text, file=sys.stderr))
        except UserError as error:
            print(error)
            sys.exit(2)
        Path(path).write_text(json.dumps(report, indent=1))
        return
    rows = []
    for recipe in args.recipe or RECIPES:
        for way in args.way or WAYS:
            print(f"{recipe}: {way}", file=sys.stderr)
            rows.append(measure(way, recipe, args.keys, args.reports))
            if args.json:
                args.json.write_text(
                    json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
                )
    Console(width=160).print(table_of(rows))


if __name__ == "__main__":
    main()
