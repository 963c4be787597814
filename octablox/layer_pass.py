"""One layer's forward or backward pass, in the steps of an order."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from octablox import computation
from octablox.kernels import vary_like
from octablox.schedule import Turn, Window
from octablox.vjp import restored, split_by_gradient, stage_vjp, without

Tree = Any


@dataclasses.dataclass(frozen=True)
class Transfer:
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


class Pass:
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
            if together and computation.helps():
                run = lambda state, n=number, step=step: self._step(n, step, {}, state)  # noqa: E731
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
        weights = self.layer.unpack(pick(state["weights"], stage.weights))
        return stage, weights, state["contexts"][turn.micro_batch]


class Forward(Pass):
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
            output, pull = stage_vjp(stage, *known, carry)
            hold(_key(turn), without(pull, known))
            if turn.stage + 1 < len(stages) and not stages[turn.stage + 1].save:
                hold(_key(turn, "output"), self.layer.pack(output))
        else:
            output = stage.fn(*known, carry)
        state["carries"][turn.micro_batch] = output = self.layer.pack(output)
        return output


class Backward(Pass):
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
        weights = self.layer.unpack(pick(state["weights"], names))
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
        output, pull = stage_vjp(stage, *known, self.layer.unpack(after(carry)))
        # The barrier rounds residuals alike, whether or not a step ends before they are used.
        ran = lax.optimization_barrier((self.layer.pack(output), without(pull, known)))
        state["ran"][_key(turn)] = ran
        return ran[0]

    def _pull(self, turn, after, state):
        stage, *known = self._inputs(turn, state)
        kept = state["kept"].pop(_key(turn)) if stage.save else state["ran"].pop(_key(turn))[1]
        pull = restored(kept, known)
        weight_grads, grad = pull(after(state["carries"][turn.micro_batch]))
        total = state["weight_grads"]
        for name, part in weight_grads.items():
            total[name] = add_trees(total[name], part) if name in total else part
        state["carries"][turn.micro_batch] = grad
        return grad, weight_grads


def pick(tree: dict[str, Tree], names: Iterable[str]) -> dict[str, Tree]:
    """Some entries of a dict."""
    return {name: tree[name] for name in names}


def add_trees(a: Tree, b: Tree) -> Tree:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, a, b)


def _after(before, values):
    """`values`, when there is `before`."""
    return lax.optimization_barrier((values, before))[0]


def _key(turn, of="residuals"):
    return f"{of} of {turn.stage}.{turn.micro_batch}"


def _zeros_like(tree):
    """Zeros that vary over the mesh as the arrays of `tree` do."""
    return jax.tree.map(lambda a: vary_like((a,), jnp.zeros(a.shape, a.dtype)), tree)
