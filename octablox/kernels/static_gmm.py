"""How fast a grouped matmul would be on a TPU, from its compiled schedule.

`step` is one tile's share of the matrix unit's limit. A whole call is modelled: each step of each
group costs its piece of code and the loop around it, or the group costs its bytes at the full rate
of HBM if that is more. What no figure holds: the arrival of the first tile, and waits for HBM that
are shorter than a step.

M rows, K contracted and N columns of the forward product, E experts; `gated` has two matrices of N,
`gated_grad` is dlhs with its epilogue.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax import numpy as jnp

from octablox.kernels import pallas_tpu, tiles
from octablox.kernels.chips import CHIPS
from octablox.kernels.contract import Scaled
from octablox.kernels.static_schedule import Piece, Report, compile_for
from octablox.kernels.tiles import Gmm, GmmTiles, Tgmm, TgmmTiles

Product = Literal["gmm", "gated", "dlhs", "gated_grad", "tgmm"]
DTYPES = {"fp8": "float8_e4m3fn", "bf16": "bfloat16", "int8": "int8"}
KINDS_OF_SIZES = ("equal", "routed", "skewed")


@dataclasses.dataclass(frozen=True)
class Case:
    """One product on one chip.

    Attributes:
      chip: "v5e", "v5p", "v6e" or "tpu7x".
      product: which one.
      type: "fp8" (scales of rows and channels), "int8" (the same) or "bf16".
      rows, k, n, experts: M, K, N, E of the forward product.
      tile: instead of the chosen one.
    """

    chip: str
    product: Product
    type: str
    rows: int
    k: int
    n: int
    experts: int
    tile: GmmTiles | TgmmTiles | None = None

    @property
    def parts(self) -> int:
        """Matrices side by side in the weight."""
        return 2 if self.product == "gated" else 1

    @property
    def streams(self) -> int:
        """Arrays of the result's size that are written or read beside the operands."""
        return 4 if self.product == "gated_grad" else 1

    @property
    def call(self) -> Gmm | Tgmm:
        """What the choice of tiles depends on."""
        types = (DTYPES[self.type], DTYPES[self.type], "bfloat16")
        if self.product == "tgmm":
            return Tgmm(self.chip, self.rows, self.k, self.n, self.experts, *types)
        back = self.product in ("dlhs", "gated_grad")
        k, columns = (self.n, self.k) if back else (self.k, self.n)
        return Gmm(
            *(self.chip, self.rows, k, columns, self.experts, *types),
            parts=self.parts,
            streams=self.streams,
            product="dlhs" if back else "gmm",
        )

    @property
    def limit(self) -> float:
        """Cycles of the matrix unit for the whole call."""
        rate = CHIPS[self.chip].macs[self.type]
        return self.rows * self.k * self.n * self.parts / rate


def measure(case: Case, timeout: float = 900) -> dict[str, Any]:
    """Compiles the case and reads its figures; see `figures`.

    Raises:
      CompileError: it does not compile, or not in time.
    """
    chosen = case.tile or tiles.choose(case.call)
    case = dataclasses.replace(case, tile=chosen)
    target = f"{__name__}:arguments"
    return figures(case, compile_for(case.chip, target, dataclasses.asdict(case), timeout))


def arguments(case: dict[str, Any]):
    """The function to compile, and the shapes of its arguments; of a `Case` as a dict."""
    made = TgmmTiles if case["product"] == "tgmm" else GmmTiles
    tile = made(**case["tile"] | {"buckets": tuple(case["tile"]["buckets"])})
    chosen = Case(**case | {"tile": tile})
    shape, m, e = jax.ShapeDtypeStruct, chosen.rows, chosen.experts
    dtype, columns = jnp.dtype(DTYPES[chosen.type]), chosen.n * chosen.parts
    scale = lambda *sizes: None if dtype.itemsize > 1 else shape(sizes, jnp.float32)  # noqa: E731
    x, dout = shape((m, chosen.k), dtype), shape((m, chosen.n), dtype)
    weight = shape((e, chosen.k, columns), dtype)
    saved = shape((m, chosen.k), jnp.bfloat16)
    operands = {
        "dlhs": (Scaled(dout, scale(m, 1)), Scaled(weight)),
        "gated_grad": (Scaled(dout, scale(m, 1)), Scaled(weight), saved, saved),
        "tgmm": (Scaled(x), Scaled(dout, scale(1, chosen.n))),
    }.get(chosen.product, (Scaled(x, scale(m, 1)), Scaled(weight, scale(e, 1, columns))))
    run = functools.partial(_run, chosen.product, e, tile)
    return run, (*operands, shape((e,), jnp.int32))


def _run(product, experts, tile, lhs, rhs, *others):
    *saved, sizes = others
    settings = {"out_dtype": jnp.bfloat16, "tiles": tile}
    if product == "tgmm":
        return pallas_tpu.tgmm(lhs, rhs, sizes, 0, num_local_groups=experts, **settings)
    if product == "gated":
        return pallas_tpu.gated_gmm(lhs, rhs, sizes, 0, **settings)
    if product == "gated_grad":
        return pallas_tpu.gated_gmm_grad(lhs, rhs, *saved, sizes, 0, **settings)
    return pallas_tpu.gmm(lhs, rhs, sizes, 0, transpose_rhs=product == "dlhs", **settings)


def figures(case: Case, report: Report) -> dict[str, Any]:
    """The figures of a compiled case that has a tile, rates and shares rounded.

    Returns:
      tile; step; hbm, bytes that a step moves over its cycles; equal, routed, skewed: the share of
      the limit that a whole call reaches with groups of one size, of rows routed at random, of
      unequal experts; allowed: the share at which HBM could move every operand and result once;
      cycles of a routed call; beside, code (MiB), seconds: see `Report`; pieces, loop, plan.
    """
    cost = _cost(case, report)
    tile, schedule = _tile(case), report.schedule
    mean = case.rows // case.experts
    bucket = next((b for b in tile.buckets if b >= mean), tile.rows)
    column_tiles = _column_tiles(case)
    step = min(cost[bucket]) + schedule.loop
    limit = case.limit / case.experts * min(bucket, mean) / mean / column_tiles
    calls = {
        kind: float(np.mean([_call_cycles(case, cost, report, s) for s in _sizes(case, kind)]))
        for kind in KINDS_OF_SIZES
    }
    allowed = case.limit * CHIPS[case.chip].hbm / _least_bytes(case)
    return {
        "tile": str(tile),
        "step": round(limit / step, 3),
        "hbm": round(_moved(case, bucket) / step),
        **{kind: round(case.limit / cycles, 3) for kind, cycles in calls.items()},
        "allowed": round(min(1.0, allowed), 3),
        "cycles": round(calls["routed"]),
        "beside": report.beside,
        "code": round(report.code / 2**20, 1),
        "seconds": report.seconds,
        "pieces": [(piece.cycles, piece.matmuls) for piece in schedule.pieces],
        "loop": schedule.loop,
        "plan": schedule.plan,
    }


def macs(chip: str, piece: Piece) -> int:
    """Multiply-accumulates of a piece of code: of 16 rows a vmatmul, or 32 of an 8-bit type."""
    rows = 16 if "bf16" in piece.kind else 32
    return piece.matmuls * rows * CHIPS[chip].side ** 2


def _tile(case: Case) -> GmmTiles | TgmmTiles:
    if case.tile is None:
        raise ValueError("tile: expected one, got None")
    return case.tile


def _column_tiles(case: Case) -> int:
    """How often the rows are gone through."""
    tile = _tile(case)
    if isinstance(tile, TgmmTiles):
        return case.k // tile.k * (case.n // tile.n)
    return (case.n if case.product in ("gmm", "gated") else case.k) // tile.columns


def _cost(case: Case, report: Report) -> dict[int, list[int]]:
    """Cycles of the pieces for each bucket; those of one differ in what they add up."""
    tile = _tile(case)
    cost: dict[int, list[int]] = {}
    # How many vmatmuls a row takes depends on the chip and on padding: the longest piece tells.
    per_row = max(piece.matmuls for piece in report.schedule.pieces) / tile.rows
    for piece in report.schedule.pieces:
        bucket = min(tile.buckets, key=lambda b: abs(b * per_row - piece.matmuls))
        cost.setdefault(bucket, []).append(piece.cycles)
    return cost


def _moved(case: Case, rows: int) -> int:
    """Bytes that a tile of columns moves for one group, whose weight moves once."""
    size, tile = jnp.dtype(DTYPES[case.type]).itemsize, _tile(case)
    if isinstance(tile, TgmmTiles):
        return rows * (tile.k + tile.n) * size + tile.k * tile.n * 2
    weight = tile.contracted * tile.columns * case.parts * size
    return weight + rows * (tile.contracted * size + tile.columns * 2 * case.streams)


def _least_bytes(case: Case) -> int:
    """Bytes of all operands and results."""
    size = jnp.dtype(DTYPES[case.type]).itemsize
    weight, x = case.experts * case.k * case.n * case.parts, case.rows * case.k
    out = case.rows * case.n
    if case.product == "tgmm":
        return (x + out) * size + weight * 2
    if case.product in ("dlhs", "gated_grad"):
        x, out = out, x
    return (weight + x) * size + out * 2 * case.streams


def _call_cycles(case: Case, cost, report: Report, sizes) -> float:
    """Cycles of a call; rows begin where the last group ended, inside a block of 32."""
    schedule, row, total = report.schedule, 0, 0.0
    for size in sizes.tolist():
        head, row = row % 32, row + size
        steps = _steps(case, head, size)
        pick = min if len(steps) == 1 else max
        compute = sum(pick(cost[b]) + schedule.loop for b in steps)
        moved = _moved(case, -(-(head + size) // 32) * 32) / CHIPS[case.chip].hbm
        total += max(compute, moved) * _column_tiles(case) + schedule.plan * len(steps)
    return total


def _steps(case: Case, head: int, size: int) -> list[int]:
    """Buckets of the steps of a group that begins `head` rows into a block."""
    tile, steps = _tile(case), []
    rest, last = size + head, tile.buckets
    if case.product == "tgmm" and rest > tile.rows:
        last = tiles.last_buckets(last)
    elif case.product == "tgmm" and rest % 32 <= head:
        rest -= rest % 32  # folded into the head's block
    while size and rest > 0:
        steps.append(next((b for b in last if b >= rest), tile.rows))
        rest -= steps[-1]
    return steps


def _sizes(case: Case, kind: str) -> Iterator[np.ndarray]:
    """Group sizes: one sample if equal, else 200."""
    rng, e = np.random.default_rng(0), case.experts
    if kind == "equal":
        yield np.full(e, case.rows // e)
        return
    for _ in range(200):
        even = np.full(e, 1 / e)
        yield rng.multinomial(case.rows, even if kind == "routed" else rng.dirichlet(np.full(e, 2)))
