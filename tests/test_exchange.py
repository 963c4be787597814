"""What crosses the expert axis in 8 bits, and buffers that hold fewer rows than may come."""

import functools

import jax
import numpy as np
import pytest
import tiny_model
from jax import lax
from jax import numpy as jnp

from octablox import fp8
from octablox.fp8 import RECIPES
from octablox.mesh import AXES
from octablox.moe import all_to_all, dispatch, exchange, overflow

# Recipes whose activations have scales of single rows: these travel, and nothing is cast twice.
BY_ROW = "fp8_full", "fp8_blockwise", "mxfp8", "int8"


@functools.cache
def run(recipe, *, fsdp=4, expert=2, rows=2, batch=16, **settings):
    """Loss and its parts, gradients, and counts; of one MoE layer on a mesh."""
    sizes = tiny_model.config(
        quantization=recipe,
        base_num_decoder_layers=1,
        max_target_length=8,
        base_moe_mlp_dim=512,
        per_device_batch_size=rows,
        **settings,
    )
    mesh = tiny_model.mesh(1, fsdp, expert)
    params, batch = tiny_model.params(sizes), tiny_model.batch(batch, length=8)
    return tiny_model.gradients(sizes, mesh, params, batch, **tiny_model.QUICK)


def distance(a, b):
    return max(tiny_model.relative_errors(a[1], b[1]).values())


@pytest.mark.parametrize(
    "recipe", ["fp8_full", *(pytest.param(r, marks=pytest.mark.slow) for r in BY_ROW[1:])]
)
def test_rows_in_the_recipes_own_cast_change_nothing(recipe):
    """Loss and gradients to the bit: each token is cast as its rows would have been."""
    assert fp8.wire_cast(RECIPES[recipe]) == RECIPES[recipe].act
    with_it, without = run(recipe, fp8_dispatch=True, fp8_health=True), run(recipe)
    assert tiny_model.differing(with_it[:2], without[:2]) == []
    counted = [result[2]["moe_layers"]["health"] for result in (with_it, without)]
    # The act casts of tokens are counted once for each token, not once for each of its copies.
    assert 0 < counted[0][0, 0, 1, 2] < counted[1][0, 0, 1, 2]


def test_what_is_not_counted_changes_nothing():
    counted, quiet = (run("fp8_full", fp8_dispatch=True, fp8_health=h) for h in (True, False))
    assert tiny_model.differing(counted[:2], quiet[:2]) == []
    assert counted[2]["moe_layers"]["health"].any()
    assert not quiet[2]["moe_layers"]["health"].any()


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("bf16", ("fp8_dispatch",)),
        ("fp8_full", ("fp8_dispatch", "fp8_dispatch_grad")),
        pytest.param("bf16", ("fp8_dispatch_grad",), marks=pytest.mark.slow),
        pytest.param("fp8_tensorwise", ("fp8_dispatch",), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sharding", ["expert", pytest.param("width", marks=pytest.mark.slow)])
def test_casts_of_what_travels_do_not_depend_on_the_mesh(recipe, flags, sharding):
    """The same casts where nothing travels, on one device; and they do change the numbers."""
    settings = dict.fromkeys(flags, True)
    got = run(recipe, fsdp=2, expert=4, expert_sharding=sharding, **settings)
    expected = run(recipe, fsdp=1, expert=1, rows=16, **settings)
    off = run(recipe, fsdp=1, expert=1, rows=16)
    bound = 1e-2 if recipe != "bf16" or "fp8_dispatch_grad" in flags else 5e-3
    assert distance(got, expected) <= bound
    assert got[0]["total"] == pytest.approx(expected[0]["total"], rel=1e-5)
    if recipe == "bf16":
        assert 2e-3 < distance(expected, off) < 0.2
        assert (expected[0]["total"] == off[0]["total"]) == (flags == ("fp8_dispatch_grad",))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("recipe", "fsdp", "expert", "settings"),
    [
        ("bf16", 2, 4, {}),
        (
            "fp8_full",
            2,
            4,
            {"fp8_dispatch": True, "fp8_dispatch_grad": True, "use_batch_split_schedule": True},
        ),
        pytest.param("bf16", 1, 8, {"use_batch_split_schedule": True}, marks=SLOW),
        pytest.param("bf16", 2, 4, {"remat_policy": "minimal"}, marks=SLOW),
        *(pytest.param(r, 4, 2, {"fp8_dispatch": True}, marks=SLOW) for r in BY_ROW),
        pytest.param("fp8_tensorwise", 4, 2, {}, marks=SLOW),
    ],
)
def test_all_to_all_equals_the_ring(recipe, fsdp, expert, settings):
    """Loss and gradients: the same tokens are cast the same way, and summed in another order."""
    settings = {"fsdp": fsdp, "expert": expert, "rows": 4, "batch": 32} | settings
    got = run(recipe, use_ring_of_experts=False, **settings)
    expected = run(recipe, **settings)
    assert got[0]["total"] == pytest.approx(expected[0]["total"], rel=1e-6)
    # What a cast makes of noise in the last bit, as among meshes.
    assert distance(got, expected) <= (3e-6 if recipe == "bf16" else 1e-2)


def test_a_gradient_is_quantized_where_it_leaves_and_opened_where_it_comes():
    """To the bit what its cast makes of it; what stands for it is no array that a loop holds."""
    rng = np.random.default_rng(0)
    x, grad = (jnp.asarray(rng.normal(size=(16, 64)), jnp.float32) for _ in range(2))

    held = fp8.without_masters(fp8.quantize_grads(x))
    assert [leaf.shape for leaf in jax.tree.leaves(held)] == [x.shape]
    structures = map(jax.tree.structure, (fp8.with_masters(held), fp8.quantize_grads(x)))
    assert len(set(structures)) == 1

    way = exchange.Ring()
    value, pull = jax.vjp(lambda x: exchange.unpermute(fp8.quantize_grads(x), way), x)
    np.testing.assert_array_equal(value, x)
    (got,) = pull(grad)
    expected = fp8.dequantize(fp8.quantize(grad, fp8.WIRE_GRAD, contracted=1))
    np.testing.assert_array_equal(got, expected)
    assert float(jnp.abs(got - grad).max()) > 0  # it was cast


def ragged_all_to_all(x, out, first, sent, there, received, *, axis_name):
    """`lax.ragged_all_to_all`, which XLA:CPU does not have, made of gathers; NaN on a mismatch."""
    gather = functools.partial(lax.all_gather, axis_name=axis_name)
    me, row = lax.axis_index(axis_name), jnp.arange(out.shape[0])
    sent = gather(sent)[:, me]
    parts = zip(gather(x), gather(first)[:, me], gather(there)[:, me], sent, strict=True)
    for part, start, to, size in parts:
        comes = ((row >= to) & (row < to + size)).reshape(-1, *[1] * (out.ndim - 1))
        out = jnp.where(comes, jnp.take(part, row - to + start, axis=0, mode="clip"), out)
    return jnp.where((sent == received).all(), out, jnp.nan)


@pytest.mark.parametrize(("tokens", "chip"), [(6, None), (5, "tpu7x"), (6, "tpu7x"), (16, "tpu7x")])
def test_slots_of_an_all_to_all(tokens, chip, monkeypatch):
    """Each token once to each device of its experts, in order; back, each copy's device summed.

    On a TPU slots are sent in packs, of 1, 2 or 8 in float32.
    """
    k, devices, experts = 3, 4, 8
    monkeypatch.setattr(all_to_all, "chip", lambda: chip)
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    chosen = np.stack(
        [np.random.default_rng(t).permutation(experts)[:k] for t in range(devices * tokens)]
    ).astype(np.int32)
    x = np.arange(devices * tokens, dtype=np.float32)[:, None] + 1

    def shard(chosen, x):
        way, arrived = all_to_all.plan(chosen, experts // devices)
        spread = way.there(way.permute(x))
        back = way.unpermute(way.back(spread))
        return arrived, spread, back, way.order.group_sizes, way.received

    mesh = tiny_model.mesh(1, 1, devices)
    spec = jax.P(AXES)
    given = jax.device_put((chosen, x), jax.NamedSharding(mesh, spec))
    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(spec, spec), out_specs=spec))
    arrived, spread, back, sizes, received = (np.asarray(a) for a in run(*given))
    device_of = chosen // (experts // devices)
    arrived, spread = (a.reshape(devices, devices, tokens, -1) for a in (arrived, spread))
    for there in range(devices):
        for source in range(devices):
            own = range(source * tokens, (source + 1) * tokens)
            going = [t for t in own if there in device_of[t]]
            assert sizes.reshape(devices, devices)[source, there] == len(going)
            assert received.reshape(devices, devices)[there, source] == len(going)
            np.testing.assert_array_equal(spread[there, source, : len(going)], x[going])
            np.testing.assert_array_equal(arrived[there, source, : len(going)], chosen[going])
            # What lies in the other slots is of no expert here.
            assert (arrived[there, source, len(going) :] // (experts // devices) != there).all()
    visits = [[len(set(row))] for row in device_of.tolist()]
    np.testing.assert_array_equal(back, x * visits)


def test_rows_of_a_quantized_gradient():
    """Picked in 8 bits they are what they are when the gradient is opened before."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    order = dispatch.sort_copies(jnp.asarray(rng.integers(0, 4, (8, 2)), jnp.int32), 4, 0)
    rows, grad = draw(16, 32), fp8.quantize_grad(draw(8, 32))
    value, pull = jax.vjp(lambda r: dispatch.combine_for_quantized_grad(r, order), rows)
    late = lambda r: fp8.quantize_grads(dispatch.combine(r, order))  # noqa: E731
    expected, expected_pull = jax.vjp(late, rows)
    grads = fp8.QuantizedGrad(jnp.zeros((8, 32), jnp.bfloat16), grad)
    np.testing.assert_array_equal(value.value, expected.value)
    np.testing.assert_array_equal(pull(grads)[0], expected_pull(grads)[0])
    assert np.abs(pull(grads)[0]).max() > 0


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("bf16", ()),
        pytest.param("bf16", ("all_to_all",), marks=pytest.mark.slow),
        pytest.param("fp8_full", ("fp8_dispatch",), marks=pytest.mark.slow),
        pytest.param("bf16", ("use_batch_split_schedule",), marks=pytest.mark.slow),
    ],
)
def test_a_buffer_that_overflows_drops_nothing(recipe, flags, monkeypatch):
    """A quarter of the mean in it, so that several windows of rows run one after the other."""
    monkeypatch.setattr(overflow, "ROW_MULTIPLE", 16)
    settings = {"fsdp": 2, "expert": 4, "rows": 4, "batch": 32} | dict.fromkeys(flags, True)
    if settings.pop("all_to_all", False):
        settings["use_ring_of_experts"] = False
    small = run(recipe, ragged_buffer_factor=0.5, **settings)
    whole = run(recipe, **settings)
    assert distance(small, whole) <= (3e-6 if recipe == "bf16" else 1e-2)
    assert small[0]["total"] == pytest.approx(whole[0]["total"], rel=1e-6)
    micro_batches = 2 if "use_batch_split_schedule" in flags else 1
    # On every device, one layer's micro-batches.
    np.testing.assert_array_equal(small[2]["moe_layers"]["overflow"], [8 * micro_batches])
    np.testing.assert_array_equal(whole[2]["moe_layers"]["overflow"], [0])


def test_rows_of_a_buffer():
    moe = tiny_model.config(ragged_buffer_factor=1.25).moe
    assert overflow.buffer_rows(moe, 262144, 16) == 20480
    assert overflow.buffer_rows(moe, 1000, 8) == 256  # 156.25, in whole tiles
    assert overflow.buffer_rows(moe, 1000, 1) == 1000
    assert overflow.buffer_rows(moe, 100, 8) == 100  # no more than there can be
    unbounded = tiny_model.config(ragged_buffer_factor=-1).moe
    assert overflow.buffer_rows(unbounded, 262144, 16) == 262144
    width = tiny_model.config(ragged_buffer_factor=1.25, expert_sharding="width").moe
    assert overflow.buffer_rows(width, 262144, 16) == 262144


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "all_to_all"])
def test_nothing_reads_what_memory_held_before(ring, monkeypatch):
    """With NaN in all memory that is not filled, and in slots that stay empty: to the bit equal."""
    sizes = tiny_model.config(
        quantization="fp8_full",
        max_target_length=8,
        per_device_batch_size=4,
        use_batch_split_schedule=True,
        use_ring_of_experts=ring,
        ragged_buffer_factor=0.75,
        fp8_dispatch=True,
        fp8_dispatch_grad=True,
    )
    mesh, params = tiny_model.mesh(1, 2, 4), tiny_model.params(sizes)
    arguments = sizes, mesh, params, tiny_model.batch(32, length=8)
    monkeypatch.setattr(dispatch, "COMBINE_CHUNK", 16)
    monkeypatch.setattr(overflow, "ROW_MULTIPLE", 8)
    clean = tiny_model.gradients(*arguments, **tiny_model.QUICK)
    assert clean[2]["moe_layers"]["overflow"].any()

    filled = []

    def garbage(shape, dtype):
        filled.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    def with_garbage(x, received, swap=all_to_all._swap_all):
        slots = swap(x, received).reshape(received.shape[0], -1, *x.shape[1:])
        empty = lax.iota(jnp.int32, slots.shape[1]) >= received[:, None]
        empty = empty.reshape(*empty.shape, *(1,) * (x.ndim - 1))
        return jnp.where(empty, jnp.array(jnp.nan, x.dtype), slots).reshape(x.shape)

    monkeypatch.setattr(lax, "empty", garbage)
    monkeypatch.setattr(all_to_all, "_swap_all", with_garbage)
    dirty = tiny_model.gradients(*arguments, **tiny_model.QUICK)
    assert len(filled) > 10 and (16, 64) not in filled
    assert tiny_model.differing(clean, dirty) == []
