"""Runs a stack of layers in the order of a schedule, forward and backward, under `lax.scan`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from octablox import computation
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
            one = _Forward(layer, contexts, carries, keep)
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
            one = _Backward(self.layer, contexts, grads, kept)
            one.have(ahead if windows else self._gathered(shards, n))
            arrived = self._gather_in(one, windows, shards, n, n - 1)
            put = self._scatter_in(one, shards, n, later)
            one.run(self.order.backward, n)
            later = one.weight_grads(later) if windows else None
            return (one.carries, arrived(), later, put(total)), None

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

    def _gather(self, group, shards, n, window=None):
        """How layer n's weights of a group come here."""
        pack, unpack = self.layer.pack, self.layer.unpack

        def prepared(state):
            del state
            of = lax.optimization_barrier(self._at(_pick(shards, group.shards), n))
            return pack(group.prepare(of))

        run = lambda prepared: pack(group.gather(unpack(prepared)))  # noqa: E731
        return _Transfer(prepared, run, window, arrives=bool(window and window.own))

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
        of = lax.optimization_barrier(self._at(_pick(shards, group.shards), n))
        prepared, pull_prepare = _vjp(group.prepare, of)
        pull = _vjp(group.gather, prepared)[1]
        run = lambda grads: pull(lax.optimization_barrier(grads))[0]  # noqa: E731
        return _Transfer(weight_grads, run, window), lambda g: pull_prepare(g)[0]

    def _scattered(self, shards, n, weight_grads):
        """Of each group whose gradients are all there: the gradients of layer n's shards."""
        done = []
        for group in self.layer.groups:
            if set(group.weights) <= weight_grads.keys():
                of = lambda state, group=group: _pick(weight_grads, group.weights)  # noqa: E731
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
            of = lambda state, group=group: _pick(later, group.weights)  # noqa: E731
            if window.own:
                of = lambda state, group=group: one.weight_grads(group.weights, state)  # noqa: E731
            layer, done = (n, own) if window.own else (n + 1, others)
            transfer, of_shards = self._scatter(group, shards, layer, of, window)
            done.append((of_shards, one.transfer(transfer)))

        def put(total):
            results = lambda done: [of_shards(one.result(place)) for of_shards, place in done]  # noqa: E731
            # Layer n + 1's own were put one turn ago.
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
    """What travels beside a step.

    Attributes:
      prepared: makes what travels, of the state of the pass.
      run: the transfer.
      window: when; None: at once.
      arrives: whether the steps that follow read what it brings, weights.
    """

    prepared: Callable[[Tree | None], Tree]
    run: Callable[[Tree], Tree]
    window: Window | None = None
    arrives: bool = False

    def at_once(self) -> Tree:
        """The result, without a window."""
        return self.run(self.prepared(None))


class _Pass:
    """One layer's forward or backward pass, step by step.

    Its `_state` is a tree of all there is at a point of it, packed (`Layer.pack`): `carries`, one
    per micro-batch, or their gradients; `contexts`; `weights` that have come, by name; `transfers`,
    of each one what travels or, when it has ended, the result; `kept`, by `_key`.
    """

    def __init__(self, layer, contexts, carries, kept):
        self.layer, self._transfers = layer, []
        self._state = {
            "carries": list(carries),
            "contexts": list(contexts),
            "weights": {},
            "transfers": [],
            "kept": kept,
        }

    @property
    def carries(self):
        """What there is of each micro-batch."""
        return self._state["carries"]

    def have(self, groups):
        """Takes packed groups of weights that have come."""
        for part in groups:
            self._state["weights"] |= part or {}

    def transfer(self, transfer):
        """Will run a transfer beside the step of its window; returns its number, for `result`."""
        self._transfers.append(transfer)
        self._state["transfers"].append(None)
        return len(self._transfers) - 1

    def result(self, number):
        """Of a transfer whose step has run."""
        return self._state["transfers"][number]

    def run(self, steps, n):
        """Runs the steps of layer n."""
        self._prepare(self._state, 0)
        waits = {}
        for number, step in enumerate(steps):
            self._before(step)
            together = step.compute and (step.communication or self._beside(number))
            if together and computation.of_use():
                run = functools.partial(self._step, number, step, {})
                self._state = computation.as_computation(run, self._state, n)
                waits = {}  # all has waited for all
            else:
                self._state = self._step(number, step, waits, self._state)

    def _before(self, step):
        """Called before each step."""

    def _turn(self, turn, after, state):
        """Changes `state` by one turn, whose input passes through `after`; returns its results."""
        raise NotImplementedError

    def _step(self, number, step, waits, state):
        """The state after a step; `waits`: what came before it, by chain."""
        state = jax.tree.map(lambda leaf: leaf, state)  # its dicts and lists are changed here
        ended = {}
        for place in self._beside(number):
            travels = _after(waits.get("compute"), state["transfers"][place])
            ended[place] = self._transfers[place].run(travels)
        for chain, turns in (("communication", step.communication), ("compute", step.compute)):
            for turn in turns:
                after = functools.partial(_after, waits.get(chain))
                waits[chain] = self._turn(turn, after, state)
        self._prepare(state, number + 1)
        for place, value in ended.items():
            waits["compute"] = waits.get("compute"), value
            if self._transfers[place].arrives:
                state["weights"] |= value
                value = None
            state["transfers"][place] = value
        return state

    def _prepare(self, state, number):
        """Does what must be done before the transfers beside a step."""
        for place in self._beside(number):
            state["transfers"][place] = self._transfers[place].prepared(state)

    def _beside(self, number):
        """The transfers beside a step."""
        return [place for place, one in enumerate(self._transfers) if one.window.step == number]

    def _inputs(self, turn, state):
        """The stage of a turn, the weights that it reads, and its context."""
        stage = self.layer.stages[turn.stage]
        weights = self.layer.unpack(_pick(state["weights"], stage.weights))
        return stage, weights, state["contexts"][turn.micro_batch]


class _Forward(_Pass):
    """One layer's forward pass."""

    def __init__(self, layer, contexts, carries, keep):
        super().__init__(layer, contexts, carries, {})
        self._keep, self._away = keep, set()

    def kept(self):
        """What the backward pass needs of this one."""
        return {
            key: jax.device_put(tree, jax.memory.Space.Host) if key in self._away else tree
            for key, tree in self._state["kept"].items()
        }

    def _turn(self, turn, after, state):
        stages = self.layer.stages
        stage, *known = self._inputs(turn, state)
        carry = state["carries"][turn.micro_batch]

        def hold(key, tree):
            state["kept"][key] = tree
            if stage.offload:
                self._away.add(key)

        if self._keep and turn.stage == 0 and not stage.save:
            hold(_key(turn, "input"), carry)
        carry = self.layer.unpack(after(carry))
        if self._keep and stage.save:
            output, pull = _stage_vjp(stage, *known, carry)
            hold(_key(turn), _without(pull, known))
            if turn.stage + 1 < len(stages) and not stages[turn.stage + 1].save:
                hold(_key(turn, "output"), self.layer.pack(output))
        else:
            output = stage.fn(*known, carry)
        state["carries"][turn.micro_batch] = output = self.layer.pack(output)
        return output


class _Backward(_Pass):
    """One layer's backward pass: `carries` are gradients.

    More entries of the state: `ran`, of turns that ran again the output and the pull; the
    `weight_grads` by name.
    """

    def __init__(self, layer, contexts, grads, kept):
        super().__init__(layer, contexts, grads, kept)
        self._state |= {"ran": {}, "weight_grads": {}}
        self._away = set(kept)

    def weight_grads(self, names, state=None):
        """The gradients of weights, zeros of those that no stage reads."""
        state = state or self._state
        weights = self.layer.unpack(_pick(state["weights"], names))
        found = state["weight_grads"]
        floats = split_by_gradient(weights)[0]
        return {n: found[n] if n in found else _zeros_like(w) for n, w in floats.items()}

    def _before(self, step):
        """Fetches what waits in the host's memory."""
        kept = self._state["kept"]
        for turn in (*step.communication, *step.compute):
            stage, key = self._kept_for(turn)
            if key in self._away and stage.offload:
                kept[key] = jax.device_put(kept[key], jax.memory.Space.Device)
                self._away.remove(key)

    def _kept_for(self, turn):
        """What a turn needs of the forward pass: the stage that it is of, and its key."""
        stages = self.layer.stages
        if turn.backward:
            return stages[turn.stage], _key(turn)
        if turn.stage == 0:
            return stages[0], _key(turn, "input")
        return stages[turn.stage - 1], _key(Turn(turn.stage - 1, turn.micro_batch), "output")

    def _turn(self, turn, after, state):
        return (self._pull if turn.backward else self._again)(turn, after, state)

    def _again(self, turn, after, state):
        stage, *known = self._inputs(turn, state)
        kept, ran = self._kept_for(turn)[1], _key(Turn(turn.stage - 1, turn.micro_batch))
        carry = state["kept"][kept] if kept in state["kept"] else state["ran"][ran][0]
        output, pull = _stage_vjp(stage, *known, self.layer.unpack(after(carry)))
        # The barrier rounds residuals alike, whether or not a step ends before they are used.
        ran = lax.optimization_barrier((self.layer.pack(output), _without(pull, known)))
        state["ran"][_key(turn)] = ran
        return ran[0]

    def _pull(self, turn, after, state):
        stage, *known = self._inputs(turn, state)
        kept = state["kept"].pop(_key(turn)) if stage.save else state["ran"].pop(_key(turn))[1]
        pull = _restored(kept, known)
        weight_grads, grad = pull(after(state["carries"][turn.micro_batch]))
        total = state["weight_grads"]
        for name, part in weight_grads.items():
            total[name] = _add(total[name], part) if name in total else part
        state["carries"][turn.micro_batch] = grad
        return grad, weight_grads


def _after(before, values):
    """`values`, when there is `before`."""
    return lax.optimization_barrier((values, before))[0]


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
