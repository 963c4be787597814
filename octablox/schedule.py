"""Stages of a layer, the orders in which micro-batches run through them, and the backward pass.

A layer is a list of `Stage`s. A *turn* is one stage of one micro-batch, and an *order* says which
turns follow one another and which run side by side; every order gives the same numbers, since
stages are pure functions. `sequential` finishes a micro-batch before it starts the next one.
`batch_split` runs each stage for all micro-batches in turn, so that while one micro-batch waits for
the network the other computes. Its *steps* are

    compute        attention 0  unpermute 1,  experts 0   experts 1   unpermute 0
                                attention 1
    communication  combine 1    dispatch 0    dispatch 1  combine 0
                   (last layer)
    weights        down; a part gate and up;
                   of the next  the rest of
                   layer's      the next's

All transfers of a step start when it starts, and the step ends when all of them and its compute
have ended. The last micro-batch's combine has nothing left to run under in its own layer, so it is
*carried*: it runs at the start of the next layer. The backward pass is the mirror image: what was
not kept is computed again first, and each stage is turned around by its own vjp.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
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
class Step:
    """Turns between two points at which everything waits for everything.

    Attributes:
      compute: turns of the compute chain, one after the other.
      communication: turns of the communication chain, one after the other, beside them: what they
        need was there before the step.
    """

    compute: tuple[Turn, ...]
    communication: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """The step beside which a group of weights, or of their gradients, travels.

    Attributes:
      step: its number in the pass.
      own: whether they are this layer's. If not, weights are those of the layer that comes next,
        gradients those of the layer that came before, in the order of the pass.
    """

    step: int
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Travel:
    """When weights travel, and their gradients: for each group.

    Attributes:
      forward: of weights, in the forward pass.
      backward: of weights, in the backward pass.
      gradients: of gradients, in the backward pass.
    """

    forward: tuple[Window, ...]
    backward: tuple[Window, ...]
    gradients: tuple[Window, ...]


@dataclasses.dataclass(frozen=True)
class Order:
    """The steps of one layer.

    Attributes:
      forward, backward: the steps; the backward pass begins a stage that is not kept by a
        forward turn.
      travel: when weights and gradients do; None: when the layer needs or has them.
      carried: the last micro-batch's tail is that of the layer before.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
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
    return Order(_steps(stages, forward), _steps(stages, backward))


def batch_split(
    stages: Sequence[Stage],
    micro_batches: int,
    carried: bool = False,
    groups: Sequence[Sequence[str]] = (),
) -> Order:
    """Each block for all micro-batches before the next one.

    Args:
      stages: of the layer.
      micro_batches: of a batch.
      carried: as in `Order`.
      groups: of weights that travel together, their keys; of weights that only the last stage that
        reads any needs, and of others.

    Backward, the last stage that reads weights runs forward again right before it runs backward,
    which makes one long piece of compute for each micro-batch, the most there is to hide transfers
    under.
    """
    all_of, last = range(micro_batches), micro_batches - 1
    heavy, blocks = _heavy(stages), _blocks(stages)
    tail = range(heavy + 1, len(stages))
    transfers, lands = _by_chain(stages, tail)
    here = all_of[:-1] if carried else all_of  # micro-batches whose tail belongs to this layer
    of = lambda some, m: [Turn(s, m) for s in some]  # noqa: E731
    back = lambda some, m: [Turn(s, m, True) for s in reversed(some)]  # noqa: E731

    forward = of(transfers, last) if carried else []
    for n, block in enumerate(blocks):
        for m in all_of:
            forward += of(lands, last) if carried and n == 0 and m == last else []
            forward += of(block, m)
    for m in all_of:
        forward += of([heavy], m) + (of(transfers, m) if m in here else [])
    forward += [turn for m in here for turn in of(lands, m)]

    again = lambda some, m: of([s for s in some if not stages[s].save], m)  # noqa: E731
    tail_is_kept = all(stages[s].save for s in tail)
    backward = [turn for m in reversed(here) for turn in back(tail, m)] if tail_is_kept else []
    for block in blocks:
        for m in reversed(all_of):
            backward += again(block, m)
    for m in reversed(all_of):
        backward += again([heavy], m)
        backward += [] if tail_is_kept else again(tail, m) + back(tail, m)
        backward += back([heavy], m)
        backward += back(_by_chain(stages, blocks[-1])[0], m) if blocks else []
    for n, block in reversed(list(enumerate(blocks))):
        for m in reversed(all_of):
            backward += back(_by_chain(stages, block)[1], m)
            backward += back(_by_chain(stages, blocks[n - 1])[0], m) if n else []
            backward += back(tail, m) if carried and n == 0 and m == last else []
    # Weights that only the heavy stage needs are there when its step begins.
    early = {name for stage in stages[:heavy] for name in stage.weights}
    late = [bool(blocks) and not early & set(names) for names in groups]
    apart = [heavy] if any(late) else []
    steps = _steps(stages, forward, apart), _steps(stages, backward, apart)
    return Order(*steps, _travel(stages, micro_batches, *steps, late), carried)


def _steps(
    stages: Sequence[Stage], turns: Sequence[Turn], apart: Sequence[int] = ()
) -> tuple[Step, ...]:
    """Cuts turns into steps; stages that are `apart` share none with compute of other stages.

    A transfer is meant to run under the compute that follows it in `turns`. It begins a step if
    what it needs is made in the one before, and so does the compute that needs what it brings.
    """
    steps: list[tuple[list[Turn], list[Turn]]] = [([], [])]
    for turn in turns:
        compute, communication = steps[-1]
        is_transfer = stages[turn.stage].chain == "communication"
        waits = any(_follows(turn, one) for one in (compute if is_transfer else communication))
        leaves = any((one.stage in apart) != (turn.stage in apart) for one in compute)
        if waits or (leaves and not is_transfer):
            steps.append(([], []))
        steps[-1][is_transfer].append(turn)
    return tuple(Step(*map(tuple, step)) for step in steps)


def _follows(turn: Turn, other: Turn) -> bool:
    """Whether a turn needs what another one makes."""
    if turn.micro_batch != other.micro_batch:
        return False
    if turn.backward == other.backward:
        return turn.stage == other.stage + (-1 if turn.backward else 1)
    # The last stage runs again, and backward then.
    return turn.backward and turn.stage == other.stage


def _travel(stages, micro_batches, forward, backward, late):
    """When each group travels; `late`: whether only the heavy stage needs it.

    All travel beside the first block, where there is most to hide them, each group of a kind beside
    another micro-batch while there are any left. Late ones arrive in the layer that needs them, and
    their gradients leave in it: their places in memory are free then. Others are needed at once;
    they are gathered a layer ahead, and scattered a layer later.
    """
    first, last = (0 if _blocks(stages) else _heavy(stages)), micro_batches - 1

    def window(steps, micro_batch, own, backward=False):
        turn = Turn(first, micro_batch, backward)
        found = (n for n, step in enumerate(steps) if turn in step.compute)
        return next((Window(n, own) for n in found), None)

    windows, counts = [], [0, 0]
    for own in late:
        m = counts[own] % micro_batches
        counts[own] += 1
        again = window(backward, last - m, own)
        windows.append(
            (
                window(forward, m, own),
                # Where nothing runs again before it is needed, a layer ahead.
                again or window(backward, last - m, own=False, backward=True),
                window(backward, last - m, own, backward=True),
            )
        )
    return Travel(*map(tuple, zip(*windows, strict=True))) if windows else Travel((), (), ())


def _heavy(stages: Sequence[Stage]) -> int:
    """The number of the last stage that reads weights; if none does, of the last stage."""
    return max((s for s, stage in enumerate(stages) if stage.weights), default=len(stages) - 1)


def _blocks(stages: Sequence[Stage]) -> list[list[int]]:
    """The stages before the heavy one, cut where compute follows a transfer."""
    blocks: list[list[int]] = []
    for s in range(_heavy(stages)):
        follows = s and stages[s - 1].chain == "communication"
        if not s or (follows and stages[s].chain == "compute"):
            blocks.append([])
        blocks[-1].append(s)
    return blocks


def _by_chain(stages: Sequence[Stage], some: Iterable[int]) -> tuple[list[int], list[int]]:
    """Of some stages those of the communication chain, and those of the compute chain."""
    transfers = [s for s in some if stages[s].chain == "communication"]
    return transfers, [s for s in some if s not in transfers]


def _same(tree: Tree) -> Tree:
    return tree


@dataclasses.dataclass(frozen=True)
class WeightGroup:
    """Weights that travel together.

    Attributes:
      shards: keys of the layer's shards that `prepare` reads.
      weights: keys of the weights that `gather` returns, as the stages read them.
      prepare: a dict of the shards -> what travels: all that can be done before.
      gather: what travels -> a dict of the weights: transfers. Its transpose scatters their
        gradients.
    """

    shards: tuple[str, ...]
    weights: tuple[str, ...]
    prepare: Callable[[dict[str, Tree]], Tree]
    gather: Callable[[Tree], dict[str, Tree]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The stages of a layer, how its weights travel, and in which order it runs.

    Attributes:
      stages: first to last; the last one's carry has the structure of the first one's input.
      groups: of the weights; each travels as `Order.travel` says.
      schedule: sequential or batch split.
      idle: makes of a carry that enters a layer one from which its *tail*, the stages after the
        last one that reads weights, makes that carry, of the structure that the tail expects: so
        the first layer finds a tail to run that does nothing. Each stage of the tail must have
        `save`. None: no tail is carried into the next layer.
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
        for stage in self.tail if self.idle else ():
            if not stage.save:
                raise ValueError(f"stage {stage.name}: one that is carried must have save")

    @property
    def tail(self) -> tuple[Stage, ...]:
        """The stages after the last one that reads weights."""
        return self.stages[_heavy(self.stages) + 1 :]

    def order(self, layers: int) -> Order:
        """The order for a stack of that many layers."""
        micro_batches = self.schedule.micro_batches
        if not self.schedule.use_batch_split_schedule:
            return sequential(self.stages, micro_batches)
        carried = bool(self.idle and self.tail) and layers > 1
        return batch_split(
            self.stages, micro_batches, carried, [group.weights for group in self.groups]
        )
