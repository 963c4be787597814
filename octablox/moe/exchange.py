"""What crosses the `expert` axis: tokens to its devices, and their partial results back.

There are two ways. `Ring`: every device of the axis gathers the tokens of all of them and computes
with the experts that it holds ("ring of experts"); partial results are summed and scattered.
`all_to_all.AllToAll`: tokens go where their experts are. By either, tokens may be 8 bits with a
scale for each row, and so may gradients, on theirs; sums are in the model's dtype.

Shapes: t tokens of this device, T of all devices of the axis, D model width.
"""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from octablox import fp8
from octablox.fp8 import Cast, Quantized
from octablox.health import counts_of
from octablox.mesh import vary


def gather_over_experts(x: jax.Array) -> jax.Array:
    """`x` [t, ...] of all devices of the axis, [T, ...]; its transpose sums and scatters."""
    return lax.all_gather(vary(x), "expert", tiled=True)


@runtime_checkable
class Way(Protocol):
    """How tokens cross the axis: a pytree of integers, with two maps that are transposes."""

    def spread(self, x: jax.Array) -> jax.Array:
        """`x` [t, ...] of this device's tokens, to [T, ...] of those that come here."""

    def collect(self, x: jax.Array) -> jax.Array:
        """`x` [T, D] of the tokens that came, to [t, D]: sums for this device's tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """All tokens to all devices."""

    spread = staticmethod(gather_over_experts)

    @staticmethod
    def collect(x: jax.Array) -> jax.Array:
        """The sum over the devices, each its own tokens."""
        return lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def send(
    tokens: Float[Array, "t D"], way: Way, health: Float[Array, "4 H"] | None, cast: Cast
) -> Quantized:
    """Tokens [t, D] to [T, D], quantized by `cast` before they travel.

    The gradient of `health` counts the casts, see `gmm.new_health`; None: nothing is counted.
    """
    return _send_forward(tokens, way, health, cast)[0]


def _send_forward(tokens, way, health, cast):
    q = fp8.quantize(tokens, cast, contracted=1)
    shape = tokens.shape[0] * lax.axis_size("expert"), tokens.shape[1]
    travelled = fp8.new_quantized(jax.tree.map(way.spread, q), shape, tokens.dtype)
    return travelled, (way, None if health is None else counts_of(tokens, q))


def _send_backward(cast, residuals, grad):
    del cast
    way, counts = residuals
    if counts is not None:
        rest = jnp.zeros_like(counts)
        counts = jnp.stack([rest, counts, rest, rest])
    return way.collect(grad.master), None, counts


send.defvjp(_send_forward, _send_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def receive(tokens: Float[Array, "T D"], way: Way, quantize_grad: bool) -> Float[Array, "t D"]:
    """Partial results [T, D] summed over the axis, each device its own tokens: [t, D].

    Args:
      tokens: [T, D].
      way: by which the tokens were spread.
      quantize_grad: whether the gradient travels in e5m2 with a scale for each row.
    """
    del quantize_grad
    return way.collect(tokens)


def _receive_forward(tokens, way, quantize_grad):
    return receive(tokens, way, quantize_grad), way


def _receive_backward(quantize_grad, way, grad):
    if not quantize_grad:
        return way.spread(grad), None
    q = jax.tree.map(way.spread, fp8.quantize(grad, fp8.WIRE_GRAD, contracted=1))
    return fp8.dequantize(q).astype(grad.dtype), None


receive.defvjp(_receive_forward, _receive_backward)


@jax.custom_vjp
def dequantized(rows: Quantized) -> Float[Array, "R D"]:
    """Rows [R, D] in their master's dtype; the gradient goes to the master as it is."""
    width = rows.master.shape[1]
    return fp8.dequantize(rows.q)[:, :width].astype(rows.master.dtype)


dequantized.defvjp(
    lambda rows: (dequantized(rows), None),
    lambda residuals, grad: (Quantized(grad, None),),
)
