"""The TPU kernel of `out[E, K, N] = lhs[M, K]^T @ rhs[M, N]` over the rows of each group: drhs.

A step multiplies one tile of rows: `[rows, tile_k]^T @ [rows, tile_n]`, contracting the rows of
both operands as they lie in HBM. Their transposition runs on the transpose unit under the matrix
unit's work. A group of several tiles adds up in a float32 accumulator; which of the paths first,
middle, last a step takes is decided outside of the straight code, so that a group of one tile
never touches the accumulator and a middle tile, all of whose rows count, masks nothing.

Rows of a tile that belong to other groups are masked in both operands: garbage in one of them
would survive the other's zero as NaN.
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
from octablox.kernels.tiles import TgmmTiles


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
        "total": pltpu.VMEM((tiles.k, tiles.n), jnp.float32),
    }
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
    resident = {name: ref for name, ref in operands.items() if PLACES[name] != pltpu.HBM}
    block = pl.BoundedSlice(tiles.rows // BLOCK)
    read = lambda s: rows_.blocks_read(first, s, plan.rows // BLOCK)  # noqa: E731

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

    def run(bucket, starts: bool, ends: bool, masked: bool):
        left, right = rows_.flat(lhs, 0, bucket), rows_.flat(rhs, 0, bucket)
        if masked:
            left, right = (_only(a, head, rows) for a in (left, right))
        for k in range(0, tiles.k, tiles.chunk_k or tiles.k):
            at = slice(k, min(tiles.k, k + (tiles.chunk_k or tiles.k)))
            value = rows_.dot(left[:, at], right, (0, 0))
            if not starts:
                value = value + scratch["total"][at, :]
            if ends:
                out[at, :] = _scaled(plan, value, at, resident, scratch).astype(out.dtype)
            else:
                scratch["total"][at, :] = value

    def last(starts):
        if "k_scale" in resident:
            block = pl.program_id(1) * (tiles.k // BLOCK)
            rows_.spread_down(resident["k_scale"], scratch["k_scale"], block, tiles.k)
        rows_.by_rows(rows, tiles.buckets, lambda bucket: run(bucket, starts, True, True))

    def not_last(starts):  # such a step fills its tile, and only a first one has a head
        run(tiles.rows, starts, False, masked=starts)

    def product():
        lax.cond(
            is_last,
            lambda: lax.cond(is_first, lambda: last(True), lambda: last(False)),
            lambda: lax.cond(is_first, lambda: not_last(True), lambda: not_last(False)),
        )

    def zeros():
        out[...] = jnp.zeros_like(out)

    lax.cond(rows > head, product, zeros)


def _only(tile, begin, end):
    return jnp.where(rows_.inside(tile.shape[0], begin, end), tile, jnp.zeros_like(tile))


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
