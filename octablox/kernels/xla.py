"""The portable backend: a loop over groups, plain XLA, right on any platform and fast on CPU.

XLA:CPU lowers `lax.ragged_dot` to a dense product over all groups, E times the work. Here each
group runs its full row tiles unmasked and one remainder tile, whose size class is chosen at run
time, so the work is that of the rows there are. 8-bit operands are widened tile by tile.
"""

import dataclasses
import functools
import pathlib

import jax
from jax import lax
from jax import numpy as jnp

from octablox.kernels.contract import Scaled, group_bounds, vary_like

name = "xla"

# Row tiles. The largest is the working tile; the others bound the padding of a remainder.
ROW_TILES = (32, 64, 128, 256)
# The working tile of groups that fill it in the mean: fewer hand-overs between XLA:CPU's threads.
LARGE_ROW_TILE = 512

_slice = lax.dynamic_slice_in_dim
_update = lax.dynamic_update_slice_in_dim


def gmm(lhs, rhs, group_sizes, group_offset, *, transpose_rhs, out_dtype):
    """Grouped matmul, see `contract.Backend.gmm`."""
    rows, columns = lhs.value.shape[0], rhs.value.shape[1 if transpose_rhs else 2]
    if rows == 0:
        return jnp.zeros((0, columns), out_dtype)
    lhs, row_scale = _fold_scale(lhs, contracted=1)
    body = functools.partial(
        _gmm,
        lhs_type=lhs.dtype,
        rhs_type=rhs.value.dtype,
        transpose_rhs=transpose_rhs,
        out_dtype=out_dtype,
    )
    rhs_scale = None if rhs.scale is None else _repeat(rhs.scale, rhs.value.shape, 0)
    args = (_as_bytes(lhs), row_scale, _as_bytes(rhs.value), rhs_scale, group_sizes, group_offset)
    return jax.custom_batching.sequential_vmap(body)(*args)


def tgmm(lhs, rhs, group_sizes, group_offset, *, num_local_groups, out_dtype):
    """Transposed grouped matmul, see `contract.Backend.tgmm`."""
    if lhs.value.shape[0] == 0:
        shape = (num_local_groups, lhs.value.shape[1], rhs.value.shape[1])
        return jnp.zeros(shape, out_dtype)
    lhs, k_scale = _fold_scale(lhs, contracted=0)
    rhs, n_scale = _fold_scale(rhs, contracted=0)
    body = functools.partial(
        _tgmm,
        lhs_type=lhs.dtype,
        rhs_type=rhs.dtype,
        num_local_groups=num_local_groups,
        out_dtype=out_dtype,
    )
    args = (_as_bytes(lhs), k_scale, _as_bytes(rhs), n_scale, group_sizes, group_offset)
    return jax.custom_batching.sequential_vmap(body)(*args)


def _gmm(
    lhs,
    row_scale,
    rhs,
    rhs_scale,
    group_sizes,
    group_offset,
    *,
    lhs_type,
    rhs_type,
    transpose_rhs,
    out_dtype,
):
    groups, rows = rhs.shape[0], lhs.shape[0]
    columns = rhs.shape[1 if transpose_rhs else 2]
    plan = _plan(rows, *group_bounds(group_sizes, group_offset, groups))
    contracting = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    def group(g, out):
        pick = functools.partial(lax.dynamic_index_in_dim, index=g, keepdims=False)
        scale = None if rhs_scale is None else pick(rhs_scale)
        weight, column_scale = _fold_scale(
            Scaled(_widen(pick(rhs), rhs_type), scale), contracted=contracting[0][1][0]
        )

        def product(start, size):
            tile = _widen(_slice(lhs, start, size), lhs_type)
            out = lax.dot_general(tile, weight, contracting, preferred_element_type=jnp.float32)
            out = out if column_scale is None else out * column_scale
            out = out if row_scale is None else out * _slice(row_scale, start, size)[:, None]
            return out.astype(out_dtype)

        def whole_tile(j, out):
            start = plan.starts[g] + j * plan.tile
            return _update(out, product(start, plan.tile), start, 0)

        def remainder(size, out):
            start = jnp.minimum(plan.rest[g], rows - size)
            new = jnp.where(
                plan.inside(g, start, size), product(start, size), _slice(out, start, size)
            )
            return _update(out, new, start, 0)

        out = lax.fori_loop(0, plan.whole_tiles[g], whole_tile, out)
        classes = [lambda out: out, *(functools.partial(remainder, size) for size in plan.sizes)]
        return lax.switch(plan.rest_class[g], classes, out)

    out = vary_like((lhs, rhs, group_sizes, group_offset), jnp.zeros((rows, columns), out_dtype))
    return lax.fori_loop(0, groups, group, out)


def _tgmm(
    lhs,
    k_scale,
    rhs,
    n_scale,
    group_sizes,
    group_offset,
    *,
    lhs_type,
    rhs_type,
    num_local_groups,
    out_dtype,
):
    (rows, k), n = lhs.shape, rhs.shape[1]
    plan = _plan(rows, *group_bounds(group_sizes, group_offset, num_local_groups))
    zeros = lambda *shape, dtype=jnp.float32: vary_like(  # noqa: E731
        (lhs, rhs, group_sizes, group_offset), jnp.zeros(shape, dtype)
    )

    def product(start, size, inside=None):
        def tile(a, dtype):
            tile = _widen(_slice(a, start, size), dtype)
            # Both operands: a garbage NaN of either would survive the other's zero.
            return tile if inside is None else jnp.where(inside, tile, 0)

        return lax.dot_general(
            tile(lhs, lhs_type),
            tile(rhs, rhs_type),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    def group(g, out):
        def remainder(size):
            start = jnp.minimum(plan.rest[g], rows - size)
            return product(start, size, plan.inside(g, start, size))

        def whole_tile(j, total):
            return total + product(plan.starts[g] + j * plan.tile, plan.tile)

        classes = [
            lambda: zeros(k, n),
            *(functools.partial(remainder, size) for size in plan.sizes),
        ]
        total = lax.switch(plan.rest_class[g], classes)
        total = lax.fori_loop(0, plan.whole_tiles[g], whole_tile, total)
        total = total if k_scale is None else total * k_scale[:, None]
        total = total if n_scale is None else total * n_scale
        return lax.dynamic_update_index_in_dim(out, total.astype(out_dtype), g, 0)

    return lax.fori_loop(0, num_local_groups, group, zeros(num_local_groups, k, n, dtype=out_dtype))


@dataclasses.dataclass(frozen=True)
class _RowPlan:
    """Per group: `whole_tiles` tiles of `tile` rows from `starts`, then `rest` up to `ends`."""

    tile: int
    sizes: tuple[int, ...]  # of remainder tiles; class 0 is "no remainder"
    starts: jax.Array
    ends: jax.Array
    whole_tiles: jax.Array
    rest: jax.Array
    rest_class: jax.Array

    def inside(self, g, start, size):
        row = start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        return (row >= self.rest[g]) & (row < self.ends[g])


def _plan(rows, starts, ends) -> _RowPlan:
    large = rows >= LARGE_ROW_TILE * starts.shape[0]
    tile = LARGE_ROW_TILE if large else min(rows, ROW_TILES[-1])
    sizes = (*(t for t in ROW_TILES if t < tile), tile)
    whole_tiles = (ends - starts) // tile
    rest = starts + whole_tiles * tile
    bounds = jnp.array((0, *sizes[:-1]), jnp.int32)
    rest_class = jnp.sum((ends - rest)[:, None] > bounds, axis=1, dtype=jnp.int32)
    return _RowPlan(tile, sizes, starts, ends, whole_tiles, rest, rest_class)


def _fold_scale(operand: Scaled, contracted: int) -> tuple[jax.Array, jax.Array | None]:
    """The 2-D operand, and the scale of each index of its outer dim, to be applied to the product.

    A scale that varies along the contracted dim cannot wait that long: it is applied here.
    """
    value, scale = operand.value, operand.scale
    if scale is None:
        return value, None
    if scale.shape[contracted] == 1:
        return value, _repeat(scale, value.shape, 1 - contracted).reshape(-1)
    return value.astype(jnp.float32) * _repeat(_repeat(scale, value.shape, 0), value.shape, 1), None


def _repeat(scale, shape, dim):
    """`scale` with each element of `dim` repeated for the elements of `shape` that it serves."""
    return jnp.repeat(scale, shape[dim] // scale.shape[dim], axis=dim)


def _as_bytes(value):
    # Loops carry 8-bit floats as bytes: XLA would hoist a conversion of the whole array out of
    # the loop and keep it in float32.
    if value.dtype.itemsize == 1 and value.dtype != jnp.int8:
        return lax.bitcast_convert_type(value, jnp.uint8)
    return value


def _widen(value, dtype):
    """Values of `dtype`, 8-bit floats among them as bytes, in a type that multiplies fast.

    Products of bfloat16, and so of 8-bit values, are exact in float32, in which dots add up.
    """
    if value.dtype == jnp.uint8:
        value = lax.bitcast_convert_type(value, dtype)
    if dtype == jnp.bfloat16 or jnp.dtype(dtype).itemsize == 1:
        return value.astype(jnp.bfloat16 if _multiplies_bfloat16() else jnp.float32)
    return value.astype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether bfloat16 is the faster type to multiply: not on a CPU without instructions for it."""
    if jax.default_backend() != "cpu":
        return True
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
