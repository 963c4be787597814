"""`gmm` and its two gradients: every recipe, every transformation, every way of sharding."""

import functools

import jax
import jaxtyping
import numpy as np
import pytest
import reference
from jax import lax
from jax import numpy as jnp

from octablox import fp8
from octablox.fp8 import BF16, RECIPES, Cast, Quantized, Recipe
from octablox.gmm import gmm, new_health
from octablox.health import OPERANDS, summary

# Few rows: kernels have tests of their own, and these compile faster.
M, K, N, E, G, OFFSET = 60, 72, 64, 4, 6, 1
LAYOUTS = {
    "ragged": [3, 21, 0, 18, 1, 9],
    "one holds all": [0, 0, M, 0, 0, 0],
    "none here": [M // 2, 0, 0, 0, 0, M // 2],
    "few": [0, 0, 3, 0, 1, 0],
    "full": [0, 20, 20, 10, 10, 0],
}
PRODUCTS = "out", "dlhs", "drhs"
some_recipes = pytest.mark.parametrize(
    "recipe", [BF16, RECIPES["fp8_full"], RECIPES["mxfp8"]], ids=lambda recipe: recipe.name
)
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@functools.cache
def data(m=M, k=K, n=N, e=E):
    """Float32 x, w, dout of magnitudes that differ between rows, channels and experts."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(reference.spread(rng, m, k, orders=(1, 0.5)))
    w = jnp.asarray(reference.spread(rng, e, k, n, orders=1))
    dout = jnp.asarray(reference.spread(rng, m, n, orders=(1, 0.5)) * np.float32(1e-4))
    return x, w, dout


@functools.partial(jax.jit, static_argnames=("recipe", "backend"))
def run(x, w, dout, sizes, offset, recipe, backend="auto"):
    """out, dlhs and drhs by their names."""
    f = lambda x, w: gmm(x, w, sizes, recipe=recipe, group_offset=offset, backend=backend)  # noqa: E731
    out, vjp = jax.vjp(f, x, w)
    return dict(zip(PRODUCTS, (out, *vjp(dout)), strict=True))


def close(got, expected, tolerance):
    for product, value in expected.items():
        bound = tolerance(product) if callable(tolerance) else tolerance
        error = reference.relative_error(got[product], value)
        assert error <= bound, f"{product} {value.shape}: {error:.2e} > {bound:.2e}"


def same(got, expected, products=PRODUCTS):
    for product in products:
        np.testing.assert_array_equal(got[product], expected[product], err_msg=product)


def budget(recipe):
    return lambda product: max(recipe.budget(product), 1e-5)


@each_recipe
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_products(sizes, recipe):
    x, w, dout = data()
    sizes = np.array(sizes)
    dead = reference.outside(M, sizes, OFFSET, E)
    got = run(reference.poisoned(x, dead), w, reference.poisoned(dout, dead), sizes, OFFSET, recipe)
    close(got, reference.products(x, w, dout, sizes, OFFSET), budget(recipe))
    assert not np.asarray(got["out"])[dead].any()
    assert not np.asarray(got["dlhs"])[dead].any()
    assert not np.asarray(got["drhs"])[sizes[OFFSET : OFFSET + E] == 0].any()
    # Bit for bit what clean rows give.
    same(got, run(x, w, dout, sizes, OFFSET, recipe))


@some_recipes
def test_bfloat16(recipe):
    x, w, dout = (jnp.asarray(a, jnp.bfloat16) for a in data())
    sizes = np.array(LAYOUTS["ragged"])
    got = run(x, w, dout, sizes, OFFSET, recipe)
    assert {str(a.dtype) for a in got.values()} == {"bfloat16"}
    rounding = 2.0**-8  # of the output; operands are exact
    close(
        got,
        reference.products(x, w, dout, sizes, OFFSET),
        lambda product: recipe.budget(product) + rounding,
    )


def test_dtypes_of_gradients_are_those_of_the_operands():
    x, w, dout = data()
    got = run(x.astype(jnp.bfloat16), w, dout.astype(jnp.bfloat16), np.array([M, 0, 0, 0]), 0, BF16)
    assert [got[p].dtype for p in PRODUCTS] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert [got[p].shape for p in PRODUCTS] == [(M, N), (M, K), (E, K, N)]


@some_recipes
def test_backends_agree(recipe):
    x, w, dout = data()
    sizes = np.array(LAYOUTS["ragged"])[1:5]
    expected = run(x, w, dout, sizes, 0, recipe, "xla")
    close(run(x, w, dout, sizes, 0, recipe, "ragged_dot"), expected, 2e-6)


MY_RECIPES = {
    "e5m2 activations": Recipe(
        name="mine",
        weight=Cast(dtype="float8_e4m3fn", tile=(1, None)),
        act=Cast(dtype="float8_e5m2", tile=(1, None)),
        dlhs_grad=Cast(dtype="float8_e5m2", tile=(1, None)),
    ),
    "blocks of rows": Recipe(
        name="mine",
        weight=Cast(dtype="float8_e4m3fn", tile=(32, None)),
        act=Cast(dtype="float8_e4m3fn", tile=(32, None)),
        dlhs_grad=Cast(dtype="float8_e5m2", tile=(1, 64)),
        drhs_grad=Cast(dtype="float8_e5m2", tile=(1, 64)),
    ),
    "cut anew, whole gradients": Recipe(
        name="mine",
        weight=Cast(dtype="float8_e4m3fn", tile=(1, 32), power_of_two=True),
        act=Cast(dtype="float8_e4m3fn", tile=(1, 32), power_of_two=True),
        dlhs_grad=Cast(dtype="float8_e5m2", tile=(1, None)),
        drhs_grad=Cast(dtype="float8_e5m2", tile=(1, None)),
    ),
    "gradients only": Recipe(
        name="mine",
        dlhs_grad=Cast(dtype="float8_e5m2", tile=(1, 64)),
        drhs_grad=Cast(dtype="float8_e5m2", tile=(32, 64)),
    ),
    "square blocks": Recipe(
        name="mine",
        weight=Cast(dtype="float8_e4m3fn", tile=(32, 32)),
        act=Cast(dtype="float8_e4m3fn", tile=(32, 32)),
        dlhs_grad=Cast(dtype="float8_e4m3fn", tile=(32, 32)),
        drhs_grad=Cast(dtype="float8_e4m3fn", tile=(1, None)),
    ),
}


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8"])
def test_blocks_that_divide_no_dim(name):
    x, w, dout = data(m=150, k=200, n=136)
    sizes, recipe = np.array([30, 0, 90, 7]), RECIPES[name]
    got = run(x, w, dout, sizes, 0, recipe)
    close(got, reference.products(x, w, dout, sizes), budget(recipe))


@pytest.mark.parametrize("recipe", MY_RECIPES.values(), ids=MY_RECIPES)
def test_recipes_of_users(recipe):
    # Spread over channels and experts, as these tiles can hold.
    spread = functools.partial(reference.spread, np.random.default_rng(1), orders=0.5)
    x, w, dout = (jnp.asarray(spread(*shape)) for shape in ((M, K), (E, K, N), (M, N)))
    sizes = np.array(LAYOUTS["ragged"])
    got = run(x, w, dout, sizes, OFFSET, recipe)
    close(got, reference.products(x, w, dout, sizes, OFFSET), budget(recipe))


def test_weight_type_is_not_the_activations():
    recipe = MY_RECIPES["e5m2 activations"]
    jaxpr = str(jax.make_jaxpr(functools.partial(local, recipe))(*data(**SMALL)[:2]))
    assert "f8_e4m3fn[4,16,24]" in jaxpr and "f8_e5m2[48,16]" in jaxpr
    assert "f8_e5m2[4,16,24]" not in jaxpr


# Transformations.

SMALL = {"m": 48, "k": 16, "n": 24}
SIZES = np.array([10, 0, 20, 7])


def local(recipe, x, w, sizes=SIZES):
    return gmm(x, w, jnp.asarray(sizes), recipe=recipe)


@some_recipes
def test_vmap(recipe):
    x, w, dout = data(**SMALL)
    sizes = np.stack([SIZES, SIZES[::-1], [48, 0, 0, 0]])
    loss = lambda x, w, sizes: jnp.vdot(local(recipe, x, w, sizes), dout)  # noqa: E731
    grads = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (None, None, 0)))(x, w, sizes)
    one = jax.jit(jax.grad(loss, (0, 1)))
    for i in range(3):
        expected = one(x, w, sizes[i])
        np.testing.assert_array_equal(grads[0][i], expected[0])
        np.testing.assert_array_equal(grads[1][i], expected[1])


@some_recipes
def test_scan_of_checkpointed_layers(recipe):
    x, _, dout = data(m=48, k=16, n=16)
    w = jnp.stack([data(m=48, k=16, n=16)[1], data(**SMALL)[1][..., :16]])

    def scanned(w, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(local(recipe, x, w)), None))
        return jnp.vdot(lax.scan(layer, x, w)[0], dout)

    def unrolled(w, x):
        for i in range(2):
            x = jnp.tanh(local(recipe, x, w[i]))
        return jnp.vdot(x, dout)

    got, expected = (jax.jit(jax.grad(f, (0, 1)))(w, x) for f in (scanned, unrolled))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("recipe", [RECIPES["fp8_full"]])
def test_health_is_the_gradient_of_its_argument(recipe):
    x, w, dout = data(**SMALL)
    x = x.at[:10, 1:].multiply(1e-9)  # beside a column that sets the rows' scales

    def loss(health):
        return jnp.vdot(gmm(x, w, jnp.asarray(SIZES), recipe=recipe, health=health), dout)

    counts = np.asarray(jax.jit(jax.grad(loss))(new_health()))
    saturated, flushed, nonzero, signal, noise = counts[:, :5].T
    live = sum(SIZES)
    np.testing.assert_array_equal(saturated, 0)
    np.testing.assert_array_equal(nonzero, [4 * 16 * 24, live * 16, live * 24, live * 24])
    errors = [getattr(recipe, operand).error for operand in OPERANDS]
    assert (np.sqrt(noise / signal) < np.multiply(errors, 1.5)).all()
    # What a gradient takes over from another operand's scale is not in its amax.
    amax = summary(counts)["amax"]
    assert amax[2] == amax[3] and 1 <= amax[3] / np.abs(dout).max() < 1.2
    assert flushed[1] >= 10 * 15


def test_nothing_is_counted_when_nobody_asks():
    x, w, _ = data(**SMALL)

    def counts(health):
        run = functools.partial(gmm, recipe=RECIPES["fp8_full"], health=health)
        return str(jax.make_jaxpr(run)(x, w, jnp.asarray(SIZES))).count("= reduce_sum")

    assert counts(new_health()) == counts(None) + 2 * 5


# Weights that come quantized, and merged ones.


@pytest.mark.parametrize("name", ["fp8_full", "fp8_blockwise", "mxfp8"])
def test_weights_that_come_quantized(name):
    x, w, dout = data()
    recipe, sizes = RECIPES[name], np.array(LAYOUTS["ragged"])
    q = jax.jit(fp8.quantize_weight, static_argnums=1)(jnp.asarray(w), recipe.weight)
    weight = Quantized(jnp.full(w.shape, jnp.nan, jnp.bfloat16), q)
    got = run(x, weight, dout, sizes, OFFSET, recipe)
    drhs = got["drhs"]
    assert isinstance(drhs, Quantized) and drhs.master.dtype == jnp.bfloat16
    expected = run(x, w, dout, sizes, OFFSET, recipe)
    same(got, expected, ("out", "dlhs"))
    np.testing.assert_array_equal(drhs.master, expected["drhs"].astype(jnp.bfloat16))


@each_recipe
def test_merged_gating(recipe):
    """One GMM of two weights side by side gives the numbers of two GMMs."""
    x, gate, dgate = data()
    up, dup = data()[1][:, :, ::-1] / 300, data()[2][:, ::-1] * 300
    sizes = np.array(LAYOUTS["ragged"])
    halves = [run(x, w, dout, sizes, OFFSET, recipe) for w, dout in ((gate, dgate), (up, dup))]
    w, dout = jnp.concatenate([gate, up], 2), jnp.concatenate([dgate, dup], 1)
    got = run(x, w, dout, sizes, OFFSET, recipe.merged(2))
    # The same 8-bit values, see test_fp8; a wider product may sum in another order.
    both = {p: np.concatenate([half[p] for half in halves], -1) for p in ("out", "drhs")}
    close(got, both, 1e-6)
    # dlhs sums over both halves: there one scale of dout may serve both, and it keeps the budget.
    exact = reference.products(x, w, dout, sizes, OFFSET)["dlhs"]
    close(got, {"dlhs": exact}, budget(recipe))
    two = np.asarray(halves[0]["dlhs"], np.float64) + np.asarray(halves[1]["dlhs"])
    own_scales = recipe.name in ("bf16", "mxfp8")
    close(got, {"dlhs": two}, 1e-6 if own_scales else budget(recipe))


def test_merging_needs_parts_of_their_own_scale():
    """The fault that `merged` is there for: one scale for gate and an up that is 300x smaller."""
    x, gate, dout = data()
    up = gate[:, :, ::-1] / 3e4
    recipe, sizes = RECIPES["fp8_tensorwise"], np.array(LAYOUTS["ragged"])
    w, dout = jnp.concatenate([gate, up], 2), jnp.concatenate([dout, dout], 1)
    exact = reference.gmm(x, up, sizes, OFFSET)

    def error(recipe):
        out = run(x, w, dout, sizes, OFFSET, recipe)["out"]
        return reference.relative_error(out[:, N:], exact)

    assert error(recipe.merged(2)) < recipe.budget("out") < error(recipe)


# Errors.


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"x": jnp.ones((4, 7))}, "gmm: x has K=7, w has K=5"),
        ({"group_sizes": jnp.ones(2, int)}, "gmm: w holds 3 groups, group_sizes names only 2"),
        ({"group_offset": 1}, r"group_offset: expected 0 to 0 \(w holds 3 of 3 groups\), got 1"),
        ({"recipe": BF16.merged(4)}, "gmm: N=6 does not come in 4 equal parts"),
        (
            {"backend": "cuda"},
            r"backend: expected auto or one of .*'pallas_tpu', .*'xla'\], got 'cuda'",
        ),
        ({"backend": "ragged_dot", "group_sizes": jnp.ones(4, int)}, "ragged_dot: group_offset: "),
    ],
)
def test_errors(change, expected):
    call = {"x": jnp.ones((4, 5)), "w": jnp.ones((3, 5, 6)), "group_sizes": jnp.ones(3, int)}
    with pytest.raises(ValueError, match=expected):
        gmm(**(call | change))


def test_error_of_a_wrong_rank(monkeypatch):
    # Where the tests' own check of annotations does not catch it first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    expected = (
        r"gmm expects x \[M, K\], w \[E, K, N\], group_sizes \[G\], "
        r"got \(4, 5, 6\), \(3, 5, 6\), \(3,\)"
    )
    with pytest.raises(ValueError, match=expected):
        gmm(jnp.ones((4, 5, 6)), jnp.ones((3, 5, 6)), jnp.ones(3, int))
