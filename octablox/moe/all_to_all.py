"""Tokens to the devices that hold their experts, and no others; their results back.

Where a ring brings every token of the axis to all of its devices, here each token goes once to
each device that holds some of its experts: with 8 experts a token on 16 devices, to fewer than
half of them. A device has a slot for each token that may come, so that nothing is ever dropped;
it fills those of each sender from the front.

Shapes: t tokens of this device, n devices of the axis, T = n*t slots, k copies a token.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Int

from octablox.kernels import uninitialized, vary_like
from octablox.kernels.pallas_tpu import chip
from octablox.mesh import vary
from octablox.moe.dispatch import CopyOrder, combine, dispatch

# Over the bytes of a type: slots that a TPU sends together. Its memory interleaves so many rows; to
# send single ones it would change the layout of all slots before each transfer and after it.
INTERLEAVED = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AllToAll:
    """How tokens of one micro-batch cross the `expert` axis; see `exchange.Ring`.

    Attributes:
      order: of the slots that this device sends, those for the first device first. A row is a
        slot; the first of a token's copies for a device takes the token there, the others have no
        row. `group_sizes` int32 [n] are the tokens for each device.
      received: int32 [n], tokens from each device.

    As any pytree it may hold other leaves in place of its arrays.
    """

    order: CopyOrder
    received: Any

    def permute(self, x: jax.Array) -> jax.Array:
        """`x` [t, ...] of this device's tokens, in their slots [T, ...]; others hold garbage."""
        return dispatch(x, self.order)

    def unpermute(self, slots: jax.Array) -> jax.Array:
        """Slots [T, D]: each token's sum over the devices it went to, [t, D]."""
        return combine(slots, self.order)

    def there(self, slots: jax.Array) -> jax.Array:
        """Slots [T, ...] of every sender, to those of this device [T, ...]."""
        return _swap(slots, self.order.group_sizes, self.received)

    def back(self, came: jax.Array) -> jax.Array:
        """The inverse of `there`."""
        return _swap(came, self.received, self.order.group_sizes)


def plan(chosen: Int[Array, "t k"], experts_of_a_device: int) -> tuple[AllToAll, Int[Array, "T k"]]:
    """The way of tokens whose copies go to experts `chosen`, int32 [t, k].

    Returns:
      the way; and the experts of the token in each slot of this device, int32 [T, k], of other
      devices in slots that stay empty.
    """
    (tokens, k), devices = chosen.shape, lax.axis_size("expert")
    chosen = vary(chosen.astype(jnp.int32))
    device_of_copy = chosen // experts_of_a_device
    iota = functools.partial(lax.broadcasted_iota, jnp.int32)
    is_for = device_of_copy[None] == iota((devices, 1, 1), 0)  # [n, t, k]
    goes = jnp.any(is_for, axis=2)
    sizes = jnp.sum(goes, axis=1, dtype=jnp.int32)

    # Slots to copies: tokens that go, in their order, then the others.
    token = vary_like((goes,), iota((devices, tokens), 1))
    stays = (~goes).astype(jnp.int32)
    copy = token * k + jnp.argmax(is_for, axis=2).astype(jnp.int32)
    _, token_of_slot, copy_of_slot = lax.sort((stays, token, copy), num_keys=2, is_stable=False)

    # Copies to slots: none for a copy whose token an earlier one takes to the same device.
    # Sums, not gathers: a TPU's SparseCore would do those, and transfers of the step wait for it.
    slot = jnp.cumsum(goes, axis=1, dtype=jnp.int32) - 1
    slot_of_copy = jnp.sum(jnp.where(is_for, slot[:, :, None], 0), axis=0)
    same = device_of_copy[:, :, None] == device_of_copy[:, None, :]
    is_first = ~jnp.any(same & jnp.tril(jnp.ones((k, k), bool), -1), axis=2)
    nowhere = devices * tokens
    row_of_copy = jnp.where(is_first, device_of_copy * tokens + slot_of_copy, nowhere)

    used = iota((devices, tokens), 1) < sizes[:, None]
    elsewhere = (iota((devices, 1, 1), 0) + 1) % devices * experts_of_a_device
    sent = jnp.where(used[:, :, None], jnp.take(chosen, token_of_slot, axis=0), elsewhere)
    exchange = functools.partial(lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0)
    order = CopyOrder(copy_of_slot.reshape(-1), row_of_copy, sizes)
    return AllToAll(order, exchange(sizes, tiled=True)), exchange(sent).reshape(-1, k)


def idle(tokens: int, k: int) -> AllToAll:
    """A way for t tokens of which none goes anywhere: what it collects is zero."""
    devices = lax.axis_size("expert")
    slots = devices * tokens
    filled = lambda value, *shape: vary(jnp.full(shape, value, jnp.int32))  # noqa: E731
    order = CopyOrder(filled(0, slots), filled(slots, tokens, k), filled(0, devices))
    return AllToAll(order, filled(0, devices))


@jax.custom_vjp
def _swap(x, sent, received):
    """Slots [T, ...] for each device, against each device's slots for this one: its own inverse.

    TPUs send the slots that are used, in packs, others all of them.
    """
    return _swap_all(x, received) if chip() is None else _swap_used(x, sent, received)


def _swap_all(x, received):
    devices = received.shape[0]
    parts = x.reshape(devices, -1, *x.shape[1:])
    return lax.all_to_all(parts, "expert", split_axis=0, concat_axis=0).reshape(x.shape)


def _swap_used(x, sent, received):
    devices, slots = sent.shape[0], x.shape[0] // sent.shape[0]
    pack = math.gcd(slots, INTERLEAVED // x.dtype.itemsize)
    packed = x.reshape(-1, pack, *x.shape[1:])
    packs = lambda slots: (slots + pack - 1) // pack  # noqa: E731
    first = vary_like((sent,), lax.iota(jnp.int32, devices) * (slots // pack))
    here = jnp.full_like(first, slots // pack) * lax.axis_index("expert")
    came = lax.ragged_all_to_all(
        packed,
        uninitialized(packed.shape, x.dtype, (x,)),
        *(first, packs(sent), here, packs(received)),
        axis_name="expert",
    )
    return came.reshape(x.shape)


_swap.defvjp(
    lambda x, sent, received: (_swap(x, sent, received), (sent, received)),
    lambda sizes, grad: (_swap(grad, *reversed(sizes)), None, None),
)
