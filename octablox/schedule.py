"""Stages of a layer, the orders in which micro-batches run through them, and the backward pass.

A layer is a list of `Stage`s. An *order* is a list of (micro-batch, stage); every order gives the
same numbers, since stages are pure functions. `sequential` finishes a micro-batch before it starts
the next one. `batch_split` runs each stage for all micro-batches in turn, so that while one
micro-batch waits for the network the other computes:

    compute        attend 0  attend 1   experts 0  experts 1
    communication            dispatch 0  dispatch 1  combine 0  combine 1

What ties an order down is `lax.optimization_barrier`: an entry of the compute chain waits for the
entry before it in that chain, an entry of the communication chain for its own predecessor, and
nothing else waits. The backward pass runs the mirrored order, each stage by its own vjp.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import pydantic
from jax import lax
from jax import numpy as jnp

Tree = Any
Order = Sequence[tuple[int, int]]


class ScheduleConfig(pydantic.BaseModel):
    """In which order the stages of a layer run over the micro-batches."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    use_batch_split_schedule: bool = pydantic.Field(
        False, description="interleave the micro-batches, so that communication runs under compute"
    )
    batch_split_factor: int = pydantic.Field(
        0,
        ge=0,
        description="micro-batches of a batch; 0: 2 with the batch-split schedule, else 1. "
        "More than 1 without it runs the same micro-batches one after the other",
    )
    remat_policy: Literal["full", "minimal", "none"] = pydantic.Field(
        "minimal",
        description="what the backward pass keeps: full only each layer's input, minimal also the "
        "dispatched rows (no dispatch runs twice), none recomputes nothing",
    )

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a batch is cut into."""
        return self.batch_split_factor or (2 if self.use_batch_split_schedule else 1)

    def order(self, stages: int) -> Order:
        """The order for a layer of that many stages."""
        make = batch_split if self.use_batch_split_schedule else sequential
        return make(stages, self.micro_batches)


def sequential(stages: int, micro_batches: int) -> Order:
    """Each micro-batch through all stages before the next one."""
    return [(m, s) for m in range(micro_batches) for s in range(stages)]


def batch_split(stages: int, micro_batches: int) -> Order:
    """Each stage for all micro-batches before the next one."""
    return [(m, s) for s in range(stages) for m in range(micro_batches)]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A pure function `fn(weights, context, carry) -> carry` and how its backward gets its inputs.

    Attributes:
      name: shown in traces.
      fn: the function. `context` (positions, masks) is never differentiated.
      weights: keys of the layer's weights that it reads.
      chain: what the stage mostly uses, the chips or the network.
      save: whether its vjp's residuals are kept (its output too where the next stage starts
        from it); otherwise it runs again in the backward pass, from the nearest kept carry.
    """

    name: str
    fn: Callable[[Tree, Tree, Tree], Tree]
    weights: tuple[str, ...]
    chain: Literal["compute", "communication"] = "compute"
    save: bool = False


@dataclasses.dataclass(frozen=True)
class Layer:
    """The stages of a layer, how its weights are opened, and the order of a step.

    Attributes:
      stages: first to last; the last one's carry has the structure of the first one's input.
      gather: shards of one layer -> weights as the stages read them (a dict).
      order: see `sequential` and `batch_split`.
    """

    stages: tuple[Stage, ...]
    gather: Callable[[Tree], dict[str, Tree]]
    order: Order


def run_layers(layer: Layer, shards: Tree, contexts: Sequence[Tree], carries: Sequence[Tree]):
    """Runs a stack of equal layers under `lax.scan`, differentiable in `shards` and `carries`.

    Args:
      layer: the layer.
      shards: stacked parameters, layers first; whatever `layer.gather` takes, with that dim.
      contexts: one per micro-batch.
      carries: one per micro-batch.

    Returns:
      The carries after the last layer.
    """

    @jax.custom_vjp
    def run(shards, contexts, carries):
        def body(carries, shards):
            weights = layer.gather(shards)
            return _forward(layer, weights, contexts, carries)[0], None

        return lax.scan(body, carries, shards)[0]

    def forward(shards, contexts, carries):
        def body(carries, shards):
            weights = layer.gather(shards)
            return _forward(layer, weights, contexts, carries, keep=True)

        carries, kept = lax.scan(body, carries, shards)
        return carries, (shards, contexts, kept)

    def backward(residuals, grads):
        shards, contexts, kept = residuals

        def body(grads, shards_and_kept):
            shards, kept = shards_and_kept
            weights, scatter = _vjp(layer.gather, shards)
            grads, weight_grads = _backward(layer, weights, contexts, kept, grads)
            return grads, scatter(weight_grads)[0]

        grads, shard_grads = lax.scan(body, list(grads), (shards, kept), reverse=True)
        return shard_grads, None, grads

    run.defvjp(forward, backward)
    return run(shards, list(contexts), list(carries))


class _Chains:
    """Makes an entry wait for the one before it in its chain."""

    def __init__(self):
        self._last = {}

    def enter(self, chain: str, values: Tree) -> Tree:
        values, _ = lax.optimization_barrier((values, self._last.get(chain)))
        return values

    def leave(self, chain: str, values: Tree) -> Tree:
        self._last[chain] = values
        return values


def _forward(layer, weights, contexts, carries, keep=False):
    carries, kept, chains = list(carries), {}, _Chains()
    if keep and not layer.stages[0].save:
        kept["input"] = list(carries)
    for m, s in layer.order:
        stage = layer.stages[s]
        inputs = _read(stage, weights), contexts[m], chains.enter(stage.chain, carries[m])
        if keep and stage.save:
            output, pull = _stage_vjp(stage, *inputs)
            kept[_key(m, s)] = _without(pull, inputs[:2])
            if s + 1 < len(layer.stages) and not layer.stages[s + 1].save:
                kept[_key(m, s) + ".output"] = output
        else:
            output = stage.fn(*inputs)
        carries[m] = chains.leave(stage.chain, output)
    return carries, kept


def _backward(layer, weights, contexts, kept, grads):
    grads, chains, weight_grads = list(grads), _Chains(), {}
    ran: dict[tuple[int, int], tuple[Tree, Callable]] = {}

    def output_of(m, s):
        if s < 0:
            return kept["input"][m]
        if layer.stages[s].save:
            return kept[_key(m, s) + ".output"]
        return run_again(m, s)[0]

    def run_again(m, s):
        if (m, s) not in ran:
            stage = layer.stages[s]
            carry = chains.enter(stage.chain, output_of(m, s - 1))
            output, pull = _stage_vjp(stage, _read(stage, weights), contexts[m], carry)
            ran[m, s] = chains.leave(stage.chain, output), pull
        return ran[m, s]

    for m, s in reversed(layer.order):
        stage = layer.stages[s]
        if stage.save:
            pull = _restored(kept[_key(m, s)], (_read(stage, weights), contexts[m]))
        else:
            pull = run_again(m, s)[1]
        stage_grads, grads[m] = pull(chains.enter(stage.chain, grads[m]))
        chains.leave(stage.chain, grads[m])
        for name, grad in stage_grads.items():
            weight_grads[name] = _add(weight_grads[name], grad) if name in weight_grads else grad
    read_by_none = [name for name in weights if name not in weight_grads]
    for name in read_by_none:
        weight_grads[name] = jax.tree.map(jnp.zeros_like, weights[name])
    return grads, _differentiable(weight_grads)[0]


def _read(stage, weights):
    return {name: weights[name] for name in stage.weights}


def _key(m, s):
    return f"{m}.{s}"


def _add(a, b):
    return jax.tree.map(jnp.add, a, b)


def _stage_vjp(stage, weights, context, carry):
    return _vjp(lambda weights, carry: stage.fn(weights, context, carry), weights, carry)


def _vjp(fn, *args):
    """`jax.vjp`, blind to integers and 8-bit values in the arguments and in the result."""
    floats, others = zip(*(_differentiable(arg) for arg in args), strict=True)

    def on_floats(*floats):
        merged = [_merge(f, o) for f, o in zip(floats, others, strict=True)]
        return _differentiable(fn(*merged))

    output, pull, other_output = jax.vjp(on_floats, *floats, has_aux=True)
    return _merge(output, other_output), pull


def _differentiable(tree):
    """`tree` twice: with only its leaves that have gradients, and with only the others."""
    has_gradient = lambda leaf: (  # noqa: E731
        jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1
    )
    floats = jax.tree.map(lambda leaf: leaf if has_gradient(leaf) else None, tree)
    others = jax.tree.map(lambda leaf: None if has_gradient(leaf) else leaf, tree)
    return floats, others


def _merge(floats, others):
    return jax.tree.map(
        lambda a, b: b if a is None else a, floats, others, is_leaf=lambda node: node is None
    )


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


def _without(tree, known):
    """`tree` less the leaves that `known` has, so that gathered weights are not kept."""
    numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(known))}
    leaves, structure = jax.tree.flatten(tree)
    places = tuple(numbers.get(id(leaf)) for leaf in leaves)
    kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return _Without(kept, places, structure)


def _restored(without, known):
    """The inverse of `_without`, with `known` computed anew."""
    known, kept = jax.tree.leaves(known), iter(without.leaves)
    leaves = [next(kept) if place is None else known[place] for place in without.places]
    return without.structure.unflatten(leaves)
