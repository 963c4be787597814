"""The TPU chips: what one TensorCore of each can do."""

import dataclasses

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore.

    Attributes:
      vmem: bytes that a kernel may use.
      macs: multiply-accumulates a cycle, by kind of operands.
      side: rows and columns of the matrix unit.
      hbm: bytes a cycle.
    """

    name: str
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
    "v5e": Chip("v5e", 116 * MIB, _macs(65536, 65536, 131072), 128, 540),
    "v5p": Chip("v5p", 58 * MIB, _macs(65536, 65536, 131072), 128, 790),
    "v6e": Chip("v6e", 116 * MIB, _macs(131072, 131072, 262144), 256, 940),
    "tpu7x": Chip("tpu7x", 61 * MIB, _macs(262144, 524288, 262144), 256, 1680),
}
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of JAX's or of our name, if it is known here."""
    return CHIPS.get(_KINDS.get(device_kind, device_kind))
