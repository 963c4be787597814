"""Runs a stack of layers in the order of a schedule, forward and backward, under `lax.scan`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from octablox.kernels import uninitialized, vary_like
from octablox.schedule import Layer, Turn

Tree = Any


def run_layers(layer: Layer, shards: Tree, contexts: Sequence[Tree], carries: Sequence[Tree]):
    """Runs a stack of equal layers under `lax.scan`, differentiable in `shards` and `carries`.

    Args:
      layer: the layer.
      shards: a dict of stacked parameters, layers first; see `WeightGroup`.
      contexts: one per micro-batch.
      carries: one per micro-batch.

    Returns:
      The carries after the last layer.
    """
    stack = _Stack(layer, jax.tree.leaves(shards)[0].shape[0])

    @jax.custom_vjp
    def run(shards, contexts, carries):
        return stack.forward(shards, contexts, carries, keep=False)[0]

    def forward(shards, contexts, carries):
        carries, kept = stack.forward(shards, contexts, carries, keep=True)
        return carries, (shards, contexts, kept)

    def backward(residuals, grads):
        shards, contexts, kept = residuals
        shard_grads, grads = stack.backward(shards, contexts, kept, list(grads))
        return shard_grads, None, grads

    run.defvjp(forward, backward)
    return run(shards, list(contexts), list(carries))


class _Stack:
    """Equal layers one after the other."""

    def __init__(self, layer: Layer, length: int):
        self.layer, self.length = layer, length
        self.order = layer.order(length)
        self.travel = self.order.travel if length > 1 else None

    def forward(self, shards, contexts, carries, keep):
        """The carries after the last layer, and what the backward pass needs, layers first."""
        layer, carries = self.layer, list(carries)
        if self.order.carried:
            carries[-1], leave_idle = _vjp(layer.idle, carries[-1])

        def body(state, n):
            carries, travelled = state
            if not self.travel:
                travelled = self._gathered(shards, n)
            turns = _Forward(layer, self._weights(travelled), contexts, keep)
            ahead = []
            if self.travel:
                ahead = turns.transfer(self._groups_at(shards, n + 1), self.travel.forward)
            carries = turns.run(self.order.forward, carries)
            return (carries, ahead or None), turns.kept

        first = self._gathered(shards, 0) if self.travel else None
        (carries, _), kept = lax.scan(body, (carries, first), jnp.arange(self.length))
        if not self.order.carried:
            return carries, (kept, None)
        carries[-1], leave_last = _stage_vjp(layer.stages[-1], {}, contexts[-1], carries[-1])
        return carries, (kept, (leave_idle, leave_last))

    def backward(self, shards, contexts, kept, grads):
        """The gradients of the shards and of the carries that entered the first layer."""
        kept, ends = kept
        if ends:
            leave_idle, leave_last = ends
            grads[-1] = leave_last(grads[-1])[1]

        def body(state, n_and_kept):
            grads, travelled, later, total = state
            n, kept = n_and_kept
            if not self.travel:
                travelled = self._gathered(shards, n)
            turns = _Backward(self.layer, self._weights(travelled), contexts, kept)
            if self.travel:
                done = turns.transfer(self._scatters(shards, n + 1, later), self.travel.gradients)
                ahead = turns.transfer(self._groups_at(shards, n - 1), self.travel.backward)
                grads = turns.run(self.order.backward, grads)
                total = self._put(total, done, n + 1)
                return (grads, ahead, turns.weight_grads(), total), None
            grads = turns.run(self.order.backward, grads)
            done = [s(g) for s, g in self._scatters(shards, n, turns.weight_grads())]
            return (grads, None, later, self._put(total, done, n)), None

        # Each layer's part is written once it is known.
        total = _uninitialized_like(shards)
        last = self._gathered(shards, self.length - 1) if self.travel else None
        # The first turn scatters these as the last layer's gradient, which the second overwrites.
        later = self._no_grads(last) if self.travel else None
        (grads, _, later, total), _ = lax.scan(
            body, (grads, last, later, total), (jnp.arange(self.length), kept), reverse=True
        )
        if self.travel:
            total = self._put(total, [s(g) for s, g in self._scatters(shards, 0, later)], 0)
        if ends:
            (grads[-1],) = leave_idle(grads[-1])
        return total, grads

    def _at(self, shards, n):
        """Layer n's shards; the nearest layer's where there is no such layer."""
        n = jnp.clip(n, 0, self.length - 1)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, n, 0, keepdims=False), shards)

    def _groups_at(self, shards, n):
        """For each group of weights, how it is gathered and from what."""
        return [
            (functools.partial(self._gather, group), self._at(_pick(shards, group.shards), n))
            for group in self.layer.groups
        ]

    def _gather(self, group, shards):
        return self.layer.pack(group.gather(shards))

    def _gathered(self, shards, n):
        return [gather(of) for gather, of in self._groups_at(shards, n)]

    def _weights(self, travelled):
        return {k: v for group in travelled for k, v in self.layer.unpack(group).items()}

    def _no_grads(self, travelled):
        return _uninitialized_like(split_by_gradient(self._weights(travelled))[0])

    def _scatters(self, shards, n, weight_grads):
        """For each group, how its gradients become those of its shards, and the gradients."""

        def scatter(group, grads):
            of = self._at(_pick(shards, group.shards), n)
            return _vjp(group.gather, of)[1](grads)[0]

        return [
            (functools.partial(scatter, group), _pick(weight_grads, group.weights))
            for group in self.layer.groups
        ]

    def _put(self, total, done, n):
        """`total` with layer n's gradients, which the groups `done` have parts of."""
        grads = {}
        for part in done:
            for name, grad in part.items():
                grads[name] = _add(grads[name], grad) if name in grads else grad
        n = jnp.clip(n, 0, self.length - 1)
        put = lambda a, b: lax.dynamic_update_index_in_dim(a, b, n, 0)  # noqa: E731
        return total | jax.tree.map(put, _pick(total, grads), grads)


class _Turns:
    """Runs turns in order: each waits for the one before it in its chain, transfers for theirs."""

    def __init__(self, layer, weights, contexts):
        self.layer, self.weights, self.contexts = layer, weights, contexts
        self._last = {}
        self._transfers = []

    def enter(self, chain, values):
        """`values`, after the turn before in the chain."""
        packed, _ = lax.optimization_barrier((self.layer.pack(values), self._last.get(chain)))
        return self.layer.unpack(packed)

    def leave(self, chain, values):
        """Ends a turn: the next one of the chain waits for `values`."""
        self._last[chain] = self.layer.pack(values)
        return values

    def transfer(self, jobs, windows):
        """Will run `jobs` (functions and their inputs) under their windows.

        Returns a list that holds the results when all turns have run.
        """
        results = [None] * len(jobs)
        for n, (job, window) in enumerate(zip(jobs, windows, strict=True)):
            self._transfers.append((window, job, results, n))
        return results

    def before(self, n):
        """Starts the transfers whose window begins with turn n."""
        for window, (function, of), results, place in self._transfers:
            if window.first == n:
                results[place] = function(self.enter("compute", of))

    def after(self, n):
        """Ends the transfers whose window ends with turn n."""
        for window, _, results, place in self._transfers:
            if window.last == n:
                self._last["compute"] = (self._last["compute"], results[place])

    def read(self, stage):
        """The weights that a stage reads."""
        return _pick(self.weights, stage.weights)


class _Forward(_Turns):
    """One layer's forward pass; `kept` is what the backward pass needs of it."""

    def __init__(self, layer, weights, contexts, keep):
        super().__init__(layer, weights, contexts)
        self._keep, self.kept = keep, {}

    def run(self, turns, carries):
        """The carries after the layer."""
        carries = list(carries)
        for n, turn in enumerate(turns):
            self.before(n)
            carries[turn.micro_batch] = self._turn(turn, carries[turn.micro_batch])
            self.after(n)
        return carries

    def _turn(self, turn, carry):
        stages, stage = self.layer.stages, self.layer.stages[turn.stage]
        if self._keep and turn.stage == 0 and not stage.save:
            self._hold(stage, _key(turn, "input"), self.layer.pack(carry))
        inputs = self.read(stage), self.contexts[turn.micro_batch], self.enter(stage.chain, carry)
        if self._keep and stage.save:
            output, pull = _stage_vjp(stage, *inputs)
            self._hold(stage, _key(turn), _without(pull, inputs[:2]))
            if turn.stage + 1 < len(stages) and not stages[turn.stage + 1].save:
                self._hold(stage, _key(turn, "output"), self.layer.pack(output))
        else:
            output = stage.fn(*inputs)
        return self.leave(stage.chain, output)

    def _hold(self, stage, key, tree):
        self.kept[key] = jax.device_put(tree, jax.memory.Space.Host) if stage.offload else tree


class _Backward(_Turns):
    """One layer's backward pass."""

    def __init__(self, layer, weights, contexts, kept):
        super().__init__(layer, weights, contexts)
        self._kept, self._ran, self._weight_grads = kept, {}, {}

    def run(self, turns, grads):
        """The gradients of the carries before the layer, of those after it."""
        grads = list(grads)
        for n, turn in enumerate(turns):
            self.before(n)
            if turn.backward:
                grads[turn.micro_batch] = self._pull(turn, grads[turn.micro_batch])
            else:
                self._again(turn)
            self.after(n)
        return grads

    def weight_grads(self):
        """Of every weight, zeros of those that no stage reads."""
        for name, weight in split_by_gradient(self.weights)[0].items():
            if name not in self._weight_grads:
                self._weight_grads[name] = _zeros_like(weight)
        return self._weight_grads

    def _held(self, stage, key):
        kept = self._kept[key]
        return jax.device_put(kept, jax.memory.Space.Device) if stage.offload else kept

    def _again(self, turn):
        stage = self.layer.stages[turn.stage]
        before = Turn(turn.stage - 1, turn.micro_batch)
        if turn.stage == 0:
            carry = self.layer.unpack(self._held(stage, _key(turn, "input")))
        elif self.layer.stages[before.stage].save:
            kept = self._held(self.layer.stages[before.stage], _key(before, "output"))
            carry = self.layer.unpack(kept)
        else:
            carry = self._ran[before][0]
        carry = self.enter(stage.chain, carry)
        output, pull = _stage_vjp(stage, self.read(stage), self.contexts[turn.micro_batch], carry)
        self._ran[turn] = self.leave(stage.chain, output), pull

    def _pull(self, turn, grad):
        stage = self.layer.stages[turn.stage]
        if stage.save:
            known = self.read(stage), self.contexts[turn.micro_batch]
            pull = _restored(self._held(stage, _key(turn)), known)
        else:
            pull = self._ran[Turn(turn.stage, turn.micro_batch)][1]
        weight_grads, grad = pull(self.enter(stage.chain, grad))
        self.leave(stage.chain, (grad, weight_grads))
        total = self._weight_grads
        for name, part in weight_grads.items():
            total[name] = _add(total[name], part) if name in total else part
        return grad


def _pick(tree, names):
    return {name: tree[name] for name in names}


def _key(turn, of="residuals"):
    return f"{of} of {turn.stage}.{turn.micro_batch}"


def _zeros_like(tree):
    """Zeros that vary over the mesh as the arrays of `tree` do."""
    return jax.tree.map(lambda a: vary_like((a,), jnp.zeros(a.shape, a.dtype)), tree)


def _uninitialized_like(tree):
    return jax.tree.map(lambda a: uninitialized(a.shape, a.dtype, (a,)), tree)


def _add(a, b):
    return jax.tree.map(jnp.add, a, b)


def _stage_vjp(stage, weights, context, carry):
    return _vjp(lambda weights, carry: stage.fn(weights, context, carry), weights, carry)


def _vjp(fn, *args):
    """`jax.vjp`, blind to integers and 8-bit values in the arguments and in the result."""
    floats, others = zip(*(split_by_gradient(arg) for arg in args), strict=True)

    def on_floats(*floats):
        merged = [merge_by_gradient(f, o) for f, o in zip(floats, others, strict=True)]
        return split_by_gradient(fn(*merged))

    output, pull, other_output = jax.vjp(on_floats, *floats, has_aux=True)
    return merge_by_gradient(output, other_output), pull


def split_by_gradient(tree: Tree) -> tuple[Tree, Tree]:
    """`tree` twice: with only its leaves that have gradients, and with only the others.

    Floats of more than 8 bits have gradients. A node with a method `split_by_gradient` says
    itself which of its leaves do.
    """
    knows = lambda node: hasattr(node, "split_by_gradient")  # noqa: E731

    def split(node):
        if knows(node):
            return node.split_by_gradient()
        has_gradient = jnp.issubdtype(node.dtype, jnp.floating) and node.dtype.itemsize > 1
        return (node, None) if has_gradient else (None, node)

    nodes, structure = jax.tree.flatten(tree, is_leaf=knows)
    floats, others = zip(*map(split, nodes), strict=True) if nodes else ((), ())
    return jax.tree.unflatten(structure, floats), jax.tree.unflatten(structure, others)


def merge_by_gradient(floats: Tree, others: Tree) -> Tree:
    """The inverse of `split_by_gradient`."""
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
