"""The TPU chips: what one TensorCore of each can do."""

import dataclasses

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore.

    Attributes:
      device_kind: JAX's name of it.
      vmem: bytes that a kernel may use.
      macs: multiply-accumulates a cycle, by kind of operands.
      side: rows and columns of the matrix unit.
      hbm: bytes a cycle.
    """

    name: str
    device_kind: str
    vmem: int
    macs: dict[str, int]
    side: int
    hbm: int

    def kind(self, lhs: str, rhs: str) -> str:
        """How two dtypes are multiplied here: "fp8", "int8", "bf16" or "f32"."""
        if lhs.startswith("float8") and rhs.startswith("float8"):
            return "fp8"
        if lhs == rhs == "int8":
            return "int8"
        return "f32" if "float32" in (lhs, rhs) else "bf16"

    def gains(self, kind: str) -> bool:
        """Whether 8 bits multiply faster than bf16 here."""
        return self.macs[kind] > self.macs["bf16"]


def _macs(bf16: int, fp8: int, int8: int) -> dict[str, int]:
    return {"bf16": bf16, "fp8": fp8, "int8": int8, "f32": bf16 // 6}


# What one matmul instruction does, read from compiled schedules. HBM: published, over the clock.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "TPU v5 lite", 116 * MIB, _macs(65536, 65536, 131072), 128, 540),
        Chip("v5p", "TPU v5", 58 * MIB, _macs(65536, 65536, 131072), 128, 790),
        Chip("v6e", "TPU v6 lite", 116 * MIB, _macs(262144, 262144, 524288), 256, 940),
        Chip("tpu7x", "TPU7x", 61 * MIB, _macs(262144, 524288, 262144), 256, 1680),
    )
}
# Other names of JAX's.
_SYNONYMS = {"TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e"}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of JAX's name, if it is known here."""
    known = {chip.device_kind: chip for chip in CHIPS.values()}
    return known.get(device_kind) or CHIPS.get(_SYNONYMS.get(device_kind, ""))


def chip_of_topology(topology: str) -> Chip | None:
    """The chip of a topology's name, as v6e-256 or tpu7x:2x2x1."""
    return next((chip for chip in CHIPS.values() if topology.startswith(chip.name)), None)
