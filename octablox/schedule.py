"""Stages of a layer, the orders in which micro-batches run through them, and the backward pass.

A layer is a list of `Stage`s. An *order* is a list of turns, each one stage of one micro-batch;
every order gives the same numbers, since stages are pure functions. `sequential` finishes a
micro-batch before it starts the next one. `batch_split` runs each stage for all micro-batches in
turn, so that while one micro-batch waits for the network the other computes:

    compute        attention 0  attention 1  experts 0   experts 1
    communication  combine 1    dispatch 0   dispatch 1  combine 0
                   (last layer)
    weights        the next layer's          and the rest of them

The last micro-batch's combine has nothing left to run under in its own layer, so it is *carried*:
it runs at the start of the next layer. Weights are gathered one layer ahead.
The backward pass is the mirror image: what was not kept is computed again first, each stage is
turned around by its own vjp, and weight gradients are scattered one layer later.

What ties an order down is `lax.optimization_barrier`: a turn of the compute chain waits for the
turn before it in that chain, a turn of the communication chain for its own predecessor, and
nothing else waits. A transfer of weights may start when the compute chain has reached its `Window`,
and the chain goes on after the window only when the transfer has ended.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pydantic

Tree = Any


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
    remat_policy: Literal["full", "minimal", "minimal_offloaded", "none"] = pydantic.Field(
        "minimal",
        description="what the backward pass keeps: full only each layer's input, minimal also the "
        "dispatched rows (no dispatch runs twice), minimal_offloaded the same in the host's "
        "memory, none recomputes nothing",
    )

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a batch is cut into."""
        return self.batch_split_factor or (2 if self.use_batch_split_schedule else 1)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A pure function `fn(weights, context, carry) -> carry` and how its backward gets its inputs.

    Attributes:
      name: what errors call it.
      fn: the function. `context` (positions, masks) is never differentiated.
      weights: keys of the layer's weights that it reads.
      chain: what the stage mostly uses, the chips or the network.
      save: whether its vjp's residuals are kept (its output too where the next stage starts
        from it); otherwise it runs again in the backward pass, from the nearest kept carry.
      offload: whether what is kept of it, or the carry that enters it as the first stage, waits
        for the backward pass in the host's pinned memory.
    """

    name: str
    fn: Callable[[Tree, Tree, Tree], Tree]
    weights: tuple[str, ...]
    chain: Literal["compute", "communication"] = "compute"
    save: bool = False
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class Turn:
    """One stage of one micro-batch, forward (or forward again) or backward."""

    stage: int
    micro_batch: int
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Window:
    """The turns under which a group of weights, or of their gradients, travels: by their numbers.

    Attributes:
      first: the first of them.
      last: the last of them.
    """

    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Travel:
    """When weights travel one layer ahead, and their gradients one layer later: for each group.

    Attributes:
      forward: of the next layer's weights, in the forward turns.
      backward: of the same, in the backward turns.
      gradients: of the layer's gradients, in the backward turns.
    """

    forward: tuple[Window, ...]
    backward: tuple[Window, ...]
    gradients: tuple[Window, ...]


@dataclasses.dataclass(frozen=True)
class Order:
    """The turns of one layer.

    Attributes:
      forward, backward: the turns; the backward pass begins a stage that is not kept by a
        forward turn.
      travel: when weights and gradients do; None: when the layer needs or has them.
      carried: the last micro-batch's last stage is that of the layer before.
    """

    forward: tuple[Turn, ...]
    backward: tuple[Turn, ...]
    travel: Travel | None = None
    carried: bool = False


def sequential(stages: Sequence[Stage], micro_batches: int) -> Order:
    """Each micro-batch through all stages before the next one."""
    forward, backward = [], []
    for m in range(micro_batches):
        forward += [Turn(s, m) for s in range(len(stages))]
    for m in reversed(range(micro_batches)):
        backward += [Turn(s, m) for s, stage in enumerate(stages) if not stage.save]
        backward += [Turn(s, m, True) for s in reversed(range(len(stages)))]
    return Order(tuple(forward), tuple(backward))


def batch_split(
    stages: Sequence[Stage], micro_batches: int, carried: bool = False, groups: int = 1
) -> Order:
    """Each stage for all micro-batches before the next one; `carried` as in `Order`.

    Backward, the last compute stage runs forward again right before it runs backward, which makes
    one long piece of compute for each micro-batch, the most there is to hide transfers under.
    """
    all_of = range(micro_batches)
    heavy, last = _compute_stages(stages)[-1], len(stages) - 1
    tail = range(heavy + 1, len(stages))
    here = all_of[:-1] if carried else all_of  # micro-batches whose tail belongs to this layer

    forward = [Turn(last, micro_batches - 1)] if carried else []
    forward += [Turn(s, m) for s in range(heavy + 1) for m in all_of]
    forward += [Turn(s, m) for s in tail for m in here]

    tail_is_kept = all(stages[s].save for s in tail)
    tail_forward = {m: [Turn(s, m) for s in tail if not stages[s].save] for m in here}
    tail_backward = {m: [Turn(s, m, True) for s in reversed(tail)] for m in here}
    backward = []
    if tail_is_kept:
        backward += [turn for m in reversed(here) for turn in tail_backward[m]]
    backward += [Turn(s, m) for s in range(heavy) if not stages[s].save for m in reversed(all_of)]
    for m in reversed(all_of):
        backward += [] if stages[heavy].save else [Turn(heavy, m)]
        if not tail_is_kept:
            backward += tail_forward[m] + tail_backward[m]
        backward.append(Turn(heavy, m, True))
    backward += [Turn(s, m, True) for s in reversed(range(heavy)) for m in reversed(all_of)]
    backward += [Turn(last, micro_batches - 1, True)] if carried else []
    travel = _travel(stages, micro_batches, forward, backward, groups)
    return Order(tuple(forward), tuple(backward), travel, carried)


def _travel(stages, micro_batches, forward, backward, groups):
    """The last of several groups under the first compute stage, the others under the last one.

    Either has about half of the compute, and what tokens wait for travels in between.
    """
    compute, last = _compute_stages(stages), micro_batches - 1
    light, heavy = compute[0], compute[-1]

    def window(turns, test, otherwise=None):
        found = [n for n, turn in enumerate(turns) if test(turn)]
        return Window(found[0], found[-1]) if found else otherwise

    def heavy_of(turns, m):
        return window(turns, lambda turn: (turn.stage, turn.micro_batch) == (heavy, m))

    others = groups if groups == 1 or light == heavy else groups - 1
    under_heavy = heavy_of(forward, 0), heavy_of(backward, 0), heavy_of(backward, last)
    of_groups = [[under] * others for under in under_heavy]
    if others < groups:
        of_groups[0].append(window(forward, lambda turn: turn.stage == light))
        of_groups[1].append(window(backward, lambda turn: turn == Turn(light, last, True)))
        is_again = lambda turn: turn.stage in compute[:-1] and not turn.backward  # noqa: E731
        of_groups[2].append(window(backward, is_again, otherwise=under_heavy[2]))
    return Travel(*map(tuple, of_groups))


def _compute_stages(stages: Sequence[Stage]) -> list[int]:
    """The numbers of the stages of the compute chain."""
    return [s for s, stage in enumerate(stages) if stage.chain == "compute"]


def _same(tree: Tree) -> Tree:
    return tree


@dataclasses.dataclass(frozen=True)
class WeightGroup:
    """Weights that travel together.

    Attributes:
      shards: keys of the layer's shards that `gather` reads.
      weights: keys of the weights that it returns, as the stages read them.
      gather: a dict of the shards -> a dict of the weights. Its transpose scatters their
        gradients.
    """

    shards: tuple[str, ...]
    weights: tuple[str, ...]
    gather: Callable[[dict[str, Tree]], dict[str, Tree]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The stages of a layer, how its weights travel, and in which order it runs.

    Attributes:
      stages: first to last; the last one's carry has the structure of the first one's input.
      groups: of the weights; each travels as `Order.travel` says.
      schedule: sequential or batch split.
      idle: makes of a carry that enters a layer one from which the last stage makes that carry,
        of the structure that the last stage expects: so the first layer finds a last stage to run
        that does nothing. That stage must read no weights and have `save`. None: no last stage is
        carried into the next layer.
      pack, unpack: a tree of weights or of a carry, less what need not be held (zeros that only
        stand for a gradient), and the inverse.
    """

    stages: tuple[Stage, ...]
    groups: tuple[WeightGroup, ...]
    schedule: ScheduleConfig
    idle: Callable[[Tree], Tree] | None = None
    pack: Callable[[Tree], Tree] = _same
    unpack: Callable[[Tree], Tree] = _same

    def __post_init__(self):
        last = self.stages[-1]
        if self.idle and (last.weights or not last.save):
            raise ValueError(f"stage {last.name}: one that is carried reads no weights, has save")

    def order(self, layers: int) -> Order:
        """The order for a stack of that many layers."""
        micro_batches = self.schedule.micro_batches
        if not self.schedule.use_batch_split_schedule:
            return sequential(self.stages, micro_batches)
        carried = self.idle is not None and layers > 1
        return batch_split(self.stages, micro_batches, carried, len(self.groups))
