"""A buffer for fewer rows than there might be, without ever dropping one.

With experts cut over the `expert` axis, a device's rows are about 1/EP of all copies, but nothing
bounds them. The buffer has rows for a multiple of that mean. Where more come, the same function
runs again for each further window of rows, one after the other: slower, and exact.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Int

from octablox.fp8 import QuantizedGrad
from octablox.mesh import AXES
from octablox.moe.config import MoeConfig

ROW_MULTIPLE = 128  # of a buffer: whole tiles of kernels


def buffer_rows(config: MoeConfig, copies: int, shards: int) -> int:
    """Rows of the buffer of a device, for `copies` on `shards` devices of the expert axis."""
    if config.ragged_buffer_factor < 0 or config.expert_sharding == "width" or shards == 1:
        return copies
    rows = config.ragged_buffer_factor * copies / shards
    return min(copies, -int(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)


def windows_for(local_rows: Int[Array, ""], rows: int) -> Int[Array, ""]:
    """Windows of `rows` that hold the local rows of every device, int32 [], at least 1."""
    needed = jnp.maximum(-(-local_rows // rows), 1)
    return lax.pmax(needed, tuple(axis for axis in AXES if axis in jax.typeof(needed).mat.varying))


def sum_over_windows(
    fn: Callable[[Any, Any, Any], Any], windows: Int[Array, ""], floats: Any, others: Any
) -> Any:
    """`fn(n, floats, others)` summed over n < windows; differentiable in `floats`.

    The first window keeps its residuals, further ones are computed again in the backward pass.

    Args:
      fn: a function of a window's number, of floats, and of what has no gradient: an array, or one
        whose gradient is quantized.
      windows: int32 [], at least 1, the same on every device.
      floats: a tree of arrays of more than 8 bits.
      others: any tree.
    """
    add = functools.partial(jax.tree.map, jnp.add)

    def further(total, windows, one):
        def body(n, total):
            return add(total, one(n))

        @jax.named_scope("fallback")  # so that `octablox compile` takes the branch to be rare
        def several(total):
            return lax.fori_loop(1, windows, body, total)

        return lax.cond(windows > 1, several, lambda total: total, total)

    def all_of(first, windows, floats, others):
        if not isinstance(first, QuantizedGrad):
            return further(first, windows, lambda n: fn(n, floats, others))
        total = further(first.value, windows, lambda n: fn(n, floats, others).value)
        return QuantizedGrad(total, first.grad)

    @jax.custom_vjp
    def run(windows, floats, others):
        return all_of(fn(0, floats, others), windows, floats, others)

    def forward(windows, floats, others):
        first, pull = jax.vjp(lambda floats: fn(0, floats, others), floats)
        return all_of(first, windows, floats, others), (windows, floats, others, pull)

    def backward(residuals, grad):
        windows, floats, others, pull = residuals

        def one(n):
            return jax.vjp(lambda floats: fn(n, floats, others), floats)[1](grad)[0]

        return None, further(pull(grad)[0], windows, one), None

    run.defvjp(forward, backward)
    return run(windows, floats, others)
