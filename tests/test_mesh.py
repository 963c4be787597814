"""The mesh and its parameters: initial values, gathering and its transpose, divisibility."""

import functools

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from octablox.errors import UserError
from octablox.mesh import (
    ALL_SHARDS,
    AXES,
    ParamSpec,
    batch_partition,
    check_divisible,
    count,
    gather,
    init_params,
    make_mesh,
    map_specs,
    norm_weight,
    shardings,
    vary,
    weight,
)

SPECS = {
    "a": weight(64, 48),
    "b": weight(64, 48),
    "stack": weight(64, 32, gather_dim=1).stacked(3),
    "experts": ParamSpec((8, 16, 2, 12), ("expert", ("fsdp",), None, None), 1, fan_in=16),
    "norm": norm_weight(64),
    "bias": ParamSpec((8,), (None,), init="zeros"),
}
SHAPES = [(1, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1)]


def mesh(data=1, fsdp=1, expert=1):
    return make_mesh({"data": data, "fsdp": fsdp, "expert": expert})


@functools.cache
def initial(shape, seed=0, dtype="float32"):
    return init_params(SPECS, seed, mesh(*shape), dtype)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_initial_values_are_the_same_for_every_mesh(shape):
    values = initial(shape)
    for name, spec in SPECS.items():
        assert values[name].sharding.spec == spec.partition_spec
        np.testing.assert_array_equal(values[name], initial(SHAPES[0])[name], err_msg=name)


def test_initial_values_differ_by_leaf_and_by_seed():
    values, other = initial(SHAPES[0]), initial(SHAPES[0], seed=1)
    for x, y in ((values["a"], values["b"]), (values["a"], other["a"]), (values["b"], other["a"])):
        assert np.mean(np.asarray(x) == np.asarray(y)) < 1e-3
        assert abs(correlation(x, y)) < 0.08
    layers = np.asarray(values["stack"])
    assert abs(correlation(layers[0], layers[1])) < 0.1


def correlation(x, y):
    return np.corrcoef(np.ravel(x), np.ravel(y))[0, 1]


def test_initial_values_are_normal():
    spec = {"w": weight(512, 768)}
    w = np.asarray(init_params(spec, 7, mesh(), jnp.float32)["w"], np.float64) * np.sqrt(512)
    n = w.size
    assert abs(w.mean()) < 4 / np.sqrt(n)
    assert abs(w.var() - 1) < 4 * np.sqrt(2 / n)
    assert abs((w**3).mean()) < 4 * np.sqrt(15 / n)
    assert abs((w**4).mean() - 3) < 4 * np.sqrt(96 / n)
    assert np.isfinite(w).all() and 4 < np.abs(w).max() < 6
    assert len(np.unique(w)) > 0.97 * n
    # Neighbours, rows and columns are independent: no pattern of the hash is seen.
    for shift in ((0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (0, 256), (256, 0)):
        assert abs(correlation(w, np.roll(w, shift, (0, 1)))) < 4 / np.sqrt(n), shift
    assert np.abs(w.mean(axis=0)).max() < 5 / np.sqrt(512)
    assert np.abs(w.mean(axis=1)).max() < 5 / np.sqrt(768)
    singular = np.linalg.svd(w, compute_uv=False)
    assert singular[0] < 1.05 * (np.sqrt(512) + np.sqrt(768))


def test_norms_are_ones_and_biases_zeros_in_the_dtype_asked_for():
    values = initial((1, 1, 1), dtype="bfloat16")
    assert all(value.dtype == jnp.bfloat16 for value in values.values())
    np.testing.assert_array_equal(values["norm"], np.ones(64))
    np.testing.assert_array_equal(values["bias"], np.zeros(8))
    np.testing.assert_array_equal(values["a"], initial((1, 1, 1))["a"].astype(jnp.bfloat16))


@pytest.mark.parametrize("seed", [-1, 2**20, 2**31 + 5])
def test_every_seed_works(seed):
    a = init_params({"w": weight(8, 8)}, seed, mesh(), jnp.float32)["w"]
    assert np.isfinite(a).all() and not np.array_equal(a, initial((1, 1, 1))["a"][:8, :8])


def test_fan_in_sets_the_size():
    stack = np.asarray(initial(SHAPES[0])["stack"], np.float64)
    assert stack.std() == pytest.approx(64**-0.5, rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_gather_gives_the_whole_weight_and_its_transpose_sums_over_devices(shape):
    """Each device adds (its number + 1) times the sum of all weights."""
    specs = {"a": SPECS["a"], "norm": SPECS["norm"]}
    values = {name: initial(shape)[name] for name in specs}
    on = mesh(*shape)

    def local(shards):
        def total(shards):
            whole = gather(specs, shards, jnp.bfloat16)
            assert whole["a"].shape == (64, 48) and whole["a"].dtype == jnp.bfloat16
            assert whole["norm"].dtype == jnp.float32
            sums = sum(jnp.sum(w.astype(jnp.float32)) for w in whole.values())
            return lax.psum(sums * (1.0 + lax.axis_index(AXES)), AXES)

        return jax.value_and_grad(total)(shards)

    partitions = map_specs(lambda spec: spec.partition_spec, specs)
    run = jax.shard_map(local, mesh=on, in_specs=(partitions,), out_specs=(P(), partitions))
    value, grads = jax.jit(run)(values)
    devices = np.prod(shape)
    numbers = devices * (devices + 1) / 2
    rounded = np.asarray(values["a"].astype(jnp.bfloat16), np.float64)
    assert float(value) == pytest.approx(numbers * (rounded.sum() + 64), rel=1e-5)
    for name in specs:
        np.testing.assert_array_equal(grads[name], np.full(specs[name].shape, numbers))


def test_vary_transposes_to_a_sum():
    on = mesh(2, 2, 2)
    f = jax.shard_map(
        lambda x: jax.grad(lambda x: lax.psum(jnp.sum(vary(vary(x))), AXES))(x),
        mesh=on,
        in_specs=P(),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.jit(f)(jnp.ones(3)), np.full(3, 8))


def test_a_mesh_that_does_not_divide_names_the_parameter():
    check_divisible(SPECS, mesh(1, 2, 4))
    specs = {"layers": {"odd": weight(36, 5).stacked(2)}}
    with pytest.raises(UserError) as error:
        check_divisible(specs, mesh(1, 2, 4))
    assert str(error.value) == (
        "mesh: layers.odd has a dim of 36, which fsdp×expert = 8 devices do not divide; "
        "choose a mesh or a size that fits"
    )


def test_axes_lie_from_slow_to_fast_links():
    on = mesh(2, 2, 2)
    assert on.axis_names == ("data", "fsdp", "expert", "context") == AXES
    ids = [device.id for device in on.devices.ravel()]
    assert ids == [device.id for device in jax.devices()]


def test_a_batch_is_cut_over_every_axis_in_order():
    """Rows over the first three, the tokens of a row over the last."""
    on = make_mesh({"fsdp": 2, "expert": 2, "context": 2})
    batch = np.arange(8 * 6).reshape(8, 6)
    placed = jax.device_put(batch, jax.NamedSharding(on, batch_partition()))
    for shard in placed.addressable_shards:
        row, column = 2 * (shard.device.id // 2), 3 * (shard.device.id % 2)
        np.testing.assert_array_equal(shard.data, batch[row : row + 2, column : column + 3])
    assert batch_partition(leading=1) == P(None, ("data", "fsdp", "expert"), "context")


def test_specs_count_and_stack():
    assert count(SPECS) == 2 * 64 * 48 + 3 * 64 * 32 + 8 * 16 * 24 + 64 + 8
    stacked = SPECS["a"].stacked(5)
    assert stacked.shape == (5, 64, 48) and stacked.partition == (None, ALL_SHARDS, None)
    assert stacked.gather_dim == 0 and stacked.fan_in == 64
    placed = shardings(SPECS, mesh(1, 2, 4))["experts"]
    assert placed.shard_shape((8, 16, 2, 12)) == (2, 8, 2, 12)
