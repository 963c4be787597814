"""The schedule that libtpu emits for a TPU kernel, read on a machine that has no TPU.

The kernel is compiled ahead of time (extra `tpu`) in a process of its own, whose dump shows the
instructions one line a cycle. Cycles in which the kernel waits for HBM are not among them.
"""

import dataclasses
import glob
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# Only these passes are dumped; the schedule is the same as without.
_PASSES = ".*(packed-bundles-post-ra|per-bundle-utilization).*"
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:(?:LH|LB|LE|PB|PF|CT)\s*)?:\s*(>*)\s*\{")
_REGION = re.compile(r"(Start|End) region (\d+)")
_MATMUL = re.compile(r"\bvmatmul((?:\.[a-z0-9_]+)*)")


class CompileError(Exception):
    """The kernel does not compile; the message is the compiler's."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A straight piece of matrix code.

    Attributes:
      cycles: from its first instruction to its last.
      matmuls: vmatmul instructions.
      kind: their type, as the dump writes it.
    """

    cycles: int
    matmuls: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's loops.

    Attributes:
      pieces: the matrix code.
      loop: cycles of all other code of the loops that hold the pieces, every branch counted.
      plan: cycles of the other loops, which run before and after those, for a step or a group.
    """

    pieces: tuple[Piece, ...]
    loop: int
    plan: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What compiling one function tells.

    Attributes:
      schedule: of its last kernel.
      beside: XLA ops that run beside the kernel.
      code: bytes of the program.
      seconds: to compile it.
    """

    schedule: Schedule
    beside: int
    code: int
    seconds: float


def compile_for(chip: str, target: str, argument: dict, timeout: float = 900) -> Report:
    """Compiles a function of one kernel for a chip.

    Args:
      chip: a key of `TOPOLOGIES`.
      target: "module:function"; the function, given `argument`, returns what to compile and the
        `ShapeDtypeStruct`s of its arguments.
      argument: of JSON's types.
      timeout: in seconds.

    Raises:
      CompileError: it does not compile, or not in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        flags += f"--xla_jf_emit_annotations=true --xla_jf_dump_llo_pass_label_regex={_PASSES}"
        env = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        env |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # what is loaded has no schedule
        env |= {"LIBTPU_INIT_ARGS": flags, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        out = Path(folder) / "report.json"
        work = json.dumps([chip, target, argument, str(out)])
        line = [sys.executable, "-m", "octablox.kernels.static_schedule", work]
        try:
            done = subprocess.run(
                line, env=os.environ | env, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"not compiled after {timeout:.0f} s") from None
        if not out.exists():
            lines = [text for text in done.stderr.splitlines() if "Error" in text]
            raise CompileError((lines or ["the compiler died"])[-1])
        report = json.loads(out.read_text())
        kernels = re.findall(r"%([\w.\-]+) = [^\n]*\"tpu_custom_call\"", report["hlo"])
        schedule = read_schedule(folder, kernels[-1])
    return Report(schedule, ops_beside(report["hlo"]), report["code"], report["seconds"])


def _compile(chip: str, target: str, argument: dict, out: str) -> None:
    """In a process of its own: compiles, and writes what the executable says of itself."""
    from jax.experimental import topologies

    module, _, function = target.partition(":")
    topology = topologies.get_topology_desc(TOPOLOGIES[chip], "tpu")
    mesh = jax.sharding.Mesh(topology.devices[:1], ("x",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        run, shapes = getattr(importlib.import_module(module), function)(argument)
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes
        )
        begin = time.perf_counter()
        compiled = jax.jit(run).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    report = {
        "hlo": compiled.as_text(),
        "seconds": round(time.perf_counter() - begin, 1),
        "code": memory.generated_code_size_in_bytes if memory else 0,
    }
    Path(out).write_text(json.dumps(report))


def ops_beside(hlo: str) -> int:
    """XLA ops of the entry computation that do something, the kernel apart."""
    ops = re.findall(r"= .*?[\])}] ([a-z][\w-]*)\(", hlo[hlo.index("\nENTRY") :])
    free = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "custom-call"}
    return sum(op not in free for op in ops)


def read_schedule(folder: str, name: str) -> Schedule:
    """What the dump before empty bundles are folded into delays says: it has one line a cycle."""
    found = glob.glob(f"{folder}/*-{glob.escape(name)}-*-packed-bundles-post-ra.txt")
    path = sorted(p for p in found if "analysis" not in p and "post-bundle" not in p)[-1]
    bundles: list[str] = []
    for line in Path(path).read_text(errors="replace").splitlines():
        if _BUNDLE.match(line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += line
    return _loops(_regions(bundles))


@dataclasses.dataclass
class _Region:
    cycles: int = 0
    matmuls: int = 0
    kind: str = ""
    depth: int = 0  # of loops


def _regions(bundles: list[str]) -> list[_Region]:
    """The stretches of code that the dump marks, by the innermost, in order."""
    regions: dict[int, _Region] = {}
    active: list[int] = []
    for bundle in bundles:
        marks = _REGION.findall(bundle)
        active.extend(int(number) for mark, number in marks if mark == "Start")
        region = regions.setdefault(active[-1] if active else -1, _Region())
        kinds = _MATMUL.findall(bundle)
        region.cycles += 1
        region.matmuls += len(kinds)
        region.kind = kinds[-1] if kinds else region.kind
        # Not every bundle inside a loop is marked so.
        found = _BUNDLE.match(bundle)
        region.depth = max(region.depth, len(found.group(1)) if found else 0)
        for mark, number in marks:
            if mark == "End" and int(number) in active:
                active.remove(int(number))
    return list(regions.values())


def _loops(regions: list[_Region]) -> Schedule:
    """A loop is a run of regions that are inside of one; code outside of loops runs once."""
    pieces: list[Piece] = []
    loop = plan = 0
    for inside, run in itertools.groupby(regions, lambda region: region.depth > 0):
        if not inside:
            continue
        found = list(run)
        matrix = [Piece(r.cycles, r.matmuls, r.kind) for r in found if r.matmuls]
        others = sum(r.cycles for r in found if not r.matmuls)
        loop, plan = (loop + others, plan) if matrix else (loop, plan + others)
        pieces += matrix
    return Schedule(tuple(pieces), loop, plan)


if __name__ == "__main__":
    _compile(*json.loads(sys.argv[1]))
