"""The TPU kernel of `out[E, K, N] = lhs[M, K]^T @ rhs[M, N]` over the rows of each group: drhs.

A step multiplies one tile of rows: `[rows, tile_k]^T @ [rows, tile_n]`, contracting the rows of
both operands as they lie in HBM. Their transposition runs on the transpose unit under the matrix
unit's work. A group of several tiles adds up in the output window; which of the paths first,
middle, last a step takes is decided outside of the straight code, so that a group of one tile
adds nothing up and a middle tile, all of whose rows count, masks nothing.

Rows of a tile that belong to other groups are masked in both operands: garbage in one of them
would survive the other's zero as NaN. The matrix unit contracts 256 rows at a time, and a group
that neither begins nor ends on a block of 32 may need one block, and with it 256 rows, more than
its rows would fill. So where the rows of its last block fit into the gap at the head of its first,
they are moved there ("folded").
"""

import dataclasses
import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octablox.kernels import pallas_tpu_rows as rows_
from octablox.kernels.pallas_tpu_rows import BLOCK, LANES
from octablox.kernels.tiles import TgmmTiles, last_buckets


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about one call."""

    tiles: TgmmTiles
    rows: int
    k: int
    n: int
    experts: int
    out_dtype: jnp.dtype
    vmem_bytes: int = 0


# Where each operand lives; HBM ones are brought in step by step, the others stay as a whole.
PLACES = {
    "lhs": pltpu.HBM,  # [M / BLOCK, BLOCK, K]
    "rhs": pltpu.HBM,  # [M / BLOCK, BLOCK, N]
    "k_scale": pltpu.VMEM,  # float32 [K / 128, 128]
    "n_scale": pltpu.VMEM,  # float32 [1 or E, N / tile_n, 1, tile_n]
    "lhs_factor": pltpu.SMEM,  # float32 [1]
    "rhs_factor": pltpu.SMEM,  # float32 [1]
}


def call(plan: Plan, operands: dict[str, jax.Array], sizes, offset, out_type, interpret):
    """Runs the kernel: `out[E, K, N]`. Arguments as those of `pallas_tpu_gmm.call`."""
    names = tuple(name for name in PLACES if name in operands)
    tiles = plan.tiles
    steps = rows_.max_steps(plan.rows, plan.experts, tiles.rows)
    scratch = {
        "first": pltpu.SMEM((steps + 1,), jnp.int32),
        "group": pltpu.SMEM((steps + 1,), jnp.int32),
        "begin": pltpu.SMEM((steps,), jnp.int32),
        "reads": pltpu.SMEM((steps,), jnp.int32),
    }
    if plan.out_dtype == jnp.bfloat16:
        scratch["rest"] = pltpu.VMEM((tiles.k, tiles.n), jnp.bfloat16)
    if "k_scale" in operands:
        scratch["k_scale"] = pltpu.VMEM((rows_.spread_size(tiles.k), LANES), jnp.float32)
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        functools.partial(_kernel, plan, names, tuple(scratch)),
        in_specs=[smem, smem, *(pl.BlockSpec(memory_space=PLACES[name]) for name in names)],
        out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
        out_shape=out_type((plan.experts, plan.k, plan.n), plan.out_dtype),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=plan.vmem_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="octablox_tgmm",
    )(sizes, offset, *(operands[name] for name in names))


def _kernel(plan, names, scratch_names, sizes, offset, *refs):
    operands = dict(zip(names, refs[: len(names)], strict=True))
    out = refs[len(names)]
    scratch = dict(zip(scratch_names, refs[len(names) + 1 :], strict=True))
    first, group, tiles = scratch["first"], scratch["group"], plan.tiles
    steps = rows_.plan_steps(
        sizes, offset, first, group, groups=plan.experts, tile=tiles.rows, empty=True
    )
    group[steps] = -1
    begin, reads = scratch["begin"], scratch["reads"]
    rows_.plan_reads(first, begin, reads, steps, plan.rows // BLOCK)
    resident = {name: ref for name, ref in operands.items() if PLACES[name] != pltpu.HBM}
    block = pl.BoundedSlice(tiles.rows // BLOCK)
    read = lambda s: pl.ds(begin[s], reads[s])  # noqa: E731

    def body(lhs, rhs, out):
        _step(plan, lhs, rhs, out, resident, scratch)

    pltpu.emit_pipeline(
        body,
        grid=(plan.n // tiles.n, plan.k // tiles.k, steps),
        in_specs=[
            pl.BlockSpec((block, BLOCK, tiles.k), lambda j, i, s: (read(s), 0, i)),
            pl.BlockSpec((block, BLOCK, tiles.n), lambda j, i, s: (read(s), 0, j)),
        ],
        out_specs=[pl.BlockSpec((None, tiles.k, tiles.n), lambda j, i, s: (group[s], i, j))],
    )(operands["lhs"], operands["rhs"], out)


def _step(plan, lhs, rhs, out, resident, scratch):
    """Adds one tile of rows to its group's matrix, or writes the zeros of an empty group."""
    step, tiles = pl.program_id(2), plan.tiles
    first, group = scratch["first"], scratch["group"]
    head = rows_.offset_in_block(first[step])
    rows = first[step + 1] - first[step] + head
    is_first = (step == 0) | (group[jnp.maximum(step - 1, 0)] != group[step])
    is_last = group[step + 1] != group[step]
    multiply = functools.partial(_multiply, plan, lhs, rhs, out, resident, scratch)

    def last(starts: bool):
        if "k_scale" in resident:
            block = pl.program_id(1) * (tiles.k // BLOCK)
            rows_.spread_down(resident["k_scale"], scratch["k_scale"], block, tiles.k)
        tail = rows_.offset_in_block(rows)
        folded = jnp.where(tail <= head, tail, 0) if starts else 0  # else there is no gap
        choose = lambda ref, bucket: _only(ref, bucket, head, rows, folded)  # noqa: E731
        buckets = tiles.buckets if starts else last_buckets(tiles.buckets)
        rows_.by_rows(rows - folded, buckets, lambda b: multiply(b, choose, starts, True))

    def not_last(starts: bool):  # such a step fills its tile, and only a first one has a head
        masked = lambda ref, bucket: _only(ref, bucket, head, rows, 0)  # noqa: E731
        whole = lambda ref, bucket: rows_.flat(ref, 0, bucket)  # noqa: E731
        multiply(tiles.rows, masked if starts else whole, starts, False)

    def product():
        lax.cond(
            is_last,
            lambda: lax.cond(is_first, lambda: last(True), lambda: last(False)),
            lambda: lax.cond(is_first, lambda: not_last(True), lambda: not_last(False)),
        )

    def zeros():
        def one_block(i, _):
            at = pl.ds(pl.multiple_of(i * BLOCK, BLOCK), BLOCK)
            out[at, :] = jnp.zeros((BLOCK, tiles.n), out.dtype)

        lax.fori_loop(0, tiles.k // BLOCK, one_block, None)

    lax.cond(rows > head, product, zeros)


def _only(ref, bucket: int, begin, end, folded):
    """Rows `begin:end` of a tile, zeros elsewhere; [bucket, X].

    The last `folded` of them, those in the block of `end`, move to the tile's beginning.
    """
    last = jnp.minimum(rows_.block_of(end), ref.shape[0] - 1)
    first_block = _masked(ref[0], begin, end)
    first_block = jnp.where(rows_.inside(BLOCK, 0, folded), ref[last], first_block)
    if bucket == BLOCK:
        return first_block
    others = _masked(rows_.flat(ref, BLOCK, bucket), 0, end - folded - BLOCK)
    return jnp.concatenate([first_block, others], axis=0)


def _masked(tile, begin, end):
    return jnp.where(rows_.inside(tile.shape[0], begin, end), tile, jnp.zeros_like(tile))


def _multiply(plan, lhs, rhs, out, resident, scratch, bucket, choose, starts, ends):
    """Adds the product of `bucket` rows, as `choose(ref, bucket)` reads them, to the window.

    A sum that goes on is kept in the output window. In bfloat16 that keeps its upper half, and
    `rest` the lower: 16 bits of mantissa, and half the VMEM of a float32 accumulator beside.
    """
    left, right = choose(lhs, bucket), choose(rhs, bucket)
    chunk = plan.tiles.chunk_k or plan.tiles.k
    for k in range(0, plan.tiles.k, chunk):
        at = slice(k, min(plan.tiles.k, k + chunk))
        value = rows_.dot(left[:, at], right, (0, 0))
        if not starts:
            value = value + out[at, :].astype(jnp.float32)
            if "rest" in scratch:
                value = value + scratch["rest"][at, :].astype(jnp.float32)
        if ends:
            value = _scaled(plan, value, at, resident, scratch)
        upper = value.astype(out.dtype)
        out[at, :] = upper
        if not ends and "rest" in scratch:
            scratch["rest"][at, :] = (value - upper.astype(jnp.float32)).astype(jnp.bfloat16)


def _scaled(plan, value, at, resident, scratch):
    """A finished part of the product, rows `at` of its K, times all scales."""
    if "lhs_factor" in resident:
        value = value * resident["lhs_factor"][0]
    if "rhs_factor" in resident:
        value = value * resident["rhs_factor"][0]
    if "n_scale" in resident:
        scale = resident["n_scale"]
        group = 0 if scale.shape[0] == 1 else scratch["group"][pl.program_id(2)]
        value = value * scale[group, pl.program_id(0)]
    if "k_scale" in resident:
        block = pl.program_id(1) * (plan.tiles.k // BLOCK)
        column = rows_.column(scratch["k_scale"], block, at.start, at.stop, plan.tiles.n)
        value = value * column
    return value
