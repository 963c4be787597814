"""`gmm` on meshes equals `gmm` on one device: inside `shard_map`, and on explicit axes outside."""

import functools

import jax
import numpy as np
import pytest
import reference
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from octablox import fp8
from octablox.fp8 import RECIPES, Quantized
from octablox.gmm import DimAxes, gmm

# Two halves of the rows, each grouped by itself; blocks of 128 divide every shard.
HALVES, M, K, N, E = 2, 256, 256, 256, 4
SIZES = np.array([[60, 0, 30, 25], [1, 127, 0, 0]])  # the first half ends with rows of no group
PRODUCTS = "out", "dlhs", "drhs"
# int8 has the tiles of fp8_full.
TILINGS = [recipe for name, recipe in RECIPES.items() if name != "int8"]


def explicit_mesh(**axes):
    types = (AxisType.Explicit,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


@functools.cache
def data():
    rng = np.random.default_rng(0)
    x = reference.spread(rng, M, K, orders=1)
    w = reference.spread(rng, E, K, N, dims=(0, 1, 2), orders=1)
    dout = reference.spread(rng, M, N, orders=1)
    x[115:128], dout[115:128] = np.nan, np.nan
    return x, w, dout


def vjp(f, x, w, dout):
    out, pull = jax.vjp(f, x, w)
    return dict(zip(PRODUCTS, (out, *pull(dout)), strict=True))


@functools.cache
def one_device(recipe):
    """One device: the groups of both halves in one row of groups, each half with a copy of w."""
    x, w, dout = data()
    # An empty group at its place takes the first half's rows of no group.
    sizes = np.insert(SIZES.ravel(), E, 128 - SIZES[0].sum())
    copies = np.concatenate([w, np.zeros_like(w[:1]), w])
    x, dout = np.nan_to_num(x), np.nan_to_num(dout)
    f = lambda x, w: gmm(x, w, jnp.asarray(sizes), recipe=recipe)  # noqa: E731
    got = jax.jit(functools.partial(vjp, f))(x, copies, dout)
    drhs = np.asarray(got["drhs"], np.float64)
    return got | {"drhs": drhs[:E] + drhs[-E:]}


def on_mesh(mesh, f, specs, arrays):
    """`out`, `dlhs`, `drhs` of a function of x and w on shards."""
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, jax.NamedSharding(mesh, spec))
            for a, spec in zip(arrays, specs, strict=True)
        ]
        return jax.device_get(jax.jit(functools.partial(vjp, f))(*placed))


def close(got, expected, bound=5e-6):
    for product in PRODUCTS:
        error = reference.relative_error(got[product], np.asarray(expected[product], np.float64))
        assert error <= bound, f"{product}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("recipe", TILINGS, ids=lambda recipe: recipe.name)
def test_every_dim_sharded(recipe):
    """M, K and N at once: scales that span them agree, parts of the sum over K add up."""
    axes = DimAxes(m=("m",), k=("k",), n=("n",))

    def shard(x, w, sizes):
        return lax.psum(gmm(x, w, sizes[0], recipe=recipe, axes=axes), "k")

    mesh = explicit_mesh(m=HALVES, k=2, n=2)
    specs = P("m", "k"), P(None, "k", "n"), P("m", "n")
    mapped = jax.shard_map(
        shard, mesh=mesh, in_specs=(*specs[:2], P("m")), out_specs=specs[2], check_vma=True
    )

    def f(x, w):
        return mapped(x, w, jax.device_put(SIZES, jax.NamedSharding(mesh, P("m"))))

    close(on_mesh(mesh, f, specs, data()), one_device(recipe))


def ways_of_weights():
    for name, recipe in RECIPES.items():
        yield pytest.param(recipe, "reduced", id=f"{name}-reduced")
    for name in ("bf16", "fp8_tensorwise"):
        yield pytest.param(RECIPES[name], "varying", id=f"{name}-varying")
        yield pytest.param(RECIPES[name], "replicated", id=f"{name}-replicated")
    for name in ("fp8_full", "mxfp8"):
        yield pytest.param(RECIPES[name], "quantized", id=f"{name}-quantized")


def gathered(w, way, recipe):
    """A weight that fsdp shards along K, as `gmm` is given it."""
    gather = functools.partial(lax.all_gather, axis_name="fsdp", axis=1, tiled=True)
    if way == "replicated":
        return w
    if way != "quantized":
        return gather(w, to=way)
    # Differentiates as the gathered weight; the values are quantized first.
    q = fp8.quantize_weight(lax.stop_gradient(w), recipe.weight, axes={1: ("fsdp",)})
    scale = q.scale if q.scale.shape[1] == 1 else gather(q.scale)
    value = gather(lax.bitcast_convert_type(q.qvalue, jnp.uint8))
    value = lax.bitcast_convert_type(value, q.qvalue.dtype)
    return Quantized(gather(w), fp8.QArray(value, scale, None, q.qtype))


@pytest.mark.parametrize(("recipe", "way"), list(ways_of_weights()))
def test_expert_and_data_parallel(recipe, way):
    """Experts sharded over `expert`, rows over `fsdp`; weights gathered over `fsdp` or whole."""
    axes = DimAxes(m=("expert", "fsdp"))

    def shard(x, w, sizes):
        w = gathered(w, way, recipe)
        offset = lax.axis_index("expert") * w.shape[0]
        out = gmm(x, w, sizes[0], recipe=recipe, group_offset=offset, axes=axes)
        return lax.psum(out, "expert")

    mesh = explicit_mesh(expert=2, fsdp=HALVES)
    weight = P("expert", None if way == "replicated" else "fsdp")
    specs = P("fsdp"), weight, P("fsdp")
    mapped = jax.shard_map(
        shard, mesh=mesh, in_specs=(*specs[:2], P("fsdp")), out_specs=specs[2], check_vma=True
    )

    def f(x, w):
        return mapped(x, w, jax.device_put(SIZES, jax.NamedSharding(mesh, P("fsdp"))))

    close(on_mesh(mesh, f, specs, data()), one_device(recipe))


# Explicit axes, outside `shard_map`.


@functools.cache
def small():
    x, w, dout = (np.nan_to_num(a) for a in data())
    return x[:40, :64], w[:, :64, :64], dout[:40, :64]


def group(x, w, recipe=RECIPES["fp8_tensorwise"]):
    sizes = jnp.array([11, 0, 20, 7])
    return gmm(x, w, sizes, recipe=recipe)


@functools.cache
def expected_small():
    return jax.device_get(jax.jit(functools.partial(vjp, group))(*small()))


@pytest.mark.parametrize(
    ("x", "w", "out"),
    [
        (P(), P(), P()),
        (P(), P("a"), P()),
        (P(), P(None, None, ("a", "b")), P(None, ("a", "b"))),
        (P(None, "b"), P("a", "b"), P()),
        (P(None, "b"), P(None, "b", "a"), P(None, "a")),
        (P(), P(None, "a"), P()),
        (P(None, "a"), P(), P()),
    ],
    ids=str,
)
def test_explicit_axes(x, w, out):
    mesh = explicit_mesh(a=2, b=4)

    def f(x, w):
        result = group(x, w)
        assert jax.typeof(result).sharding.spec == P(*out, *(None,) * (2 - len(out)))
        return result

    close(on_mesh(mesh, f, (x, w, out), small()), expected_small())


def test_explicit_axes_and_a_quantized_weight():
    recipe, mesh = RECIPES["fp8_full"], explicit_mesh(a=2, b=4)
    x, w, _ = small()
    q = fp8.quantize_weight(jnp.asarray(w), recipe.weight)
    expected = group(jnp.asarray(x), jnp.asarray(w), recipe)
    with jax.set_mesh(mesh):
        place = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
        value = place(q.qvalue, P("a", None, "b")), place(q.scale, P("a", None, "b"))
        weight = Quantized(place(w, P("a", None, "b")), fp8.QArray(*value, None, q.qtype))
        out = jax.jit(functools.partial(group, recipe=recipe))(place(x, P()), weight)
        assert jax.typeof(out).sharding.spec == P(None, "b")
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("x", "w", "expected"),
    [
        (
            P("a"),
            P(),
            r"gmm: x is sharded over \('a',\) on M, but rows are grouped globally; call "
            "gmm inside jax.shard_map with each shard's own group_sizes",
        ),
        (
            P(None, "a"),
            P(None, "b"),
            r"gmm: K is sharded over \('a',\) in x and over \('b',\) in w",
        ),
        (P(None, "a"), P("a"), r"gmm: one mesh axis shards two of E \('a',\), K \('a',\), N \(\)"),
    ],
)
def test_explicit_axes_that_cannot_work(x, w, expected):
    with pytest.raises(ValueError, match=expected):
        on_mesh(explicit_mesh(a=2, b=4), group, (x, w, P()), small())
