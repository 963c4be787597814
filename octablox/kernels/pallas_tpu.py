"""The TPU backend: what the contract's operands become before the kernels run.

Operands whose M is a multiple of 32 and whose K and N are multiples of 128 reach the kernels as
they are; others are padded with zeros. Scales take the layout that costs a kernel least.
"""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from octablox.kernels import pallas_tpu_gmm, pallas_tpu_tgmm
from octablox.kernels.chips import CHIPS, Chip, chip_of
from octablox.kernels.contract import Scaled, Unsupported, manual_axes, vary_like
from octablox.kernels.pallas_tpu_rows import BLOCK, LANES, to_lanes
from octablox.kernels.tiles import Gmm, GmmTiles, Tgmm, TgmmTiles, choose

name = "pallas_tpu"


def target(chip: str):
    """Traces for a chip ("v5e", "v5p", "v6e", "tpu7x") that this process does not have.

    Not needed where the mesh in use (`jax.set_mesh`) is one of TPUs, real or from a topology
    description.
    """
    if chip not in CHIPS:
        raise ValueError(f"target: expected v5e, v5p, v6e or tpu7x, got {chip!r}")
    device = jax.sharding.AbstractDevice(CHIPS[chip].device_kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def gmm(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    *,
    transpose_rhs,
    out_dtype,
    tiles: GmmTiles | None = None,
    interpret=False,
):
    """Grouped matmul, see `contract.Backend.gmm`."""
    m, n = lhs.value.shape[0], rhs.value.shape[1 if transpose_rhs else 2]
    how = _How(out_dtype, tiles, interpret, transpose_rhs=transpose_rhs)
    (out,) = _gmm(how, lhs, rhs, group_sizes, group_offset)
    return out[:m, :n]


def gated_gmm(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    *,
    out_dtype,
    row_weight=None,
    save=False,
    tiles: GmmTiles | None = None,
    interpret=False,
) -> list[jax.Array]:
    """`silu(gate) * up` of gate, up = lhs @ rhs, without a round trip through HBM between.

    Args:
      lhs: [M, K].
      rhs: [E, K, 2F]: gate and up side by side; F is a multiple of 128.
      group_sizes: int [G].
      group_offset: int [], the group of `rhs[0]`.
      out_dtype: of all results.
      row_weight: float32 [M]; multiplies the rows of the first result.
      save: also return gate and up, which the backward pass needs.
      tiles: instead of the chosen ones.
      interpret: False, or `pltpu.InterpretParams`.

    Returns:
      [out] or [out, gate, up], each [M, F] and exactly zero in rows of no local group.
    """
    if rhs.value.shape[2] % (2 * LANES):
        reason = f"expected 2F columns with F a multiple of {LANES}, got {rhs.value.shape[2]}"
        raise Unsupported(name, "rhs", reason)
    how = _How(out_dtype, tiles, interpret, gated=True, save=save)
    outs = _gmm(how, lhs, rhs, group_sizes, group_offset, row_weight)
    return [out[: lhs.value.shape[0]] for out in outs]


def gated_gmm_grad(
    lhs,
    rhs,
    gate,
    up,
    group_sizes,
    group_offset,
    *,
    out_dtype,
    tiles: GmmTiles | None = None,
    interpret=False,
) -> list[jax.Array]:
    """The gradients of gate and up, where `h = silu(gate) * up` was multiplied by `rhs`.

    The product for h's gradient, `lhs @ rhs^T`, and the derivative in one kernel; h's gradient
    itself is not stored.

    Args:
      lhs: [M, K], the gradient of `h @ rhs`.
      rhs: [E, F, K].
      gate: [M, F] of any float type, as `gated_gmm` saved it.
      up: the same.
      group_sizes: int [G].
      group_offset: int [], the group of `rhs[0]`.
      out_dtype: of both results.
      tiles: instead of the chosen ones.
      interpret: False, or `pltpu.InterpretParams`.

    Returns:
      The gradients of gate and of up, each [M, F] and exactly zero in rows of no local group.
    """
    how = _How(out_dtype, tiles, interpret, transpose_rhs=True, gated_grad=True)
    extra = {"gate": gate, "up": up}
    outs = _gmm(how, lhs, rhs, group_sizes, group_offset, extra=extra)
    return [out[: gate.shape[0], : gate.shape[1]] for out in outs]


@dataclasses.dataclass(frozen=True)
class _How:
    """The settings of `gmm`, `gated_gmm` and `gated_gmm_grad`."""

    out_dtype: Any
    tiles: GmmTiles | None
    interpret: Any
    transpose_rhs: bool = False
    gated: bool = False
    save: bool = False
    gated_grad: bool = False

    @property
    def outputs(self) -> int:
        """How many results there are."""
        return 3 if self.save else 2 if self.gated_grad else 1


def _gmm(how: _How, lhs, rhs, sizes, offset, row_weight=None, extra=None) -> list[jax.Array]:
    """The kernel's results [M, N] or [M, F], padded to whole blocks and lanes.

    `extra` are arrays [M, N] that the epilogue reads, by name.
    """
    chip = _chip(how.interpret)
    _refuse_types(lhs, rhs, how.out_dtype)
    (m, k), parts, extra = lhs.value.shape, 2 if how.gated else 1, extra or {}
    experts, n = rhs.value.shape[0], rhs.value.shape[1 if how.transpose_rhs else 2]
    if 0 in (m, k, n, experts):
        return [jnp.zeros((m, n // parts), how.out_dtype)] * how.outputs
    lhs, rhs, sizes, offset = _vary(lhs, rhs, sizes, offset)
    lhs, rhs, k_block = _k_block(lhs, rhs, 2 if how.transpose_rhs else 1)
    operands = _gmm_values(lhs, rhs, how.transpose_rhs)
    rows, (width, columns) = operands["lhs"].shape[0] * BLOCK, _padded_matrix(k, n)
    columns //= parts
    for key, array in extra.items():
        operands[key] = vary_like((sizes,), _row_blocks(_pad(array, (rows, columns))))
    call = Gmm(
        *(chip.name, rows, width, columns, experts),
        *_names(lhs.value, rhs.value, how.out_dtype),
        parts=parts,
        streams=how.outputs + len(extra),
        k_block=k_block,
        product="dlhs" if how.transpose_rhs else "gmm",
    )
    tiles = how.tiles or _choose(call)
    operands |= _gmm_scales(lhs, rhs, how.transpose_rhs, tiles, k_block)
    if row_weight is not None:
        weight = to_lanes(row_weight.astype(jnp.float32))
        operands["row_weight"] = vary_like((sizes,), weight)
    plan = pallas_tpu_gmm.Plan(
        *(tiles, rows, columns, experts, jnp.dtype(how.out_dtype)),
        transpose_rhs=how.transpose_rhs,
        gated=how.gated,
        save=how.save,
        gated_grad=how.gated_grad,
        k_block=k_block,
        vmem_bytes=chip.vmem,
    )
    out_type = _out_type(*operands.values(), sizes, offset)
    outs = pallas_tpu_gmm.call(plan, operands, sizes, offset, out_type, how.interpret)
    return [out.reshape(rows, columns) for out in outs]


def tgmm(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    *,
    num_local_groups,
    out_dtype,
    group_scale: jax.Array | None = None,
    tiles: TgmmTiles | None = None,
    interpret=False,
):
    """Transposed grouped matmul, see `contract.Backend.tgmm`.

    `group_scale`, float32 [E, N], multiplies the columns of each group's matrix: for gradients
    that were quantized with a scale for each expert and channel.
    """
    chip = _chip(interpret)
    _refuse_types(lhs, rhs, out_dtype)
    (m, k), n = lhs.value.shape, rhs.value.shape[1]
    if 0 in (m, k, n, num_local_groups):
        return jnp.zeros((num_local_groups, k, n), out_dtype)
    lhs, rhs, sizes, offset = _vary(lhs, rhs, group_sizes, group_offset)
    # The kernel's scales are those of whole columns.
    lhs, rhs = (_without_row_scales(a) for a in (lhs, rhs))
    rows, (width, columns) = m + -m % BLOCK, _padded_matrix(k, n)
    types = _names(lhs.value, rhs.value, out_dtype)
    tiles = tiles or _choose(Tgmm(chip.name, rows, width, columns, num_local_groups, *types))
    operands = {
        "lhs": _row_blocks(_pad(lhs.value, (rows, width))),
        "rhs": _row_blocks(_pad(rhs.value, (rows, columns))),
        **_tgmm_scales(lhs, rhs, group_scale, columns, tiles),
    }
    plan = pallas_tpu_tgmm.Plan(
        tiles,
        rows,
        width,
        columns,
        num_local_groups,
        jnp.dtype(out_dtype),
        vmem_bytes=chip.vmem,
    )
    out_type = _out_type(*operands.values(), sizes, offset)
    out = pallas_tpu_tgmm.call(plan, operands, sizes, offset, out_type, interpret)
    return out[:, :k, :n]


def chip() -> Chip | None:
    """The chip that is traced for: of the mesh in use, or of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return chip_of(device.device_kind)


def _chip(interpret) -> Chip:
    found = chip() or (CHIPS["tpu7x"] if interpret else None)
    if found is None:
        kind = jax.devices()[0].device_kind
        raise Unsupported(name, "platform", f"expected a TPU v5e, v5p, v6e or 7x, got {kind}")
    return found


_TYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


def _refuse_types(lhs: Scaled, rhs: Scaled, out_dtype) -> None:
    for argument, dtype in (("lhs", lhs.value.dtype), ("rhs", rhs.value.dtype)):
        if dtype.name not in _TYPES:
            raise Unsupported(name, argument, f"expected one of {', '.join(_TYPES)}, got {dtype}")
    if jnp.dtype(out_dtype).name not in ("float32", "bfloat16"):
        raise Unsupported(name, "out_dtype", f"expected float32 or bfloat16, got {out_dtype}")


def _names(lhs, rhs, out_dtype) -> tuple[str, str, str]:
    return lhs.dtype.name, rhs.dtype.name, jnp.dtype(out_dtype).name


def _choose(call: Gmm | Tgmm) -> Any:
    try:
        return choose(call)
    except ValueError as error:
        raise Unsupported(name, "shape", str(error)) from None


def _vary(lhs, rhs, group_sizes, group_offset):
    """All arguments varying over the same mesh axes; sizes int32 [G], offset int32 [1]."""
    # XLA compiles a kernel that reads a constant apart from others that are alike.
    offset = lax.optimization_barrier(jnp.asarray(group_offset, jnp.int32)).reshape(1)
    groups = group_sizes.astype(jnp.int32), offset
    arrays = (*jax.tree.leaves((lhs, rhs)), *groups)
    return jax.tree.map(lambda a: vary_like(arrays, a), (lhs, rhs, *groups))


def _out_type(*arrays):
    """Makes output types that vary over the mesh axes over which any of the arrays does."""
    axes = manual_axes(*arrays)
    if not axes:
        return jax.ShapeDtypeStruct
    varying = jax.sharding.ManualAxisType(varying=axes)
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def _padded_matrix(k: int, n: int) -> tuple[int, int]:
    return k + -k % LANES, n + -n % LANES


def _pad(a, shape):
    if a.shape == shape:
        return a
    return jnp.pad(a, [(0, to - size) for size, to in zip(a.shape, shape, strict=True)])


def _row_blocks(a):
    return a.reshape(a.shape[0] // BLOCK, BLOCK, a.shape[1])


def _gmm_values(lhs, rhs, transpose_rhs):
    (m, k), (experts, *matrix) = lhs.value.shape, rhs.value.shape
    width, columns = _padded_matrix(k, matrix[0 if transpose_rhs else 1])
    shape = (experts, columns, width) if transpose_rhs else (experts, width, columns)
    return {
        "lhs": _row_blocks(_pad(lhs.value, (m + -m % BLOCK, width))),
        "rhs": _pad(rhs.value, shape),
    }


def _k_block(lhs, rhs, rhs_contracted) -> tuple[Scaled, Scaled, int | None]:
    """Both operands, and how many elements along K share their scales; None: all.

    The kernel takes 32, 64, or a multiple of 128. With another block, which no recipe has, the
    operands that have it are widened to float32.
    """
    operands, k, counts = (lhs, rhs), lhs.value.shape[1], [1, 1]
    for i, (a, dim) in enumerate(zip(operands, (1, rhs_contracted), strict=True)):
        counts[i] = 1 if a.scale is None else a.scale.shape[dim]
    block = k // math.lcm(*counts)
    if block == k or block in (32, 64) or block % LANES == 0:
        return lhs, rhs, None if block == k else block
    left, right = (
        a if count == 1 else Scaled(_dequantized(a))
        for a, count in zip(operands, counts, strict=True)
    )
    return left, right, None


def _dequantized(a: Scaled) -> jax.Array:
    scale = a.scale
    for dim, size in enumerate(a.value.shape):
        scale = _repeat(scale, dim, size)
    return a.value.astype(jnp.float32) * scale


def _gmm_scales(lhs, rhs, transpose_rhs, tiles, k_block):
    """The scales in the forms of `pallas_tpu_gmm.PLACES`."""
    m, experts = lhs.value.shape[0], rhs.value.shape[0]
    n = rhs.value.shape[1 if transpose_rhs else 2]
    k = lhs.value.shape[1]
    blocks = (k + -k % LANES) // k_block if k_block else 1  # zeros past K, as the values
    scales = {}
    if lhs.scale is not None:
        if lhs.scale.shape == (1, 1):
            scales["lhs_factor"] = lhs.scale.reshape(1)
        elif lhs.scale.shape[1] == 1:
            scales["row_scale"] = to_lanes(_repeat(lhs.scale, 0, m).reshape(m))
        else:
            scale = _repeat(_repeat(lhs.scale, 0, m), 1, k // k_block)
            scales["lhs_blocks"] = _row_blocks(_pad(scale, (m + -m % BLOCK, blocks)))
    if rhs.scale is None:
        return scales
    scale = rhs.scale.swapaxes(1, 2) if transpose_rhs else rhs.scale
    columns = n + -n % LANES
    if scale.shape[1:] == (1, 1):
        scales["rhs_factor"] = _per_expert(scale, experts).reshape(-1)
    elif scale.shape[1] == 1:
        scale = _pad_last(_repeat(_per_expert(scale, experts), 2, n), columns)
        scales["column_scale"] = scale.reshape(scale.shape[0], -1, 1, tiles.columns)
    else:
        scale = _repeat(_repeat(_repeat(scale, 0, experts), 1, k // k_block), 2, n)
        scales["rhs_blocks"] = _pad(scale, (experts, blocks, columns))
    return scales


def _tgmm_scales(lhs, rhs, group_scale, columns, tiles):
    """The scales in the forms of `pallas_tpu_tgmm.PLACES`."""
    scales, (k, n) = {}, (lhs.value.shape[1], rhs.value.shape[1])
    if lhs.scale is not None:
        if lhs.scale.size == 1:
            scales["lhs_factor"] = lhs.scale.reshape(1)
        else:
            scales["k_scale"] = to_lanes(_repeat(lhs.scale, 1, k).reshape(k))
    by_column = group_scale if group_scale is None else vary_like((rhs.value,), group_scale)
    if rhs.scale is not None:
        if rhs.scale.size == 1:
            scales["rhs_factor"] = rhs.scale.reshape(1)
        else:
            channels = _repeat(rhs.scale, 1, n)
            by_column = channels if by_column is None else channels * by_column
    if by_column is not None:
        by_column = _pad_last(by_column, columns)
        scales["n_scale"] = by_column.reshape(by_column.shape[0], -1, 1, tiles.n)
    return scales


def _without_row_scales(a: Scaled) -> Scaled:
    """The operand in float32 if its scale varies along the rows that tgmm sums over."""
    return a if a.scale is None or a.scale.shape[0] == 1 else Scaled(_dequantized(a))


def _per_expert(scale, experts):
    """A scale of one element for all experts, or of one for each."""
    return scale if scale.shape[0] == 1 else _repeat(scale, 0, experts)


def _repeat(scale, dim, size):
    return jnp.repeat(scale, size // scale.shape[dim], axis=dim)


def _pad_last(a, size):
    return _pad(a, (*a.shape[:-1], size))
