"""The TPU kernel of `out[M, N] = lhs[M, K] @ rhs[E, K, N]` by groups: forward, dlhs and gated.

With `gated`, rhs holds two matrices side by side (gate, up) and `out = silu(gate) * up`; with
`gated_grad`, lhs @ rhs is that out's gradient, which goes on to gate and up before it is stored.

A step multiplies one tile of rows with the whole K of its group's matrix, `[rows, K] @
[K, columns]`, in one straight piece of code, thousands of cycles long: to enter and leave such a
piece costs the matrix unit about 270 cycles, and to keep an accumulator across steps costs more.
Scales are applied once to the finished product, or where they vary along K to each block's part.

Rows are independent here, so a tile computes on whatever rows lie in it, garbage among them, and
only the store selects: a step writes the row blocks that it completes, and hands the block that
it leaves half full to the next step in `carry`. Only blocks at a group's edge are masked.
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
from octablox.kernels.tiles import GmmTiles


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about one call. `columns` are those of one output, N or F.

    Attributes:
      k_block: elements along K that share a scale, 32, 64 or a multiple of 128; None: all.
      save: also return gate and up, for the backward pass.
      gated_grad: return the gradients of gate and up.
    """

    tiles: GmmTiles
    rows: int
    columns: int
    experts: int
    out_dtype: jnp.dtype
    transpose_rhs: bool = False
    gated: bool = False
    save: bool = False
    gated_grad: bool = False
    k_block: int | None = None
    vmem_bytes: int = 0

    @property
    def parts(self) -> int:
        """Matrices side by side in rhs."""
        return 2 if self.gated else 1

    @property
    def column_tiles(self) -> int:
        """Tiles along the columns of one output."""
        return self.columns // self.tiles.columns

    @property
    def outputs(self) -> int:
        """`out`; out, gate and up; or the gradients of gate and up."""
        return 3 if self.save else 2 if self.gated_grad else 1


# Where each operand lives; HBM ones are brought in step by step, the others stay as a whole.
PLACES = {
    "lhs": pltpu.HBM,  # [M / BLOCK, BLOCK, K]
    "rhs": pltpu.HBM,  # [E, K, parts * columns], or [E, columns, K] with transpose_rhs
    "lhs_blocks": pltpu.HBM,  # scales along K: float32 [M / BLOCK, BLOCK, K / k_block]
    "rhs_blocks": pltpu.HBM,  # float32 [E, K / k_block, parts * columns]
    "gate": pltpu.HBM,  # [M / BLOCK, BLOCK, columns], with gated_grad
    "up": pltpu.HBM,  # the same
    "row_scale": pltpu.VMEM,  # float32 [M / 128, 128]
    "row_weight": pltpu.VMEM,  # the same; multiplies the gated output
    "column_scale": pltpu.VMEM,  # float32 [E, parts * column_tiles, 1, tile]
    "lhs_factor": pltpu.SMEM,  # float32 [1]
    "rhs_factor": pltpu.SMEM,  # float32 [1] or [E]
}


def call(plan: Plan, operands: dict[str, jax.Array], sizes, offset, out_type, interpret):
    """Runs the kernel: `plan.outputs` arrays [M / BLOCK, BLOCK, columns].

    Args:
      plan: see there.
      operands: some of `PLACES`; lhs and rhs always.
      sizes: int32 [G].
      offset: int32 [1].
      out_type: makes the ShapeDtypeStruct of an output from shape and dtype.
      interpret: False, or `pltpu.InterpretParams`.
    """
    names = tuple(name for name in PLACES if name in operands)
    shape = (plan.rows // BLOCK, BLOCK, plan.columns)
    hbm, smem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.SMEM)
    steps = rows_.max_steps(plan.rows, plan.experts, plan.tiles.rows)
    tile = plan.tiles.columns
    scratch = {
        "first": pltpu.SMEM((steps + 1,), jnp.int32),
        "group": pltpu.SMEM((steps,), jnp.int32),
        "begin": pltpu.SMEM((steps,), jnp.int32),
        "reads": pltpu.SMEM((steps,), jnp.int32),
        "stores": pltpu.SMEM((steps,), jnp.int32),
        "carry": pltpu.VMEM((2, plan.outputs, BLOCK, tile), plan.out_dtype),  # zeros, and the block
        "zeros": pltpu.VMEM((1, BLOCK, plan.columns), plan.out_dtype),
        "done": pltpu.SemaphoreType.DMA(()),
    }
    for name in ("row_scale", "row_weight"):
        if name in operands:
            down = rows_.spread_size(plan.tiles.rows)
            scratch[name] = pltpu.VMEM((down, LANES), jnp.float32)
    if plan.k_block:
        scratch["total"] = pltpu.VMEM((plan.parts, plan.tiles.rows, tile), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, plan, names, tuple(scratch)),
        in_specs=[smem, smem, *(pl.BlockSpec(memory_space=PLACES[name]) for name in names)],
        out_specs=[hbm] * plan.outputs,
        out_shape=[out_type(shape, plan.out_dtype)] * plan.outputs,
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=plan.vmem_bytes,
            # Each check costs scalar cycles in every step; interpret mode makes them in tests.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"octablox_{'gated_' if plan.gated or plan.gated_grad else ''}gmm",
    )(sizes, offset, *(operands[name] for name in names))


def _kernel(plan, names, scratch_names, sizes, offset, *refs):
    operands = dict(zip(names, refs[: len(names)], strict=True))
    outs = refs[len(names) : len(names) + plan.outputs]
    scratch = dict(zip(scratch_names, refs[len(names) + plan.outputs :], strict=True))
    first, group = scratch["first"], scratch["group"]
    steps = rows_.plan_steps(
        sizes, offset, first, group, groups=plan.experts, tile=plan.tiles.rows, empty=False
    )
    rows_.plan_reads(first, scratch["begin"], scratch["reads"], steps, plan.rows // BLOCK)
    rows_.plan_stores(first, scratch["stores"], steps)
    scratch["zeros"][...] = jnp.zeros_like(scratch["zeros"])
    scratch["carry"][0] = jnp.zeros_like(scratch["carry"][0])
    fill = functools.partial(_zero_rows, plan, outs, scratch, steps)
    fill(lambda copy: copy.start())
    streamed = {name: operands[name] for name in names if PLACES[name] == pltpu.HBM}
    resident = {name: operands[name] for name in names if PLACES[name] != pltpu.HBM}
    specs = _specs(plan, tuple(streamed), scratch)
    arrays = [streamed[name] for name, *_ in specs]

    def body(*refs):
        tiles = {}
        for (name, *_), ref in zip(specs, refs, strict=False):
            tiles.setdefault(name, []).append(ref)
        _step(plan, {**tiles, **resident}, refs[len(specs) :], scratch)

    pltpu.emit_pipeline(
        body,
        grid=(plan.column_tiles, steps),
        in_specs=[spec for _, spec in specs],
        out_specs=[_out_spec(plan, scratch)] * plan.outputs,
    )(*arrays, *outs)
    fill(lambda copy: copy.wait())


def _zero_rows(plan, outs, scratch, steps, act):
    """Starts, or waits for, the copies of zeros into all blocks that hold no local row."""
    first, zeros = scratch["first"], scratch["zeros"]
    begin, end = first[0], first[steps]
    # Without any step nobody writes the block that `begin` falls into.
    before = jnp.where(steps > 0, rows_.block_of(begin), rows_.blocks_to(begin))

    def one_block(block, _):
        for out in outs:
            act(pltpu.make_async_copy(zeros, out.at[pl.ds(block, 1)], scratch["done"]))

    lax.fori_loop(0, before, one_block, None)
    lax.fori_loop(rows_.blocks_to(end), plan.rows // BLOCK, one_block, None)


def _specs(plan, names, scratch):
    """(operand, BlockSpec) of each array that the pipeline reads; rhs once for each part."""
    tile, column_tiles = plan.tiles.columns, plan.column_tiles
    block = pl.BoundedSlice(plan.tiles.rows // BLOCK)
    group, begin, reads = scratch["group"], scratch["begin"], scratch["reads"]
    by_row = lambda j, s: (pl.ds(begin[s], reads[s]), 0, 0)  # noqa: E731
    specs = []
    for name in names:
        if name in ("lhs", "lhs_blocks"):
            width = _width(plan, name)
            specs.append((name, pl.BlockSpec((block, BLOCK, width), by_row)))
            continue
        if name in ("gate", "up"):
            by_tile = lambda j, s: (pl.ds(begin[s], reads[s]), 0, j)  # noqa: E731
            specs.append((name, pl.BlockSpec((block, BLOCK, tile), by_tile)))
            continue
        for part in range(plan.parts):
            if name == "rhs" and plan.transpose_rhs:
                shape = (None, tile, plan.tiles.contracted)
                index = lambda j, s: (group[s], j, 0)  # noqa: E731
            else:
                shape = (None, _width(plan, name), tile)
                index = lambda j, s, part=part: (group[s], 0, part * column_tiles + j)  # noqa: E731
            specs.append((name, pl.BlockSpec(shape, index)))
    return specs


def _width(plan: Plan, name: str) -> int:
    """Elements along K of an operand, or of its scales."""
    k = plan.tiles.contracted
    return k // plan.k_block if plan.k_block and name.endswith("_blocks") else k


def _out_spec(plan, scratch):
    """The blocks that a step completes, see `plan_stores`."""
    begin, stores = scratch["begin"], scratch["stores"]
    block = pl.BoundedSlice(plan.tiles.rows // BLOCK)
    index = lambda j, s: (pl.ds(begin[s], stores[s]), 0, j)  # noqa: E731
    return pl.BlockSpec((block, BLOCK, plan.tiles.columns), index)


def _step(plan, tiles, outs, scratch):
    """One tile of rows by one tile of columns."""
    step = pl.program_id(1)
    first, carry = scratch["first"], scratch["carry"]
    block = scratch["begin"][step]
    head = rows_.offset_in_block(first[step])
    rows = first[step + 1] - first[step] + head

    def run(bucket):
        for name in ("row_scale", "row_weight"):
            if name in tiles:
                rows_.spread_down(tiles[name], scratch[name], block, bucket)
        for begin, end in _chunks(bucket, plan.tiles.chunk):
            _store(plan, outs, _values(plan, tiles, scratch, block, begin, end), begin, end)

    rows_.by_rows(rows, plan.tiles.buckets, run)

    @pl.when(head > 0)  # rows of earlier groups in the block that this step opens
    def _():
        begun = jnp.minimum(step, 1)  # before the first step are rows of no local group
        earlier = rows_.inside(BLOCK, 0, head)
        for i, out in enumerate(outs):
            out[0] = jnp.where(earlier, carry[begun, i], out[0])

    @pl.when(rows_.offset_in_block(rows) > 0)  # the block that it leaves half full
    def _():
        last = rows_.block_of(rows)
        mine = rows_.inside(BLOCK, 0, rows_.offset_in_block(rows))
        for i, out in enumerate(outs):
            half = jnp.where(mine, out[last], jnp.zeros_like(out[last]))
            carry[1, i] = half
            out[last] = half


def _chunks(rows: int, chunk: int | None) -> list[tuple[int, int]]:
    """Rows cut into pieces of `chunk`, the first of them longer by what is left over."""
    count = max(1, rows // (chunk or rows))
    ends = [rows - i * (chunk or rows) for i in range(count)][::-1]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _store(plan, outs, values, begin, end):
    for out, value in zip(outs, values, strict=True):
        shape = (end - begin) // BLOCK, BLOCK, plan.tiles.columns
        out[begin // BLOCK : end // BLOCK] = value.astype(out.dtype).reshape(shape)


def _values(plan, tiles, scratch, block, begin, end):
    """Rows `begin:end` of every output, float32 [end - begin, tile]."""
    product = functools.partial(_product, plan, tiles, scratch, block, begin, end)
    if plan.gated_grad:
        gate, up = (
            rows_.flat(tiles[name][0], begin, end).astype(jnp.float32) for name in ("gate", "up")
        )
        sigmoid, grad = jax.nn.sigmoid(gate), product(0)
        silu = gate * sigmoid
        return [grad * up * (sigmoid + silu - silu * sigmoid), grad * silu]
    if not plan.gated:
        return [product(0)]
    gate, up = product(0), product(1)
    out = gate * jax.nn.sigmoid(gate) * up
    if "row_weight" in tiles:
        width = plan.tiles.columns
        out = out * rows_.column(scratch["row_weight"], block, begin, end, width)
    return [out, gate, up] if plan.save else [out]


def _product(plan, tiles, scratch, block, begin, end, part):
    """Scaled product of one part of rhs, float32 [end - begin, tile]."""
    if plan.k_block:
        out = _by_blocks(plan, tiles, scratch["total"].at[part], begin, end, part)
    else:
        lhs, rhs = rows_.flat(tiles["lhs"][0], begin, end), tiles["rhs"][part][...]
        out = rows_.dot(lhs, rhs, (1, 1 if plan.transpose_rhs else 0))
    group = scratch["group"][pl.program_id(1)]
    if "lhs_factor" in tiles:
        out = out * tiles["lhs_factor"][0]
    if "rhs_factor" in tiles:
        factor = tiles["rhs_factor"]
        out = out * factor[0 if factor.shape[0] == 1 else group]
    if "column_scale" in tiles:
        scale = tiles["column_scale"]
        index = 0 if scale.shape[0] == 1 else group
        out = out * scale[index, part * plan.column_tiles + pl.program_id(0)]
    if "row_scale" in tiles:
        out = out * rows_.column(scratch["row_scale"], block, begin, end, plan.tiles.columns)
    return out


def _by_blocks(plan, tiles, total, begin, end, part):
    """The product where a scale varies along K: each block's part times its scales, added up.

    A loop takes 128 elements of K at a time, as lanes are addressed. Blocks smaller than that are
    cut out of lhs by masks; the zeros leave nothing of rhs but the block.
    """
    rows, lhs, rhs = end - begin, tiles["lhs"][0], tiles["rhs"][part]
    width = max(plan.k_block, LANES)
    blocks = width // plan.k_block
    total[:rows, :] = jnp.zeros((rows, plan.tiles.columns), jnp.float32)

    def one_width(i, _):
        at = pl.ds(pl.multiple_of(i * width, width), width)
        left = lhs[begin // BLOCK : end // BLOCK, :, at].reshape(rows, width)
        right = rhs[:, at] if plan.transpose_rhs else rhs[at, :]
        for j in range(blocks):
            mine = left if blocks == 1 else _only_lanes(left, j * plan.k_block, plan.k_block)
            out = rows_.dot(mine, right, (1, 1 if plan.transpose_rhs else 0))
            if "lhs_blocks" in tiles:
                scales = rows_.flat(tiles["lhs_blocks"][0], begin, end)
                chosen = _only_lanes(scales, i * blocks + j, 1)
                out = out * jnp.sum(chosen, axis=1, keepdims=True)
            if "rhs_blocks" in tiles:
                out = out * tiles["rhs_blocks"][part][pl.ds(i * blocks + j, 1), :]
            total[:rows, :] += out

    lax.fori_loop(0, plan.tiles.contracted // width, one_width, None)
    return total[:rows, :]


def _only_lanes(a, begin, size: int):
    lane = lax.broadcasted_iota(jnp.int32, (1, a.shape[1]), 1)
    return jnp.where((lane >= begin) & (lane < begin + size), a, jnp.zeros_like(a))
