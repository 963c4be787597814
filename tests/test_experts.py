"""Experts on shards: gathering, merged gating, width sharding, no token dropped, health."""

import functools

import jax
import model_reference as reference
import numpy as np
import pytest
import tiny_model
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from octablox import fp8
from octablox.fp8 import BF16, RECIPES, QArray
from octablox.health import COUNTS
from octablox.mesh import AXES, EXPERT_SHARDS, map_specs, shardings
from octablox.moe import experts
from octablox.moe.config import MoeConfig
from octablox.moe.dispatch import combine, dispatch, sort_copies, weights_of_rows
from octablox.moe.experts import Experts, new_health

T, D, F, E, K = 32, 64, 256, 4, 2
RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def config(sharding="expert", merged=True):
    return MoeConfig(
        num_experts=E,
        num_experts_per_tok=K,
        base_moe_mlp_dim=F,
        expert_sharding=sharding,
        merge_gating_gmm=merged,
    )


@functools.cache
def weights():
    """Gate's, up's and the experts' magnitudes differ, so that a scale at the wrong place shows."""
    rng = np.random.default_rng(0)
    gate_up = rng.normal(size=(E, D, 2, F)) / 8
    gate_up[:, :, 1] /= 300
    down = rng.normal(size=(E, F, D)) * 20
    size = np.exp(rng.normal(size=(E, 1, 1)))
    values = {"gate_up": gate_up * size[..., None], "down": down * size}
    return {name: value.astype(np.float32) for name, value in values.items()}


@functools.cache
def tokens(load="random", seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(T, D)).astype(np.float32)
    mix = rng.uniform(0.2, 1, (T, K)).astype(np.float32)
    chosen = np.stack([rng.permutation(E)[:K] for _ in range(T)])
    if load == "one expert":
        chosen = np.full((T, K), 2)
    elif load == "half the experts":
        chosen = np.broadcast_to([3, 1], (T, K))
    return x, mix, chosen.astype(np.int32)


def gather(kernel, shards, health):
    return {
        "gate_up": kernel.gathered("gate_up", shards["gate_up"], health[0]),
        "down": kernel.gathered("down", shards["down"], health[1]),
    }


@functools.cache
def program(config, recipe, **axes):
    """(weights, x, mix, chosen, out_grad) -> out, its gradients, and counts; tokens cut by axis."""
    specs = experts.specs(config, D)
    partitions = map_specs(lambda spec: spec.partition_spec, specs)
    kernel = Experts(config, recipe, jnp.dtype("float32"))

    def forward(weights, x, mix, health, chosen):
        gathered = gather(kernel, weights, health)
        x, mix, chosen = (lax.all_gather(a, "expert", tiled=True) for a in (x, mix, chosen))
        own = E // lax.axis_size("expert") if config.expert_sharding == "expert" else 0
        order = sort_copies(chosen, E, lax.axis_index("expert") * own)
        rows, row_weights = dispatch(x, order), weights_of_rows(mix, order)
        rows = kernel.apply(gathered, rows, row_weights, order.group_sizes, health)
        return lax.psum_scatter(combine(rows, order), "expert", tiled=True)

    def local(weights, x, mix, chosen, out_grad):
        run = functools.partial(forward, chosen=chosen)
        out, pull = jax.vjp(run, weights, x, mix, new_health())
        return (out, *pull(out_grad))

    in_specs = partitions, *(P(AXES),) * 4
    out_specs = P(AXES), partitions, P(AXES), P(AXES), P()
    mesh = tiny_model.mesh(**axes)
    on_mesh = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(on_mesh, compiler_options=tiny_model.QUICK)


def run(config, recipe=BF16, load="random", **axes):
    """out, gradients of the weights, of x and of mix, and the casts' counts, by name."""
    mesh = tiny_model.mesh(**axes)
    placed = jax.device_put(weights(), shardings(experts.specs(config, D), mesh))
    rows = *tokens(load), tokens(seed=2)[0]
    rows = jax.device_put(rows, jax.NamedSharding(mesh, P(AXES)))
    out = program(config, recipe, **axes)(placed, *rows)
    return dict(zip(("out", "weights", "x", "mix", "health"), jax.device_get(out), strict=True))


one_device = functools.cache(lambda recipe, merged=True: run(config(merged=merged), recipe))


def gathered(config, recipe, values, **axes):
    """Each device's dequantized weights [device, ...], and the counts of the casts."""
    specs = experts.specs(config, D)
    partitions = map_specs(lambda spec: spec.partition_spec, specs)
    kernel = Experts(config, recipe, jnp.dtype("float32"))

    def local(shards):
        def masters(health):
            weights = gather(kernel, shards, health)
            return {name: weight.master for name, weight in weights.items()}, weights

        zeros, pull, weights = jax.vjp(masters, new_health(), has_aux=True)
        (counts,) = pull(zeros)
        return {name: _values(weight)[None] for name, weight in weights.items()}, counts

    mesh = tiny_model.mesh(**axes)
    placed = jax.device_put(values, shardings(specs, mesh))
    on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(partitions,), out_specs=(P(AXES), P()))
    return jax.device_get(jax.jit(on_mesh)(placed))


def _values(weight):
    """A gathered weight in float32, less the padding of its blocks."""
    _, k, n = weight.shape
    value = weight.q
    if isinstance(value, QArray):
        value = fp8.dequantize(value)[:, :k, :n]
    return value.astype(jnp.float32)


def dense(x, mix, chosen):
    """Float64, token by token."""
    out = np.zeros((T, D))
    for t in range(T):
        for e, weight in zip(chosen[t], mix[t], strict=True):
            gate_up, down = weights()["gate_up"][e], weights()["down"][e]
            out[t] += weight * reference.swiglu(gate_up, down, x[t].astype(np.float64))
    return out


def close(got, expected, bound, parts=("out", "weights", "x", "mix")):
    a, b = ({name: values[name] for name in parts} for values in (got, expected))
    errors = tiny_model.relative_errors(a, b)
    assert max(errors.values()) <= bound, errors


@pytest.mark.parametrize("load", ["random", "one expert", "half the experts"])
@pytest.mark.parametrize(
    ("sharding", "expert"), [("expert", 1), ("expert", 2), ("expert", 4), ("width", 4)]
)
def test_no_token_is_dropped(load, sharding, expert):
    """Whatever the load; gate and up, cut by width, stay each other's partners."""
    got = run(config(sharding), load=load, fsdp=8 // expert, expert=expert)
    close(got, {"out": dense(*tokens(load))}, 2e-6, parts=("out",))
    if load == "one expert":
        unused = [0, 1, 3]
        assert not any(w[unused].any() for w in got["weights"].values())


@pytest.mark.parametrize("merged", [True, False])
def test_bf16_gradients_are_autodiffs(merged):
    x, mix, chosen = (jnp.asarray(a) for a in tokens())

    def plain(weights, x, mix):
        gate_up = weights["gate_up"].transpose(2, 0, 1, 3)
        gate, up = jnp.einsum("td,pedf->ptef", x, gate_up, precision="highest")
        every = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, weights["down"])
        share = jnp.sum(jax.nn.one_hot(chosen, E) * mix[:, :, None], axis=1)
        return jnp.einsum("te,ted->td", share, every)

    out, pull = jax.vjp(plain, weights(), x, mix)
    names = "out", "weights", "x", "mix"
    grads = pull(jnp.asarray(tokens(seed=2)[0]))
    close(one_device(BF16, merged), dict(zip(names, (out, *grads), strict=True)), 3e-6)


@pytest.mark.parametrize(
    "name",
    [
        *("bf16", "fp8_full", "fp8_tensorwise", "fp8_blockwise"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mxfp8", "int8")),
    ],
)
def test_merging_gate_and_up_changes_no_number(name):
    """Not in `out`, nor in the weights' gradients; dlhs sums both halves' columns in another order.

    Where a gradient's scale spans columns, dlhs quantizes over 2F columns instead of twice F.
    """
    recipe = RECIPES[name]
    merged, apart = one_device(recipe), one_device(recipe, merged=False)
    exact = ("out", "weights", "mix")
    assert tiny_model.differing(*({n: v[n] for n in exact} for v in (merged, apart))) == []
    spans = recipe.dlhs_grad is not None and recipe.dlhs_grad.tile[1] is None
    close(merged, apart, recipe.budget("dlhs") if spans else 1e-6, parts=("x",))
    np.testing.assert_array_equal(merged["health"][:, 0], apart["health"][:, 0])


@RECIPE
def test_up_may_be_far_smaller_than_gate(recipe):
    """One scale for both would flush up, which is 300 times smaller here."""
    got, expected = one_device(recipe), one_device(BF16)
    # Two GMMs in a row, and a product of two quantized values between them.
    close(got, expected, 2 * recipe.budget("out") + 1e-12, parts=("out",))


MESHES = {
    "fsdp8": ("expert", {"fsdp": 8}),
    "data2fsdp2EP2": ("expert", {"data": 2, "fsdp": 2, "expert": 2}),
    "EP4": ("expert", {"fsdp": 2, "expert": 4}),
    "fsdp4width2": ("width", {"fsdp": 4, "expert": 2}),
}


@RECIPE
@pytest.mark.parametrize(("sharding", "axes"), MESHES.values(), ids=MESHES)
def test_gathered_weights_are_those_of_one_device(recipe, sharding, axes):
    """Bit for bit, whether a scale's blocks fit a shard or are gathered first; and counted once."""
    got, counts = gathered(config(sharding), recipe, weights(), **axes)
    (whole,), expected_counts = split_devices(gathered(config(), recipe, weights()))
    ways = axes.get("expert", 1)
    for device in range(8):
        part = device % ways  # the expert axis is the last
        if sharding == "expert":
            own = slice(part * E // ways, (part + 1) * E // ways)
            expected = {name: value[own] for name, value in whole.items()}
        else:
            own = slice(part * F // ways, (part + 1) * F // ways)
            both = whole["gate_up"].reshape(E, D, 2, F)[..., own].reshape(E, D, -1)
            expected = {"gate_up": both, "down": whole["down"][:, own]}
        found = {name: value[device] for name, value in got.items()}
        if recipe.name == "int8":
            # absmax / scale is 127.5, a tie that the last bit decides: -128 or -127.
            assert max(tiny_model.relative_errors(found, expected).values()) < 1e-3
        else:
            assert tiny_model.differing(found, expected) == []
    # Other rows are sampled on other shards, and each shard's absmax has a bucket.
    whole_counts = expected_counts[..., :3] * axes.get("data", 1)
    np.testing.assert_allclose(counts[..., :3], whole_counts, rtol=1e-6)


def split_devices(gathered):
    values, counts = gathered
    devices = len(values["down"])
    return [{name: value[n] for name, value in values.items()} for n in range(devices)], counts


@pytest.mark.parametrize("axes", [axes for _, axes in MESHES.values()][:3], ids=list(MESHES)[:3])
@pytest.mark.parametrize("name", ["fp8_full", "fp8_tensorwise", "fp8_blockwise", "int8"])
def test_health_counts_weights(name, axes):
    """Weights beyond 3 saturate under fixed,-3,3; tiny ones flush; zeros do not count."""
    cast = RECIPES[name].weight.model_copy(update={"calibration": "fixed,-3,3"})
    recipe = RECIPES[name].model_copy(update={"weight": cast})
    values = {"gate_up": np.full((E, D, 2, F), 1.0), "down": np.full((E, F, D), 1.0)}
    values["gate_up"][1, :10, 0, :3] = -4.0
    values["down"][3, 7, :5] = 100.0
    values["gate_up"][2, 5, :, :7] = 1e-6
    values["down"][0] = 0
    values = {key: value.astype(np.float32) for key, value in values.items()}
    counts = gathered(config(), recipe, values, **axes)[1]
    gate_up, down = (np.count_nonzero(value) for value in values.values())
    expected = np.array([[10 * 3, 2 * 7, gate_up], [5, 0, down]]) * axes.get("data", 1)
    np.testing.assert_array_equal(counts[:, 0, :3], expected)
    assert not counts[:, 1:].any()


def test_blocks_that_straddle_shards_of_the_width_are_refused():
    with pytest.raises(ValueError, match=r"weight blocks of 128 straddle shards of 64 \(dim 1"):
        gathered(config("width"), RECIPES["fp8_blockwise"], weights(), fsdp=2, expert=4)
    narrow = {"gate_up": weights()["gate_up"][..., :64], "down": weights()["down"][:, :64]}
    small = config("width").model_copy(update={"base_moe_mlp_dim": 64})
    gathered(small, RECIPES["fp8_blockwise"], narrow, fsdp=8)  # where nothing cuts the width


def test_health_counts_activations_and_gradients():
    """T*K rows each: x (D) and hidden (F); dout for dlhs and for drhs, of F+F and D."""
    health = one_device(RECIPES["fp8_full"])["health"]
    rows = T * K
    nonzero = rows * np.array([[D, 2 * F, 2 * F], [F, D, D]])
    np.testing.assert_allclose(health[:, 1:, COUNTS.index("nonzero")], nonzero, rtol=1e-3)
    assert not health[..., COUNTS.index("saturated")].any()
    assert not one_device(BF16)["health"].any()


def test_specs_cut_width_within_gate_and_within_up():
    by_width = experts.specs(config("width"), D)
    assert by_width["gate_up"].partition == (None, EXPERT_SHARDS, None, "expert")
    assert by_width["down"].partition == (None, "expert", EXPERT_SHARDS)
    by_expert = experts.specs(config(), D)
    assert by_expert["gate_up"].partition == ("expert", EXPERT_SHARDS, None, None)
    assert by_expert["down"].partition == ("expert", None, EXPERT_SHARDS)
    assert (by_expert["gate_up"].fan_in, by_expert["down"].fan_in) == (D, F)
