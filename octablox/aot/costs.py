"""FLOPs and memory traffic of one instruction of a compiled module.

FLOPs of dense products come from their shapes. Those of the experts' grouped products cannot: how
many rows are real is known at run time only, and XLA's own figure for `ragged_dot` is senseless.
Theirs are 2 x rows x K x N, with the rows that a device works on when the load is even, which the
config gives, and K x N of the expert's matrix, which the kernel's operand gives.
"""

import functools
import math
import re
from collections.abc import Iterable

from octablox.aot.hlo import HBM, HOST, Buffer, Computation, Instruction, Module

# The kinds of products, by HLO's dtype; mixed operands run at the wider one's rate.
_KINDS = {"s8": "int8", "u8": "int8", "bf16": "bf16", "f16": "bf16", "f32": "f32"}
_NO_TRAFFIC = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id "
    "opt-barrier add-dependency while call conditional send recv".split()
)
# What a fusion computes in passing: of what is read through it no more is read than is used.
_PASSING = frozenset(("bitcast", "reshape", "copy", "convert"))
_SLICES = ("dynamic-slice", "slice", "gather")


# Splash attention's kernels, by the beginning of their names: products that contract or produce a
# head's key width, those of its value width, and the share of the bf16 peak that blocks of 1,024
# queries by 1,024 keys reach in the kernel's schedule for TPU7x.
_ATTENTION = {
    "splash_mha_fwd": (1, 1, 0.27),
    "splash_mha_dkv": (2, 2, 0.48),
    "splash_mha_dq": (2, 1, 0.43),
}
_ATTENTION_BLOCK = 1024


class Costs:
    """Costs of the instructions of one module; remembers what it has counted.

    Args:
      module: the program of one device.
      expert_rows: rows of one micro-batch that a device's experts work on, see the module's top.
    """

    def __init__(self, module: Module, expert_rows: float):
        self._module, self._expert_rows = module, expert_rows
        self._flops_of: dict[str, dict[str, float]] = {}
        self._reads_of: dict[tuple[str, int], float] = {}
        self.unknown_kernels: set[str] = set()

    def flops(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        """FLOPs by kind of operands, "bf16", "fp8", "int8" or "f32"; empty where it has none."""
        grouped = self._grouped_product(computation, instruction)
        if grouped:
            return grouped
        if instruction.opcode == "custom-call" and is_kernel(instruction):
            return self._kernel(computation, instruction)
        if instruction.opcode in ("convolution", "dot"):
            left, right = computation.operands(instruction)[:2]
            count = _convolution if instruction.opcode == "convolution" else _dot
            work = count(instruction, left.buffers[0], right.buffers[0])
            kind = _kind(left.buffers[0], right.buffers[0])
            if kind == "f32" and "operand_precision={highest" not in instruction.attributes:
                kind = "bf16"  # without more being asked, float32 is rounded to bf16
            return {kind: work}
        if instruction.opcode != "fusion":
            return {}
        total: dict[str, float] = {}
        for name in instruction.called:
            if name not in self._flops_of:
                inside = self._module.computations[name]
                self._flops_of[name] = _sum(self.flops(inside, one) for one in inside)
            total = _sum([total, self._flops_of[name]])
        return total

    def expert_product(
        self, computation: Computation, instruction: Instruction
    ) -> dict[str, float]:
        """FLOPs of one of the experts' grouped products; empty where it is none."""
        if "combine/" in instruction.op_name:  # sums of rows, see `moe.dispatch`
            return {}
        return self._grouped_product(computation, instruction)

    def _grouped_product(self, computation, instruction) -> dict[str, float]:
        where = instruction.op_name
        is_gmm = instruction.opcode == "custom-call" and "gmm" in where and is_kernel(instruction)
        is_ragged = instruction.opcode == "fusion" and "ragged_dot" in where
        if not (is_gmm or is_ragged):
            return {}
        out = instruction.buffers[0]
        wide = [b for o in computation.operands(instruction) for b in o.buffers if _is_wide(b)]
        matrix = out
        if not (out.dims[:1] and len(out.dims) == 3 and "tgmm" in where):
            # The rows, cut into blocks, begin as the result does; the matrices do not.
            matrices = [b for b in wide if len(b.dims) == 3 and b.dims[:2] != out.dims[:2]]
            if not matrices:
                return {}
            matrix = max(matrices, key=lambda b: b.bytes)
        kind = _kind(*wide[:2]) if len(wide) >= 2 else "bf16"
        return {kind: 2.0 * self._expert_rows * matrix.dims[-1] * matrix.dims[-2]}

    def _kernel(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        """FLOPs of attention's kernels; else as a Pallas kernel declares by its `cost_estimate`."""
        attention = _attention(instruction)
        if attention:
            return {"bf16": self._attention_flops(computation, instruction, *attention[:2])}
        declared = instruction.attribute(r'"cost_estimate":\{"flops":"?(\d+)')
        if not declared:
            self.unknown_kernels.add(re.sub(r"[._]*\d*$", "", instruction.name))
        return {"bf16": float(declared or 0)}

    def _attention_flops(self, computation, instruction, of_keys, of_values) -> float:
        """Blocks on the diagonal count whole, blocks above it are not computed.

        Of a part of a sequence it is the last one, which sees most and is waited for.
        """
        operands = [b for o in computation.operands(instruction) for b in o.buffers]
        heads = [b.dims for b in operands if len(b.dims) >= 3 and b.dtype in ("bf16", "f32")]
        queries, keys, values = heads[:3]
        rows, widths = queries[-2], of_keys * queries[-1] + of_values * values[-1]
        seen = rows * (keys[-2] - rows + (rows + min(_ATTENTION_BLOCK, rows)) / 2)
        return 2.0 * math.prod(queries[:-2]) * seen * widths

    def share_of_peak(self, instruction: Instruction) -> float:
        """The share of the peak rate at which an instruction's FLOPs are taken to run."""
        attention = _attention(instruction)
        return attention[2] if attention else 1.0

    def traffic(self, computation: Computation, instruction: Instruction) -> dict[int, float]:
        """Bytes read and written, by memory space: `HBM` and `HOST`.

        A slice read from a large array, or written into one, counts as long as it is.
        """
        spaces: dict[int, float] = {HBM: 0.0, HOST: 0.0}

        def add(space: int, size: float) -> None:
            spaces[space] = spaces.get(space, 0.0) + size

        opcode = instruction.opcode
        if opcode in _NO_TRAFFIC or opcode.endswith(("-done", "-update")):
            return spaces
        if 'custom_call_target="AllocateBuffer"' in instruction.attributes:
            return spaces  # memory to be written over
        operands = [one.buffers for one in computation.operands(instruction)]
        if opcode.endswith("-start"):
            for space, size in _transfer(opcode.removesuffix("-start"), operands, instruction):
                add(space, size)
            return spaces
        for number, buffers in enumerate(operands):
            if len(buffers) == 1:
                size = self._read(computation, instruction, number, buffers[0])
                add(buffers[0].space, size)
        sizes = self._written(computation, instruction)
        for buffer, size in zip(instruction.buffers, sizes, strict=False):
            add(buffer.space, size)
        return spaces

    def _read(self, computation, instruction, number, buffer) -> float:
        """Bytes that `instruction` reads of its operand `number`."""
        opcode = instruction.opcode
        if opcode == "fusion":
            return min(buffer.bytes, self._parameter_reads(instruction.called[0], number))
        if opcode in _SLICES and number == 0:
            return instruction.buffers[0].bytes
        if opcode == "dynamic-update-slice" and number == 0:
            return 0.0  # the rest of the array stays where it is
        return buffer.bytes

    def _parameter_reads(self, name: str, number: int) -> float:
        """Bytes that a fused computation reads of its parameter `number`."""
        key = (name, number)
        if key not in self._reads_of:
            inside = self._module.computations[name]
            parameter = next(
                one for one in inside if one.opcode == "parameter" and one.argument == str(number)
            )
            self._reads_of[key] = self._reads(inside, parameter)
        return self._reads_of[key]

    def _reads(self, inside: Computation, value: Instruction) -> float:
        total = 0.0
        if value.is_root:
            total += value.buffers[0].bytes
        for user in inside.users[value.name]:
            if user.opcode in _PASSING or "output_to_operand_aliasing={{}: (0, {})}" in (
                user.attributes if user.opcode == "fusion" else ""
            ):
                total += self._reads(inside, user)
                continue
            for number, name in enumerate(user.operands):
                if name == value.name:
                    total += self._read(inside, user, number, value.buffers[0])
        return total

    def _written(self, computation: Computation, instruction: Instruction) -> list[float]:
        """Bytes written of each array of the result."""
        if instruction.opcode == "fusion":
            inside = self._module.computations[instruction.called[0]]
            root = inside.root
            results = inside.operands(root) if root.opcode == "tuple" else [root]
            return [size for one in results for size in self._written(inside, one)]
        if instruction.opcode in _PASSING:
            operands = computation.operands(instruction)
            if operands and operands[0].opcode != "parameter":
                return self._written(computation, operands[0])
        if instruction.opcode == "dynamic-update-slice":
            return [computation.operands(instruction)[1].buffers[0].bytes]
        return [buffer.bytes for buffer in instruction.buffers]

    def has_product(self, computation: Computation, instruction: Instruction) -> bool:
        """Whether it is, or holds, a matrix product or a kernel: what a transfer can run under."""
        return is_kernel(instruction) or bool(self.flops(computation, instruction))


def _attention(instruction: Instruction) -> tuple[int, int, float] | None:
    if not is_kernel(instruction):
        return None
    where = instruction.op_name
    return next((how for name, how in _ATTENTION.items() if name in where), None)


def _transfer(kind, operands, instruction) -> list[tuple[int, float]]:
    """(memory space, bytes) of both ends of a copy that runs beside the TensorCore."""
    if kind == "copy":
        target, source = instruction.buffers[:2]
        return [(source.space, source.bytes), (target.space, target.bytes)]
    if kind in _SLICES:  # the type has the operands first
        source, target = operands[0][0], instruction.buffers[len(operands)]
        return [(source.space, target.bytes), (target.space, target.bytes)]
    if kind == "dynamic-update-slice":
        target, source = operands[0][0], operands[1][0]
        return [(source.space, source.bytes), (target.space, source.bytes)]
    return []


def _sum(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for kind, number in part.items():
            total[kind] = total.get(kind, 0.0) + number
    return total


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is a Pallas kernel."""
    return 'custom_call_target="tpu_custom_call"' in instruction.attributes


def _is_wide(buffer: Buffer) -> bool:
    """Whether it can be an operand of a product, and no scale, size or index."""
    return len(buffer.dims) >= 2 and not buffer.dtype.startswith(("s32", "u32", "pred"))


def _kind(left: Buffer, right: Buffer) -> str:
    kinds = [
        "fp8" if one.dtype.startswith("f8") else _KINDS.get(one.dtype, "bf16")
        for one in (left, right)
    ]
    if kinds[0] == kinds[1]:
        return kinds[0]
    return "f32" if "f32" in kinds else "bf16"


def _dot(instruction: Instruction, left: Buffer, right: Buffer) -> float:
    contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    work = 2.0 * instruction.buffers[0].bytes / _width(instruction.buffers[0])
    for dim in filter(None, contracted.split(",")):
        work *= left.dims[int(dim)]
    return work


def _width(buffer: Buffer) -> float:
    return Buffer(buffer.dtype, (), buffer.space).bytes


def _convolution(instruction: Instruction, left: Buffer, right: Buffer) -> float:
    """XLA writes every product as a convolution; batch dims are spatial ones with dilation.

    Each place of the window counts only where it meets an element of the input.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    lhs, rhs, out = labels.groups()
    size = dict(zip(out, instruction.buffers[0].dims, strict=True))
    work = 2.0 * size["b"] * size["f"] * right.dims[rhs.index("i")]
    window = instruction.attribute(r"window=\{([^}]*)\}")
    fields = dict(field.split("=") for field in window.split())
    for number, label in enumerate(sorted(set(out) - {"b", "f"})):
        part = {key: value.split("x")[number] for key, value in fields.items()}
        work *= _meetings(
            *(size[label], int(part["size"]), left.dims[lhs.index(label)]),
            stride=int(part.get("stride", 1)),
            low=int(part.get("pad", "0_0").split("_")[0]),
            lhs_dilate=int(part.get("lhs_dilate", 1)),
            rhs_dilate=int(part.get("rhs_dilate", 1)),
        )
    return work


@functools.cache
def _meetings(out: int, window: int, size: int, *, stride, low, lhs_dilate, rhs_dilate) -> int:
    """How many pairs of a place in the output and one in the window meet an input element."""
    met = 0
    for k in range(window):
        # Output o meets input (o * stride + k * rhs_dilate - low) / lhs_dilate.
        first = k * rhs_dilate - low
        met += sum(
            1
            for at in range(first, first + out * stride, stride)
            if at >= 0 and at % lhs_dilate == 0 and at // lhs_dilate < size
        )
    return met
