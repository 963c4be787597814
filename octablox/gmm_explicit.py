"""`gmm` under a mesh of explicit axes: its `shard_map` is derived from the operands' types."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DimAxes:
    """The mesh axes that shard each dim of a GMM, for scales that span the dim.

    With K sharded, a local product is this shard's part of the sum.
    """

    m: Axes = ()
    k: Axes = ()
    n: Axes = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that shard w's experts, and the other dims."""

    experts: Axes
    dims: DimAxes


def layout_of(x: Any, w: Any) -> Layout | None:
    """How `x` [M, K] and `w` [E, K, N] are sharded; None if not, or inside `shard_map`.

    Raises:
      ValueError: rows are sharded, K of x and w differently, or one axis shards two dims.
    """
    (m, x_k), (e, w_k, n) = (_axes(getattr(a, "master", a)) for a in (x, w))
    if m:
        raise ValueError(
            f"gmm: x is sharded over {m} on M, but rows are grouped globally; call gmm inside "
            "jax.shard_map with each shard's own group_sizes"
        )
    if x_k and w_k and x_k != w_k:
        raise ValueError(f"gmm: K is sharded over {x_k} in x and over {w_k} in w; reshard one")
    k = x_k or w_k
    if len({*e, *k, *n}) < len(e) + len(k) + len(n):
        raise ValueError(f"gmm: one mesh axis shards two of E {e}, K {k}, N {n}; reshard x or w")
    # Each shard of w's experts counts its own rows alone, so scales over rows must agree.
    return Layout(e, DimAxes(m=e, k=k, n=n)) if e or k or n else None


def sharded(
    local: Callable[..., jax.Array],
    layout: Layout,
    x: Any,
    w: Any,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    health: jax.Array | None,
) -> jax.Array:
    """`local` on each shard: partial products over K and E are summed, N stays sharded.

    `local(x, w, group_sizes, group_offset, health, axes=)` is the GMM of what a device holds.
    """
    dims, summed = layout.dims, layout.experts + layout.dims.k

    def shard(x, w, group_sizes, group_offset, health):
        if layout.experts:
            group_offset = group_offset + lax.axis_index(layout.experts) * w.shape[0]
        out = local(x, w, group_sizes, group_offset, health, axes=dims)
        return lax.psum(out, summed) if summed else out

    operands = (
        jax.tree.map(lambda a: _reshard(a, ((), dims.k)), x),
        # A scale has a single element along the dims that it spans: nothing to shard there.
        jax.tree.map(lambda a: _reshard(a, (layout.experts, dims.k, dims.n)), w),
        *jax.tree.map(lambda a: _reshard(a, ((),) * a.ndim), (group_sizes, group_offset, health)),
    )
    specs = jax.tree.map(_spec, operands)
    return jax.shard_map(shard, in_specs=specs, out_specs=P(None, dims.n))(*operands)


def _reshard(a: jax.Array, axes: tuple[Axes, ...]) -> jax.Array:
    sharded_dims = zip(a.shape, axes, strict=True)
    return jax.reshard(a, P(*(names if size > 1 else None for size, names in sharded_dims)))


def _spec(a: jax.Array) -> P:
    return jax.typeof(a).sharding.spec


def _axes(a: jax.Array) -> tuple[Axes, ...]:
    """Mesh axes of each dim."""
    spec = tuple(_spec(a)) + (None,) * (a.ndim - len(_spec(a)))
    return tuple(() if s is None else s if isinstance(s, tuple) else (s,) for s in spec)
