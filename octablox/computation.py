"""A part of a program that XLA compiles as a computation of its own."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from octablox.kernels.pallas_tpu import chip

Tree = Any


def helps() -> bool:
    """Whether the program is for a TPU: `as_computation` is about XLA:TPU's scheduler."""
    return chip() is not None


def as_computation(fn: Callable[[Tree], Tree], tree: Tree, number: jax.Array) -> Tree:
    """`fn(tree)`, of which nothing begins before all of `tree` is there, nor ends later than it.

    XLA:TPU schedules each computation by itself. In one long computation its latency-hiding
    scheduler starts a transfer as late as its own estimates of transfers, of kernels above all,
    allow; in a short one, all that can start does, and runs beside the rest. So `fn` becomes a
    branch of a conditional, one that is always taken but not so that XLA could know.

    Args:
      fn: called twice, to the same effect; not differentiated through.
      tree: its argument; what `fn` returns of it unchanged is not copied.
      number: int32, 0 or more.
    """
    given = jax.tree.leaves(tree)
    jaxpr, result = jax.make_jaxpr(fn, return_shape=True)(tree)
    there: dict[Any, jax.Array] = dict(zip(jaxpr.jaxpr.invars, given, strict=True))
    there |= dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    out = jaxpr.jaxpr.outvars
    is_new = [isinstance(var, Literal) or var not in there for var in out]

    def run():
        # Traced anew: parts of it (attention's kernels) are traced without the mesh's types, and a
        # jaxpr with such parts cannot be evaluated where types are checked.
        leaves = jax.tree.leaves(fn(tree))
        return [leaf for leaf, new in zip(leaves, is_new, strict=True) if new]

    def never():
        return [_empty(var.aval) for var, new in zip(out, is_new, strict=True) if new]

    made = iter(lax.cond(lax.optimization_barrier(number) >= 0, run, never))
    leaves = [next(made) if new else there[var] for var, new in zip(out, is_new, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


def _empty(aval):
    value = lax.empty(aval.shape, aval.dtype)
    varying = tuple(sorted(aval.mat.varying))
    return lax.pcast(value, varying, to="varying") if varying else value
