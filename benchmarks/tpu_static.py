"""TPU kernels read from the schedule that libtpu emits: no TPU is needed.

    python -m benchmarks.tpu_static [--chip tpu7x] [--rows 8192 16384] [--product fwd dlhs ...]
                                    [--type fp8 bf16] [--kernel octablox ...] [--json FILE]

Each kernel is compiled for the chip (extras `tpu` and, for its two kernels, `tokamax`) and the
dump of its schedule is read: one line a cycle, DMA stalls not among them. Columns:

    step     cycles at the matrix unit's limit over all cycles of a step: the piece of code that
             multiplies a group of the mean size (or a whole tile), and all other code of the loop
    hbm      bytes that a step moves over its cycles; what the chip gives is in the title
    equal, routed, skewed   the limit over the modelled cycles of a whole call: each step of each
             group costs its piece of code and the loop, or its bytes at full HBM rate if that is
             more, and the plan of all steps is made once; groups equal, of rows routed at random,
             or unequal (octablox only: how the others split a group into steps is theirs)
    allowed  the share of the matrix unit's limit at which HBM could move every operand and
             result once
    beside   XLA ops that run beside the kernel; code: MiB of it
"""

import argparse
import dataclasses
import functools
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
import numpy as np
from jax import numpy as jnp
from rich.console import Console
from rich.table import Table

from octablox.kernels import pallas_tpu, tiles
from octablox.kernels.contract import Scaled

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
K, N, EXPERTS = 7168, 2048, 16  # DeepSeek-V3's experts on one of 16 devices
TYPES = {"fp8": ("float8_e4m3fn", 32), "bf16": ("bfloat16", 16)}
PRODUCTS = ("fwd", "gated", "dlhs", "drhs")
KERNELS = ("octablox", "tokamax v2", "tokamax v1", "megablox")
# Only these passes are dumped; the schedule is the same as without.
PASSES = ".*(packed-bundles-post-ra|per-bundle-utilization).*"
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:(?:LH|LB|LE|PB|PF|CT)\s*)?:\s*(>*)\s*\{")
_REGION = re.compile(r"(Start|End) region (\d+)")
_MATMUL = re.compile(r"\bvmatmul((?:\.[a-z0-9_]+)*)")


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel on one product."""

    chip: str
    kernel: str
    product: str
    type: str
    rows: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole call."""
        return self.rows * K * N * (2 if self.product == "gated" else 1)

    @property
    def rate(self) -> int:
        """Multiply-accumulates a cycle at the limit."""
        return tiles.CHIPS[self.chip].macs[self.type]


def arguments(case: Case):
    """The function to compile, and the shapes of its arguments."""
    shape = jax.ShapeDtypeStruct
    dtype, sizes = jnp.dtype(TYPES[case.type][0]), shape((EXPERTS,), jnp.int32)
    columns = N * (2 if case.product == "gated" else 1)
    operands = {
        "dlhs": (shape((case.rows, N), dtype), shape((EXPERTS, K, N), dtype)),
        "drhs": (shape((case.rows, K), dtype), shape((case.rows, N), dtype)),
    }.get(case.product, (shape((case.rows, K), dtype), shape((EXPERTS, K, columns), dtype)))
    scales = {
        "dlhs": ((case.rows, 1), None),
        "drhs": (None, (1, N)),
    }.get(case.product, ((case.rows, 1), (EXPERTS, 1, columns)))
    if case.type != "fp8":
        scales = (None, None)
    scales = [scale and shape(scale, jnp.float32) for scale in scales]
    run = _octablox if case.kernel == "octablox" else _others(case)
    return functools.partial(run, case.product), (*operands, *scales, sizes)


def _octablox(product, lhs, rhs, lhs_scale, rhs_scale, sizes):
    operands = Scaled(lhs, lhs_scale), Scaled(rhs, rhs_scale), sizes, 0
    if product == "drhs":
        return pallas_tpu.tgmm(*operands, num_local_groups=EXPERTS, out_dtype=jnp.bfloat16)
    if product == "gated":
        return pallas_tpu.gated_gmm(*operands, out_dtype=jnp.bfloat16)
    return pallas_tpu.gmm(*operands, transpose_rhs=product == "dlhs", out_dtype=jnp.bfloat16)


def _others(case):
    return _megablox if case.kernel == "megablox" else functools.partial(_tokamax, case.kernel)


# One tile for megablox, which chooses none: the best of a few tried on these shapes.
MEGABLOX_TILE = (512, 1024, 1024)


def _megablox(product, lhs, rhs, lhs_scale, rhs_scale, sizes):
    """It knows no scales and no gating: the bare products."""
    kernel = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    run = functools.partial(kernel.gmm, preferred_element_type=jnp.bfloat16, tiling=MEGABLOX_TILE)
    if product == "drhs":
        tgmm = functools.partial(kernel.tgmm, preferred_element_type=jnp.bfloat16)
        return tgmm(lhs.swapaxes(0, 1), rhs, sizes, tiling=MEGABLOX_TILE)
    return run(lhs, rhs, sizes, transpose_rhs=product == "dlhs")


def _tokamax(kernel, product, lhs, rhs, lhs_scale, rhs_scale, sizes):
    """Tokamax's own choice of tiles. v2 quantizes lhs itself, so it is given bfloat16 rows."""
    from qwix import QArray
    from tokamax._src.ops.ragged_dot import api, base
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as v1

    quantized = lambda a, s: a if s is None else QArray(a, s, None, a.dtype)  # noqa: E731
    second = kernel == "tokamax v2"
    if lhs.dtype.itemsize == 1 and product == "drhs":
        lhs_scale = jnp.ones((1, 1), jnp.float32)
    if lhs.dtype.itemsize == 1 and product == "dlhs":
        rhs_scale = jnp.ones((EXPERTS, 1, 1), jnp.float32)
    if second and lhs_scale is not None and product in ("fwd", "gated"):
        lhs = base.AsQArray(lhs.astype(jnp.bfloat16), lhs.dtype)
    else:
        lhs = quantized(lhs, lhs_scale)
    name = "mosaic_tpu_v2" if second else "mosaic_tpu"
    dims = {"dlhs": v1.DLHS_RAGGED_DOT_DIM_NUMS, "drhs": v1.DRHS_RAGGED_DOT_DIM_NUMS}
    fused = {"fuse_gateup_activation": "silu"} if product == "gated" else {}
    return api.IMPLEMENTATIONS[name].replace(bypass_device_check=True)(
        lhs,
        quantized(rhs, rhs_scale),
        group_sizes=sizes,
        ragged_dot_dimension_numbers=dims.get(product, v1.DEFAULT_RAGGED_DOT_DIM_NUMS),
        preferred_element_type=jnp.bfloat16,
        **fused,
    )


def _compile(case: Case, out: Path) -> None:
    """In a process of its own: compiles, and writes what the executable says of itself."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(TOPOLOGIES[case.chip], "tpu")
    mesh = jax.sharding.Mesh(topology.devices[:1], ("x",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        run, shapes = arguments(case)
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes
        )
        begin = time.perf_counter()
        compiled = jax.jit(run).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    report = {
        "hlo": compiled.as_text(),
        "seconds": round(time.perf_counter() - begin, 1),
        "code": memory.generated_code_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
    }
    out.write_text(json.dumps(report))


def measure(case: Case) -> dict:
    """The table's row of a case; `error` instead of figures where it does not compile."""
    row = dict(dataclasses.asdict(case))
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        flags = f"{dump} --xla_jf_emit_annotations=true --xla_jf_dump_llo_pass_label_regex={PASSES}"
        env = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        env |= {"LIBTPU_INIT_ARGS": flags, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        out = Path(folder) / "report.json"
        line = [sys.executable, "-m", "benchmarks.tpu_static", "--worker", str(out)]
        done = subprocess.run(
            [*line, json.dumps(dataclasses.asdict(case))],
            env=os.environ | env,
            capture_output=True,
            text=True,
        )
        if not out.exists():
            lines = [text for text in done.stderr.splitlines() if "Error" in text]
            return row | {"error": (lines or ["died"])[-1][:160]}
        report = json.loads(out.read_text())
        names = re.findall(r"%([\w.\-]+) = [^\n]*\"tpu_custom_call\"", report["hlo"])
        schedule = read_schedule(folder, names[-1])
    row |= {"seconds": report["seconds"], "code": round(report["code"] / 2**20, 1)}
    row |= {"beside": ops_beside(report["hlo"])}
    return row | dataclasses.asdict(schedule) | figures(case, schedule)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's loops.

    Attributes:
      pieces: cycles, vmatmuls and their type of each piece of matrix code.
      loop: cycles of all other code of the loops that hold the pieces.
      plan: cycles of the other loops, which run before and after those, for a step or a group.
    """

    pieces: list[tuple[int, int, str]]
    loop: int
    plan: int


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
    regions: dict[int, list] = {}  # in order: cycles, vmatmuls, their type, depth in loops
    active: list[int] = []
    for bundle in bundles:
        marks = _REGION.findall(bundle)
        active.extend(int(region) for mark, region in marks if mark == "Start")
        region = regions.setdefault(active[-1] if active else -1, [0, 0, "", 0])
        kinds = _MATMUL.findall(bundle)
        region[0] += 1
        region[1] += len(kinds)
        region[2] = kinds[-1] if kinds else region[2]
        # Not every bundle inside a loop is marked so.
        region[3] = max(region[3], len(_BUNDLE.match(bundle).group(1)))
        for mark, number in marks:
            if mark == "End" and int(number) in active:
                active.remove(int(number))
    return _loops(list(regions.values()))


def _loops(regions: list[list]) -> Schedule:
    """A loop is a run of regions that are inside of one; code outside of loops runs once."""
    pieces: list[tuple[int, int, str]] = []
    totals = {True: 0, False: 0}
    for inside, run in itertools.groupby(regions, lambda region: region[3] > 0):
        loop = list(run) if inside else []
        matrix = [(cycles, count, kind) for cycles, count, kind, _ in loop if count]
        totals[bool(matrix)] += sum(cycles for cycles, count, *_ in loop if not count)
        pieces += matrix
    return Schedule(pieces, totals[True], totals[False])


def figures(case: Case, schedule: Schedule) -> dict:
    """Step, HBM rate and whole-call shares from the cycles of the pieces."""
    chip = tiles.CHIPS[case.chip]
    # One vmatmul multiplies 16 rows of bfloat16, or 32 of an 8-bit type, with a full side.
    rows = {True: 16, False: 32}
    pieces, loop = schedule.pieces, schedule.loop
    work = [(count * rows["bf16" in kind] * chip.side**2, cycles) for cycles, count, kind in pieces]
    if case.kernel != "octablox":
        macs, cycles = max(work)
        return {"step": round(macs / case.rate / (cycles + loop), 3)}
    tile, columns, column_tiles = _tiles(case)
    # The pieces of one amount of work differ in what they do with an accumulator.
    cost = {}
    for macs, cycles in work:
        cost.setdefault(min(tile.buckets, key=lambda b: abs(b * columns - macs)), []).append(cycles)
    mean = case.rows // EXPERTS
    bucket = next((b for b in tile.buckets if b >= mean), tile.rows)
    used = min(bucket, mean)
    step = min(cost[bucket]) + loop
    shares = {}
    for kind in ("equal", "routed", "skewed"):
        total = [
            sum(_group_cycles(case, tile, cost, schedule, column_tiles, sizes))
            for sizes in group_sizes(case.rows, kind)
        ]
        shares[kind] = round(case.macs / case.rate / float(np.mean(total)), 3)
    limit = case.macs / EXPERTS * used / mean / column_tiles / case.rate
    return {
        "tile": str(tile),
        "step": round(limit / step, 3),
        "hbm": round(_step_bytes(case, tile, bucket) / step),
        **shares,
        "allowed": round(min(1.0, case.macs / case.rate * chip.hbm / _least_bytes(case)), 3),
    }


def _tiles(case: Case):
    """The tiles that octablox chooses, MACs of a row of a step, and tiles of the columns."""
    dtype = TYPES[case.type][0]
    types = (dtype, dtype, "bfloat16")
    if case.product == "drhs":
        call = tiles.Tgmm(case.chip, case.rows, K, N, EXPERTS, *types)
        tile = tiles.choose(call)
        return tile, tile.k * tile.n, K // tile.k * (N // tile.n)
    back = case.product == "dlhs"
    k, columns, parts = (N, K, 1) if back else (K, N, 2 if case.product == "gated" else 1)
    product = "dlhs" if back else "gmm"
    call = tiles.Gmm(
        case.chip, case.rows, k, columns, EXPERTS, *types, parts=parts, product=product
    )
    tile = tiles.choose(call)
    return tile, k * parts * tile.columns, columns // tile.columns


def _step_bytes(case: Case, tile, rows: int) -> int:
    """Bytes that a tile of columns moves for one group, whose weight moves once."""
    size = jnp.dtype(TYPES[case.type][0]).itemsize
    if case.product == "drhs":
        return rows * (tile.k + tile.n) * size + tile.k * tile.n * 2
    parts = 2 if case.product == "gated" else 1
    weight = tile.contracted * tile.columns * parts * size
    return weight + rows * (tile.contracted * size + tile.columns * 2)


def _least_bytes(case: Case) -> int:
    """Bytes of all operands and results."""
    size = jnp.dtype(TYPES[case.type][0]).itemsize
    k, n, parts = K, N, 2 if case.product == "gated" else 1
    weight, x, out = EXPERTS * k * n * parts, case.rows * k, case.rows * n
    if case.product == "drhs":
        return (x + out) * size + weight * 2
    if case.product == "dlhs":
        x, out = out, x
    return (weight + x) * size + out * 2


def _group_cycles(case, tile, cost, schedule, column_tiles, sizes):
    """Cycles of each group; rows begin where the last group ended, inside a block of 32."""
    hbm, row = tiles.CHIPS[case.chip].hbm, 0
    for size in sizes:
        head, row, steps = row % 32, row + size, []
        rest, ends = size + head, tile.buckets
        if case.product == "drhs":  # the last step of a longer group has fewer row counts
            ends = ends if rest <= tile.rows else ends[::-2][::-1]
            if rest % 32 <= head and rest <= tile.rows:
                rest -= rest % 32  # folded into the head's block
        while size and rest > 0:
            steps.append(next((b for b in ends if b >= rest), tile.rows))
            rest -= steps[-1]
        pick = min if len(steps) == 1 else max
        compute = sum(pick(cost[b]) + schedule.loop for b in steps)
        moved = _step_bytes(case, tile, -(-(head + size) // 32) * 32)
        yield max(compute, moved / hbm) * column_tiles + schedule.plan * len(steps)


def group_sizes(rows: int, kind: str):
    """Group sizes: one sample if equal, else 200."""
    rng = np.random.default_rng(0)
    if kind == "equal":
        return [np.full(EXPERTS, rows // EXPERTS)]
    even = np.full(EXPERTS, 1 / EXPERTS)
    share = lambda: even if kind == "routed" else rng.dirichlet(np.full(EXPERTS, 2.0))  # noqa: E731
    return [rng.multinomial(rows, share()) for _ in range(200)]


COLUMNS = ("rows", "product", "type", "kernel", "step", "hbm", "equal", "routed", "skewed", "allowed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chip", choices=TOPOLOGIES, default="tpu7x")
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--product", choices=PRODUCTS, nargs="+", default=PRODUCTS)
    parser.add_argument("--type", choices=TYPES, nargs="+", default=list(TYPES))
    parser.add_argument("--kernel", choices=KERNELS, nargs="+", default=KERNELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return _compile(Case(**json.loads(args.worker[1])), Path(args.worker[0]))
    cases = [
        Case(args.chip, kernel, product, kind, rows)
        for rows in args.rows
        for kind in args.type
        for product in args.product
        for kernel in args.kernel
    ]
    rows = []
    for case in cases:
        rows.append(measure(case))
        print(f"{case}: {rows[-1].get('step', rows[-1].get('error'))}", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    hbm = tiles.CHIPS[args.chip].hbm
    table = Table(title=f"{args.chip}, K {K}, N {N}, {EXPERTS} experts; HBM gives {hbm} B a cycle")
    for column in (*COLUMNS, "beside", "code", "seconds"):
        table.add_column(column)
    for row in rows:
        cells = [str(row.get(column, "–")) for column in (*COLUMNS, "beside", "code", "seconds")]
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
