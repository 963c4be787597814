"""What a grouped-matmul backend is given and must return.

Shapes: M rows, K contracted, N output columns, E experts held here, G groups in all (G >= E).

`gmm`   out[M, N]     = lhs[M, K] @ rhs[E, K, N]     row by row with its group's matrix
`tgmm`  out[E, K, N]  = lhs[M, K]^T @ rhs[M, N]      over the rows of each group

Rows are sorted by group; group g owns `group_sizes[g]` of them. This shard holds groups
`group_offset ... group_offset + E - 1`. All other rows (of groups held elsewhere, and past
`sum(group_sizes)`) are exactly zero in `out` and are never read, whatever they contain.

Scales follow qwix's rule: a scale has its operand's rank, and each of its dims divides the
operand's dim, so one scale element serves a tile of `dim // scale_dim` elements. `None` means 1.
"""

import dataclasses
from typing import Literal, Protocol

import jax
from jax import lax
from jax import numpy as jnp


@dataclasses.dataclass(eq=False)  # not frozen: Python writes tracebacks into exceptions
class Unsupported(Exception):
    """A backend refuses a call; `argument` is what it refuses and `reason` why."""

    backend: str
    argument: str
    reason: str

    def __str__(self) -> str:
        """One line for the report of a failed choice."""
        return f"{self.backend}: {self.argument}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Scaled[A]:
    """An operand: values of any float type or int8, and their scale (float32) or None."""

    value: A
    scale: A | None = None


jax.tree_util.register_dataclass(Scaled, data_fields=["value", "scale"], meta_fields=[])


class Backend(Protocol):
    """The two products. Both return float32 accumulations cast to `out_dtype`."""

    name: str

    def gmm(
        self,
        lhs: Scaled[jax.Array],
        rhs: Scaled[jax.Array],
        group_sizes: jax.Array,
        group_offset: jax.Array,
        *,
        transpose_rhs: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> jax.Array:
        """`out[M, N]`; with `transpose_rhs` the matrices come as `rhs[E, N, K]`."""
        ...

    def tgmm(
        self,
        lhs: Scaled[jax.Array],
        rhs: Scaled[jax.Array],
        group_sizes: jax.Array,
        group_offset: jax.Array,
        *,
        num_local_groups: int,
        out_dtype: jax.typing.DTypeLike,
    ) -> jax.Array:
        """`out[E, K, N]`; the matrix of an empty group is exactly zero."""
        ...


Product = Literal["gmm", "tgmm"]


def group_bounds(
    group_sizes: jax.Array, group_offset: jax.Array, num_local_groups: int
) -> tuple[jax.Array, jax.Array]:
    """First row and one past the last row of each local group: int32 [E], int32 [E]."""
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes
    local = lambda a: lax.dynamic_slice_in_dim(a, group_offset, num_local_groups)  # noqa: E731
    return local(starts), local(ends)


def manual_axes(*arrays: jax.Array) -> frozenset[str]:
    """Mesh axes over which any of the arrays varies inside `shard_map`."""
    return frozenset().union(*(jax.typeof(a).mat.varying for a in arrays))


def vary_like(arrays: tuple[jax.Array, ...], value: jax.Array) -> jax.Array:
    """`value` marked as varying over every axis over which one of `arrays` does."""
    missing = manual_axes(*arrays) - manual_axes(value)
    return lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def uninitialized(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, arrays: tuple[jax.Array, ...]
) -> jax.Array:
    """An array to be written over, which varies as `vary_like` says.

    It holds zeros on CPU, and on TPU and GPU whatever its memory held before: filling it would cost
    a pass over it.
    """
    return vary_like(arrays, lax.empty(shape, dtype))
