"""Runs a stack of layers in the order of a schedule, forward and backward, under `lax.scan`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from octablox.kernels import uninitialized, vary_like
from octablox.schedule import Layer, Turn, Window

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
        windows = self.travel.forward if self.travel else None

        def body(state, n):
            carries, ahead = state
            turns = _Forward(layer, contexts, keep)
            turns.have(ahead if windows else self._gathered(shards, n))
            ahead = self._gather_in(turns, windows, shards, n, n + 1)
            carries = turns.run(self.order.forward, layer.unpack(carries))
            return (layer.pack(carries), ahead), turns.kept

        first = self._gathered(shards, 0, windows) if windows else None
        start = layer.pack(carries), first
        (carries, _), kept = lax.scan(body, start, jnp.arange(self.length))
        carries = layer.unpack(carries)
        if not self.order.carried:
            return carries, (kept, None)
        pulls = [leave_idle]
        for stage in layer.tail:
            carries[-1], pull = _stage_vjp(stage, {}, contexts[-1], carries[-1])
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
            turns = _Backward(self.layer, contexts, kept)
            turns.have(ahead if windows else self._gathered(shards, n))
            ahead = self._gather_in(turns, windows, shards, n, n - 1)
            put = self._scatter_in(turns, shards, n, later)
            grads = turns.run(self.order.backward, grads)
            later = turns.weight_grads(later) if windows else None
            return (grads, ahead, later, put(total)), None

        # Each layer's part is written once it is known.
        total = _uninitialized_like(shards)
        last = self._gathered(shards, self.length - 1, windows) if windows else None
        # The first turn scatters these as the last layer's gradient, which the second overwrites.
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

    def _gather(self, group, shards, n):
        """How layer n's weights of a group come here."""
        return _Transfer(
            lambda: self._at(_pick(shards, group.shards), n),
            lambda prepared: self.layer.pack(group.gather(prepared)),
            group.prepare,
        )

    def _gathered(self, shards, n, windows=None):
        """Layer n's weights of each group; None of those that have a window in their own layer."""
        is_own = [window.own for window in windows or ()] or [False] * len(self.layer.groups)
        return [
            None if own else self._gather(group, shards, n).at_once()
            for group, own in zip(self.layer.groups, is_own, strict=True)
        ]

    def _gather_in(self, turns, windows, shards, n, following):
        """Has turns gather layer n's weights, and those of the layer that follows.

        Returns a list that holds the latter when all turns have run, as `_gathered` would; None
        without windows.
        """
        if not windows:
            return None
        ahead = [None] * len(self.layer.groups)
        for place, (group, window) in enumerate(zip(self.layer.groups, windows, strict=True)):
            if window.own:
                transfer = self._gather(group, shards, n)
                turns.transfer(transfer, window, lambda part: turns.have([part]))
            else:
                transfer = self._gather(group, shards, following)
                turns.transfer(transfer, window, functools.partial(ahead.__setitem__, place))
        return ahead

    def _no_grads(self, ahead):
        """Of the weights whose gradients are scattered a layer later."""
        of = {
            name: weight
            for part, window in zip(ahead, self.travel.gradients, strict=True)
            if not window.own
            for name, weight in self.layer.unpack(part).items()
        }
        return _uninitialized_like(split_by_gradient(of)[0])

    def _scatter(self, group, shards, n, weight_grads):
        """How the gradients of a group leave, and what makes of the result those of its shards."""
        # The barrier keeps what is counted of casts from being fused otherwise in another order.
        of = lax.optimization_barrier(self._at(_pick(shards, group.shards), n))
        prepared, pull_prepare = _vjp(group.prepare, of)
        pull = _vjp(group.gather, prepared)[1]
        return _Transfer(weight_grads, lambda grads: pull(grads)[0]), lambda g: pull_prepare(g)[0]

    def _scattered(self, shards, n, weight_grads):
        """Of each group whose gradients are all there: the gradients of layer n's shards."""
        done = []
        for group in self.layer.groups:
            if set(group.weights) <= weight_grads.keys():
                of = functools.partial(_pick, weight_grads, group.weights)
                transfer, of_shards = self._scatter(group, shards, n, of)
                done.append(of_shards(transfer.at_once()))
        return done

    def _scatter_in(self, turns, shards, n, later):
        """Has turns scatter their gradients, and those of the layer before, `later`.

        Returns what puts them in their places when all turns have run.
        """
        if not self.travel:
            names = [name for group in self.layer.groups for name in group.weights]
            scattered = lambda: self._scattered(shards, n, turns.weight_grads(names))  # noqa: E731
            return lambda total: self._put(total, scattered(), n)
        own, others = [], []
        for group, window in zip(self.layer.groups, self.travel.gradients, strict=True):
            of = functools.partial(_pick, later, group.weights)
            if window.own:
                of = functools.partial(turns.weight_grads, group.weights)
            layer, done = (n, own) if window.own else (n + 1, others)
            transfer, of_shards = self._scatter(group, shards, layer, of)
            keep = lambda grads, of_shards=of_shards, done=done: done.append(of_shards(grads))  # noqa: E731
            turns.transfer(transfer, window, keep)

        def put(total):
            # Layer n + 1's own were put one turn ago.
            total = self._put(total, others, n + 1, add=self._own_shards())
            return self._put(total, own, n)

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
                grads[name] = _add(grads[name], grad) if name in grads else grad
        n = jnp.clip(n, 0, self.length - 1)
        for name, grad in grads.items():
            if name in add:
                grad = _add(grad, self._at(total[name], n))
            put = lambda a, b: lax.dynamic_update_index_in_dim(a, b, n, 0)  # noqa: E731
            total = total | {name: jax.tree.map(put, total[name], grad)}
        return total


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """What travels under a window.

    Attributes:
      of: makes what there is before it.
      run: the transfer.
      prepare: what must be done before the transfer; None: nothing.
    """

    of: Callable[[], Tree]
    run: Callable[[Tree], Tree]
    prepare: Callable[[Tree], Tree] | None = None

    def at_once(self) -> Tree:
        """The result, without a window."""
        return self.run(self.prepare(self.of()) if self.prepare else self.of())


class _Turns:
    """Runs turns in order: each waits for the one before it in its chain, transfers for theirs."""

    def __init__(self, layer, contexts):
        self.layer, self.contexts = layer, contexts
        self._weights = {}
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

    def have(self, groups):
        """Takes packed groups of weights that have come."""
        for part in groups:
            self._weights |= self.layer.unpack(part or {})

    def transfer(self, transfer, window, arrived):
        """Will run a transfer under its window, and give the result to `arrived` at its end."""
        self._transfers.append(_UnderWay(transfer, window, arrived))

    def before(self, turns, n):
        """Starts the transfers whose window begins with turn n, prepares those of the next one."""
        for one in self._transfers:
            if one.transfer.prepare and n == self._turn_before(turns, one.window.first):
                of = self.enter("compute", one.transfer.of())
                one.value = one.transfer.prepare(of)
        for one in self._transfers:
            if one.window.first == n:
                if one.transfer.prepare:
                    self._last["compute"] = self._last.get("compute"), self.layer.pack(one.value)
                else:
                    one.value = one.transfer.of()
                one.value = one.transfer.run(self.enter("compute", one.value))

    def _turn_before(self, turns, n):
        """The compute turn before turn n; or that one, if it is the first."""
        is_compute = lambda m: self.layer.stages[turns[m].stage].chain == "compute"  # noqa: E731
        return max(filter(is_compute, range(n)), default=n)

    def after(self, n):
        """Ends the transfers whose window ends with turn n."""
        for one in self._transfers:
            if one.window.last == n:
                self._last["compute"] = (self._last["compute"], one.value)
                one.arrived(one.value)

    def read(self, stage):
        """The weights that a stage reads."""
        return _pick(self._weights, stage.weights)


@dataclasses.dataclass
class _UnderWay:
    """A transfer with its window; `value` is what there is of it: prepared, then the result."""

    transfer: _Transfer
    window: Window
    arrived: Callable[[Tree], None]
    value: Tree = None


class _Forward(_Turns):
    """One layer's forward pass; `kept` is what the backward pass needs of it."""

    def __init__(self, layer, contexts, keep):
        super().__init__(layer, contexts)
        self._keep, self.kept = keep, {}

    def run(self, turns, carries):
        """The carries after the layer."""
        carries = list(carries)
        for n, turn in enumerate(turns):
            self.before(turns, n)
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

    def __init__(self, layer, contexts, kept):
        super().__init__(layer, contexts)
        self._kept, self._ran, self._weight_grads = kept, {}, {}

    def run(self, turns, grads):
        """The gradients of the carries before the layer, of those after it."""
        grads = list(grads)
        for n, turn in enumerate(turns):
            self.before(turns, n)
            if turn.backward:
                grads[turn.micro_batch] = self._pull(turn, grads[turn.micro_batch])
            else:
                self._again(turn)
            self.after(n)
        return grads

    def weight_grads(self, names):
        """The gradients of weights, zeros of those that no stage reads."""
        floats = split_by_gradient(_pick(self._weights, names))[0]
        found = self._weight_grads
        return {n: found[n] if n in found else _zeros_like(w) for n, w in floats.items()}

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
