"""What crosses the `expert` axis: tokens to all its devices, and their partial results back.

Every device of the axis gathers the tokens of all of them and computes with the experts that it
holds ("ring of experts"); partial results are summed and scattered. On the way there tokens may
be 8 bits with a scale for each row, and so may gradients, on theirs; sums are in the model's dtype.

Shapes: t tokens of this device, T of all devices of the axis, D model width.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from octablox import fp8
from octablox.fp8 import Cast, Quantized
from octablox.mesh import vary


def gather_over_experts(x: jax.Array) -> jax.Array:
    """`x` [t, ...] of all devices of the axis, [T, ...]; its transpose sums and scatters."""
    return lax.all_gather(vary(x), "expert", tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def send(tokens: Float[Array, "t D"], health: Float[Array, "3 3"], cast: Cast) -> Quantized:
    """Tokens [t, D] of all devices of the axis, quantized by `cast` before they travel: [T, D].

    The gradient of `health` counts the casts, see `gmm.new_health`.
    """
    del health
    return _gather_quantized(tokens, fp8.quantize(tokens, cast, contracted=1))


def _send_forward(tokens, health, cast):
    del health
    q = fp8.quantize(tokens, cast, contracted=1)
    return _gather_quantized(tokens, q), fp8.health(tokens, q)


def _send_backward(cast, counts, grad):
    del cast
    rest = jnp.zeros_like(counts)
    return _sum_and_scatter(grad.master), jnp.stack([rest, counts, rest])


send.defvjp(_send_forward, _send_backward)


def _gather_quantized(tokens, q):
    shape = tokens.shape[0] * lax.axis_size("expert"), tokens.shape[1]
    return fp8.new_quantized(jax.tree.map(gather_over_experts, q), shape, tokens.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def receive(tokens: Float[Array, "T D"], quantize_grad: bool) -> Float[Array, "t D"]:
    """Partial results [T, D] summed over the axis, each device its own tokens: [t, D].

    Args:
      tokens: [T, D].
      quantize_grad: whether the gradient travels in e5m2 with a scale for each row.
    """
    del quantize_grad
    return _sum_and_scatter(tokens)


def _receive_forward(tokens, quantize_grad):
    return receive(tokens, quantize_grad), None


def _receive_backward(quantize_grad, residuals, grad):
    del residuals
    if not quantize_grad:
        return (gather_over_experts(grad),)
    q = jax.tree.map(gather_over_experts, fp8.quantize(grad, fp8.WIRE_GRAD, contracted=1))
    return (fp8.dequantize(q).astype(grad.dtype),)


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


def _sum_and_scatter(x):
    return lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True)
