"""A compiled module's text as data: computations, their instructions in scheduled order.

Only what `octablox compile` reads is parsed. The text is `compiled.as_text()` of a TPU program,
whose instructions stand in the order in which the TensorCore runs them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_SIZES = {"pred": 1.0, "bf16": 2.0, "s4": 0.5, "u4": 0.5}
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+|f8e\w+|c64)\[([\d,]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*)$")
_STARTS_LINE = re.compile(r"^(\s+(ROOT )?%\S+ = |%|ENTRY |HloModule |\}$|$)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition)=%([^\s,}]+)"
    r"|(?:called_computations|branch_computations)=\{([^}]*)\}"
)
# Compiled kernels, most of the text.
_BODY = re.compile(r'"body":"[^"]*"')
HBM, VMEM, HOST = 0, 1, 5


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """One array of an instruction's result.

    Attributes:
      dtype: HLO's name.
      dims: sizes.
      space: memory space: `HBM`, `VMEM`, `HOST`, or another of the chip's small ones.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> float:
        """Size without padding."""
        if self.dtype in _SIZES:
            width = _SIZES[self.dtype]
        elif self.dtype.startswith("f8"):
            width = 1.0
        else:
            width = int(re.sub(r"\D", "", self.dtype)) / 8
        return math.prod(self.dims) * width


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in its computation.
      type: text of the result's type.
      opcode: such as "fusion" or "custom-call-start".
      operands: names of instructions of the same computation.
      argument: text between the opcode's parentheses.
      attributes: text after them.
      is_root: whether it is the computation's result.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    argument: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The arrays of the result, a tuple's in order."""
        return buffers(self.type)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        found: list[str] = []
        for one, several in _CALLED.findall(self.attributes):
            found += [one] if one else re.findall(r"%([^\s,}]+)", several)
        return tuple(found)

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the JAX program it comes from; may be empty."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @functools.cached_property
    def cycles(self) -> int | None:
        """XLA's own estimate of the TensorCore's cycles, where there is one."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        return int(match.group(1)) if match else None

    def attribute(self, pattern: str) -> str:
        """The first group of a pattern found in the attributes, or ""."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else ""


class Computation:
    """Instructions in scheduled order, and by name."""

    def __init__(self, instructions: list[Instruction]):
        self.instructions = instructions
        self.by_name = {one.name: one for one in instructions}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(one for one in self.instructions if one.is_root)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that `instruction` reads."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name -> the instructions that read it."""
        found: dict[str, list[Instruction]] = {one.name: [] for one in self.instructions}
        for one in self.instructions:
            for name in one.operands:
                if name in found:
                    found[name].append(one)
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """All computations by name, and the name of the one that the program starts with."""

    computations: dict[str, Computation]
    entry: str


def buffers(type_text: str) -> tuple[Buffer, ...]:
    """The arrays in the text of a type."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(type_text):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size) for size in dims.split(",") if size)
        found.append(Buffer(dtype, sizes, int(space.group(1)) if space else HBM))
    return tuple(found)


def parse(text: str) -> Module:
    """Parses the text of a scheduled module.

    Raises:
      ValueError: the text is no module, or one whose instructions are in no order.
    """
    first = text.split("\n", 1)[0]
    if "is_scheduled=true" not in first:
        raise ValueError(f"expected a scheduled HLO module, got {first[:80]!r}")
    computations: dict[str, list[Instruction]] = {}
    current, entry = None, ""
    for line in _lines(_BODY.sub('"body":""', text)):
        opening = _COMPUTATION.match(line)
        if opening:
            current = opening.group(2)
            computations[current] = []
            entry = current if opening.group(1) else entry
        elif line == "}":
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                computations[current].append(instruction)
    return Module({name: Computation(lines) for name, lines in computations.items()}, entry)


def _lines(text: str) -> Iterator[str]:
    """Lines, with attributes that span several of them (a kernel's metadata) joined."""
    pending = None
    for line in text.split("\n"):
        if pending is None or _STARTS_LINE.match(line):
            if pending is not None:
                yield pending
            pending = line
        else:
            pending += " " + line
    if pending is not None:
        yield pending


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    root, name, rest = match.groups()
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    opcode, found, rest = rest.partition("(")
    if not found:
        return None
    end = _closing("(" + rest) - 1
    argument, attributes = rest[:end], rest[end + 1 :]
    operands = tuple(re.findall(r"%([^\s,()]+)", argument))
    return Instruction(name, type_text, opcode, operands, argument, attributes, bool(root))


def _closing(text: str) -> int:
    """Where the parenthesis closes that opens at 0."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")
