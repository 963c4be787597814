"""TPU chips as published, and the topologies that `compile_topology` can name.

Peak rates, HBM and network bandwidth are those of Google's pages of each chip
(docs.cloud.google.com/tpu/docs/tpu7x, /v6e, /v5p, /v5e). All figures here are of one JAX device:
a whole chip, except that a TPU7x chip is two devices, one for each of its TensorCores.
"""

import dataclasses
import difflib
import itertools
import math
import re

from octablox.errors import UserError

GB = 1e9
GIB = 2**30
# A ring gets about nine tenths of what its links can carry (jax-ml.github.io/scaling-book, "TPUs").
REACHED = 0.9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a kind of TPU.

    Attributes:
      name: as in `compile_topology`.
      dims: of its torus, 2 or 3.
      devices: JAX devices of one chip.
      cores: TensorCores of one chip, what the number in names such as v5p-128 counts; 1 for the
        chips whose names count chips.
      flops: peak FLOP/s by kind of operands: "bf16", "fp8", "int8".
      clock: Hz at which XLA's cycles pass: the bf16 peak over what the matrix units do in a cycle.
      hbm_bytes: what XLA lets a program use, read from libtpu 0.0.52's refusals.
      hbm_rate: bytes/s.
      ring_rate: bytes/s that a device receives on a ring along one axis of the torus, both ways
        round; see `REACHED`.
      slice_rate: bytes/s to other slices, over the data center's network.
    """

    name: str
    dims: int
    devices: int
    cores: int
    flops: dict[str, float]
    clock: float
    hbm_bytes: float
    hbm_rate: float
    ring_rate: float
    slice_rate: float


@dataclasses.dataclass(frozen=True)
class _Published:
    """A whole chip's figures, in their usual units.

    Attributes:
      name, dims, devices, cores: see `Chip`.
      bf16, fp8, int8: peak TFLOP/s.
      macs: bf16 multiply-accumulates a cycle of all its cores.
      hbm_gib: of a device, see `Chip`.
      hbm: GB/s.
      ici: GB/s of all links, both directions.
      dcn: Gb/s.
    """

    name: str
    dims: int
    devices: int
    cores: int
    bf16: int
    fp8: int
    int8: int
    macs: int
    hbm_gib: float
    hbm: int
    ici: int
    dcn: int

    def chip(self) -> Chip:
        """One device of it."""
        share = 1 / self.devices
        links = 2 * self.dims  # two to an axis of the torus
        return Chip(
            *(self.name, self.dims, self.devices, self.cores),
            flops={kind: getattr(self, kind) * 1e12 * share for kind in ("bf16", "fp8", "int8")},
            clock=self.bf16 * 1e12 / (2 * self.macs),
            hbm_bytes=self.hbm_gib * GIB,
            hbm_rate=self.hbm * GB * share,
            # A ring receives on two links; half of a link's published rate is each direction's.
            ring_rate=REACHED * 2 * self.ici / links / 2 * GB,
            slice_rate=self.dcn / 8 * GB * share,
        )


# Multiply-accumulates a cycle: v5e 4 matrix units of 128 x 128, v5p 2 x 4 of them, v6e 4 of
# 256 x 256, TPU7x 2 x 4. Chips without FP8 units multiply FP8 as bf16.
_PUBLISHED = (
    #           dims, devices, cores; TFLOP/s bf16, fp8, int8; macs; HBM GiB, GB/s; ICI, DCN
    _Published("tpu7x", 3, 2, 2, 2307, 4614, 2307, 2 * 262144, 94.74, 7380, 1200, 100),
    _Published("v6e", 2, 1, 1, 918, 918, 1836, 262144, 31.24, 1638, 800, 100),
    _Published("v5p", 3, 1, 2, 459, 459, 918, 2 * 65536, 95.73, 2765, 1200, 50),
    _Published("v5e", 2, 1, 1, 197, 197, 393, 65536, 15.75, 819, 400, 25),
)
CHIPS = {published.name: published.chip() for published in _PUBLISHED}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of one kind of chip.

    Attributes:
      chip: the kind.
      shape: chips along each axis of a slice's torus.
      slices: how many slices.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """As libtpu spells one slice: "tpu7x:4x4x8"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.chip.devices * math.prod(self.shape) * self.slices


def parse_topology(text: str, slices: int = 1) -> Topology:
    """Reads "tpu7x:4x4x8", or MaxText's "tpu7x-256" (TensorCores), "v5e-256" (chips).

    Raises:
      UserError: no such chip or shape; the line lists some that there are.
    """
    name, separator, size = re.match(r"([^:-]*)([:-]?)(.*)", text.strip().lower()).groups()  # type: ignore[union-attr]
    chip = CHIPS.get(name)
    if chip is None or not separator:
        raise UserError(
            f"compile_topology: expected {_examples()} or smaller, got {text!r}{_near_chip(name)}"
        )
    if separator == ":":
        shape = _shape(chip, size)
    else:
        shape = _shape_of_count(chip, int(size)) if size.isdecimal() else None
    if shape is None:
        near = ", ".join(_near_shapes(chip, text, size, separator))
        raise UserError(f"compile_topology: {text!r} is no {name} topology; near ones are {near}")
    return Topology(chip, shape, slices)


def _examples() -> str:
    return ", ".join(f"{c.name}:{'x'.join(map(str, _shapes(c)[-1]))}" for c in CHIPS.values())


def _near_chip(name: str) -> str:
    close = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.3)
    return f"; did you mean {close[0]}?" if close else ""


def _shapes(chip: Chip) -> list[tuple[int, ...]]:
    """Shapes of slices that are commonly offered, small ones first."""
    if chip.dims == 2:
        return [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    small: list[tuple[int, ...]] = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
    cubes = itertools.combinations_with_replacement((4, 8, 12, 16), 3)  # made of 4 x 4 x 4
    return small + sorted(cubes, key=math.prod)


def _shape(chip: Chip, size: str) -> tuple[int, ...] | None:
    sides = size.split("x")
    if not all(side.isdecimal() and int(side) for side in sides) or len(sides) != chip.dims:
        return None
    shape = tuple(map(int, sides))
    # Hosts of 2 x 2 chips fill a slice; what is larger than a host is cut from cubes or squares.
    even = all(side % 2 == 0 for side in shape[:2])
    return shape if even or math.prod(shape) == 1 else None


def _shape_of_count(chip: Chip, count: int) -> tuple[int, ...] | None:
    """The most compact shape of that many chips (TensorCores where the names count those)."""
    chips, rest = divmod(count, chip.cores)
    fitting = [shape for shape in _shapes(chip) if math.prod(shape) == chips and not rest]
    return min(fitting, key=sum, default=None)


def _near_shapes(chip: Chip, text: str, size: str, separator: str) -> list[str]:
    """The topologies nearest in number of chips, in the spelling of `text`."""
    numbers = [int(number) for number in re.findall(r"\d+", size)]
    wanted = math.prod(numbers) if numbers else 1
    names = {}
    for shape in _shapes(chip):
        chips = math.prod(shape)
        if separator == ":":
            names[f"{chip.name}:{'x'.join(map(str, shape))}"] = chips
        else:
            names[f"{chip.name}-{chips * chip.cores}"] = chips * chip.cores
    return sorted(names, key=lambda name: abs(math.log(names[name] / max(wanted, 1))))[:3]
