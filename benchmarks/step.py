"""A training step beside MaxText's: the same sizes, batch and optimizer, on 8 virtual CPU devices.

    python -m benchmarks.step [--json FILE] [--steps N] [--maxtext PYTHON]

Each row is measured in a process of its own that begins without compiled programs: CPU-seconds of
a step (median, the first one left out), seconds from launch to the end of the first step, the
process's peak memory, and the losses. Beside each stands MaxText 0.2.5 as it was recorded on a
machine of 2 cores, and with `--maxtext PYTHON`, a Python that has MaxText installed, as it runs
now, in turn with ours. Initial weights differ, so the curves are compared by their shape.
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

STEPS = 10
TARGET_RATIO = 6.0  # MaxText's CPU-seconds to ours
SHAPE_TOLERANCE = 0.1  # of the fall from the first loss to the last
_DEVICES = 8
_FIXED = "fixed,-224,224"
_CALIBRATION = {
    f"{kind}_quantization_calibration_method": _FIXED for kind in ("weight", "act", "bwd")
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the small model.

    Attributes:
      recipe, schedule, mesh: in words, for the table.
      keys: octablox's, beside those of `SHARED` and the preset.
      maxtext: MaxText's, beside those of `MAXTEXT`; None where it does not run on CPU.
      recorded: the name of MaxText's figures in `RECORDED`.
    """

    recipe: str
    schedule: str
    mesh: str
    keys: dict[str, str]
    maxtext: dict[str, str] | None
    recorded: str


_FP8 = {"quantization": "fp8_full", **_CALIBRATION}
_FP8_MAXTEXT = {**_FP8, "use_qwix_quantization": "true"}
CASES = {
    "bf16": Case("bf16", "sequential", "fsdp 8", {}, {}, "bf16"),
    "fp8": Case("fp8_full", "sequential", "fsdp 8", _FP8, _FP8_MAXTEXT, "fp8"),
    "fp8 split": Case(
        "fp8_full",
        "batch_split",
        "fsdp 4 x expert 2",
        {**_FP8, "ici_expert_parallelism": "2", "use_batch_split_schedule": "true"},
        None,
        "fp8",
    ),
}
# MaxText does not update the router's bias unless it is told to.
SHARED = {"model_name": "maxtext-small", "routed_bias_update_rate": "0.0", "jax_cache_dir": ""}

# MaxText's names for the preset's sizes. Its synthetic data are one fixed batch.
MAXTEXT = {
    "run_name": "step",
    "hardware": "cpu",
    "skip_jax_distributed_system": "true",
    "enable_checkpointing": "false",
    "jax_cache_dir": "",
    "dataset_type": "synthetic",
    "packing": "false",
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "attention": "dot_product",
    "base_emb_dim": "256",
    "base_num_query_heads": "4",
    "base_num_kv_heads": "4",
    "q_lora_rank": "64",
    "kv_lora_rank": "64",
    "qk_nope_head_dim": "128",
    "qk_rope_head_dim": "64",
    "v_head_dim": "128",
    "base_mlp_dim": "512",
    "base_moe_mlp_dim": "256",
    "base_num_decoder_layers": "5",
    "first_num_dense_layers": "1",
    "num_experts": "16",
    "num_experts_per_tok": "4",
    "n_routing_groups": "8",
    "topk_routing_group": "4",
    "shared_experts": "1",
    "routed_score_func": "sigmoid",
    "routed_bias": "true",
    "routed_bias_update_rate": "0.0",
    "mlp_activations": "['silu','linear']",
    "vocab_size": "2048",
    "max_target_length": "128",
    "per_device_batch_size": "2",
    "ici_fsdp_parallelism": "8",
    "remat_policy": "full",
    "learning_rate": "0.001",
    "warmup_steps_fraction": "0.1",
    "learning_rate_final_fraction": "0.1",
    "log_period": "1",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; None is what is not known.

    Attributes:
      cpu_seconds: of a step.
      cpu_ratio: cpu_seconds of the program to octablox's; seconds_ratio likewise.
      seconds_to_first_step: from launch to its end.
      same_shape: whether the curve is that of MaxText's recorded one.
      losses: of each step, with blanks between.
    """

    program: str
    recipe: str
    schedule: str
    mesh: str
    cpu_seconds: float
    cpu_ratio: float
    seconds_to_first_step: float
    seconds_ratio: float
    peak_mib: float | None
    same_shape: bool | None
    losses: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one process came to; peak memory in MiB."""

    cpu_seconds: float
    seconds_to_first_step: float
    peak_mib: float | None
    losses: tuple[float, ...]


RECORDED = {
    "bf16": Measured(
        23.5, 106, None, (8.105, 8.105, 6.591, 5.503, 4.653, 3.999, 3.523, 3.202, 3.002, 2.885)
    ),
    "fp8": Measured(
        32.3, 106, None, (8.105, 8.105, 6.650, 5.597, 4.776, 4.144, 3.682, 3.367, 3.177, 3.061)
    ),
}


def same_shape(losses, expected) -> bool | None:
    """Whether two curves have done the same part of their way down after every step."""
    if len(losses) != len(expected):
        return None  # the schedule has the length of the run
    if not losses[-1] < losses[0]:
        return False
    pairs = zip(_progress(losses), _progress(expected), strict=True)
    return all(abs(a - b) < SHAPE_TOLERANCE for a, b in pairs)


def _progress(losses):
    """Of each loss, the part of the fall from the first to the last that is done."""
    return [(losses[0] - loss) / (losses[0] - losses[-1]) for loss in losses]


# The process that measures octablox.


def measure_here(case: str, steps: int, launched: float) -> Measured:
    """Trains in this process; `launched` is the wall clock, in seconds, when it was started."""
    import jax

    from octablox import config, mesh
    from octablox.bench.step import random_batch
    from octablox.checks import resolve_mesh_shape
    from octablox.train.step import Trainer

    keys = {**SHARED, **CASES[case].keys, "steps": str(steps)}
    settings = config.load([f"{key}={value}" for key, value in keys.items()]).config
    devices = mesh.make_mesh(resolve_mesh_shape(settings, jax.device_count()))
    trainer = Trainer(settings, devices)
    with jax.set_mesh(devices):
        host = random_batch(settings, jax.device_count())
        trainer.compile_step(host["tokens"].shape)
        state, batch = trainer.init(), trainer.place(host)
        cpu, losses, first = [], [], 0.0
        for _ in range(steps):
            before = _cpu_seconds()
            state, metrics = trainer.step(state, batch)
            jax.block_until_ready((state, metrics))
            cpu.append(_cpu_seconds() - before)
            first = first or time.time() - launched
            losses.append(round(float(metrics["loss"]), 4))
    return Measured(statistics.median(cpu[1:]), first, _peak_mib(os.getpid()), tuple(losses))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


# The process that starts them.


def _environment() -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={_DEVICES}"
    cleared = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return cleared | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"}


def measure_octablox(case: str, steps: int) -> Measured:
    """A process of its own for `measure_here`."""
    command = [sys.executable, "-m", "benchmarks.step", "--steps", str(steps), "--here", case]
    command += ["--launched", str(time.time())]
    done = subprocess.run(command, env=_environment(), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: octablox's run of {case!r} failed with {done.returncode}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


_COMPLETED = re.compile(r"completed step: (\d+),.*? loss: ([-+.\dnaif]+)")


def measure_maxtext(case: str, steps: int, command: list[str]) -> Measured:
    """MaxText's own training command, watched from outside.

    It prints a step's line when that step's loss is there, so the process's CPU time between two
    such lines is a step's. (The seconds it prints itself are those of the dispatch.) The line of
    the first step may come up to one step late.
    """
    with tempfile.TemporaryDirectory() as folder:
        keys = {**MAXTEXT, **(CASES[case].maxtext or {}), "steps": str(steps)}
        keys["base_output_directory"] = folder
        line = [*command, *(f"{key}={value}" for key, value in keys.items())]
        launched, cpu, losses, last_lines, first, peak = time.time(), [], [], [], 0.0, 0.0
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(line, cwd=folder, env=_environment(), **pipes) as process:
            for text in process.stdout:
                last_lines = [*last_lines[-9:], text.rstrip()]
                if completed := _COMPLETED.search(text):
                    first = first or time.time() - launched
                    cpu.append(_cpu_seconds_of(process.pid))
                    peak = max(peak, _peak_mib(process.pid))
                    losses.append(float(completed[2]))
    if process.returncode or len(losses) != steps:
        tail = "\n".join(last_lines)
        raise SystemExit(
            f"error: expected {steps} steps of MaxText, got {len(losses)} and exit code "
            f"{process.returncode}; its last lines:\n{tail}"
        )
    spent = [after - before for before, after in itertools.pairwise(cpu)]
    return Measured(statistics.median(spent), first, peak, tuple(losses))


def _cpu_seconds_of(pid: int) -> float:
    """User and system time of a running process, all its threads."""
    with open(f"/proc/{pid}/stat") as file:
        after_name = file.read().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mib(pid: int) -> float:
    """Of a process, 0 once it has ended; getrusage's begins with that of whoever started it."""
    with open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 2**10


def row_of(program: str, case: str, found: Measured, ours: Measured) -> Row:
    """A line of the table, beside ours."""
    one = CASES[case]
    recorded = RECORDED[one.recorded]
    return Row(
        program,
        one.recipe,
        one.schedule if found is ours else "sequential",
        one.mesh if found is ours else "fsdp 8",
        found.cpu_seconds,
        found.cpu_seconds / ours.cpu_seconds,
        found.seconds_to_first_step,
        found.seconds_to_first_step / ours.seconds_to_first_step,
        found.peak_mib,
        same_shape(found.losses, recorded.losses),
        " ".join(f"{loss:.3f}" for loss in found.losses),
    )


def table_of(rows: list[Row]) -> Table:
    """The rows for people."""
    table = Table(title="one training step, 16.3M parameters, 2,048 tokens, 8 virtual CPU devices")
    for name in ("program", "recipe", "schedule", "mesh"):
        table.add_column(name)
    for name in ("CPU-s a step", "", "s to first step", "", "peak MiB", "same curve"):
        table.add_column(name, justify="right")
    table.add_column("losses", overflow="fold")
    for row in rows:
        table.add_row(
            *(row.program, row.recipe, row.schedule, row.mesh),
            f"{row.cpu_seconds:.2f}",
            f"{row.cpu_ratio:.1f}x",
            f"{row.seconds_to_first_step:.0f}",
            f"{row.seconds_ratio:.1f}x",
            "–" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
            {True: "yes", False: "NO", None: "–"}[row.same_shape],
            row.losses,
        )
    return table


def summary(rows: list[Row]):
    """Lines with what was reached beside what should be."""
    for row in rows:
        if row.program != "octablox":
            yield (
                f"{row.recipe}: {row.program} / octablox: {row.cpu_ratio:.1f}x the CPU-seconds a "
                f"step (target: {TARGET_RATIO:g}x or more)"
            )


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the table and writes the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as a list of objects")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run; 2 or more")
    parser.add_argument("--case", choices=CASES, action="append", help="only this case")
    parser.add_argument("--maxtext", metavar="PYTHON", help="run MaxText too, with this Python")
    parser.add_argument("--here", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps: expected 2 or more, since the first is left out, got {args.steps}")
    if args.here:
        found = measure_here(args.here, args.steps, args.launched or time.time())
        print(json.dumps(dataclasses.asdict(found)))
        return
    console, rows = Console(width=160), []
    for case, one in CASES.items():
        if args.case and case not in args.case:
            continue
        console.print(f"{case}: octablox", highlight=False)
        ours = measure_octablox(case, args.steps)
        rows.append(row_of("octablox", case, ours, ours))
        if args.maxtext and one.maxtext is not None:
            console.print(f"{case}: MaxText", highlight=False)
            command = [args.maxtext, "-m", "maxtext.trainers.pre_train.train"]
            theirs = measure_maxtext(case, args.steps, command)
            rows.append(row_of("MaxText", case, theirs, ours))
        rows.append(row_of("MaxText 0.2.5, recorded", case, RECORDED[one.recorded], ours))
    console.print(table_of(rows))
    for line in summary(rows):
        console.print(line, highlight=False)
    if args.json:
        with open(args.json, "w") as file:
            json.dump([dataclasses.asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
