"""The grouped matmul with its two gradients, under any recipe.

    out  [M, N]     = x    [M, K] @ w[E, K, N]        by group_sizes
    dlhs [M, K]     = dout [M, N] @ w[E, K, N]^T      by group_sizes
    drhs [E, K, N]  = x^T  [K, M] @ dout [M, N]       over the rows of each group

How scales move between the three products is explained at the top of `fp8.py`.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from octablox import fp8, gmm_explicit, kernels
from octablox import health as health_counts
from octablox.fp8 import BF16, QArray, Quantized, Recipe
from octablox.gmm_explicit import DimAxes
from octablox.kernels import Scaled

ActivationsLike = Float[Array, "M K"] | Quantized
WeightLike = Float[Array, "E _ N"] | Quantized


@dataclasses.dataclass(frozen=True)
class _How:
    """What is static about one call."""

    recipe: Recipe
    axes: DimAxes
    backend: str
    counts: bool  # of `health`
    x_dtype: jnp.dtype
    w_dtype: jnp.dtype
    w_shape: tuple[int, int, int]


def new_health() -> Float[Array, "4 H"]:
    """Zeros float32 [operands, H], to be passed to `gmm` and differentiated.

    Its gradient counts how the casts fared, see `health`. On a mesh it sums over the devices,
    replicas too: `health.summary` reads fractions from it.
    """
    return health_counts.new_counts()


def gmm(
    x: ActivationsLike,
    w: WeightLike,
    group_sizes: Int[Array, " G"],
    *,
    recipe: Recipe = BF16,
    group_offset: Int[Array, ""] | int = 0,
    axes: DimAxes = DimAxes(),
    health: Float[Array, "4 H"] | None = None,
    backend: str = "auto",
) -> Float[Array, "M N"]:
    """Grouped matmul: row m of `x` times the matrix of m's group.

    Rows are sorted by group. Rows of groups that `w` does not hold, and rows past
    `sum(group_sizes)`, come out as exact zeros and are never read, in the gradients too.

    Args:
      x: [M, K] float, or the same quantized before (`fp8.Quantized`) under the recipe's cast.
      w: [E, K, N] float, or the same quantized before.
      group_sizes: int [G], rows of each group, G >= E.
      recipe: how operands are quantized, in the forward and in the backward pass.
      group_offset: the group of `w[0]`.
      axes: inside `shard_map`, which mesh axes shard the dims.
      health: see `new_health`.
      backend: a kernel backend by name; "auto" takes the first that supports the call.

    Returns:
      [M, N] in x's dtype, accumulated in float32.

    Raises:
      ValueError: shapes that do not fit, an unknown backend, or one that refuses the call.

    Outside `shard_map`, on a mesh of explicit axes, `w` may be sharded on any dim and `x` on K;
    `axes` is then found from the types.
    """
    _check(x, w, group_sizes, group_offset, recipe)
    local = functools.partial(_local_gmm, recipe=recipe, backend=backend)
    layout = gmm_explicit.layout_of(x, w)
    if layout is not None:
        call = functools.partial(gmm_explicit.sharded, local, layout)
    else:
        call = functools.partial(local, axes=axes)
    return call(x, w, jnp.asarray(group_sizes), jnp.asarray(group_offset), health)


def _local_gmm(x, w, group_sizes, group_offset, health, *, axes, recipe, backend):
    """`gmm` of what this device holds."""
    x, w = (a if isinstance(a, Quantized) else Quantized(a, None) for a in (x, w))
    dtypes = jnp.dtype(x.master.dtype), jnp.dtype(w.master.dtype)
    how = _How(recipe, axes, backend, health is not None, *dtypes, w.shape)
    health = new_health() if health is None else health
    groups = group_sizes.astype(jnp.int32), group_offset.astype(jnp.int32)
    # Outside the custom_vjp, so that autodiff itself turns these casts around: into the psum of
    # a replicated weight's gradient, or into an unreduced gradient of a gathered weight.
    operands = *jax.tree.map(fp8.as_varying, (x, w)), health
    arrays = (*jax.tree.leaves(operands), *groups)
    operands = jax.tree.map(lambda leaf: kernels.vary_like(arrays, leaf), operands)
    return _gmm(how, *operands, *groups)


def _check(x, w, group_sizes, group_offset, recipe):
    if len(x.shape) != 2 or len(w.shape) != 3 or group_sizes.ndim != 1:
        raise ValueError(
            "gmm expects x [M, K], w [E, K, N], group_sizes [G], got "
            f"{x.shape}, {w.shape}, {group_sizes.shape}"
        )
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"gmm: x has K={x.shape[1]}, w has K={w.shape[1]}")
    if group_sizes.shape[0] < w.shape[0]:
        raise ValueError(
            f"gmm: w holds {w.shape[0]} groups, group_sizes names only {group_sizes.shape[0]}"
        )
    last = group_sizes.shape[0] - w.shape[0]
    if isinstance(group_offset, int) and not 0 <= group_offset <= last:
        raise ValueError(
            f"gmm: group_offset: expected 0 to {last} (w holds {w.shape[0]} of "
            f"{group_sizes.shape[0]} groups), got {group_offset}"
        )
    if w.shape[2] % recipe.column_parts:
        raise ValueError(f"gmm: N={w.shape[2]} does not come in {recipe.column_parts} equal parts")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gmm(how, x, w, health, group_sizes, group_offset):
    """The product `out`."""
    return _forward(how, x, w, health, group_sizes, group_offset)[0]


def _forward(how, x, w, health, group_sizes, group_offset):
    """The product `out`, and both operands as they were multiplied."""
    del health
    experts, _, columns = how.w_shape
    rows = _local_rows(group_sizes, group_offset, experts)
    weight, weight_health = _quantized_weight(how, w)
    act, act_health = _quantized_act(how, x, weight.shape[1], rows)
    out = kernels.run(
        "gmm",
        how.backend,
        _scaled(act),
        _scaled(_pad(weight, 1, act.shape[1])),
        group_sizes,
        group_offset,
        transpose_rhs=False,
        out_dtype=how.x_dtype,
    )
    residuals = act, weight, weight_health, act_health, group_sizes, group_offset
    return out[: x.shape[0], :columns], residuals


def _backward(how, residuals, dout):
    """(dlhs, drhs) of x and w; the counts of the casts as the gradient of `health`."""
    act, weight, weight_health, act_health, *groups = residuals
    groups = [jnp.asarray(a) for a in groups]  # `checkpoint` makes NumPy arrays of constants
    rows = _local_rows(*groups, how.w_shape[0])
    dout = _only(dout.astype(jnp.float32), rows)
    dlhs, dlhs_health = _dlhs(how, dout, weight, groups, rows)
    drhs, drhs_health = _drhs(how, dout, act, groups, rows)
    health = jnp.stack([weight_health, act_health, dlhs_health, drhs_health])
    grads = Quantized(dlhs, None), Quantized(drhs, None)
    return *grads, kernels.vary_like((dlhs, drhs), health), None, None


def _dlhs(how, dout, weight, groups, rows):
    """dlhs[M, K] = dout[M, N] @ w[E, K, N]^T: w's channel scales move into dout."""
    cast, (m, k) = how.recipe.dlhs_grad, (dout.shape[0], how.w_shape[1])
    moved, health = None, _no_counts()
    if cast and isinstance(weight, QArray):
        weight, moved = _for_dlhs(how, weight)
    dout = unscaled = _pad(dout, 1, weight.shape[2])
    if moved is not None:
        dout = dout * jnp.take(moved, _group_of_row(m, groups, moved), axis=0)
    if cast:
        q = fp8.quantize(dout, cast, contracted=1, axes={0: how.axes.m, 1: how.axes.n}, rows=rows)
        health = _health(how, lambda: dout, q, unscaled)
    dlhs = kernels.run(
        "gmm",
        how.backend,
        _scaled(q if cast else dout.astype(how.x_dtype)),
        _scaled(_pad(weight, 2, q.shape[1]) if cast else weight),
        *groups,
        transpose_rhs=True,
        out_dtype=how.x_dtype,
    )
    return dlhs[:m, :k], health


def _drhs(how, dout, act, groups, rows):
    """drhs[E, K, N] = x^T[K, M] @ dout[M, N]: x's row scales move into dout."""
    cast, (experts, k, n) = how.recipe.drhs_grad, how.w_shape
    moved, health = None, _no_counts()
    if cast and isinstance(act, QArray):
        act, moved = _for_drhs(how, act)
    dout = unscaled = _pad(dout, 0, act.shape[0])
    if moved is not None:  # what scales are of rows that do not count is not known
        dout = _only(dout * moved, rows)
    if cast:
        sharding = {0: how.axes.m, 1: how.axes.n}
        parts = how.recipe.column_parts
        q = fp8.quantize(dout, cast, contracted=0, axes=sharding, rows=rows, parts=parts)
        health = _health(how, lambda: dout, q, unscaled)
    drhs = kernels.run(
        "tgmm",
        how.backend,
        _scaled(_pad(act, 0, q.shape[0]) if cast else act),
        _scaled(q if cast else dout.astype(how.x_dtype)),
        *groups,
        num_local_groups=experts,
        out_dtype=how.w_dtype,
    )
    return drhs[:, :k, :n], health


_gmm.defvjp(_forward, _backward)


def _quantized_act(how, x, width, rows):
    """The activations as they are multiplied, and how their cast fared if it is done here."""
    cast = how.recipe.act
    if x.q is not None or cast is None:
        return _pad(x.master if x.q is None else x.q, 1, width), _no_counts()
    act = _pad(x.master, 1, width)
    q = fp8.quantize(act, cast, contracted=1, axes={0: how.axes.m, 1: how.axes.k}, rows=rows)
    return q, _health(how, lambda: _only(act, rows), q)


def _quantized_weight(how, w):
    """The weight as it is multiplied, and how its cast fared if it is done here."""
    cast, parts = how.recipe.weight, how.recipe.column_parts
    if w.q is not None or cast is None:
        return (w.master if w.q is None else w.q), _no_counts()
    q = fp8.quantize_weight(w.master, cast, axes={1: how.axes.k, 2: how.axes.n}, parts=parts)
    return q, _health(how, lambda: w.master, q)


def _health(how, x, q, unscaled=None):
    """The counts of a cast, or zeros where nobody asks: they cost a pass over the operand."""
    return health_counts.counts_of(x(), q, unscaled) if how.counts else _no_counts()


def _no_counts():
    return health_counts.new_counts()[0]


def _for_dlhs(how, weight: QArray) -> tuple[QArray, jax.Array | None]:
    """The weight for a product that contracts N; the scale [E, N] that dout takes over from it."""
    cast, scale = how.recipe.weight, weight.scale
    if scale.shape[2] == 1:
        return weight, None
    if scale.shape[1] == 1:
        moved = jnp.repeat(scale[:, 0], weight.shape[2] // scale.shape[2], axis=1)
        return _without_scale(weight), moved
    if not cast.recut:
        return weight, None
    recut = _turned(cast).model_copy(update={"tile": (cast.tile[1], cast.tile[0])})
    return fp8.quantize_weight(fp8.dequantize(weight), recut), None


def _for_drhs(how, act: QArray) -> tuple[QArray, jax.Array | None]:
    """The activations for a product that contracts M; the scale [M, 1] that dout takes over."""
    cast, scale = how.recipe.act, act.scale
    if scale.shape[0] == 1:
        return act, None
    if scale.shape[1] == 1:
        moved = jnp.repeat(scale, act.shape[0] // scale.shape[0], axis=0)
        return _without_scale(act), moved
    if not cast.recut:
        return act, None
    return fp8.quantize(fp8.dequantize(act), _turned(cast), contracted=0), None


def _turned(cast):
    """`cast` for values that it has been applied to: nothing may saturate a second time."""
    return cast.model_copy(update={"calibration": "absmax"})


def _without_scale(q: QArray) -> QArray:
    one = kernels.vary_like((q.scale,), jnp.ones((1,) * q.ndim, jnp.float32))
    return QArray(q.qvalue, one, None, q.qtype)


def _group_of_row(rows, groups, per_group):
    """Local group of each row, int32 [rows]; any valid index for rows of no local group."""
    _, ends = kernels.group_bounds(*groups, per_group.shape[0])
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return jnp.minimum(jnp.sum(row >= ends, axis=1, dtype=jnp.int32), per_group.shape[0] - 1)


def _local_rows(group_sizes, group_offset, experts):
    starts, ends = kernels.group_bounds(group_sizes, group_offset, experts)
    return starts[0], ends[-1]


def _only(x, rows):
    row = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where((row >= rows[0]) & (row < rows[1]), x, 0)


def _pad(x, dim, size):
    """`x` with zeros along `dim` up to `size`; its scale, if any, already spans them."""
    missing = size - x.shape[dim]
    if missing <= 0:
        return x
    pad = [(0, missing if d == dim else 0) for d in range(x.ndim)]
    if isinstance(x, QArray):
        return QArray(jnp.pad(x.qvalue, pad), x.scale, None, x.qtype)
    return jnp.pad(x, pad)


def _scaled(x: jax.Array | QArray) -> Scaled:
    return Scaled(x.qvalue, x.scale) if isinstance(x, QArray) else Scaled(x)
