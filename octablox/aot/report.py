"""What `octablox compile` reports, as data and as tables."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from octablox.aot.chips import GB, GIB, Topology
from octablox.aot.collectives import PHASES
from octablox.aot.overlap import Collective, Schedule, compute_seconds


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      state: of the arguments, parameters and optimizer.
      arguments: the state and the batch.
      outputs: the new state and the metrics.
      aliased: of the outputs, those that lie where an argument lay.
      temporaries: all that lives within the step.
      code: the program.
      host: arguments and temporaries that lie in the host's memory.
      available: what XLA lets a program use.
    """

    state: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: int
    available: int

    @property
    def peak(self) -> int:
        """The most that the step needs at a time: XLA keeps one place for all temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """Whether the device has that much."""
        return self.peak <= self.available


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one phase, set of axes and kind, in one step on one device.

    Attributes:
      phase, axes, kind: see `Collective`.
      count: executions.
      bytes: that the device receives.
      overlapped_bytes: of those, in transfers with a matrix product between start and end.
      seconds: of the transfers.
      exposed_seconds: of those, in which the TensorCore waits.
    """

    phase: str
    axes: str
    kind: str
    count: int
    bytes: float
    overlapped_bytes: float
    seconds: float
    exposed_seconds: float

    @property
    def overlapped(self) -> float:
        """Fraction of the bytes that travel under a matrix product."""
        return self.overlapped_bytes / self.bytes if self.bytes else 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """What compiling took on this machine: seconds, CPU-seconds, and the largest memory."""

    lower_seconds: float
    compile_seconds: float
    cpu_seconds: float
    peak_host_bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """A train step compiled for a topology. All but `cost` are figures of one device.

    Attributes:
      model: model_name.
      recipe: name of the quantization recipe.
      topology: what it is compiled for.
      mesh: axis -> devices.
      tokens: of one optimizer step on all devices.
      memory: bytes.
      model_flops: 3 x the model's forward pass, by the config; what MFU counts.
      schedule: the compiled program as read and modelled.
      traffic: the schedule's collectives, summed.
      cost: of compiling.
    """

    model: str
    recipe: str
    topology: Topology
    mesh: dict[str, int]
    tokens: int
    memory: Memory
    model_flops: float
    schedule: Schedule
    traffic: tuple[Traffic, ...]
    cost: Cost

    @property
    def roofline(self) -> dict[str, float]:
        """Seconds that FLOPs, HBM and network need, each alone and at its peak rate."""
        chip = self.topology.chip
        return {
            "flops": compute_seconds(self.schedule.flops, chip),
            "hbm": self.schedule.hbm_bytes / chip.hbm_rate,
            "network": math.fsum(one.seconds for one in self.traffic),
        }

    @property
    def roofline_seconds(self) -> float:
        """The longest of them: what a step takes if all else runs beside it."""
        return max(self.roofline.values())

    @property
    def exposed_seconds(self) -> float:
        """Of the modelled step, in which the TensorCore waits for the network."""
        return math.fsum(one.exposed_seconds for one in self.traffic)

    def select(self, phase: str = "", axes: str = "") -> list[Traffic]:
        """The traffic of a phase and over a set of axes; "" is any."""
        return [one for one in self.traffic if phase in ("", one.phase) and axes in ("", one.axes)]

    def mfu(self, seconds: float) -> float:
        """Model FLOPs a second over the bf16 peak, for a step of that length."""
        return self.model_flops / seconds / self.topology.chip.flops["bf16"] if seconds else 0.0

    def assumptions(self) -> list[str]:
        """What the times rest on, a line each."""
        chip, lines = self.topology.chip, []
        if chip.devices > 1:
            lines.append(
                f"JAX counts each of a {chip.name} chip's {chip.devices} TensorCores as a device; "
                "all figures are of one device, with its share of the chip"
            )
        lines += [
            f"peak {chip.flops['bf16'] / 1e12:.0f} TFLOP/s bf16, {chip.flops['fp8'] / 1e12:.0f} "
            f"fp8; HBM {chip.hbm_rate / GB:.0f} GB/s; XLA's cycles pass at "
            f"{chip.clock / 1e9:.2f} GHz",
            f"all collectives share one ring of {chip.ring_rate / GB:.0f} GB/s a device, those "
            "that are asynchronous one after the other; no latencies, no contention",
            "what the SparseCore computes (some gathers) stands in the queue and takes as long as "
            "its result from and to HBM",
            "FLOPs of dense products are from their shapes; of the experts' grouped products from "
            "the config: even load, no padding, no row computed twice, and at the peak rate",
            "an instruction takes XLA's own estimate of its cycles, else what its FLOPs or bytes "
            "need; copies between HBM and VMEM run beside",
            "a ragged all-to-all sends what an even load makes of it",
            "attention's kernels run at the share of the peak that their schedule for TPU7x has: "
            "27% forward, 43 to 48% backward",
            "under compute: a matrix product stands between a transfer's start and its end. Rank "
            "by exposed time instead",
            "model FLOPs are 3 x the forward pass; MFU is of the bf16 peak",
        ]
        if self.topology.slices > 1:
            lines.append(
                f"between slices {chip.slice_rate / GB:.1f} GB/s a device over the data center's "
                "network"
            )
        return [*lines, *self.schedule.notes]

    def to_json(self) -> dict[str, Any]:
        """Everything, of JSON's types; seconds and bytes."""
        network: dict[str, float] = {}
        for one in self.traffic:
            key = f"{one.axes} {one.kind}"
            network[key] = network.get(key, 0.0) + one.bytes
        memory = dataclasses.asdict(self.memory)
        schedule = self.schedule
        return {
            "model": self.model,
            "recipe": self.recipe,
            "topology": self.topology.name,
            "slices": self.topology.slices,
            "devices": self.topology.devices,
            "devices_per_chip": self.topology.chip.devices,
            "mesh": self.mesh,
            "tokens": self.tokens,
            "fits": self.memory.fits,
            "memory_bytes": {**memory, "peak": self.memory.peak},
            "model_flops": self.model_flops,
            "flops": schedule.flops,
            "expert_flops": schedule.expert_flops,
            "hbm_bytes": schedule.hbm_bytes,
            "host_bytes": schedule.host_bytes,
            "network_bytes": network,
            "collectives": [
                {**dataclasses.asdict(one), "overlapped": one.overlapped} for one in self.traffic
            ],
            "roofline_seconds": {**self.roofline, "step": self.roofline_seconds},
            "roofline_mfu": self.mfu(self.roofline_seconds),
            "modelled_seconds": {
                "compute": sum(schedule.compute.values()),
                **{f"compute_{phase}": schedule.compute[phase] for phase in PHASES},
                "exposed": self.exposed_seconds,
                "step": schedule.seconds,
            },
            "modelled_mfu": self.mfu(schedule.seconds),
            "compile": dataclasses.asdict(self.cost),
            "assumptions": self.assumptions(),
        }


def sum_collectives(collectives: Iterable[Collective]) -> tuple[Traffic, ...]:
    """The collectives by phase, axes and kind."""

    def key(one):
        return PHASES.index(one.phase), one.axes, one.kind

    rows = []
    for _, group in itertools.groupby(sorted(collectives, key=key), key):
        ones = list(group)
        first = ones[0]
        rows.append(
            Traffic(
                *(first.phase, first.axes, first.kind),
                count=sum(one.times for one in ones),
                bytes=math.fsum(one.times * one.bytes for one in ones),
                overlapped_bytes=math.fsum(one.times * one.bytes for one in ones if one.products),
                seconds=math.fsum(one.times * one.seconds for one in ones),
                exposed_seconds=math.fsum(one.times * one.exposed for one in ones),
            )
        )
    return tuple(rows)


def print_report(report: Report, console: Console) -> None:
    """Prints the tables."""
    topology, chip = report.topology, report.topology.chip
    axes = " × ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    slices = f"{topology.slices} × " if topology.slices > 1 else ""
    a_chip = f", {chip.devices} to a chip" if chip.devices > 1 else ""
    per_device = report.tokens / topology.devices
    head = {
        "model": f"{report.model}, {report.recipe}",
        "topology": f"{slices}{topology.name}: {topology.devices} devices{a_chip}; {axes}",
        "batch": f"{report.tokens:,} tokens a step, {per_device:,.0f} a device\n",
    }
    for name, text in head.items():
        console.print(f"[bold]{name:10}[/]{text}", highlight=False)
    for table in (
        _memory_table(report.memory),
        _work_table(report),
        _collective_table(report),
        _step_table(report),
    ):
        console.print(table)
        console.print()
    console.print("[bold]assumed[/]")
    for line in report.assumptions():
        console.print(f"  - {line}", highlight=False)
    cost = report.cost
    console.print(
        f"\nlowered in {cost.lower_seconds:.1f} s, compiled in {cost.compile_seconds:.1f} s; "
        f"{cost.cpu_seconds:.0f} CPU-seconds, {cost.peak_host_bytes / GIB:.1f} GiB at most",
        highlight=False,
    )


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """A plain table whose first `left` columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table


def _memory_table(memory: Memory) -> Table:
    table = _table("memory of a device", "", "GiB")
    rows = {
        "arguments": memory.arguments,
        "  of which parameters and optimizer": memory.state,
        "temporaries": memory.temporaries,
        "outputs, less those in place of arguments": memory.outputs - memory.aliased,
        "program": memory.code,
        "peak": memory.peak,
        "available": memory.available,
        "in the host's memory": memory.host,
    }
    for name, size in rows.items():
        table.add_row(name, f"{size / GIB:.3f}", style="bold" if name == "peak" else "")
    return table


def _work_table(report: Report) -> Table:
    table = _table("work of a device in a step", "", "amount", "ms at the peak rate")
    schedule, chip = report.schedule, report.topology.chip
    for kind, number in sorted(schedule.flops.items()):
        expert = schedule.expert_flops.get(kind, 0.0)
        share = f", {100 * expert / number:.0f}% of it experts'" if expert else ""
        seconds = compute_seconds({kind: number}, chip)
        table.add_row(f"{kind} FLOPs{share}", _si(number), _ms(seconds))
    table.add_row("HBM bytes", _si(schedule.hbm_bytes), _ms(report.roofline["hbm"]))
    network: dict[tuple[str, str], list[Traffic]] = {}
    for one in report.traffic:
        network.setdefault((one.axes, one.kind), []).append(one)
    for (axes, kind), ones in sorted(network.items()):
        size = math.fsum(one.bytes for one in ones)
        seconds = math.fsum(one.seconds for one in ones)
        table.add_row(f"network bytes, {axes}, {kind}", _si(size), _ms(seconds))
    if schedule.host_bytes:
        table.add_row("bytes to and from the host", _si(schedule.host_bytes), "")
    table.add_row(
        "roofline: the longest of FLOPs, HBM, network",
        "",
        _ms(report.roofline_seconds),
        style="bold",
    )
    return table


def _collective_table(report: Report) -> Table:
    title = "collectives of a device in a step"
    columns = ("phase", "axes", "kind", "count", "MB", "under compute", "ms", "exposed ms")
    table = _table(title, *columns, left=3)
    for one in report.traffic:
        table.add_row(*(one.phase, one.axes, one.kind), *_numbers([one]))
    axes = sorted({one.axes for one in report.traffic})
    totals = [(phase, "") for phase in PHASES] + [("", name) for name in axes] + [("", "")]
    for phase, name in totals:
        ones = report.select(phase, name)
        if ones:
            table.add_row(phase or "all", name or "all", "", *_numbers(ones), style="bold")
    return table


def _numbers(ones: Iterable[Traffic]) -> list[str]:
    ones = list(ones)
    size = math.fsum(one.bytes for one in ones)
    under = math.fsum(one.overlapped_bytes for one in ones)
    return [
        f"{sum(one.count for one in ones):,}",
        f"{size / 1e6:,.2f}",
        f"{100 * under / size:.0f}%" if size else "–",
        _ms(math.fsum(one.seconds for one in ones)),
        _ms(math.fsum(one.exposed_seconds for one in ones)),
    ]


def _step_table(report: Report) -> Table:
    table = _table("a step, modelled", "", "ms")
    schedule = report.schedule
    for phase in PHASES:
        table.add_row(f"compute, {phase}", _ms(schedule.compute[phase]))
    table.add_row("exposed communication", _ms(report.exposed_seconds))
    table.add_row("step", _ms(schedule.seconds), style="bold")
    table.add_row("MFU of that step", f"{100 * report.mfu(schedule.seconds):.1f}%")
    table.add_row("MFU bound, of the roofline", f"{100 * report.mfu(report.roofline_seconds):.1f}%")
    return table


def _si(number: float) -> str:
    """Three decimals with an SI prefix."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:,.3f} {prefix}"
    return f"{number / 1e3:,.3f} k"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"
