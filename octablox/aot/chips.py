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


def _chip(name, *, dims, devices=1, cores=1, tflops, macs, hbm_gib, hbm, ici, dcn_gbits) -> Chip:
    """A chip from its published figures, those of the whole chip.

    Args:
      name, dims, devices, cores: see `Chip`.
      tflops: by kind of operands, TFLOP/s.
      macs: bf16 multiply-accumulates a cycle of all its cores.
      hbm_gib: of a device, see `Chip`.
      hbm: GB/s.
      ici: GB/s of all links, both directions.
      dcn_gbits: Gb/s.
    """
    links = 2 * dims  # two to an axis, so that a ring may pass through
    return Chip(
        *(name, dims, devices, cores),
        flops={kind: rate * 1e12 / devices for kind, rate in tflops.items()},
        clock=tflops["bf16"] * 1e12 / (2 * macs),
        hbm_bytes=hbm_gib * GIB,
        hbm_rate=hbm * GB / devices,
        # A ring receives on two links, and half of a link's published rate is each direction's.
        ring_rate=REACHED * 2 * ici / links / 2 * GB,
        slice_rate=dcn_gbits / 8 * GB / devices,
    )


# Multiply-accumulates a cycle: v5e 4 matrix units of 128 x 128, v5p 2 x 4 of them, v6e 4 of
# 256 x 256, TPU7x 2 x 4. Chips without FP8 units multiply FP8 as bf16.
CHIPS = {
    chip.name: chip
    for chip in (
        _chip(
            *("tpu7x",),
            **dict(dims=3, devices=2, cores=2, macs=2 * 262144),
            tflops={"bf16": 2307, "fp8": 4614, "int8": 2307},
            **dict(hbm_gib=94.74, hbm=7380, ici=1200, dcn_gbits=100),
        ),
        _chip(
            *("v6e",),
            **dict(dims=2, macs=262144),
            tflops={"bf16": 918, "fp8": 918, "int8": 1836},
            **dict(hbm_gib=31.24, hbm=1638, ici=800, dcn_gbits=100),
        ),
        _chip(
            *("v5p",),
            **dict(dims=3, cores=2, macs=2 * 65536),
            tflops={"bf16": 459, "fp8": 459, "int8": 918},
            **dict(hbm_gib=95.73, hbm=2765, ici=1200, dcn_gbits=50),
        ),
        _chip(
            *("v5e",),
            **dict(dims=2, macs=65536),
            tflops={"bf16": 197, "fp8": 197, "int8": 393},
            **dict(hbm_gib=15.75, hbm=819, ici=400, dcn_gbits=25),
        ),
    )
}


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
        raise UserError(f"compile_topology: expected {_examples()}, got {text!r}{_near_chip(name)}")
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
        sides = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
        return sides  # type: ignore[return-value]
    small = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
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
