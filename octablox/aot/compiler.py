"""Lowers and compiles the whole train step for a topology, and reads what came out.

Needs libtpu (`pip install 'octablox[tpu]'`) and no TPU: it compiles for chips that it is told of.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from octablox import checks, show
from octablox.aot import hlo
from octablox.aot.chips import GIB, Topology, parse_topology
from octablox.aot.overlap import read_schedule
from octablox.aot.report import Cost, Memory, Report, sum_collectives
from octablox.aot.timeline import timeline_text
from octablox.config import Config
from octablox.errors import UserError
from octablox.fp8 import recipe_from_config
from octablox.mesh import make_mesh
from octablox.train.step import Trainer

# libtpu asks the cloud's metadata server where it is, takes a lock on TPUs, and logs to stderr.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}


class DoesNotFit(UserError):
    """The step needs more memory than a device has; both in bytes."""

    def __init__(self, message: str, needed: float, available: float):
        super().__init__(message)
        self.needed, self.available = needed, available


@dataclasses.dataclass(frozen=True)
class Options:
    """What `octablox compile` can be told beside the config.

    Attributes:
      xla: XLA's options, name -> value.
      ring_gbps: GB/s of the ring that collectives share; None: the chip's.
      clock_ghz: at which XLA's cycles pass; None: what the chip's peak rate implies.
      save_hlo: where to write the scheduled program's text.
      timeline: where to write what the program does when, see `timeline_text`.
    """

    xla: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ring_gbps: float | None = None
    clock_ghz: float | None = None
    save_hlo: Path | None = None
    timeline: Path | None = None


def compile_report(
    config: Config,
    options: Options = Options(),
    note: Callable[[str], Any] = lambda text: None,
) -> Report:
    """Compiles the train step of `config` for its `compile_topology`, and reads it.

    Args:
      config: with `compile_topology`.
      options: see `Options`.
      note: called with what is being done, a line each.

    Raises:
      DoesNotFit: a device has not enough memory.
      UserError: no libtpu; a topology or mesh that cannot be; XLA refuses the program.
    """
    topology = _topology(config, options)
    checks.check_devices(config, topology.devices, topology.slices)
    shape = checks.resolve_mesh_shape(config, topology.devices, topology.slices)
    slices = checks.resolve_slices(config, topology.slices)
    mesh = make_mesh(shape, _devices(topology), slices)
    trainer = Trainer(config, mesh)
    rows = checks.global_batch_size(config, topology.devices)
    with _jax_config(_WHILE_COMPILING):
        began, cpu = time.monotonic(), _cpu_seconds()
        note(f"tracing and lowering for {topology.devices} devices")
        lowered = trainer.lower_step((rows, config.run.max_target_length))
        lowered_in = time.monotonic() - began
        note(f"XLA compiles for {topology.name}")
        state = _state_bytes(trainer)
        xla = trainer.compiler_options | dict(options.xla)
        compiled = _compile(lowered, topology, xla, state)
        compiled_in = time.monotonic() - began - lowered_in
        cost = Cost(
            *(lowered_in, compiled_in, _cpu_seconds() - cpu),
            peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
    note("reading the schedule")
    text = compiled.as_text()
    if options.save_hlo:
        _write(options.save_hlo, text)
    schedule = read_schedule(
        *(hlo.parse(text), topology.chip, dict(mesh.shape)),
        expert_rows=_expert_rows(config, mesh),
        slow_axes=[axis for axis, count in slices.items() if count > 1],
        slots_used=_slots_used(config, mesh),
    )
    if options.timeline:
        _write(options.timeline, timeline_text(schedule))
    tokens = rows * config.run.max_target_length
    forward = sum(show.flops_per_token(config).values())
    report = Report(
        *(config.model_name, recipe_from_config(config.quantization).name, topology),
        mesh=dict(mesh.shape),
        tokens=tokens,
        memory=_memory(compiled, topology, state),
        model_flops=3 * forward * tokens / topology.devices,
        schedule=schedule,
        traffic=sum_collectives(schedule.collectives),
        cost=cost,
    )
    if not report.memory.fits:
        raise _does_not_fit(topology, report.memory.peak, state)
    return report


def _topology(config: Config, options: Options) -> Topology:
    """The topology, with the rates that the options replace."""
    text = config.target.compile_topology
    if not text:
        raise UserError(
            "expected compile_topology=, such as compile_topology=tpu7x:4x4x8, got none"
        )
    if config.mesh.num_cpu_devices:
        raise UserError(
            f"num_cpu_devices={config.mesh.num_cpu_devices} has no meaning with "
            f"compile_topology={text}, which says how many devices there are; leave it out"
        )
    topology = parse_topology(text, max(config.target.compile_topology_num_slices, 1))
    chip = topology.chip
    if options.ring_gbps:
        chip = dataclasses.replace(chip, ring_rate=options.ring_gbps * 1e9)
    if options.clock_ghz:
        chip = dataclasses.replace(chip, clock=options.clock_ghz * 1e9)
    return dataclasses.replace(topology, chip=chip)


def _devices(topology: Topology) -> list[jax.Device]:
    """The described devices.

    Raises:
      UserError: libtpu is not installed, or knows no such topology.
    """
    from jax.experimental import topologies

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    settings = {"num_slices": topology.slices} if topology.slices > 1 else {}
    try:
        with _quiet_stderr():
            described = topologies.get_topology_desc(
                platform="tpu", topology_name=topology.name, **settings
            )
    except Exception as error:
        reason = str(error).splitlines()[0]
        if importlib.util.find_spec("libtpu") is None:
            raise UserError(
                "octablox compile needs libtpu, which is not installed; "
                "pip install 'octablox[tpu]' (no TPU is needed)"
            ) from error
        raise UserError(
            f"compile_topology: libtpu refuses {topology.name}: {reason}; choose another"
        ) from error
    return list(described.devices)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Without what libtpu's C++ prints while it loads, whatever its log levels say."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


_WHILE_COMPILING = {
    # Nothing compiled is taken from a cache: its cost is part of the report.
    "jax_enable_compilation_cache": False,
    # Kernels carry the lines of Python that called them, and XLA compiles those apart that were
    # called from elsewhere: each again for the backward pass and for the MTP layer.
    "jax_traceback_in_locations_limit": 0,
}


@contextlib.contextmanager
def _jax_config(settings: Mapping[str, Any]) -> Iterator[None]:
    """JAX's config with other values."""
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _compile(lowered, topology: Topology, xla: dict, state: int):
    try:
        return lowered.compile(compiler_options=xla or None)
    except Exception as error:
        text = str(error)
        needed = _needed_bytes(text)
        if needed is not None:
            raise _does_not_fit(topology, needed, state) from error
        unknown = re.search(r"[Nn]o such (?:compile )?option:? '?(\w+)", text)
        if unknown:
            raise UserError(
                f"--xla: expected an option of XLA's, got {unknown.group(1)!r}"
            ) from error
        path = _save_error(text)
        reason = " ".join(text.split())
        raise UserError(
            f"XLA cannot compile this step for {topology.name}: {reason[:200]} "
            f"(all of it is in {path})"
        ) from error


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Two wordings of one refusal; the sizes are rounded as XLA prints them.
_REFUSALS = (
    r"\(([\d.]+)([BKMGT]?)\) exceeds available HBM",
    r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm",
)


def _needed_bytes(text: str) -> float | None:
    """The memory that XLA says a program needs where it refuses it for that; else None."""
    for pattern in _REFUSALS:
        match = re.search(pattern, text)
        if match:
            return float(match.group(1)) * _UNITS[match.group(2)]
    return None


def _does_not_fit(topology: Topology, needed: float, state: int) -> DoesNotFit:
    available = topology.chip.hbm_bytes
    gib = {"needed": needed, "available": available, "short": needed - available, "state": state}
    text = {name: f"{size / GIB:.2f} GiB" for name, size in gib.items()}
    if state > available * 0.7:
        what = "choose a larger compile_topology or a larger ici_fsdp_parallelism"
    else:
        what = (
            "lower per_device_batch_size or max_target_length, write remat_policy=full, or choose "
            "a larger compile_topology"
        )
    return DoesNotFit(
        f"does not fit: a step needs {text['needed']} on each device ({text['state']} of it "
        f"parameters and optimizer), {topology.chip.name} has {text['available']}: "
        f"{text['short']} too little; {what}",
        needed,
        available,
    )


def _save_error(text: str) -> str:
    handle, path = tempfile.mkstemp(prefix="octablox-compile-", suffix=".txt")
    with open(handle, "w") as file:
        file.write(text)
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _state_bytes(trainer: Trainer) -> int:
    """Parameters and optimizer on one device."""
    leaves = jax.tree.leaves(trainer.abstract_state())
    shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in leaves)
    return sum(
        int(np.prod(shard)) * leaf.dtype.itemsize
        for shard, leaf in zip(shards, leaves, strict=True)
    )


def _memory(compiled, topology: Topology, state: int) -> Memory:
    stats = compiled.memory_analysis()
    return Memory(
        state=state,
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
        available=int(topology.chip.hbm_bytes),
    )


def _expert_rows(config: Config, mesh: Mesh) -> float:
    """Rows of a micro-batch that a device's experts work on when all experts get as many."""
    rows = config.run.per_device_batch_size / config.schedule.micro_batches
    copies = rows * config.run.max_target_length * config.moe.num_experts_per_tok
    # With the width cut, each device computes a part of every row of the expert axis.
    by_width = config.moe.expert_sharding == "width"
    return copies * (mesh.shape["expert"] if by_width else 1)


def _slots_used(config: Config, mesh: Mesh) -> float:
    """The share of the expert axis's devices that a token goes to when all experts get as many."""
    moe, devices = config.moe, mesh.shape["expert"]
    # A token's experts are in its groups, so on that part of the devices.
    candidates = max(devices * moe.topk_routing_group / moe.n_routing_groups, 1.0)
    missed = (1 - 1 / candidates) ** moe.num_experts_per_tok
    return candidates * (1 - missed) / devices


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
