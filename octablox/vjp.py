"""`jax.vjp` of functions whose arguments and results hold integers and 8-bit values too."""

import dataclasses
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
from jax import numpy as jnp

from octablox.schedule import Stage

Tree = Any


def stage_vjp(stage: Stage, weights: Tree, context: Tree, carry: Tree):
    """`vjp` of a stage, in its weights and its carry."""
    return vjp(lambda weights, carry: stage.fn(weights, context, carry), weights, carry)


def vjp(fn: Callable[..., Tree], *args: Tree):
    """`jax.vjp`, blind to integers and 8-bit values in the arguments and in the result."""
    floats, others = zip(*(split_by_gradient(arg) for arg in args), strict=True)

    def on_floats(*floats):
        merged = [merge_by_gradient(f, o) for f, o in zip(floats, others, strict=True)]
        return split_by_gradient(fn(*merged))

    output, pull, other_output = jax.vjp(on_floats, *floats, has_aux=True)
    return merge_by_gradient(output, other_output), pull


def split_by_gradient(tree: Tree) -> tuple[Tree, Tree]:
    """`tree` twice: with only its leaves that have gradients, and with only the others.

    Floats of more than 8 bits have gradients. A dataclass with a method `split_by_gradient` says
    itself which of its fields do.
    """

    def split(node):
        if _knows_gradient(node):
            return node.split_by_gradient()
        has_gradient = jnp.issubdtype(node.dtype, jnp.floating) and node.dtype.itemsize > 1
        return (node, None) if has_gradient else (None, node)

    nodes, structure = jax.tree.flatten(tree, is_leaf=_knows_gradient)
    floats, others = zip(*map(split, nodes), strict=True) if nodes else ((), ())
    return jax.tree.unflatten(structure, floats), jax.tree.unflatten(structure, others)


def merge_by_gradient(floats: Tree, others: Tree) -> Tree:
    """The inverse of `split_by_gradient`."""

    def merge(a, b):
        if _knows_gradient(a):
            return type(a)(*(merge(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)))
        return b if a is None else a

    is_leaf = lambda node: node is None or _knows_gradient(node)  # noqa: E731
    return jax.tree.map(merge, floats, others, is_leaf=is_leaf)


def _knows_gradient(node):
    return hasattr(node, "split_by_gradient")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Without:
    """A tree less the leaves that `places` marks with their number in another tree."""

    leaves: list
    places: tuple[int | None, ...]
    structure: jax.tree_util.PyTreeDef

    def tree_flatten(self):
        return (self.leaves,), (self.places, self.structure)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)


def without(tree: Tree, known: Tree) -> "_Without":
    """`tree` less the leaves that `known` has, so that gathered weights are not kept."""
    numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(known))}
    leaves, structure = jax.tree.flatten(tree)
    places = tuple(numbers.get(id(leaf)) for leaf in leaves)
    kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return _Without(kept, places, structure)


def restored(part: "_Without", known: Tree) -> Tree:
    """The inverse of `without`, with `known` computed anew."""
    leaves, kept = jax.tree.leaves(known), iter(part.leaves)
    every = [next(kept) if place is None else leaves[place] for place in part.places]
    return part.structure.unflatten(every)
