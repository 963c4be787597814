"""The collectives of a compiled module: of what kind, over which mesh axes, in which phase."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from octablox.aot.hlo import Computation, Instruction, Module

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


@dataclasses.dataclass(frozen=True)
class Found:
    """A collective where it stands.

    Attributes:
      instruction: the collective itself.
      computation: that has it.
      kind: "all-gather", "reduce-scatter", ...
      axes: mesh axes of more than one device that it runs over, in the mesh's order.
      bytes: that a device receives.
      is_slow: whether it runs between slices.
    """

    instruction: Instruction
    computation: Computation
    kind: str
    axes: tuple[str, ...]
    bytes: float
    is_slow: bool

    @property
    def label(self) -> str:
        """The axes as one word."""
        return "+".join(self.axes)

    def touched(self) -> list:
        """The arrays that it reads and writes."""
        ends = [*self.computation.operands(self.instruction), self.instruction]
        return [buffer for one in ends for buffer in one.buffers]


class Finder:
    """Finds collectives, those inside fusions and asynchronous calls too.

    Args:
      module: the program of one device.
      mesh: axis -> devices, in the mesh's order.
      slow_axes: axes between slices.
      slots_used: the share of its operand that a ragged all-to-all sends.
    """

    def __init__(
        self,
        module: Module,
        mesh: Mapping[str, int],
        slow_axes: Sequence[str] = (),
        slots_used: float = 1.0,
    ):
        self._module, self._mesh, self._slow_axes = module, mesh, tuple(slow_axes)
        self._slots_used = slots_used
        self._inside: dict[str, list[Found]] = {}

    def find(self, computation: Computation, one: Instruction) -> list[Found]:
        """The collectives that an instruction is, or that the computations it calls hold."""
        kind = one.opcode.removesuffix("-start")
        if kind in _RECEIVED:
            return [self._found(computation, one, kind)]
        if one.opcode == "send" and "_xla_megascale" in one.attributes:
            return [self._between_slices(computation, one)]
        found = []
        for name in one.called:
            if name not in self._inside:
                inside = self._module.computations.get(name, Computation([]))
                slices = _keeps_a_slice(inside)
                parts = [part for other in inside for part in self.find(inside, other)]
                self._inside[name] = [self._as_fused(part) if slices else part for part in parts]
            found += self._inside[name]
        return found

    def _found(self, computation: Computation, one: Instruction, kind: str) -> Found:
        axes = self._axes(one)
        n = math.prod(self._mesh[axis] for axis in axes)
        operands = computation.operands(one)
        share = 1.0
        if kind == "ragged-all-to-all":
            operands, share = operands[:1], self._slots_used
        size = share * math.fsum(b.bytes for operand in operands for b in operand.buffers)
        received = size * _RECEIVED[kind](n) if n > 1 else 0.0
        return Found(one, computation, kind, axes, received, bool(set(axes) & set(self._slow_axes)))

    def _between_slices(self, computation: Computation, one: Instruction) -> Found:
        """What leaves a slice goes through its host: a send, and a recv of the result."""
        kind = one.attribute(r'_xla_megascale_transfer_type="(\w+)"').lower().replace("_", "-")
        count = len(one.attribute(r'_xla_megascale_target="\{([\d,]+)\}').split(","))
        size = computation.operands(one)[0].buffers[0].bytes
        received = size * _RECEIVED.get(kind, lambda n: 1.0)(count)
        return Found(one, computation, kind, self._slow_axes, received, is_slow=True)

    def _as_fused(self, part: Found) -> Found:
        """XLA fuses a reduce-scatter as an all-reduce of which each device keeps a slice."""
        if part.kind != "all-reduce":
            return part
        return self._found(part.computation, part.instruction, "reduce-scatter")

    def _axes(self, one: Instruction) -> tuple[str, ...]:
        groups = one.attribute(r"replica_groups=((?:mesh\[[^\]]*\] )?.*?)(?:, \w+=|$)")
        named = re.match(r"mesh\[[^\]]*\] \{([^}]*)\}", groups)
        if named:
            names = set(re.findall(r"'(\w+)'", named.group(1)))
        else:
            pairs = one.attribute(r"source_target_pairs=(\{\{.*?\}\})")
            names = _varying_axes(self._mesh, groups or pairs)
        return tuple(axis for axis, size in self._mesh.items() if axis in names and size > 1)


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
    # A hand-written backward pass: sums over `expert` alone are of results, others of gradients.
    sums = kind in ("reduce-scatter", "all-reduce") and axes != "expert"
    return "backward" if sums else "remat"


def phase_of_operands(
    computation: Computation, one: Instruction, kind: str, axes: str
) -> str | None:
    """The phase of what an instruction without a name reads, or None."""
    frontier = [one]
    for _ in range(6):
        frontier = [operand for item in frontier for operand in computation.operands(item)]
        for operand in frontier:
            if operand.op_name and operand.opcode not in ("parameter", "while"):
                return phase_of(operand.op_name, kind, axes)
    return None


def _keeps_a_slice(inside: Computation) -> bool:
    """Whether a computation's result is a slice of what it computes."""
    if not inside.instructions or inside.root.opcode not in ("dynamic-slice", "bitcast"):
        return False
    return any(one.opcode == "dynamic-slice" for one in inside)


def _varying_axes(mesh: Mapping[str, int], groups: str) -> set[str]:
    """Axes along which the devices of the first group differ; groups by number of the device."""
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups)
    if iota:
        shape, dims, order = (
            [int(n) for n in part.split(",")] if part else [] for part in iota.groups()
        )
        numbers = np.arange(math.prod(dims)).reshape(dims)
        members = numbers.transpose(order or range(len(dims))).reshape(shape)[0]
    else:
        first = re.search(r"\{([\d,]+)\}", groups)
        if first is None:  # no groups: all devices
            return set(mesh)
        members = np.array([int(n) for n in first.group(1).split(",")])
    places = np.unravel_index(members, tuple(mesh.values()))
    return {axis for axis, place in zip(mesh, places, strict=True) if len(set(place)) > 1}
