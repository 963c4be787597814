"""Token copies to their experts and back, without scatters.

Every token has k copies. Dispatch sorts copies by expert, so that the grouped matmul finds each
expert's rows together; combine gathers each token's k results and sums them. Both are gathers
forward *and* backward: each is the other's transpose.

Shapes: T tokens, D model width, E experts, k copies a token, R rows (T*k, or those of a window).
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from octablox import fp8, kernels
from octablox.fp8 import Quantized, QuantizedGrad
from octablox.kernels import Scaled, uninitialized, vary_like
from octablox.kernels.pallas_tpu import chip

# Tokens whose copies' rows exist at the same time while they are summed.
COMBINE_CHUNK = 4096
# Tokens of a group where sums are a grouped matmul; by the model of `kernels.tiles` the best of
# 128 to 1024 for DeepSeek-V3 on 256 devices.
SUM_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CopyOrder:
    """How rows and copies correspond.

    Attributes:
      copy_of_row: int32 [R]; copy c belongs to token c // k.
      row_of_copy: int32 [T, k], its inverse; R or more for copies that have no row here.
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
    # Not argsort: that loses the varying type inside shard_map. Two keys instead of a stable sort
    # of one: libtpu spends minutes of compilation on the latter.
    sorted_expert, copy_of_row = lax.sort((expert, copy), num_keys=2, is_stable=False)
    _, row_of_copy = lax.sort((copy_of_row, copy), num_keys=1, is_stable=False)
    sizes = _sizes_of_groups(sorted_expert, num_experts)
    return CopyOrder(copy_of_row, row_of_copy.reshape(chosen.shape), sizes)


def _sizes_of_groups(sorted_groups, count):
    """How often each of the groups 0 to `count` - 1 is in a sorted array, int32 [count]."""
    groups = vary_like((sorted_groups,), lax.iota(jnp.int32, count))
    ends = jnp.searchsorted(sorted_groups, groups, side="right").astype(jnp.int32)
    return jnp.diff(ends, prepend=vary_like((ends,), jnp.zeros(1, jnp.int32)))


def window(order: CopyOrder, first: Int[Array, ""] | int, rows: int) -> CopyOrder:
    """The order of only the rows [first, first + rows) of another; `rows` is static.

    `first` must be a multiple of `rows`. The last window may reach past the last row: what lies
    there is garbage, of no expert.
    """
    total = order.copy_of_row.shape[0]
    if rows == total:
        return order
    copy_of_row = jnp.pad(order.copy_of_row, (0, -total % rows))
    copy_of_row = lax.dynamic_slice_in_dim(copy_of_row, first, rows)
    relative = order.row_of_copy - first
    row_of_copy = jnp.where((relative >= 0) & (relative < rows), relative, rows)
    ends = jnp.clip(jnp.cumsum(order.group_sizes) - first, 0, rows)
    group_sizes = jnp.diff(ends, prepend=vary_like((ends,), jnp.zeros(1, ends.dtype)))
    return CopyOrder(copy_of_row, row_of_copy, group_sizes.astype(jnp.int32))


def dispatch(tokens: Float[Array, "T D"] | Int[Array, "T D"] | Quantized, order: CopyOrder):
    """Rows [R, D] of `tokens` [T, D], sorted by expert; quantized if the tokens are."""
    if not isinstance(tokens, Quantized):
        return _dispatch(tokens, order)
    q = jax.tree.map(lambda a: _rows(a, _token_of_row(order)), tokens.q)
    return Quantized(_dispatch(tokens.master, order), q)


@jax.custom_vjp
def _dispatch(tokens, order):
    return _rows(tokens, _token_of_row(order))


def _rows(x, numbers):
    """Rows of `x` by numbers that are all its own: to fill in others takes twice the time."""
    return jnp.take(x, numbers, axis=0, mode="clip")


@jax.custom_vjp
def combine(rows: Float[Array, "R D"], order: CopyOrder) -> Float[Array, "T D"]:
    """Tokens [T, D]: each the sum of its copies' rows, in rows' dtype, summed in float32.

    `rows` [R, D]; those of experts held elsewhere are zero.
    """
    tokens, k = order.row_of_copy.shape
    # To gather k rows for each token is to read many times what there is, where most of a token's
    # copies are on other devices.
    few = tokens * k > 2 * rows.shape[0] and tokens % SUM_BLOCK == 0
    if few and rows.dtype == jnp.bfloat16 and chip() is not None:
        return _sums_as_products(rows, order)
    return _sums_of_gathers(rows, order)


@jax.custom_vjp
def combine_for_quantized_grad(rows: Float[Array, "R D"], order: CopyOrder) -> QuantizedGrad:
    """As `combine`; the tokens' gradient is quantized, and opened when rows are picked from it."""
    return fp8.new_quantized_grad(combine(rows, order))


@jax.named_scope("combine")
def _sums_as_products(rows, order):
    """A grouped matmul, whose groups are blocks of B tokens and whose rows are sorted by token.

    sums[T/B, B, D] = is_of_token[R, B]^T @ rows[R, D]    over the rows of each block
    """
    (tokens, k), blocks = order.row_of_copy.shape, order.row_of_copy.shape[0] // SUM_BLOCK
    row = vary_like((rows, order.copy_of_row), lax.iota(jnp.int32, rows.shape[0]))
    counts = _rows(order.row_of_copy.reshape(-1), order.copy_of_row) == row
    copy = jnp.where(counts, order.copy_of_row, tokens * k)
    copy, row = lax.sort((copy, row), num_keys=1, is_stable=False)
    token = copy // k
    is_of_token = token[:, None] % SUM_BLOCK == lax.broadcasted_iota(jnp.int32, (1, SUM_BLOCK), 1)
    sums = kernels.run(
        "tgmm",
        "auto",
        Scaled(is_of_token.astype(rows.dtype)),
        Scaled(_rows(rows, row)),
        _sizes_of_groups(token // SUM_BLOCK, blocks),
        vary_like((row,), jnp.int32(0)),
        num_local_groups=blocks,
        out_dtype=rows.dtype,
    )
    return sums.reshape(tokens, rows.shape[1])


def _sums_of_gathers(rows, order):
    def summed(row_of_copy):
        # A gather for each of the k copies, and additions, which XLA fuses: on a TPU a sum over
        # a dim of one gather takes nine times as long (its estimate of cycles).
        total = jnp.zeros((row_of_copy.shape[0], rows.shape[1]), jnp.float32)
        for row in row_of_copy.T:
            total += jnp.take(rows, row, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
        return total.astype(rows.dtype)

    tokens = order.row_of_copy.shape[0]
    if tokens <= COMBINE_CHUNK or tokens % COMBINE_CHUNK:
        return summed(order.row_of_copy)

    # Not `lax.map`, which fills its result with zeros first: on a TPU half of the time.
    def body(n, result):
        first = n * COMBINE_CHUNK
        row_of_copy = lax.dynamic_slice_in_dim(order.row_of_copy, first, COMBINE_CHUNK)
        return lax.dynamic_update_slice_in_dim(result, summed(row_of_copy), first, 0)

    arrays = rows, order.row_of_copy
    result = uninitialized((tokens, rows.shape[1]), rows.dtype, arrays)
    return lax.fori_loop(0, tokens // COMBINE_CHUNK, body, result)


@jax.custom_vjp
def weights_of_rows(weights: Float[Array, "T k"], order: CopyOrder) -> Float[Array, " R"]:
    """The weight [R] of each row, of the copies' weights float32 [T, k]."""
    return jnp.take(weights.reshape(-1), order.copy_of_row)


_dispatch.defvjp(
    lambda tokens, order: (_dispatch(tokens, order), order),
    lambda order, grad: (combine(grad, order), None),
)
combine.defvjp(
    lambda rows, order: (combine(rows, order), order),
    lambda order, grad: (_dispatch(grad, order), None),
)
combine_for_quantized_grad.defvjp(
    lambda rows, order: (combine_for_quantized_grad(rows, order), order),
    lambda order, grad: (_dequantized_rows(grad, order), None),
)
weights_of_rows.defvjp(
    lambda weights, order: (weights_of_rows(weights, order), order),
    lambda order, grad: (jnp.take(grad, order.row_of_copy, mode="fill", fill_value=0), None),
)


def _dequantized_rows(tokens: QuantizedGrad, order):
    rows = jax.tree.map(lambda a: _rows(a, _token_of_row(order)), tokens.grad)
    return fp8.dequantize(rows).astype(tokens.value.dtype)


def _token_of_row(order):
    return order.copy_of_row // order.row_of_copy.shape[1]
