"""What the two grouped products share on TPU: which rows a step reads, and scales laid along rows.

Rows are handled in blocks of `BLOCK`, since HBM keeps 8-bit values in tiles of 32 rows and a DMA
moves whole tiles. An array [M, X] is passed as [M / BLOCK, BLOCK, X], which moves no byte.

A step is a run of rows of one group. Its tile begins on a block boundary, `head` rows before the
run where the group does not begin on one; those rows belong to earlier groups.

Everything here that depends on the group sizes runs on the scalar core inside the kernel: no XLA
op is needed beside the call.
"""

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

BLOCK = 32
LANES = 128
_SHIFT = 5  # index maps run many times a step on the scalar core: shifts, no divisions


def block_of(row):
    """The block that holds a row."""
    return row >> _SHIFT


def blocks_to(row):
    """How many blocks hold all rows before this one."""
    return (row + (BLOCK - 1)) >> _SHIFT


def offset_in_block(row):
    """Rows of the row's block before it."""
    return row & (BLOCK - 1)


def max_steps(rows: int, groups: int, tile: int) -> int:
    """Upper bound of the number of steps: a group may begin and end inside a tile."""
    return rows // tile + 2 * groups + 1


def plan_steps(sizes, offset, first, group, *, groups: int, tile: int, empty: bool):
    """Fills the step tables and returns the number of steps.

    Args:
      sizes: SMEM int32 [G], rows of every group.
      offset: SMEM int32 [1], the first group held here.
      first: SMEM int32 [max_steps + 1]; `first[s] : first[s + 1]` become the rows of step s.
      group: SMEM int32 [max_steps]; becomes the local group of step s.
      groups: groups held here.
      tile: rows of a tile.
      empty: whether a group of no rows gets a step too.
    """
    begin = lax.fori_loop(0, offset[0], lambda g, row: row + sizes[g], jnp.int32(0))

    def one_group(g, carry):
        step, row = carry
        end = row + sizes[offset[0] + g]
        head = offset_in_block(row)
        count = jnp.where(end > row, pl.cdiv(end - row + head, tile), int(empty))

        def one_step(i, _):
            first[step + i] = jnp.where(i == 0, row, row - head + i * tile)
            group[step + i] = g

        lax.fori_loop(0, count, one_step, None)
        return step + count, end

    steps, end = lax.fori_loop(0, groups, one_group, (jnp.int32(0), begin))
    first[steps] = end
    return steps


def plan_reads(first, begin, count, steps, blocks: int) -> None:
    """Fills `begin` and `count` with the blocks that hold any row of a step, of `blocks` in all.

    A step of no rows gets one block, and so does step 0 where there is no step: no DMA has size
    zero, since not every part of the toolchain can wait for one.
    """
    begin[0], count[0] = 0, 1

    def one_step(step, _):
        block = jnp.minimum(block_of(first[step]), blocks - 1)
        begin[step] = block
        count[step] = jnp.maximum(blocks_to(first[step + 1]) - block, 1)

    lax.fori_loop(0, steps, one_step, None)


def plan_stores(first, count, steps) -> None:
    """Fills `count` with how many blocks each step stores, from its first on.

    A step that completes no block gets the blocks of the next one that does. It begins in the
    same block, so both have the same window, and a pipeline stores a window once, when it changes.
    """

    def one_step(i, end):
        step = steps - 1 - i
        begin, mine = block_of(first[step]), block_of(first[step + 1])
        end = jnp.where((i > 0) & (mine > begin), mine, end)
        count[step] = end - begin
        return end

    # The last step also stores the block that it leaves half full.
    lax.fori_loop(0, steps, one_step, blocks_to(first[steps]))


def by_rows(rows, buckets: tuple[int, ...], body) -> None:
    """Runs `body(bucket)` of the least bucket that holds `rows`: a tree of comparisons."""
    if len(buckets) == 1:
        return body(buckets[0])
    middle = len(buckets) // 2
    lax.cond(
        rows > buckets[middle - 1],
        lambda: by_rows(rows, buckets[middle:], body),
        lambda: by_rows(rows, buckets[:middle], body),
    )


def flat(ref, begin: int, end: int):
    """Rows `begin:end` of [blocks, BLOCK, X] as [rows, X]: whole tiles, nothing moves."""
    return ref[begin // BLOCK : end // BLOCK].reshape(end - begin, ref.shape[-1])


def inside(rows: int, begin, end):
    """Bool [rows, 1]: begin <= row < end."""
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return (row >= begin) & (row < end)


def to_lanes(scale: jax.Array) -> jax.Array:
    """Float32 [S] as [S / 128, 128], padded: its bytes in HBM are the same, so it is free."""
    missing = -scale.shape[0] % LANES
    return jnp.pad(scale, (0, missing)).reshape(-1, LANES)


def spread_size(rows: int) -> int:
    """Rows of the scratch that `spread_down` fills for a tile of `rows`."""
    return pl.cdiv(rows + LANES - BLOCK, LANES) * LANES


def spread_down(lanes, down, block, rows: int) -> None:
    """Turns scales that lie along lanes into columns: the kernel multiplies rows by them.

    Args:
      lanes: VMEM float32 [S / 128, 128].
      down: VMEM float32 [spread_size(rows), 128]; row r becomes the scale of index
        `block // 4 * 128 + r`, the same in every lane.
      block: int32, the first block of BLOCK indices that is wanted.
      rows: how many indices are wanted.
    """
    line = block >> 2
    for i in range(spread_size(rows) // LANES):
        # Past the end of the scales any will do: those rows are no one's.
        values = lanes[pl.ds(jnp.minimum(line + i, lanes.shape[0] - 1), 1), :]
        down[i * LANES : (i + 1) * LANES, :] = jnp.broadcast_to(values, (LANES, LANES)).T


def column(down, block, begin: int, end: int, width: int):
    """Rows `begin:end` of what `spread_down` made, float32 [end - begin, width]."""
    start = pl.multiple_of((block & 3) * BLOCK, BLOCK) + begin
    return jnp.concatenate([down[pl.ds(start, end - begin), :]] * (width // LANES), axis=1)


def dot(lhs, rhs, contracting: tuple[int, int]):
    """Float32 product of two tiles of any of the types.

    8-bit floats are multiplied as they are, mixed or not, and int8 pairs in int32. Any other
    pair is widened to the wider of the two; float32 takes as many MXU passes as it needs.
    """
    dims = (((contracting[0],), (contracting[1],)), ((), ()))
    if lhs.dtype == jnp.int8 and rhs.dtype == jnp.int8:
        return lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.int32).astype(jnp.float32)
    if not (is_fp8(lhs.dtype) and is_fp8(rhs.dtype)) and lhs.dtype != rhs.dtype:
        wide = jnp.float32 if jnp.float32 in (lhs.dtype, rhs.dtype) else jnp.bfloat16
        lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    return lax.dot_general(lhs, rhs, dims, precision, preferred_element_type=jnp.float32)


def is_fp8(dtype) -> bool:
    """Whether it is an 8-bit float type."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
