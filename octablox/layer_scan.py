"""Runs a stack of layers in the order of a schedule, forward and backward, under `lax.scan`."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from octablox.kernels import uninitialized
from octablox.layer_pass import Backward, Forward, Transfer, add_trees, pick
from octablox.schedule import Layer
from octablox.vjp import split_by_gradient, stage_vjp, vjp

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
            carries[-1], leave_idle = vjp(layer.idle, carries[-1])
        windows = self.travel.forward if self.travel else None

        def body(state, n):
            carries, ahead = state
            one = Forward(layer, contexts, carries, keep)
            one.have(ahead if windows else self._gathered(shards, n))
            arrived = self._gather_in(one, windows, shards, n, n + 1)
            one.run(self.order.forward, n)
            return (one.carries, arrived()), one.kept()

        first = self._gathered(shards, 0, windows) if windows else None
        start = layer.pack(carries), first
        (carries, _), kept = lax.scan(body, start, jnp.arange(self.length))
        carries = layer.unpack(carries)
        if not self.order.carried:
            return carries, (kept, None)
        pulls = [leave_idle]
        for stage in layer.tail:
            carries[-1], pull = stage_vjp(stage, {}, contexts[-1], carries[-1])
            pulls.append(pull)
        return carries, (kept, pulls)

    def backward(self, shards, contexts, kept, grads):
        """The gradients of the shards and of the carries that entered the first layer."""
        kept, ends = kept
        if ends:
            leave_idle, *leave_tail = ends
            for leave in reversed(leave_tail):
                grads[-1] = leave(grads[-1])[1]
        windows = self.travel.backward if self.travel else None

        def body(state, n_and_kept):
            grads, ahead, later, total = state
            n, kept = n_and_kept
            one = Backward(self.layer, contexts, grads, kept)
            one.have(ahead if windows else self._gathered(shards, n))
            arrived = self._gather_in(one, windows, shards, n, n - 1)
            put = self._scatter_in(one, shards, n, later)
            one.run(self.order.backward, n)
            later = one.weight_grads(later) if windows else None
            return (one.carries, arrived(), later, put(total)), None

        # Each layer's part is written once it is known.
        total = _uninitialized_like(shards)
        last = self._gathered(shards, self.length - 1, windows) if windows else None
        # The last layer scatters these as gradients of a layer after it; its own overwrite them.
        later = self._no_grads(last) if windows else None
        (grads, _, later, total), _ = lax.scan(
            body, (grads, last, later, total), (jnp.arange(self.length), kept), reverse=True
        )
        if windows:
            total = self._put(total, self._scattered(shards, 0, later), 0, self._own_shards())
        if ends:
            (grads[-1],) = leave_idle(grads[-1])
        return total, grads

    def _at(self, shards, n):
        """Layer n's shards; the nearest layer's where there is no such layer."""
        n = jnp.clip(n, 0, self.length - 1)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, n, 0, keepdims=False), shards)

    def _gather(self, group, shards, n, window=None):
        """How layer n's weights of a group come here."""
        pack, unpack = self.layer.pack, self.layer.unpack

        def prepared(state):
            del state
            of = lax.optimization_barrier(self._at(pick(shards, group.shards), n))
            return pack(group.prepare(of))

        run = lambda prepared: pack(group.gather(unpack(prepared)))  # noqa: E731
        return Transfer(prepared, run, window, arrives=bool(window and window.own))

    def _gathered(self, shards, n, windows=None):
        """Layer n's weights of each group; None of those that have a window in their own layer."""
        is_own = [window.own for window in windows or ()] or [False] * len(self.layer.groups)
        return [
            None if own else self._gather(group, shards, n).at_once()
            for group, own in zip(self.layer.groups, is_own, strict=True)
        ]

    def _gather_in(self, one, windows, shards, n, following):
        """Has a pass gather layer n's weights, and those of the layer that follows.

        Returns what gives the latter when its steps have run, as `_gathered` would; None without
        windows.
        """
        if not windows:
            return lambda: None
        ahead = []
        for group, window in zip(self.layer.groups, windows, strict=True):
            place = one.transfer(
                self._gather(group, shards, n if window.own else following, window)
            )
            ahead.append(None if window.own else place)
        return lambda: [None if place is None else one.result(place) for place in ahead]

    def _no_grads(self, ahead):
        """Of the weights whose gradients are scattered a layer later."""
        of = {
            name: weight
            for part, window in zip(ahead, self.travel.gradients, strict=True)
            if not window.own
            for name, weight in self.layer.unpack(part).items()
        }
        return _uninitialized_like(split_by_gradient(of)[0])

    def _scatter(self, group, shards, n, weight_grads, window=None):
        """How the gradients of a group leave, and what makes of the result those of its shards."""
        # The barrier keeps what is counted of casts from being fused otherwise in another order.
        of = lax.optimization_barrier(self._at(pick(shards, group.shards), n))
        prepared, pull_prepare = vjp(group.prepare, of)
        pull = vjp(group.gather, prepared)[1]
        run = lambda grads: pull(lax.optimization_barrier(grads))[0]  # noqa: E731
        return Transfer(weight_grads, run, window), lambda g: pull_prepare(g)[0]

    def _scattered(self, shards, n, weight_grads):
        """Of each group whose gradients are all there: the gradients of layer n's shards."""
        done = []
        for group in self.layer.groups:
            if set(group.weights) <= weight_grads.keys():
                of = lambda state, group=group: pick(weight_grads, group.weights)  # noqa: E731
                transfer, of_shards = self._scatter(group, shards, n, of)
                done.append(of_shards(transfer.at_once()))
        return done

    def _scatter_in(self, one, shards, n, later):
        """Has a pass scatter its gradients, and those of the layer before, `later`.

        Returns what puts them in their places when its steps have run.
        """
        if not self.travel:
            names = [name for group in self.layer.groups for name in group.weights]
            scattered = lambda: self._scattered(shards, n, one.weight_grads(names))  # noqa: E731
            return lambda total: self._put(total, scattered(), n)
        own, others = [], []
        for group, window in zip(self.layer.groups, self.travel.gradients, strict=True):
            of = lambda state, group=group: pick(later, group.weights)  # noqa: E731
            if window.own:
                of = lambda state, group=group: one.weight_grads(group.weights, state)  # noqa: E731
            layer, done = (n, own) if window.own else (n + 1, others)
            transfer, of_shards = self._scatter(group, shards, layer, of, window)
            done.append((of_shards, one.transfer(transfer)))

        def put(total):
            results = lambda done: [of_shards(one.result(place)) for of_shards, place in done]  # noqa: E731
            # Layer n + 1's own were put when that layer ran.
            total = self._put(total, results(others), n + 1, add=self._own_shards())
            return self._put(total, results(own), n)

        return put

    def _own_shards(self):
        """Names of the shards whose gradients come, all or in part, while their layer runs."""
        pairs = zip(self.layer.groups, self.travel.gradients, strict=True)
        return {name for group, window in pairs if window.own for name in group.shards}

    def _put(self, total, done, n, add=()):
        """`total` with layer n's gradients, which groups have parts of; added where `add` says."""
        grads = {}
        for part in done:
            for name, grad in part.items():
                grads[name] = add_trees(grads[name], grad) if name in grads else grad
        n = jnp.clip(n, 0, self.length - 1)
        for name, grad in grads.items():
            if name in add:
                grad = add_trees(grad, self._at(total[name], n))
            put = lambda a, b: lax.dynamic_update_index_in_dim(a, b, n, 0)  # noqa: E731
            total = total | {name: jax.tree.map(put, total[name], grad)}
        return total


def _uninitialized_like(tree):
    return jax.tree.map(lambda a: uninitialized(a.shape, a.dtype, (a,)), tree)
