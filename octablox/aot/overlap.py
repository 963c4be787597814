"""What a compiled schedule does with its collectives: which run under compute, which stall it.

A TPU program's instructions stand in the order in which the TensorCore runs them. An asynchronous
collective is two or three of them: `-start`, on some chips `-update` (where its operand is handed
over), and `-done`, where the TensorCore waits. What stands between runs while the bytes travel.

The model behind the times is small on purpose. The TensorCore runs one instruction after the other,
each for XLA's own estimate of its cycles or, where there is none that can be true, for what its
FLOPs and its bytes need at the chip's peak rates. All collectives share one ring, one after the
other. A `-done` waits for what is left of its transfer: that is its exposed time.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from octablox.aot.chips import Chip
from octablox.aot.costs import Costs
from octablox.aot.hlo import HBM, HOST, Computation, Instruction, Module

PHASES = ("forward", "remat", "backward", "update")
# kind -> bytes that a device receives, over its operand's bytes, in a group of n devices
_RECEIVED = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}
# Cycles that no instruction takes: XLA says so of ragged products, whose cost it cannot know.
_ABSURD_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the schedule.

    Attributes:
      name: the instruction's.
      kind: "all-gather", "reduce-scatter", ...
      axes: mesh axes that it runs over, joined by "+".
      phase: one of `PHASES`.
      times: executions in a step; more than one inside a loop.
      bytes: that a device receives, each time.
      seconds: of the transfer, each time.
      exposed: of those, how many the TensorCore waits.
      products: matrix products between its start and its end; 0 if it is synchronous.
      is_async: whether it has a start and an end.
    """

    name: str
    kind: str
    axes: str
    phase: str
    times: int
    bytes: float
    seconds: float
    exposed: float
    products: int
    is_async: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A step of one device, as scheduled and modelled.

    Attributes:
      collectives: in scheduled order.
      compute: phase -> seconds in which the TensorCore works.
      seconds: of the whole step: compute, and what is exposed.
      flops: kind of operands -> FLOPs, with each loop's trips.
      expert_flops: of those, by kind, those of the experts' grouped products.
      hbm_bytes: read and written in HBM.
      host_bytes: moved from and to the host's memory.
      notes: what could not be read, each a line.
    """

    collectives: tuple[Collective, ...]
    compute: dict[str, float]
    seconds: float
    flops: dict[str, float]
    expert_flops: dict[str, float]
    hbm_bytes: float
    host_bytes: float
    notes: tuple[str, ...]


def read_schedule(
    module: Module,
    chip: Chip,
    mesh: Mapping[str, int],
    *,
    expert_rows: float = 0.0,
    slow_axes: Sequence[str] = (),
) -> Schedule:
    """Reads one device's program.

    Args:
      module: the program.
      chip: what it runs on.
      mesh: axis -> devices, in the mesh's order.
      expert_rows: see `Costs`.
      slow_axes: axes between slices; collectives over them use the data center's network.
    """
    walk = _Walk(module, chip, dict(mesh), Costs(module, expert_rows), frozenset(slow_axes))
    seconds = walk.run(module.entry, 1, "update")
    return Schedule(
        collectives=tuple(walk.collectives),
        compute={phase: walk.compute[phase] for phase in PHASES},
        seconds=seconds,
        flops=dict(walk.flops),
        expert_flops=dict(walk.expert_flops),
        hbm_bytes=walk.traffic[HBM],
        host_bytes=walk.traffic[HOST],
        notes=tuple(walk.notes()),
    )


def phase_of(op_name: str, kind: str = "", axes: str = "") -> str | None:
    """The phase that an instruction's place in the JAX program says; None if it says nothing.

    JAX writes `jvp` around what is differentiated and `transpose` around its backward pass. Inside
    the latter a second `transpose` is the backward pass itself, and what has none is run again.
    """
    if not op_name:
        return None
    before, backward, inside = op_name.partition("transpose(")
    if not backward:
        return "forward" if "jvp(" in before else "update"
    if "transpose(" in inside:
        return "backward"
    if "rematted_computation" in inside or "/jvp(" in inside:
        return "remat"
    if "eval_jaxpr" not in inside:
        return "backward"
    # A hand-written backward pass: gradients are summed over axes that cut the batch only.
    sums = kind in ("reduce-scatter", "all-reduce") and "expert" not in axes.split("+")
    return "backward" if sums else "remat"


@dataclasses.dataclass
class _Open:
    """An asynchronous collective under way: its start, what hands its operand over, its parts."""

    start: Instruction
    feeder: Instruction
    found: list["_Found"]
    ends: float | None = None
    products: int = 0


@dataclasses.dataclass(frozen=True)
class _Found:
    """A collective, and the computation that it stands in."""

    instruction: Instruction
    computation: Computation
    kind: str


class _Walk:
    """Runs through the schedule, loops included."""

    def __init__(self, module, chip, mesh, costs, slow_axes):
        self._module, self._chip, self._mesh = module, chip, mesh
        self._costs, self._slow_axes = costs, slow_axes
        self._collectives_in: dict[str, list[_Found]] = {}
        self._unknown_loops = 0
        self.collectives: list[Collective] = []
        self.compute: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.flops: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.expert_flops: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.traffic: collections.defaultdict[int, float] = collections.defaultdict(float)

    def notes(self) -> list[str]:
        """What could not be read."""
        lines = []
        if self._unknown_loops:
            lines.append(f"{self._unknown_loops} loops of unknown length are counted once")
        if self._costs.unknown_kernels:
            names = ", ".join(sorted(self._costs.unknown_kernels))
            lines.append(f"kernels whose FLOPs are not known count by their bytes: {names}")
        return lines

    def run(self, name: str, times: int, phase: str) -> float:
        """Walks one computation, executed `times` a step; returns its seconds, each time."""
        computation = self._module.computations[name]
        now, ring, products = 0.0, 0.0, 0
        under_way: dict[str, _Open] = {}
        for one in computation:
            opcode = one.opcode
            if opcode == "while":
                trips = self._trips(one)
                body = one.attribute(r"body=%([^\s,}]+)")
                now += trips * self.run(body, times * trips, phase_of(one.op_name) or phase)
                continue
            if opcode in ("call", "conditional"):
                now += self._branches(one, times, phase)
                continue
            if opcode.endswith(("-update", "-done")) and one.operands:
                transfer = under_way.pop(one.operands[0], None)
                if transfer is None:
                    continue
                if opcode.endswith("-update"):
                    transfer.products, transfer.feeder = products, one
                    ring = self._begin(transfer, now, ring)
                    under_way[one.name] = transfer
                    continue
                ring = self._begin(transfer, now, ring) if transfer.ends is None else ring
                stall = max(0.0, (transfer.ends or now) - now)
                now += stall
                between = products - transfer.products
                self._add(
                    transfer.found, computation, transfer.feeder, times, phase, stall, between, True
                )
                continue
            found = self._found(computation, one)
            if not found:
                self._count_traffic(computation, one, times)
            if found and opcode.endswith("-start"):
                transfer = _Open(one, one, found, products=products)
                if one.operands:  # the operand is there: the transfer begins here
                    ring = self._begin(transfer, now, ring)
                under_way[one.name] = transfer
            elif found:
                stall = self._seconds(found)
                now = ring = max(now, ring) + stall
                self._add(found, computation, one, times, phase, stall, 0, False)
            elif not opcode.endswith("-start"):
                seconds, has_product = self._work(computation, one, times)
                now += seconds
                products += has_product
                where = phase_of(one.op_name) or phase
                self.compute[where] += seconds * times
        return now

    def _trips(self, loop: Instruction) -> int:
        """A loop's length: what its condition compares the counter with."""
        known = loop.attribute(r'known_trip_count"?[:=]\{"?n"?:"?(\d+)')
        if known:
            return int(known)
        condition = self._module.computations[loop.attribute(r"condition=%([^\s,}]+)")]
        limits = [
            int(one.argument)
            for one in condition
            if one.opcode == "constant" and one.argument.isdecimal()
        ]
        if len(limits) != 1:
            self._unknown_loops += 1
            return 1
        return limits[0]

    def _branches(self, one: Instruction, times: int, phase: str) -> float:
        """The longest branch, less those that a program marks as rare by the name "fallback"."""
        names = [name for name in one.called if name in self._module.computations]
        usual = [name for name in names if not self._is_fallback(name)] or names
        if len(usual) > 1:
            lengths = {name: _Length(self).of(name) for name in usual}
            usual = [max(usual, key=lambda name: lengths[name])]
        return math.fsum(self.run(name, times, phase) for name in usual)

    def _is_fallback(self, name: str) -> bool:
        named = [one for one in self._module.computations[name] if one.op_name]
        return bool(named) and all("fallback" in one.op_name for one in named)

    def _found(self, computation: Computation, one: Instruction) -> list[_Found]:
        """The collectives that an instruction is, or that the computations it calls hold."""
        kind = re.sub(r"-start$", "", one.opcode)
        if kind in _RECEIVED:
            return [_Found(one, computation, kind)]
        found = []
        for name in one.called if one.opcode != "while" else ():
            if name not in self._collectives_in:
                inside = self._module.computations.get(name, Computation([]))
                parts = [part for other in inside for part in self._found(inside, other)]
                self._collectives_in[name] = _as_reduce_scatter(inside, parts)
            found += self._collectives_in[name]
        return found

    def _begin(self, transfer: _Open, now: float, ring: float) -> float:
        transfer.ends = max(now, ring) + self._seconds(transfer.found)
        return transfer.ends

    def _seconds(self, found: list[_Found]) -> float:
        return math.fsum(self._bytes(one) / self._rate(self._axes(one)) for one in found)

    def _rate(self, axes: Sequence[str]) -> float:
        slow = self._slow_axes & set(axes)
        return self._chip.slice_rate if slow else self._chip.ring_rate

    def _bytes(self, found: _Found) -> float:
        n = int(np.prod([self._mesh.get(axis, 1) for axis in self._axes(found)]))
        operands = found.computation.operands(found.instruction)
        if found.kind == "ragged-all-to-all":
            operands = operands[:1]
        size = sum(buffer.bytes for operand in operands for buffer in operand.buffers)
        return size * _RECEIVED[found.kind](n) if n > 1 else 0.0

    def _axes(self, found: _Found) -> tuple[str, ...]:
        """The mesh axes of a collective that have more than one device, in the mesh's order."""
        groups = found.instruction.attribute(r"replica_groups=((?:mesh\[[^\]]*\] )?.*?), \w+=")
        named = re.match(r"mesh\[[^\]]*\] \{([^}]*)\}", groups)
        if named:
            names = set(re.findall(r"'(\w+)'", named.group(1)))
        else:
            pairs = found.instruction.attribute(r"source_target_pairs=(\{\{.*?\}\})")
            names = _varying_axes(self._mesh, groups or pairs)
        return tuple(axis for axis, size in self._mesh.items() if axis in names and size > 1)

    def _add(self, found, computation, one, times, phase, stall, products, is_async) -> None:
        for part in found:
            axes, size = self._axes(part), self._bytes(part)
            self._count_collective(part, times)
            if not axes or not size:
                continue
            label = "+".join(axes)
            where = (
                phase_of(part.instruction.op_name or one.op_name, part.kind, label)
                or _phase_of_operands(computation, one, part.kind, label)
                or phase
            )
            seconds = size / self._rate(axes)
            exposed = min(stall, seconds) if len(found) == 1 else stall / len(found)
            self.collectives.append(
                Collective(
                    one.name,
                    part.kind,
                    label,
                    where,
                    times,
                    size,
                    seconds,
                    exposed,
                    products,
                    is_async,
                )
            )

    def _count_traffic(self, computation, one, times) -> None:
        for space, size in self._costs.traffic(computation, one).items():
            self.traffic[space] += size * times

    def _count_collective(self, found: _Found, times: int) -> None:
        """What a collective reads and writes, beside what it sends."""
        ends = [*found.computation.operands(found.instruction), found.instruction]
        for buffer in [buffer for one in ends for buffer in one.buffers]:
            self.traffic[buffer.space] += buffer.bytes * times

    def _work(self, computation, one, times) -> tuple[float, bool]:
        """Seconds of an instruction, and whether it has a matrix product; counts its FLOPs."""
        flops = self._costs.flops(computation, one)
        for kind, number in flops.items():
            self.flops[kind] += number * times
        expert = self._costs.expert_product(computation, one)
        for kind, number in expert.items():
            self.expert_flops[kind] += number * times
        return self.seconds_of(computation, one), self._costs.has_product(computation, one)

    def seconds_of(self, computation: Computation, one: Instruction) -> float:
        """Seconds of one instruction on the TensorCore."""
        estimate = (one.cycles or 0) / self._chip.clock
        if 0 < estimate < _ABSURD_SECONDS and not self._costs.expert_product(computation, one):
            return estimate
        traffic = self._costs.traffic(computation, one)[HBM] / self._chip.hbm_rate
        return max(traffic, compute_seconds(self._costs.flops(computation, one), self._chip))


class _Length:
    """How long a computation is, without counting it."""

    def __init__(self, walk: _Walk):
        self._walk = walk

    def of(self, name: str) -> float:
        computation = self._walk._module.computations[name]
        return math.fsum(
            math.fsum(self.of(called) for called in one.called if one.opcode in ("while", "call"))
            or self._walk.seconds_of(computation, one)
            for one in computation
        )


def compute_seconds(flops: Mapping[str, float], chip: Chip) -> float:
    """Seconds of FLOPs by kind of operands at the chip's peak; float32 at a sixth of bf16's."""
    rates = {**chip.flops, "f32": chip.flops["bf16"] / 6}  # three passes of two bf16 halves
    return math.fsum(number / rates[kind] for kind, number in flops.items())


def _as_reduce_scatter(inside: Computation, parts: list[_Found]) -> list[_Found]:
    """XLA fuses a reduce-scatter as an all-reduce of which each device keeps a slice."""
    if not parts or inside.root.opcode not in ("dynamic-slice", "bitcast"):
        return parts
    has_slice = any(one.opcode == "dynamic-slice" for one in inside)
    return [
        dataclasses.replace(part, kind="reduce-scatter")
        if part.kind == "all-reduce" and has_slice
        else part
        for part in parts
    ]


def _varying_axes(mesh: Mapping[str, int], groups: str) -> set[str]:
    """Axes along which the devices of the first group differ; groups by number of the device."""
    sizes = tuple(mesh.values())
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups)
    if iota:
        shape, dims, order = (
            [int(n) for n in part.split(",")] if part else [] for part in iota.groups()
        )
        numbers = np.arange(int(np.prod(dims))).reshape(dims)
        members = numbers.transpose(order or range(len(dims))).reshape(shape)[0]
    else:
        first = re.search(r"\{([\d,]+)\}", groups)
        if first is None:  # no groups: all devices
            return set(mesh)
        members = np.array([int(n) for n in first.group(1).split(",")])
    places = np.unravel_index(members, sizes)
    return {axis for axis, place in zip(mesh, places, strict=True) if len(set(place)) > 1}


def _phase_of_operands(
    computation: Computation, one: Instruction, kind: str, axes: str
) -> str | None:
    """The phase of what an instruction without a name reads, or None."""
    frontier, depth = [one], 0
    while frontier and depth < 6:
        depth += 1
        frontier = [operand for item in frontier for operand in computation.operands(item)]
        for operand in frontier:
            if operand.op_name and operand.opcode not in ("parameter", "while"):
                return phase_of(operand.op_name, kind, axes)
    return None
