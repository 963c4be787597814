"""What a compiled schedule does with its collectives: which run under compute, which stall it.

A TPU program's instructions stand in the order in which the TensorCore runs them. An asynchronous
collective is two or three of them: `-start`, on some chips `-update` (where its operand is handed
over), and `-done`, where the TensorCore waits. What stands between runs while the bytes travel.

The model behind the times is small on purpose. The TensorCore runs one instruction after the other,
each for XLA's own estimate of its cycles or, where there is none that can be true, for what its
FLOPs and its bytes need at the chip's peak rates. Asynchronous collectives queue for one ring, in
the order in which they start; those between slices for the network of the data center. A `-done`
waits for what is left of its transfer and of those before it. A synchronous collective does not
queue: it has half of the ring while a transfer is on it. What is on a network while the TensorCore
waits is exposed.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from octablox.aot.chips import Chip
from octablox.aot.collectives import PHASES, Finder, Found, phase_of, phase_of_operands
from octablox.aot.costs import Costs
from octablox.aot.hlo import HBM, HOST, Computation, Instruction, Module

# Longer than any instruction takes: XLA says so of ragged products, whose cost it cannot know.
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
class Event:
    """Something on the timeline of a computation, such as a loop's body.

    Attributes:
      kind: "works", "sends" (a transfer begins) or "waits".
      computation: its name.
      times: executions of the computation in a step.
      phase: one of `PHASES`.
      begin, end: seconds since the computation began; both the same of "sends".
      name: of the instruction.
      what: of work, where it comes from in the program; of a transfer, its axes, kind and bytes.
    """

    kind: str
    computation: str
    times: int
    phase: str
    begin: float
    end: float
    name: str
    what: str


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A step of one device, as scheduled and modelled.

    Attributes:
      collectives: in the order in which they end.
      events: in the order of the program; what a loop's body does stands before the loop's end.
      compute: phase -> seconds in which the TensorCore works.
      seconds: of the whole step: compute, and what is exposed.
      flops: kind of operands -> FLOPs, with each loop's trips.
      expert_flops: of those, by kind, those of the experts' grouped products.
      hbm_bytes: read and written in HBM.
      host_bytes: moved from and to the host's memory.
      notes: what could not be read, each a line.
    """

    collectives: tuple[Collective, ...]
    events: tuple[Event, ...]
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
    slots_used: float = 1.0,
) -> Schedule:
    """Reads one device's program.

    Args:
      module: the program.
      chip: what it runs on.
      mesh: axis -> devices, in the mesh's order.
      expert_rows: see `Costs`.
      slow_axes: axes between slices; collectives over them use the data center's network.
      slots_used: see `Finder`.
    """
    finder = Finder(module, mesh, slow_axes, slots_used)
    costs = Costs(module, expert_rows)
    walk = _Walk(module, chip, finder, costs)
    seconds = walk.run(module.entry, 1, "update")
    return Schedule(
        collectives=tuple(walk.collectives),
        events=tuple(walk.events),
        compute={phase: walk.compute[phase] for phase in PHASES},
        seconds=seconds,
        flops=dict(walk.flops),
        expert_flops=dict(walk.expert_flops),
        hbm_bytes=walk.traffic[HBM],
        host_bytes=walk.traffic[HOST],
        notes=tuple(walk.notes()),
    )


def compute_seconds(flops: Mapping[str, float], chip: Chip) -> float:
    """Seconds of FLOPs by kind of operands at the chip's peak; float32 at a sixth of bf16's."""
    rates = {**chip.flops, "f32": chip.flops["bf16"] / 6}  # six products of bf16 parts
    return math.fsum(number / rates[kind] for kind, number in flops.items())


def _within(phase: str, said: str | None) -> str:
    """The phase of an instruction whose name says `said` in a loop of `phase`.

    XLA keeps the first name of what it finds twice: what is called forward in the backward loop
    runs again there.
    """
    again = phase in ("backward", "remat") and said == "forward"
    return "remat" if again else said or phase


def _part_of_fused(one: Instruction) -> str:
    """What an instruction is of a transfer that v5e fuses with the compute beside it, or "".

    Its start and its end are fusions by these names, and each fusion between moves it on.
    """
    if one.opcode != "fusion":
        return ""
    if any(name.startswith("async_collective_fusion") for name in one.called):
        return "step"
    for part in ("start", "done"):
        if one.name.startswith(f"async-collective-{part}"):
            return part
    return ""


def _rendezvous(one: Instruction | None) -> str:
    """What a send to other slices and the recv of its result have in common."""
    return one.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"') if one else ""


@dataclasses.dataclass(eq=False)
class _Transfer:
    """What an instruction sends: its collectives, what is left of them, what is exposed.

    Or, without collectives, what the SparseCore computes: it stands in the queue with transfers.
    """

    instruction: Instruction
    found: list[Found]
    seconds: float  # with the network for itself
    left: float = 0.0  # of those seconds
    has_begun: bool = False
    is_queued: bool = True  # else it shares the ring with what is
    exposed: float = 0.0
    products: int = 0  # before it began

    @property
    def is_slow(self) -> bool:
        """Whether it goes between slices."""
        return any(part.is_slow for part in self.found)


class _Timeline:
    """The clock of one execution of a computation: TensorCore, networks, transfers under way.

    Attributes:
      now: seconds since it began.
      products: matrix products until now.
      started: transfers that have started, by what their end will name.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.products = 0
        self.started: dict[str, _Transfer] = {}
        self._moving: list[_Transfer] = []

    def begin(self, transfer: _Transfer) -> None:
        """Puts a transfer in the queue of its network."""
        transfer.left, transfer.has_begun = transfer.seconds, True
        if {part.kind for part in transfer.found} == {"collective-permute"}:
            transfer.is_queued = False  # the TensorCore's own DMAs, no program of the SparseCore
        transfer.products = self.products
        self._moving.append(transfer)

    def work(self, seconds: float) -> None:
        """The TensorCore works, and bytes travel meanwhile."""
        until = self.now + seconds
        while self._moving and self.now < until:
            self._move(until - self.now)
        self.now = until

    def wait(self, transfer: _Transfer) -> None:
        """The TensorCore waits for a transfer's end; one that has not begun is synchronous."""
        if not transfer.has_begun:
            transfer.is_queued = False
            self.begin(transfer)
        while transfer in self._moving:
            before, beside = self.now, self._on_network(transfer.is_slow)
            self._move(math.inf)
            for one in beside:
                one.exposed += (self.now - before) / len(beside)

    def _on_network(self, is_slow: bool) -> list[_Transfer]:
        """What travels on a network now: the head of its queue, and what does not queue."""
        here = [one for one in self._moving if one.is_slow == is_slow]
        return [one for one in here if one.is_queued][:1] + [o for o in here if not o.is_queued]

    def _move(self, longest: float) -> None:
        """Until the next transfer ends; those on one network have equal shares of it."""
        shares: dict[_Transfer, int] = {}
        for is_slow in (False, True):
            here = self._on_network(is_slow)
            on_ring = sum(bool(one.found) for one in here)
            shares |= {one: on_ring if one.found else 1 for one in here}
        step = min(longest, *(one.left * share for one, share in shares.items()))
        for one, share in shares.items():
            # Exactly nothing is left of the one that ends.
            one.left = 0.0 if one.left * share <= step else one.left - step / share
        self._moving = [one for one in self._moving if one.left > 0.0]
        self.now += step


class _Walk:
    """Runs through the schedule, loops included, and adds up."""

    def __init__(self, module: Module, chip: Chip, finder: Finder, costs: Costs):
        self._module, self._chip = module, chip
        self._finder, self._costs = finder, costs
        self._unknown_loops = 0
        self.collectives: list[Collective] = []
        self.events: list[Event] = []
        self._inside: list[str] = []  # names of the computations that are being walked
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
        computation, timeline = self._module.computations[name], _Timeline()
        self._inside.append(name)
        for one in computation:
            if one.opcode == "while":
                trips = self._trips(one)
                body = one.attribute(r"body=%([^\s,}]+)")
                inside = _within(phase, phase_of(one.op_name))
                timeline.work(trips * self.run(body, times * trips, inside))
            elif one.opcode in ("call", "conditional"):
                timeline.work(
                    math.fsum(self.run(branch, times, phase) for branch in self._branches(one))
                )
            elif one.opcode.endswith(("-update", "-done")) and one.operands:
                self._go_on(timeline, computation, one, times, phase)
            else:
                self._execute(timeline, computation, one, times, phase)
        self._inside.pop()
        return timeline.now

    def _go_on(self, timeline, computation, one, times, phase) -> None:
        """The update or the end of a transfer."""
        key = one.operands[0]
        if one.opcode == "recv-done":
            key = _rendezvous(computation.by_name.get(key))
        transfer = timeline.started.pop(key, None)
        if transfer is None:
            return
        if one.opcode.endswith("-update"):
            transfer.instruction = one  # it has the operand
            if not transfer.found:
                transfer.seconds = self._on_sparse_core(computation, one)
            self._begin(timeline, transfer, times, phase)
            timeline.started[one.name] = transfer
        else:
            if not transfer.found:
                transfer.instruction = one  # it has the name
            self._end(timeline, transfer, computation, times, phase)

    def _execute(self, timeline, computation, one, times, phase) -> None:
        """Any instruction that is no loop, no call, and no later part of a transfer."""
        found, part_of = self._finder.find(computation, one), _part_of_fused(one)
        if found and part_of != "step":
            transfer = _Transfer(one, found, math.fsum(self._seconds(part) for part in found))
            channel = found[0].instruction.attribute(r"channel_id=(\d+)")
            if part_of == "done" and channel in timeline.started:
                transfer = timeline.started.pop(channel)
                self._end(timeline, transfer, computation, times, phase)
            elif part_of == "start" or one.opcode == "send":
                self._begin(timeline, transfer, times, phase)
                timeline.started[channel if part_of else _rendezvous(one)] = transfer
            elif one.opcode.endswith("-start"):
                if one.operands:  # the operand is there: the transfer begins here
                    self._begin(timeline, transfer, times, phase)
                timeline.started[one.name] = transfer
            else:
                self._wait(timeline, transfer, times, phase)
                self._add(transfer, computation, times, phase, 0, is_async=False)
            return
        for space, size in self._costs.traffic(computation, one).items():
            self.traffic[space] += size * times
        if one.opcode == "custom-call-start":
            timeline.started[one.name] = _Transfer(one, [], 0.0)
        if one.opcode.endswith("-start") or one.opcode == "recv":
            return  # a copy, or the SparseCore, which run beside the TensorCore
        self._count_flops(computation, one, times)
        seconds, began = self._compute(computation, one), timeline.now
        timeline.work(seconds)
        timeline.products += self._costs.has_product(computation, one)
        phase = _within(phase, phase_of(one.op_name))
        self.compute[phase] += seconds * times
        if seconds:
            span = began, timeline.now
            self._note("works", times, phase, span, one.name, one.op_name)

    def _begin(self, timeline, transfer, times, phase) -> None:
        timeline.begin(transfer)
        self._note_transfer("sends", (timeline.now,) * 2, transfer, times, phase)

    def _wait(self, timeline, transfer, times, phase) -> None:
        began = timeline.now
        timeline.wait(transfer)
        if timeline.now > began:
            span = began, timeline.now
            self._note_transfer("waits", span, transfer, times, phase)

    def _note_transfer(self, kind, span, transfer, times, phase) -> None:
        parts = [f"{part.kind} over {part.label}" for part in transfer.found]
        size = math.fsum(part.bytes for part in transfer.found)
        what = f"{' and '.join(parts)}, {size / 1e6:.1f} MB"
        if not parts:
            what = f"SparseCore, {1e3 * transfer.seconds:.3f} ms: {transfer.instruction.op_name}"
        self._note(kind, times, phase, span, transfer.instruction.name, what)

    def _note(self, kind, times, phase, span, name, what) -> None:
        begin, end = span
        inside = self._inside[-1]
        self.events.append(Event(kind, inside, times, phase, begin, end, name, what))

    def _end(self, timeline, transfer, computation, times, phase) -> None:
        self._wait(timeline, transfer, times, phase)
        if not transfer.found:
            where = _within(phase, phase_of(transfer.instruction.op_name))
            self.compute[where] += transfer.exposed * times
        between = timeline.products - transfer.products
        self._add(transfer, computation, times, phase, between, is_async=True)

    def _add(self, transfer, computation, times, phase, products, *, is_async) -> None:
        for part in transfer.found:
            for buffer in part.touched():
                self.traffic[buffer.space] += buffer.bytes * times
            if not part.bytes:
                continue
            one, name = transfer.instruction, part.instruction.op_name
            where = phase_of(name or one.op_name, part.kind, part.label)
            where = where or phase_of_operands(computation, one, part.kind, part.label)
            seconds = self._seconds(part)
            self.collectives.append(
                Collective(
                    *(one.name, part.kind, part.label, _within(phase, where)),
                    times=times,
                    bytes=part.bytes,
                    seconds=seconds,
                    exposed=transfer.exposed * seconds / transfer.seconds,
                    products=products,
                    is_async=is_async,
                )
            )

    def _on_sparse_core(self, computation: Computation, update: Instruction) -> float:
        """Seconds of a gather or a change of layout: its result is read and written once."""
        results = [b for done in computation.users.get(update.name, ()) for b in done.buffers]
        return 2 * math.fsum(buffer.bytes for buffer in results) / self._chip.hbm_rate

    def _seconds(self, part: Found) -> float:
        return part.bytes / (self._chip.slice_rate if part.is_slow else self._chip.ring_rate)

    def _count_flops(self, computation: Computation, one: Instruction, times: int) -> None:
        for kind, number in self._costs.flops(computation, one).items():
            self.flops[kind] += number * times
        for kind, number in self._costs.expert_product(computation, one).items():
            self.expert_flops[kind] += number * times

    def _compute(self, computation: Computation, one: Instruction) -> float:
        """Seconds of one instruction on the TensorCore."""
        estimate = (one.cycles or 0) / self._chip.clock
        if 0 < estimate < _ABSURD_SECONDS and not self._costs.expert_product(computation, one):
            return estimate
        traffic = self._costs.traffic(computation, one)[HBM] / self._chip.hbm_rate
        compute = compute_seconds(self._costs.flops(computation, one), self._chip)
        return max(traffic, compute / self._costs.share_of_peak(one))

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

    def _branches(self, one: Instruction) -> list[str]:
        """The computations of a call; of a conditional the branch that is taken to be taken.

        That is the longest one, less those that a program marks as rare by the name "fallback".
        """
        names = [name for name in one.called if name in self._module.computations]
        if one.opcode == "call" or len(names) < 2:
            return names
        usual = [name for name in names if not self._is_fallback(one, name)] or names
        return [max(usual, key=self._length)]

    def _is_fallback(self, conditional: Instruction, name: str) -> bool:
        """Whether a branch begins with that name; another conditional inside it may have one."""
        marked = re.compile(re.escape(conditional.op_name) + r"/branch_\d+_fun/fallback(/|$)")
        return any(marked.match(one.op_name) for one in self._module.computations[name])

    def _length(self, name: str) -> float:
        """Compute seconds of a computation, each loop in it once."""
        computation = self._module.computations[name]
        return math.fsum(
            math.fsum(self._length(called) for called in one.called)
            if one.opcode in ("while", "call", "conditional")
            else self._compute(computation, one)
            for one in computation
        )
