"""A training run from its first line to its last picture."""

import dataclasses
import datetime
import functools
import math
import os
import resource
import shlex
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from octablox import config as configs
from octablox import health
from octablox import mesh as meshes
from octablox.checks import global_batch_size, resolve_mesh_shape, resolve_slices
from octablox.config import Config, Resolved
from octablox.errors import UserError
from octablox.fp8 import QuantizationConfig, recipe_from_config
from octablox.model import transformer
from octablox.model.config import ModelConfig
from octablox.moe.experts import GEMMS
from octablox.train import hosts
from octablox.train.checkpoint import Checkpoints
from octablox.train.data import Data, make_data
from octablox.train.interrupt import SIGNALS, Interrupt
from octablox.train.metrics import MetricsWriter, NoWriter, cannot_write
from octablox.train.progress import Progress
from octablox.train.report import plot_loss, summary_table, write_summary
from octablox.train.step import Trainer, TrainState

# What may differ from the saved config of a run that is resumed, beside where it is: what it
# reports and keeps, and how its steps are computed. (That a step still has as many sequences is
# seen to by `_Run.restore`.)
RESUMABLE = {
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "use_batch_split_schedule",
    "batch_split_factor",
    "remat_policy",
    "ragged_buffer_factor",
    "fp8_health",
    "steps",
    "log_period",
    "eval_interval",
    "eval_steps",
    "checkpoint_period",
    "max_num_checkpoints_to_keep",
    "checkpoint_keep_period",
    "enable_checkpointing",
    "enable_tensorboard",
    "jax_cache_dir",
    "num_cpu_devices",
    "ici_data_parallelism",
    "ici_fsdp_parallelism",
    "ici_expert_parallelism",
    "ici_context_parallelism",
    "dcn_data_parallelism",
    "dcn_fsdp_parallelism",
    "dcn_expert_parallelism",
    "dcn_context_parallelism",
    "base_output_directory",
}


def train(resolved: Resolved, started: float) -> int:
    """Runs or resumes a run; returns the exit code.

    Args:
      resolved: the config and where its values come from.
      started: `time.monotonic()` when the program was launched.

    Raises:
      UserError: whatever the user can mend; what was saved before is kept.
    """
    config = _named(resolved.config)
    folder = Path(config.run.base_output_directory) / config.run.run_name
    prepare = functools.partial(_prepare_folder, folder, config, resolved.resuming)
    notes = hosts.on_main(prepare) or []
    _use_compilation_cache(config.run.jax_cache_dir)
    console = Console(quiet=not hosts.is_main())
    note = functools.partial(_note, console)
    for text in notes:
        note(text)
    with _checkpoints(folder, config, note) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done >= config.run.steps:
            note(f"{folder} has {done} steps already; to go on, give a larger steps=")
            return 0
        mesh = _make_mesh(config)
        trainer = Trainer(config, mesh)
        shape = global_batch_size(config, jax.device_count()), config.run.max_target_length
        data = _read_data(config, shape)
        with jax.set_mesh(mesh), ThreadPoolExecutor(1) as compiler:
            run = _Run(config, folder, trainer, data, checkpoints, started, console)
            if done:
                run.restore()  # before anything compiles: it may be of another model
            elif config.run.load_parameters_path:
                run.load_parameters()  # likewise
            step_compiled = compiler.submit(run.compile_steps, shape)
            eval_compiled = compiler.submit(trainer.compile_eval, shape)
            with hosts.lost_peers():
                return run.run(step_compiled, eval_compiled)


@dataclasses.dataclass
class _Clock:
    """Times of one run, in seconds of `time.monotonic`."""

    started: float
    first_step: float | None = None
    window: float = 0.0  # since when steps are counted for the next log line
    steps: int = 0
    training: float = 0.0  # spent in steps after the first one
    trained_steps: int = 0


class _Run:
    """The state of a run while it trains."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        trainer: Trainer,
        data: Data,
        checkpoints: Checkpoints,
        started: float,
        console: Console,
    ):
        self._config, self._run, self._folder = config, config.run, folder
        self._trainer, self._data = trainer, data
        self._checkpoints, self._console = checkpoints, console
        self._clock = _Clock(started)
        self._warmup_steps = config.quantization.quantization_warmup_steps
        # The same program without casts; its `init` and its eval are not used.
        self._warmup = Trainer(_without_casts(config), trainer.mesh)
        casts = recipe_from_config(config.quantization).weight is not None
        self._counts_casts = casts and config.moe.fp8_health
        self._eval_loss: float | None = None
        self._last: dict[str, Any] = {}
        self._losses: list[float] = []
        self._rows = global_batch_size(config, jax.device_count())
        self._restored: tuple[TrainState, int] | None = None

    def restore(self) -> None:
        """Starts from the newest checkpoint, with the data where it was."""
        first, state, data_state = self._checkpoints.restore(self._trainer.abstract_state())
        self._data.train.set_state(self._data_position(dict(data_state)))
        self._restored = state, first
        _note(self._console, f"resuming {self._folder} from step {first}")

    def _data_position(self, state: dict[str, Any]) -> dict[str, Any]:
        """The data iterator's state of a checkpoint, as that of this launch's batches."""
        rows = state.pop("rows", self._rows)
        if rows == self._rows:
            return state
        if not self._config.launch.resume_with_changes:
            here = self._config.run.per_device_batch_size * rows / self._rows
            raise UserError(
                f"{self._folder} was trained with {rows} sequences a step, these devices would "
                f"take {self._rows}; write per_device_batch_size={here:g}, or "
                f"resume_with_changes=true"
            )
        # It counts batches; rows that were read are not read again.
        return {**state, "next_index": -(-state["next_index"] * rows // self._rows)}

    def load_parameters(self) -> None:
        """Starts from the parameters of `load_parameters_path`, with a new optimizer."""
        self._restored = self._trainer.init(), 0
        path = self._run.load_parameters_path
        _note(self._console, f"starting {self._folder} from the parameters in {path}")

    def compile_steps(self, shape: tuple[int, int]) -> None:
        """Compiles the step, and the one without casts if this run still has such steps."""
        done = self._restored[1] if self._restored else 0
        if done < self._warmup_steps:
            self._warmup.compile_step(shape)
        self._trainer.compile_step(shape)

    def run(self, step_compiled: Future, eval_compiled: Future) -> int:
        """Trains to the last step, or until it is asked to stop."""
        note = functools.partial(_note, self._console)
        with Interrupt(note) as interrupt:
            state, first = self._restored or (self._trainer.init(), 0)
            self._restored = None  # its arrays are donated to the first step
            progress = Progress(
                self._run.steps, first, self._data.bigram_nats, console=self._console
            )
            with self._writer(first) as writer, progress:
                progress.note("compiling the train step")
                step_compiled.result()
                self._wait_for_eval = eval_compiled.result
                stop = self._train(state, first, writer, progress, interrupt)
        self._finish(stop)
        if stop == "finished":
            return 0
        if self._run.enable_checkpointing:
            note(f"saved step {self._last['step']}; to resume: {self._resume_command()}")
        else:
            note(f"stopped at step {self._last['step']}; enable_checkpointing=false: nothing saved")
        return 130

    def _writer(self, first: int) -> MetricsWriter:
        """Of process 0 the run's metrics."""
        if not hosts.is_main():
            return NoWriter()
        return MetricsWriter(self._folder, self._run.enable_tensorboard, resume_step=first)

    def _train(self, state, first, writer, progress, interrupt) -> str:
        """The loop over steps; returns why it ended: "finished" or a signal's name."""
        checkpoints, saving = self._checkpoints, self._run.enable_checkpointing
        batch = self._trainer.place(next(self._data.train))
        self._clock.window = time.monotonic()
        for step in range(first + 1, self._run.steps + 1):
            trainer = self._warmup if step <= self._warmup_steps else self._trainer
            state, metrics = trainer.step(state, batch)
            # The data's state as a resumed run needs it: before the next batch is drawn.
            data_state = {**self._data.train.get_state(), "rows": self._rows}
            batch = self._trainer.place(next(self._data.train))
            counts = metrics.pop("health", {})  # stays on the devices until it is logged
            self._take(step, jax.device_get(metrics))
            # All processes stop after the same step, whichever was asked to.
            stop = SIGNALS[hosts.largest(SIGNALS.index(interrupt.requested))]
            last, went_wrong = step == self._run.steps, not self._is_finite()
            if step % self._run.log_period == 0 or last or stop or went_wrong or step == first + 1:
                self._log(step, writer, progress)
            due = self._run.eval_interval > 0 and step % self._run.eval_interval == 0
            if last or due or went_wrong or step == first + 1:
                self._log_health(step, counts, writer)
            self._require_finite(step)
            if last or due:
                self._evaluate(step, state, writer, progress)
            if saving and (checkpoints.due(step) or last or stop):
                checkpoints.save(step, state, data_state, blocking=last or stop is not None)
            if stop and not last:
                return stop
        return "finished"

    def _take(self, step, metrics) -> None:
        """Keeps a step's numbers."""
        now = time.monotonic()
        clock = self._clock
        clock.steps += 1
        if clock.first_step is None:
            clock.first_step = now - clock.started
        self._last = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        self._losses.append(self._last["loss"])

    def _is_finite(self) -> bool:
        return all(math.isfinite(self._last[name]) for name in ("loss", "grad_norm"))

    def _require_finite(self, step) -> None:
        """A loss that is no number ends the run, once it is logged."""
        if not self._is_finite():
            raise UserError(
                f"loss and gradient norm must be finite, got {self._last['loss']} and "
                f"{self._last['grad_norm']} at step {step} {self._what_to_do()}"
            )

    def _what_to_do(self) -> str:
        """What is saved, and what else to try, where the numbers went wrong."""
        self._checkpoints.wait()
        saved = self._checkpoints.latest_step()
        kept = "no step was saved yet" if saved is None else f"step {saved} is saved"
        return (
            f"({kept}); try another run_name with a lower learning_rate, more "
            f"warmup_steps_fraction, or quantization=bf16"
        )

    def _log(self, step, writer, progress) -> None:
        """Writes and shows the steps since the last time."""
        now, clock = time.monotonic(), self._clock
        seconds = (now - clock.window) / clock.steps
        row = {**self._last, "kind": "train", "loss": float(np.mean(self._losses))}
        row |= {"step_seconds": seconds, "tokens_per_second": row["tokens"] / seconds}
        if not self._counts_casts:
            row = {k: v for k, v in row.items() if not k.endswith(("_saturated", "_flushed"))}
        if clock.trained_steps or clock.steps > 1 or self._last["step"] > 1:
            clock.training += now - clock.window
            clock.trained_steps += clock.steps
        writer.write(row)
        progress.update(row)
        self._last["mean_loss"] = row["loss"]
        clock.steps, self._losses = 0, []
        clock.window = time.monotonic()

    def _log_health(self, step, counts, writer) -> None:
        """Writes how the casts of each layer's GEMMs fared in this step."""
        row = _health_row(self._config.model, jax.device_get(counts)) if self._counts_casts else {}
        if row:
            writer.write({"step": step, "kind": "health", **row})

    def _evaluate(self, step, state, writer, progress) -> None:
        """Mean loss of the held-out split, over its counted tokens."""
        began = time.monotonic()
        progress.note("evaluating")
        self._wait_for_eval()
        sums = [
            jax.device_get(self._trainer.eval_sums(state.params, self._trainer.place(batch)))
            for batch in self._data.eval_batches()
        ]
        loss, tokens = np.sum(np.array(sums, np.float64), axis=0)
        self._eval_loss = float(loss / tokens)
        writer.write({"step": step, "kind": "eval", "eval_loss": self._eval_loss})
        if not math.isfinite(self._eval_loss):
            raise UserError(
                f"eval loss must be finite, got {self._eval_loss} after step {step} "
                f"{self._what_to_do()}"
            )
        progress.eval(self._eval_loss, step)
        self._clock.window += time.monotonic() - began

    def _finish(self, stop: str) -> None:
        """The summary, the picture and the table."""
        if not hosts.is_main():
            return
        summary = self._summary(stop)
        write_summary(self._folder, summary)
        title = f"{summary['run_name']}: {summary['recipe']}, {summary['schedule']}"
        picture = plot_loss(self._folder, title, self._data.bigram_nats)
        self._console.print(summary_table(summary))
        _note(self._console, str(picture))

    def _summary(self, stop: str) -> dict[str, Any]:
        config, clock = self._config, self._clock
        seconds = clock.training / clock.trained_steps if clock.trained_steps else None
        return {
            "run_name": self._run.run_name,
            "stopped": stop,
            "recipe": recipe_from_config(config.quantization).name,
            "schedule": "batch_split" if config.schedule.use_batch_split_schedule else "sequential",
            "steps": self._last["step"],
            "train_loss": self._last.get("mean_loss", self._last["loss"]),
            "eval_loss": self._eval_loss,
            "bigram_nats": self._data.bigram_nats,
            "tokens_per_second": self._last["tokens"] / seconds if seconds else None,
            "step_seconds": seconds,
            "seconds_to_first_step": clock.first_step,
            "total_seconds": time.monotonic() - clock.started,
            "peak_memory_bytes": _peak_memory(),
            "parameters": meshes.count(self._trainer.specs),
            "devices": jax.device_count(),
        }

    def _resume_command(self) -> str:
        args = [f"run_name={self._run.run_name}"]
        base = self._run.base_output_directory
        if base != type(self._run).model_fields["base_output_directory"].default:
            args.append(f"base_output_directory={base}")
        return shlex.join(["octablox", "train", *args])


def _health_row(model: ModelConfig, counts: dict[str, np.ndarray]) -> dict[str, float]:
    """`layers.3.gate_up.act.amax` and so on: `health.FIGURES` of every cast, by stack's counts."""
    names = transformer.moe_layer_names(model)
    row: dict[str, float] = {}
    for stack, figures in ((stack, health.summary(of)) for stack, of in counts.items()):
        for at in np.ndindex(figures["amax"].shape):
            cast = names[stack][at[0]], GEMMS[at[1]], health.OPERANDS[at[2]]
            if not np.isnan(figures["amax"][at]):  # else nothing was cast
                row |= {".".join((*cast, name)): float(figures[name][at]) for name in figures}
    return row


def _without_casts(config: Config) -> Config:
    return config.model_copy(update={"quantization": QuantizationConfig()})


def _make_mesh(config: Config) -> Mesh:
    slices = meshes.slice_count(jax.devices())
    shape = resolve_mesh_shape(config, jax.device_count(), slices)
    if jax.local_device_count() % shape["context"]:
        raise UserError(
            f"the context axis, {shape['context']}, must divide the devices of a process, "
            f"{jax.local_device_count()}, which reads whole sequences"
        )
    return meshes.make_mesh(shape, slices=resolve_slices(config, slices))


def _note(console: Console, text: str) -> None:
    """One line as it is: not wrapped, so that a command in it can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _checkpoints(folder: Path, config: Config, note: Callable[[str], None]) -> Checkpoints:
    return Checkpoints(
        folder / "checkpoints",
        period=config.run.checkpoint_period,
        keep=config.run.max_num_checkpoints_to_keep,
        keep_every=config.run.checkpoint_keep_period,
        note=note,
    )


def _named(config: Config) -> Config:
    """The config with a run_name: one made from the model and the time if none is given."""
    if config.run.run_name:
        return config
    name = hosts.mains(f"{config.model_name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    return config.model_copy(update={"run": config.run.model_copy(update={"run_name": name})})


def _prepare_folder(folder: Path, config: Config, resuming: bool) -> list[str]:
    """Makes the run folder and writes config.yml; returns what the user should know of it."""
    notes = [f"run folder: {folder}"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resuming:
            changed = configs.difference(configs.read(folder / "config.yml"), config)
            changed.pop("base_output_directory", None)
            if not config.launch.resume_with_changes:
                _require_resumable(folder, changed)
            notes += [f"resuming with {key}={b} (was {a})" for key, (a, b) in changed.items()]
        _write_config(config, folder / "config.yml")
    except OSError as error:
        raise cannot_write(folder, error) from error
    return notes


def _write_config(config: Config, path: Path) -> None:
    """Replaces config.yml as a whole: a full disk must not cost a run its settings."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        configs.write(config, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _require_resumable(folder: Path, changed: dict) -> None:
    refused = {key: values for key, values in changed.items() if key not in RESUMABLE}
    if refused:
        listed = ", ".join(f"{key}: {a} there, {b} here" for key, (a, b) in refused.items())
        raise UserError(
            f"{folder} was trained with other settings ({listed}); leave them out to resume it, "
            f"choose another run_name, or write resume_with_changes=true"
        )


def _use_compilation_cache(folder: str) -> None:
    if folder:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def _read_data(config: Config, shape: tuple[int, int]) -> Data:
    return make_data(
        config.data,
        batch_size=shape[0],
        sequence_length=shape[1],
        vocab_size=config.model.vocab_size,
        eval_steps=config.run.eval_steps,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def _peak_memory() -> int:
    """Bytes: of the busiest device where it says so, else of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    return max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
