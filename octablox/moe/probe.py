"""Counts that leave a layer as gradients.

Gradients are what is summed over micro-batches, devices and accumulation steps anyway, and they
come out of any schedule. So a count is declared as the gradient of a *probe*, an input that
nothing depends on.
"""

from typing import Any

import jax


@jax.custom_vjp
def counted(value: Any, probe: jax.Array, count: jax.Array) -> Any:
    """`value`, a tree; the gradient of `probe` is `count`, of probe's shape and dtype."""
    del probe, count
    return value


counted.defvjp(
    lambda value, probe, count: (value, count),
    lambda count, grad: (grad, count, None),
)
