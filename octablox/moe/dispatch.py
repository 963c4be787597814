"""Token copies to their experts and back, without scatters.

Every token has k copies. Dispatch sorts copies by expert, so that the grouped matmul finds each
expert's rows together; combine gathers each token's k results and sums them by weight. Both are
gathers forward *and* backward: each is the other's transpose.

Shapes: T tokens, D model width, E experts, k copies a token, R = T*k rows.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from octablox.kernels import vary_like


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CopyOrder:
    """How rows and copies correspond.

    Attributes:
      copy_of_row: int32 [R]; copy c belongs to token c // k.
      row_of_copy: int32 [T, k], its inverse.
      group_sizes: int32 [E], rows of each expert, this shard's experts first.

    As any pytree it may hold other leaves in place of its arrays, such as partition specs.
    """

    copy_of_row: Any
    row_of_copy: Any
    group_sizes: Any


def sort_copies(
    chosen: Int[Array, "T k"], num_experts: int, first_local: Int[Array, ""] | int
) -> CopyOrder:
    """Sorts copies by expert, beginning with expert `first_local`.

    Args:
      chosen: int32 [T, k], the expert of each copy.
      num_experts: E.
      first_local: the first expert of this shard.
    """
    expert = ((chosen - first_local) % num_experts).reshape(-1).astype(jnp.int32)
    copy = lax.iota(jnp.int32, expert.size)
    copy = vary_like((expert,), copy)
    # Not argsort: that loses the varying type inside shard_map.
    _, copy_of_row = lax.sort((expert, copy), num_keys=1, is_stable=True)
    _, row_of_copy = lax.sort((copy_of_row, copy), num_keys=1, is_stable=False)
    is_of_group = expert[:, None] == lax.broadcasted_iota(jnp.int32, (1, num_experts), 1)
    group_sizes = jnp.sum(is_of_group, axis=0, dtype=jnp.int32)
    return CopyOrder(copy_of_row, row_of_copy.reshape(chosen.shape), group_sizes)


@jax.custom_vjp
def dispatch(tokens: Float[Array, "T D"], order: CopyOrder) -> Float[Array, "R D"]:
    """Rows [R, D] of `tokens` [T, D], sorted by expert."""
    return jnp.take(tokens, _token_of_row(order), axis=0)


def _dispatch_forward(tokens, order):
    return dispatch(tokens, order), order


def _dispatch_backward(order, grad):
    ones = jnp.ones_like(order.row_of_copy, jnp.float32)
    return combine(grad, ones, order), None


@jax.custom_vjp
def combine(
    rows: Float[Array, "R D"], weights: Float[Array, "T k"], order: CopyOrder
) -> Float[Array, "T D"]:
    """Tokens [T, D]: each the weighted sum of its copies' rows.

    Args:
      rows: [R, D]; rows of experts held elsewhere are zero.
      weights: float32 [T, k].
      order: of `sort_copies`.

    Returns:
      [T, D] in rows' dtype, summed in float32.
    """
    copies = jnp.take(rows, order.row_of_copy, axis=0).astype(jnp.float32)
    return jnp.sum(copies * weights[:, :, None], axis=1).astype(rows.dtype)


def _combine_forward(rows, weights, order):
    return combine(rows, weights, order), (rows, weights, order)


def _combine_backward(residuals, grad):
    rows, weights, order = residuals
    copies = jnp.take(rows, order.row_of_copy, axis=0)
    weight_grad = jnp.einsum("tkd,td->tk", copies, grad, preferred_element_type=jnp.float32)
    weight_of_row = jnp.take(weights.reshape(-1), order.copy_of_row)[:, None]
    row_grad = jnp.take(grad, _token_of_row(order), axis=0).astype(jnp.float32) * weight_of_row
    return row_grad.astype(rows.dtype), weight_grad, None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)
combine.defvjp(_combine_forward, _combine_backward)


def _token_of_row(order):
    return order.copy_of_row // order.row_of_copy.shape[1]
