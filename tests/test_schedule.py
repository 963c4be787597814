"""Schedules: orders, gradients equal to autodiff's, what is kept, what waits for what."""

import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest
import tiny_model
from jax import numpy as jnp

from octablox.layer_scan import run_layers
from octablox.schedule import (
    Layer,
    ScheduleConfig,
    Stage,
    Step,
    Travel,
    Turn,
    WeightGroup,
    Window,
    batch_split,
    sequential,
)

T, D, F, LAYERS = 8, 16, 32, 3
# The order, and whether the last combine is carried into the next layer.
SPLITS = {"sequential": (False, False), "batch split": (True, False), "carried": (True, True)}
ORDERS = pytest.mark.parametrize("order", SPLITS)
GROUPS = ("gate", "up"), ("down", "wa", "unused")
NAMES = "attend", "dispatch", "experts", "combine", "unpermute"
# Which stages keep their residuals.
SAVES = {
    "full": "",
    "minimal": "dispatch",
    "none": "attend dispatch experts combine unpermute",
    "first": "attend",
    "middle": "dispatch experts",
    "last": "combine unpermute",
    "apart": "attend experts",
}


def stages(save=""):
    """Stages like those of a MoE layer, with integers in the carries between them."""

    def attend(weights, context, x):
        return x + jnp.tanh(x @ weights["wa"]) * context[:, None]

    def dispatch(weights, context, x):
        del weights, context
        back = jnp.argsort(jnp.arange(T)[::-1])
        return {"x": x, "rows": x[::-1], "back": back, "small": x.astype(jnp.float8_e4m3fn)}

    def experts(weights, context, carry):
        del context
        h = jax.nn.silu(carry["rows"] @ weights["gate"]) * (carry["rows"] @ weights["up"])
        return {"x": carry["x"], "rows": h @ weights["down"], "back": carry["back"]}

    def combine(weights, context, carry):
        del weights, context
        return {"x": carry["x"], "rows": carry["rows"][carry["back"]]}

    def unpermute(weights, context, carry):
        del weights, context
        return carry["x"] + carry["rows"]

    kinds = ("wa",), (), ("gate", "up", "down"), (), ()
    chains = "compute", "communication", "compute", "communication", "compute"
    functions = attend, dispatch, experts, combine, unpermute
    return tuple(
        Stage(name, fn, weights, chain, save=name in save.split())
        for name, fn, weights, chain in zip(NAMES, functions, kinds, chains, strict=True)
    )


@functools.cache
def data(micro_batches=2):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D), "wa": (D, D), "unused": (D, 3)}
    weights = {name: draw(LAYERS, *shape) for name, shape in shapes.items()}
    xs = [draw(T, D) * 4 for _ in range(micro_batches)]
    contexts = [jnp.arange(T, dtype=jnp.float32) + m for m in range(micro_batches)]
    return weights, xs, contexts


def idle(x):
    return {"x": x, "rows": jnp.zeros_like(x), "back": jnp.arange(T)}


def layer_of(order, save, micro_batches=2, prepare=dict, gather=dict):
    split, carried = SPLITS[order]
    config = ScheduleConfig(use_batch_split_schedule=split, batch_split_factor=micro_batches)
    groups = tuple(WeightGroup(names, names, prepare, gather) for names in GROUPS)
    chain = stages(save)
    if carried:  # the tail must be kept
        chain = (*chain[:3], *(dataclasses.replace(stage, save=True) for stage in chain[3:]))
    return Layer(chain, groups, config, idle=idle if carried else None)


def scheduled(order, save, micro_batches=2, **kwargs):
    """(weights, xs) -> a scalar, through `run_layers`."""
    _, _, contexts = data(micro_batches)
    layer = layer_of(order, save, micro_batches, **kwargs)

    def total(weights, xs):
        return sum(jnp.sum(x**2) for x in run_layers(layer, weights, contexts, xs))

    return total


def plain(micro_batches=2):
    """The same without a schedule."""
    _, _, contexts = data(micro_batches)

    def total(weights, xs):
        def one(x, context):
            for n in range(LAYERS):
                for stage in stages():
                    x = stage.fn({k: w[n] for k, w in weights.items()}, context, x)
            return jnp.sum(x**2)

        return sum(map(one, xs, contexts))

    return total


@functools.cache
def value_and_grads(order, save="", micro_batches=2):
    total = plain(micro_batches) if order is None else scheduled(order, save, micro_batches)
    weights, xs, _ = data(micro_batches)
    return jax.device_get(jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(weights, xs))


@ORDERS
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_gradients_equal_autodiffs(order, save):
    got, expected = value_and_grads(order, save), value_and_grads(None)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("order", ["batch split", "carried"])
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_orders_give_the_same_bits(save, order):
    got, expected = value_and_grads(order, save), value_and_grads("sequential", save)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@ORDERS
def test_what_is_kept_may_wait_in_the_hosts_memory(order):
    """The same bits; and each kept array goes there and comes back."""
    weights, xs, contexts = data()
    layer = layer_of(order, SAVES["minimal"])
    away = tuple(dataclasses.replace(stage, offload=True) for stage in layer.stages)
    layer = dataclasses.replace(layer, stages=away)
    total = lambda weights, xs: sum(  # noqa: E731
        jnp.sum(x**2) for x in run_layers(layer, weights, contexts, xs)
    )
    value_and_grad = jax.value_and_grad(total, argnums=(0, 1))
    got = jax.device_get(jax.jit(value_and_grad)(weights, xs))
    jax.tree.map(np.testing.assert_array_equal, got, value_and_grads(order, SAVES["minimal"]))
    text = str(jax.make_jaxpr(value_and_grad)(weights, xs))
    kept = [shape for shape in kept_shapes(order, SAVES["minimal"]) if len(shape) > 1]
    assert text.count("Host") >= len(kept) and text.count("Space.Device") >= len(kept)


@pytest.mark.parametrize("order", ["batch split", "carried"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_any_number_of_micro_batches(micro_batches, order):
    save = SAVES["minimal"]
    got = value_and_grads(order, save, micro_batches)
    jax.tree.map(
        np.testing.assert_array_equal, got, value_and_grads("sequential", save, micro_batches)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5),
        got,
        value_and_grads(None, micro_batches=micro_batches),
    )


def test_weights_that_no_stage_reads_have_zero_gradients():
    grads = value_and_grads("carried", SAVES["minimal"])[1][0]
    np.testing.assert_array_equal(grads["unused"], np.zeros((LAYERS, D, 3)))
    assert all(np.abs(grads[name]).max() > 0 for name in ("gate", "up", "down", "wa"))


def kept_shapes(order, save):
    """Shapes of all that the backward pass gets of the forward pass, less its own arguments."""
    weights, xs, contexts = data()
    pull = lambda weights, xs: jax.vjp(scheduled(order, save), weights, xs)[1]  # noqa: E731
    shapes = [v.aval.shape for v in jax.make_jaxpr(pull)(weights, xs).jaxpr.outvars]
    for a in (*jax.tree.leaves(weights), *contexts):
        if a.shape in shapes:
            shapes.remove(a.shape)
    return [shape for shape in shapes if shape and shape[0] == LAYERS]


@ORDERS
def test_what_each_policy_keeps(order):
    """Per micro-batch and layer; nothing of the size of a weight ever."""
    full, minimal, none = (kept_shapes(order, SAVES[save]) for save in ("full", "minimal", "none"))
    indices = [(LAYERS, T, 1)] * 2 if order == "carried" else []  # the tail is always kept
    assert full == [(LAYERS, T, D)] * 2 + indices
    # The layer's input, and dispatch's outputs: x, rows and the 8-bit copy; its indices, twice.
    assert minimal.count((LAYERS, T, D)) == 2 + 3 * 2
    assert set(minimal) == {(LAYERS, T, D), (LAYERS, T), *indices}
    assert not {(LAYERS, D, F), (LAYERS, F, D), (LAYERS, D, D)} & set(none)
    assert none.count((LAYERS, T, F)) > 0


@pytest.mark.parametrize("save", ["", SAVES["none"]], ids=["full", "none"])
@ORDERS
def test_gathered_weights_are_not_kept_and_are_differentiated_through(save, order):
    weights, xs, _ = data()
    sine = lambda shards: {name: jnp.sin(w) for name, w in shards.items()}  # noqa: E731
    total = scheduled(order, save, gather=sine)
    pull = jax.make_jaxpr(lambda weights, xs: jax.vjp(total, weights, xs)[1])(weights, xs)
    shapes = [v.aval.shape for v in pull.jaxpr.outvars]
    assert shapes.count((LAYERS, D, F)) == 2 and shapes.count((LAYERS, F, D)) == 1  # the shards
    opened = {name: jnp.sin(w) for name, w in weights.items()}
    _, expected = jax.value_and_grad(plain())(opened, xs)
    got = jax.jit(jax.grad(total))(weights, xs)
    for name, w in weights.items():
        expected[name] *= jnp.cos(w)
    assert max(tiny_model.relative_errors(got, expected).values()) < 1e-5


def computed_stages(order, save):
    """How often each stage's mark stands in the lowered value-and-gradient."""
    weights, xs, contexts = data()

    def marked(stage):
        def fn(weights, context, carry):
            with jax.named_scope(f"stage_{stage.name}"):
                out = stage.fn(weights, context, carry)
                return out | {"x": jnp.sin(out["x"])} if isinstance(out, dict) else jnp.sin(out)

        return dataclasses.replace(stage, fn=fn)

    layer = layer_of(order, save)
    layer = dataclasses.replace(layer, stages=tuple(map(marked, layer.stages)))
    total = lambda weights, xs: sum(  # noqa: E731
        jnp.sum(x**2) for x in run_layers(layer, weights, contexts, xs)
    )
    jaxpr = jax.make_jaxpr(jax.grad(total))(weights, xs)
    text = jaxpr.pretty_print(name_stack=True)
    sines = [line for line in text.splitlines() if re.search(r"= sin\b", line)]
    return [sum(f"stage_{name}" in line for line in sines) for name in NAMES]


@pytest.mark.parametrize("order", ["sequential", "batch split"])
def test_what_runs_twice(order):
    """Times that a stage runs for two micro-batches: forward, and again where it was not kept."""
    assert computed_stages(order, SAVES["none"]) == [2, 2, 2, 2, 2]
    assert computed_stages(order, SAVES["minimal"]) == [4, 2, 4, 4, 4]
    assert computed_stages(order, SAVES["full"]) == [4, 4, 4, 4, 4]


def test_what_runs_twice_when_the_tail_is_carried():
    """It runs once more, for the last micro-batch after the last layer."""
    assert computed_stages("carried", SAVES["minimal"]) == [4, 2, 4, 3, 3]


def turns(text):
    """`attend 0` as a turn; `'` behind it: backward."""
    words = text.split()
    return tuple(
        Turn(NAMES.index(name), int(micro_batch.rstrip("'")), micro_batch.endswith("'"))
        for name, micro_batch in zip(words[::2], words[1::2], strict=True)
    )


def steps(*texts):
    """Each of a text: compute, then `|`, then communication."""
    return tuple(Step(*map(turns, (text + "|").split("|")[:2])) for text in texts)


def test_the_sequential_order():
    order = sequential(stages("combine unpermute"), 2)
    one = "attend {0}", "| dispatch {0}", "experts {0}", "| combine {0}"
    # Nothing runs beside a transfer: what follows it needs it.
    assert order.forward == steps(
        *(step.format(0) for step in one),
        "unpermute 0 attend 1",
        *(step.format(1) for step in one[1:]),
        "unpermute 1",
    )
    one = "attend {0}", "| dispatch {0}", "experts {0} unpermute {0}'", "| combine {0}'"
    one = (*one, "experts {0}'", "| dispatch {0}'")
    assert order.backward == steps(
        *(step.format(1) for step in one),
        *("attend 1' attend 0", *(step.format(0) for step in one[1:]), "attend 0'"),
    )


def test_the_batch_split_order():
    order = batch_split(stages("combine unpermute"), 2, carried=True, groups=GROUPS)
    assert order.forward == steps(
        "attend 0 | combine 1",
        "unpermute 1 attend 1 | dispatch 0",
        "experts 0 | dispatch 1",
        "experts 1 | combine 0",
        "unpermute 0",
    )
    assert order.backward == steps(
        "unpermute 0'",
        "attend 1 | combine 0'",
        "attend 0 | dispatch 1",
        "experts 1 experts 1' | dispatch 0",
        "experts 0 experts 0' | dispatch 1'",
        "attend 1' unpermute 1' | dispatch 0'",
        "attend 0' | combine 1'",
    )
    assert order.carried
    # Gate and up, which only experts need, in their own layer; the others a layer ahead or later.
    assert order.travel == Travel(
        forward=(Window(0, own=True), Window(0)),
        backward=(Window(1, own=True), Window(1)),
        gradients=(Window(5, own=True), Window(5)),
    )


def test_each_group_has_a_micro_batch_to_itself():
    groups = ("gate",), ("up", "down"), ("wa",), ("unused", "wa")
    travel = batch_split(stages("combine unpermute"), 2, carried=True, groups=groups).travel
    own = functools.partial(Window, own=True)
    assert travel.forward == (own(0), own(1), Window(0), Window(1))
    assert travel.backward == (own(1), own(2), Window(1), Window(2))
    assert travel.gradients == (own(5), own(6), Window(5), Window(6))


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@ORDERS
def test_what_a_turn_needs_was_there(order, save, micro_batches):
    """Transfers need nothing that their own step computes, compute nothing that it brings."""
    got = layer_of(order, save, micro_batches).order(LAYERS)
    last = micro_batches - 1
    for pass_ in (got.forward, got.backward):
        chains = [chain for step in pass_ for chain in (step.communication, step.compute)]
        at = {turn: (n, m) for n, chain in enumerate(chains) for m, turn in enumerate(chain)}
        for turn, (n, m) in at.items():
            needed = {dataclasses.replace(turn, stage=turn.stage + (1 if turn.backward else -1))}
            if turn.backward:
                needed.add(dataclasses.replace(turn, backward=False))
            elif got.carried and turn == Turn(0, last):
                needed.add(Turn(4, last))
            for other in needed & at.keys():
                between = {turn.stage, other.stage}
                if got.carried and turn.micro_batch == last and between == {2, 3}:
                    continue  # of another layer
                k, place = at[other]
                assert k // 2 < n // 2 or (k == n and place < m)


def test_weights_are_there_before_the_step_that_needs_them():
    """Where nothing travels between attention and experts, these have steps of their own."""
    groups = GROUPS[:1]
    order = batch_split(stages("dispatch combine unpermute"), 2, carried=True, groups=groups)
    assert order.backward == steps(
        "unpermute 0'",
        "attend 1 attend 0 | combine 0'",
        "experts 1 experts 1'",
        "experts 0 experts 0' | dispatch 1'",
        "attend 1' unpermute 1' | dispatch 0'",
        "attend 0' | combine 1'",
    )
    assert order.travel.backward == (Window(1, own=True),)
    without = batch_split(stages("dispatch combine unpermute"), 2, carried=True)
    assert without.backward[1] == steps("attend 1 attend 0 experts 1 experts 1' | combine 0'")[0]


def test_weights_are_gathered_a_layer_ahead_where_nothing_runs_again_before_they_are_needed():
    order = batch_split(stages("attend dispatch"), 2, groups=GROUPS)
    attend_back = next(
        n for n, step in enumerate(order.backward) if Turn(0, 1, True) in step.compute
    )
    assert order.travel.backward[0] == Window(attend_back)
    assert order.travel.gradients[0] == Window(attend_back, own=True)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@ORDERS
def test_an_order_runs_every_stage_once_and_backward_once(order, save, micro_batches):
    layer = layer_of(order, save, micro_batches)
    got = layer.order(LAYERS)
    every = list(itertools.product(range(5), range(micro_batches)))
    of = lambda steps: [t for step in steps for t in (*step.compute, *step.communication)]  # noqa: E731
    assert sorted((turn.stage, turn.micro_batch) for turn in of(got.forward)) == every
    pulls = [(turn.stage, turn.micro_batch) for turn in of(got.backward) if turn.backward]
    again = [(turn.stage, turn.micro_batch) for turn in of(got.backward) if not turn.backward]
    assert sorted(pulls) == every
    assert sorted(again) == [(s, m) for s, m in every if not layer.stages[s].save]


def test_a_single_layer_carries_nothing():
    assert not layer_of("carried", "").order(1).carried


def test_error_of_an_idle_stage_that_is_not_kept():
    with pytest.raises(ValueError, match="stage combine: one that is carried must have save"):
        Layer(stages(""), (), ScheduleConfig(), idle=idle)


def barriers(order, save):
    weights, xs, _ = data()
    text = jax.jit(jax.grad(scheduled(order, save))).lower(weights, xs).as_text()
    return text.count("stablehlo.optimization_barrier")


@pytest.mark.parametrize("order", SPLITS)
def test_every_turn_waits_for_the_one_before_in_its_chain(order):
    """A barrier for each of 5 stages x 2 micro-batches, and another behind what ran again."""
    for save, again in ((SAVES["none"], 0), (SAVES["minimal"], 8), (SAVES["full"], 10)):
        again -= 4 if order == "carried" and again else 0  # its tail is kept
        travel = layer_of(order, save).order(LAYERS).travel
        # Gathers, forward and backward; scatters. Beside a step they wait for the one before.
        transfers = 2 + 2 + 2
        if travel:
            windows = travel.forward + travel.backward + travel.gradients
            # Of what travels a layer ahead or later also the first layer's, or the last one's.
            transfers += len(windows) + sum(not window.own for window in windows)
        assert barriers(order, save) == 10 + 2 * again + 10 + transfers


def test_a_barrier_holds_the_turn_before_of_its_own_chain():
    """Forward: how many values each barrier holds."""
    chains = {"a": "compute", "b": "compute", "c": "communication", "d": "compute"}
    layer = Layer(
        tuple(Stage(name, lambda w, c, x: x + 1, (), chain) for name, chain in chains.items()),
        (),
        ScheduleConfig(use_batch_split_schedule=True),
    )
    contexts = [jnp.zeros(()), jnp.ones(())]
    shards = {"unread": jnp.zeros(1)}
    jaxpr = jax.make_jaxpr(lambda xs: run_layers(layer, shards, contexts, xs))([0.0, 1.0])
    sizes = [
        len(line.split("optimization_barrier")[1].split())
        for line in str(jaxpr).splitlines()
        if "optimization_barrier" in line
    ]
    # a0 and c0 have nothing before them; else b0 waits for a0, c1 for c0, and so on. Then come the
    # turns a0 b0 | a1 b1 beside c0 | d0 beside c1 | d1.
    assert sizes == [1, 2, 1, 2, 2, 2, 2, 2]


def test_weights_travel_before_they_are_needed():
    """Gate and up under attention, in their own layer; those of attention a layer ahead."""
    seen = []

    def spy(what):
        return lambda shards: (seen.append(f"{what} " + " ".join(sorted(shards))), shards)[1]

    layer = layer_of(
        *("batch split", SAVES["minimal"]), prepare=spy("prepare"), gather=spy("gather")
    )
    spied = tuple(
        dataclasses.replace(
            stage, fn=lambda *a, stage=stage: (seen.append(stage.name), stage.fn(*a))[1]
        )
        for stage in layer.stages
    )
    weights, xs, contexts = data()
    layer = dataclasses.replace(layer, stages=spied)
    jax.make_jaxpr(lambda xs: run_layers(layer, weights, contexts, xs))(xs)
    first, in_layer = seen[:2], seen[2:]
    gate_up, rest = "gate up", "down unused wa"
    assert first == [f"prepare {rest}", f"gather {rest}"]
    assert in_layer == [
        *(f"prepare {gate_up}", f"prepare {rest}", f"gather {gate_up}", f"gather {rest}"),
        *("attend", "dispatch", "attend", "dispatch"),
        *("experts", "combine", "experts", "combine", "unpermute", "unpermute"),
    ]


def test_micro_batches_of_a_config():
    cases = {(False, 0): 1, (True, 0): 2, (True, 4): 4, (False, 2): 2}
    for (split, factor), expected in cases.items():
        config = ScheduleConfig(use_batch_split_schedule=split, batch_split_factor=factor)
        assert config.micro_batches == expected
