"""`lax.ragged_dot` as a backend: for comparison, and for platforms where XLA lowers it well.

It dequantizes operands first. On CPU its work grows with the number of groups.
"""

import jax
from jax import lax
from jax import numpy as jnp

from octablox.kernels.contract import Scaled, Unsupported, group_bounds

name = "ragged_dot"


def gmm(lhs, rhs, group_sizes, group_offset, *, transpose_rhs, out_dtype):
    """Grouped matmul, see `contract.Backend.gmm`."""
    _refuse_offset(group_sizes, rhs.value.shape[0])
    inside = _inside(lhs.value.shape[0], group_sizes, group_offset, rhs.value.shape[0])
    weight = _dequantize(rhs)
    weight = weight.swapaxes(1, 2) if transpose_rhs else weight
    lhs = jnp.where(inside, _dequantize(lhs), 0)
    wide = jnp.promote_types(lhs.dtype, weight.dtype)
    out = lax.ragged_dot(
        lhs.astype(wide),
        weight.astype(wide),
        group_sizes,
        preferred_element_type=jnp.float32,
    )
    return jnp.where(inside, out, 0).astype(out_dtype)


def tgmm(lhs, rhs, group_sizes, group_offset, *, num_local_groups, out_dtype):
    """Transposed grouped matmul, see `contract.Backend.tgmm`."""
    _refuse_offset(group_sizes, num_local_groups)
    inside = _inside(lhs.value.shape[0], group_sizes, group_offset, num_local_groups)
    lhs, rhs = (jnp.where(inside, _dequantize(a), 0) for a in (lhs, rhs))
    wide = jnp.promote_types(lhs.dtype, rhs.dtype)
    out = lax.ragged_dot_general(
        lhs.astype(wide),
        rhs.astype(wide),
        group_sizes,
        lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[],
        ),
        preferred_element_type=jnp.float32,
    )
    return out.astype(out_dtype)


def _refuse_offset(group_sizes, num_local_groups):
    if group_sizes.shape[0] != num_local_groups:
        reason = (
            f"holds {num_local_groups} of {group_sizes.shape[0]} groups, lax.ragged_dot wants all"
        )
        raise Unsupported(name, "group_offset", reason)


def _inside(rows, group_sizes, group_offset, num_local_groups):
    starts, ends = group_bounds(group_sizes, group_offset, num_local_groups)
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return (row >= starts[0]) & (row < ends[-1])


def _dequantize(operand: Scaled) -> jax.Array:
    value, scale = operand.value, operand.scale
    if scale is None:
        return value.astype(jnp.float32) if value.dtype.itemsize == 1 else value
    for dim, size in enumerate(value.shape):
        scale = jnp.repeat(scale, size // scale.shape[dim], axis=dim)
    return value.astype(jnp.float32) * scale
