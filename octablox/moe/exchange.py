"""What crosses the `expert` axis: tokens to its devices, and their partial results back.

There are two ways. `Ring`: every device of the axis gathers the tokens of all of them and computes
with the experts that it holds ("ring of experts"); partial results are summed and scattered.
`all_to_all.AllToAll`: tokens go where their experts are. By either, tokens may be 8 bits with a
scale for each row, and so may gradients, on theirs; sums are in the model's dtype.

Either way has four steps, each the transpose of its opposite. Those of `dispatch` and `combine`
are transfers and nothing else, so that they can be stages of the communication chain:

    permute    x [t] -> slots [S]        unpermute  slots [S] -> x [t], summed
    dispatch   slots [S] -> came [T]     combine    came [T] -> slots [S]

Shapes: t tokens of this device, S slots of what it sends (t, or n*t for n devices of the axis), T
tokens that may come, D model width.
"""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from octablox import fp8
from octablox.fp8 import Cast, Quantized, QuantizedGrad
from octablox.health import counts_of
from octablox.mesh import vary


def gather_over_experts(x: jax.Array) -> jax.Array:
    """`x` [t, ...] of all devices of the axis, [T, ...]; its transpose sums and scatters."""
    return lax.all_gather(vary(x), "expert", tiled=True)


@runtime_checkable
class Way(Protocol):
    """How tokens cross the axis: a pytree of integers, with two pairs of transposes."""

    def permute(self, x: jax.Array) -> jax.Array:
        """`x` [t, ...] of this device's tokens, in the slots in which they leave: [S, ...]."""

    def unpermute(self, slots: jax.Array) -> jax.Array:
        """Slots [S, D] that came back, to [t, D]: sums for this device's tokens."""

    def there(self, slots: jax.Array) -> jax.Array:
        """Slots [S, ...] of every device, to [T, ...] of those that come here."""

    def back(self, came: jax.Array) -> jax.Array:
        """[T, ...] of the tokens that came, to the slots [S, ...] that they left."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """All tokens to all devices; a slot for each token."""

    there = staticmethod(gather_over_experts)

    @staticmethod
    def permute(x: jax.Array) -> jax.Array:
        """`x`."""
        return x

    @staticmethod
    def unpermute(slots: jax.Array) -> jax.Array:
        """`slots`."""
        return slots

    @staticmethod
    def back(came: jax.Array) -> jax.Array:
        """The sum over the devices, each its own tokens."""
        return lax.psum_scatter(came, "expert", scatter_dimension=0, tiled=True)


def permute(
    tokens: Float[Array, "t D"],
    way: Way,
    cast: Cast | None,
    health: Float[Array, "4 H"] | None = None,
) -> Float[Array, "S D"] | Quantized:
    """Tokens [t, D] in their slots [S, D], quantized by `cast` if there is one.

    The gradient of `health` counts the casts, see `gmm.new_health`; None: nothing is counted.
    """
    return _quantize_and_permute(tokens, way, health, cast) if cast else way.permute(tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _quantize_and_permute(tokens, way, health, cast):
    return _quantize_and_permute_forward(tokens, way, health, cast)[0]


def _quantize_and_permute_forward(tokens, way, health, cast):
    q = fp8.quantize(tokens, cast, contracted=1)
    slots = jax.tree.map(way.permute, q)
    shape = slots.qvalue.shape[0], tokens.shape[1]
    counts = None if health is None else counts_of(tokens, q)
    return fp8.new_quantized(slots, shape, tokens.dtype), (way, counts)


def _quantize_and_permute_backward(cast, residuals, grad):
    del cast
    way, counts = residuals
    if counts is not None:
        rest = jnp.zeros_like(counts)
        counts = jnp.stack([rest, counts, rest, rest])
    return way.unpermute(grad.master), None, counts


_quantize_and_permute.defvjp(_quantize_and_permute_forward, _quantize_and_permute_backward)


def dispatch(slots: jax.Array | Quantized, way: Way) -> jax.Array | Quantized:
    """Slots [S, ...] to [T, ...] on the devices that they are for."""
    return _dispatch_quantized(slots, way) if isinstance(slots, Quantized) else way.there(slots)


@jax.custom_vjp
def _dispatch_quantized(slots, way):
    came = jax.tree.map(way.there, slots.q)
    return fp8.new_quantized(came, (came.qvalue.shape[0], slots.shape[1]), slots.master.dtype)


_dispatch_quantized.defvjp(
    lambda slots, way: (_dispatch_quantized(slots, way), way),
    lambda way, grad: (Quantized(way.back(grad.master), None), None),
)


def combine(came: Float[Array, "T D"] | QuantizedGrad, way: Way) -> jax.Array | QuantizedGrad:
    """Partial results [T, D] back to the slots [S, D] of the devices whose tokens they are of."""
    return _combine(came, way) if isinstance(came, QuantizedGrad) else way.back(came)


@jax.custom_vjp
def _combine(came, way):
    return fp8.new_quantized_grad(way.back(came.value))


_combine.defvjp(
    lambda came, way: (_combine(came, way), way),
    lambda way, grad: (QuantizedGrad(None, jax.tree.map(way.there, grad.grad)), None),
)


def unpermute(slots: Float[Array, "S D"] | QuantizedGrad, way: Way) -> Float[Array, "t D"]:
    """For each token [t, D] the sum over its slots."""
    return _unpermute(slots, way) if isinstance(slots, QuantizedGrad) else way.unpermute(slots)


@jax.custom_vjp
def _unpermute(slots, way):
    return way.unpermute(slots.value)


def _unpermute_backward(way, grad):
    return QuantizedGrad(None, jax.tree.map(way.permute, fp8.quantize_grad(grad))), None


_unpermute.defvjp(lambda slots, way: (_unpermute(slots, way), way), _unpermute_backward)


@jax.custom_vjp
def dequantized(rows: Quantized) -> Float[Array, "R D"]:
    """Rows [R, D] in their master's dtype; the gradient goes to the master as it is."""
    width = rows.master.shape[1]
    return fp8.dequantize(rows.q)[:, :width].astype(rows.master.dtype)


dequantized.defvjp(
    lambda rows: (dequantized(rows), None),
    lambda residuals, grad: (Quantized(grad, None),),
)
