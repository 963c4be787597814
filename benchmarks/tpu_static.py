"""TPU kernels read from the schedule that libtpu emits: no TPU is needed.

    python -m benchmarks.tpu_static [--chip tpu7x] [--rows 8192 16384] [--product gmm dlhs ...]
                                    [--type fp8 bf16] [--kernel octablox ...] [--json FILE]

Each kernel is compiled for the chip (extras `tpu` and, for its two kernels, `tokamax`) and the
dump of its schedule is read: one line a cycle, waits for HBM not among them. Columns:

    step     cycles at the matrix unit's limit over all cycles of a step: the piece of code that
             multiplies a group of the mean size (or a whole tile), and all other code of its loop,
             every branch counted
    hbm      bytes that a step moves over its cycles; what the chip gives is in the title
    equal, routed, skewed   the limit over the modelled cycles of a whole call: each step of each
             group costs its piece of code and the loop, or its bytes at full HBM rate if that is
             more, and the plan of all steps is made once; groups equal, of rows routed at random,
             or unequal (octablox only: how the others split a group into steps is theirs)
    allowed  the share of the matrix unit's limit at which HBM could move every operand and
             result once
    beside   XLA ops that run beside the kernel; code: MiB of the program

Megablox and tokamax v1 stand with the best of the tiles in `TILES` and, v1, of its own choice.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path

import jax
from jax import numpy as jnp
from rich.console import Console
from rich.table import Table

from octablox.kernels import static_gmm
from octablox.kernels.chips import CHIPS
from octablox.kernels.static_gmm import DTYPES
from octablox.kernels.static_schedule import TOPOLOGIES, CompileError, compile_for

K, N, EXPERTS = 7168, 2048, 16  # DeepSeek-V3's experts on one of 16 devices
PRODUCTS = ("gmm", "gated", "dlhs", "gated_grad", "tgmm")  # gated_grad: octablox alone has it
KERNELS = ("octablox", "tokamax v2", "tokamax v1", "megablox")
TILES = ((512, 1024, 1024), (512, 2048, 1024), (1024, 1024, 1024))


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel on one product, with a tile (M, K, N) if it is not to choose."""

    chip: str
    kernel: str
    product: static_gmm.Product
    type: str
    rows: int
    tile: tuple[int, int, int] | None = None

    @property
    def ours(self) -> static_gmm.Case:
        """The same product, as octablox's kernels take it."""
        # The epilogue of the gate is at the second matrix of an expert, [N, K].
        k, n = (N, K) if self.product == "gated_grad" else (K, N)
        return static_gmm.Case(self.chip, self.product, self.type, self.rows, k, n, EXPERTS)


def arguments(case: dict):
    """The function of another's kernel to compile, and the shapes of its arguments."""
    case = Case(**case | {"tile": case["tile"] and tuple(case["tile"])})
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(DTYPES[case.type])
    columns = N * (2 if case.product == "gated" else 1)
    x, dout, scale = shape((case.rows, K), dtype), shape((case.rows, N), dtype), None
    lhs, rhs = {
        "dlhs": (dout, shape((EXPERTS, K, N), dtype)),
        "tgmm": (x, dout),
    }.get(case.product, (x, shape((EXPERTS, K, columns), dtype)))
    if case.type == "fp8":
        scale = shape((1, N) if case.product == "tgmm" else (EXPERTS, 1, columns), jnp.float32)
    run = _megablox if case.kernel == "megablox" else _tokamax
    return functools.partial(run, case), (lhs, rhs, scale, shape((EXPERTS,), jnp.int32))


def _megablox(case, lhs, rhs, scale, sizes):
    """It knows no scales and no gating: the bare products."""
    kernel = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    settings = {"preferred_element_type": jnp.bfloat16, "tiling": case.tile}
    if case.product == "tgmm":
        return kernel.tgmm(lhs.swapaxes(0, 1), rhs, sizes, **settings)
    return kernel.gmm(lhs, rhs, sizes, transpose_rhs=case.product == "dlhs", **settings)


def _tokamax(case, lhs, rhs, scale, sizes):
    """Both versions. v2 quantizes lhs itself, so it is given bfloat16 rows."""
    from qwix import QArray
    from tokamax._src.ops.ragged_dot import api, base
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as v1

    second, fp8 = case.kernel == "tokamax v2", lhs.dtype.itemsize == 1
    quantized = lambda a, s: QArray(a, s, None, a.dtype)  # noqa: E731
    if fp8 and second and case.product in ("gmm", "gated"):
        lhs = base.AsQArray(lhs.astype(jnp.bfloat16), lhs.dtype)
    elif fp8:
        rows = 1 if case.product == "tgmm" else case.rows
        lhs = quantized(lhs, jnp.ones((rows, 1), jnp.float32))
    if fp8:
        one = jnp.ones((EXPERTS, 1, 1), jnp.float32)
        rhs = quantized(rhs, one if case.product == "dlhs" else scale)
    kernel = api.IMPLEMENTATIONS["mosaic_tpu_v2" if second else "mosaic_tpu"]
    if case.tile:
        kernel = v1.PallasMosaicTpuRaggedDot(
            config=v1.Config(**dict(zip(("tile_m", "tile_k", "tile_n"), case.tile, strict=True)))
        )
    if second and case.product == "tgmm" and not fp8:
        return _by_autodiff(kernel.replace(bypass_device_check=True), lhs, rhs, sizes)
    dims = {"dlhs": v1.DLHS_RAGGED_DOT_DIM_NUMS, "tgmm": v1.DRHS_RAGGED_DOT_DIM_NUMS}
    fused = {"fuse_gateup_activation": "silu"} if case.product == "gated" else {}
    return kernel.replace(bypass_device_check=True)(
        *(lhs, rhs),
        group_sizes=sizes,
        ragged_dot_dimension_numbers=dims.get(case.product, v1.DEFAULT_RAGGED_DOT_DIM_NUMS),
        preferred_element_type=jnp.bfloat16,
        **fused,
    )


def _by_autodiff(kernel, x, dout, sizes):
    """The gradient of the weight, which v2 computes nowhere else."""
    from tokamax._src import config

    def product(weight):
        return kernel(x, weight, group_sizes=sizes, preferred_element_type=jnp.bfloat16)

    with config.cross_compile(True):
        _, vjp = jax.vjp(product, jnp.zeros((EXPERTS, K, N), x.dtype))
        return vjp(dout)[0]


def measure(case: Case, timeout: float) -> dict:
    """The table's row of a case; `error` instead of figures where it does not compile."""
    row = dataclasses.asdict(case)
    try:
        if case.kernel == "octablox":
            return row | static_gmm.measure(case.ours, timeout)
        report = compile_for(
            case.chip, "benchmarks.tpu_static:arguments", dataclasses.asdict(case), timeout
        )
    except CompileError as error:
        return row | {"error": str(error)[:160]}
    schedule = report.schedule
    work, cycles = max((static_gmm.macs(case.chip, p), p.cycles) for p in schedule.pieces)
    rate = CHIPS[case.chip].macs[case.type]
    return row | {
        "step": round(work / rate / (cycles + schedule.loop), 3),
        "beside": report.beside,
        "code": round(report.code / 2**20, 1),
        "seconds": report.seconds,
        "pieces": [(piece.cycles, piece.matmuls) for piece in schedule.pieces],
        "loop": schedule.loop,
    }


def best(case: Case, timeout: float) -> dict:
    """The row of the tile of the highest step, where a kernel leaves the choice to others."""
    given = {"megablox": TILES, "tokamax v1": (None, *TILES)}.get(case.kernel, (None,))
    rows = [measure(dataclasses.replace(case, tile=tile), timeout) for tile in given]
    return max(rows, key=lambda row: row.get("step", 0.0))


COLUMNS = (
    *("rows", "product", "type", "kernel", "step", "hbm", "equal", "routed", "skewed", "allowed"),
    *("beside", "code", "seconds"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chip", choices=TOPOLOGIES, default="tpu7x")
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--product", choices=PRODUCTS, nargs="+", default=PRODUCTS)
    parser.add_argument("--type", choices=DTYPES, nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--kernel", choices=KERNELS, nargs="+", default=KERNELS)
    parser.add_argument("--timeout", type=float, default=600, help="seconds to compile a kernel")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for count in args.rows:
        for kind in args.type:
            for product in args.product:
                for kernel in args.kernel if product != "gated_grad" else ["octablox"]:
                    case = Case(args.chip, kernel, product, kind, count)
                    rows.append(best(case, args.timeout))
                    print(f"{case}: {rows[-1].get('step', rows[-1].get('error'))}", file=sys.stderr)
                    if args.json:  # after each: the whole table takes long
                        args.json.write_text(json.dumps(rows, indent=1))
    hbm = CHIPS[args.chip].hbm
    table = Table(title=f"{args.chip}, K {K}, N {N}, {EXPERTS} experts; HBM gives {hbm} B a cycle")
    for column in COLUMNS:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row.get(column, "–")) for column in COLUMNS))
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)


if __name__ == "__main__":
    main()
