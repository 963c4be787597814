"""Casts, scales, calibrations, recipes, and the quantizer of weights on shards."""

import functools
import math

import jax
import numpy as np
import pydantic
import pytest
import qwix
import reference
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from octablox import fp8
from octablox.errors import UserError
from octablox.fp8 import (
    BF16,
    RECIPES,
    Cast,
    QArray,
    QuantizationConfig,
    Recipe,
    recipe_from_config,
)

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0, "int8": 127.0}
FIXED_ONE = {E4M3: "fixed,-448,448", E5M2: "fixed,-57344,57344", "int8": "fixed,-127.5,127.5"}


def values(q):
    return np.asarray(q.qvalue, np.float32)


@functools.partial(jax.jit, static_argnums=1, static_argnames="parts")
def weight(w, cast, parts=1):
    return fp8.quantize_weight(w.astype(jnp.float32), cast, parts=parts)


@functools.partial(jax.jit, static_argnums=1)
def act(x, cast, rows=None):
    return fp8.quantize(x.astype(jnp.float32), cast, contracted=1, rows=rows)


# Values and scales.


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("beyond", [1.04, 1.08, 1e9, np.inf])
def test_casts_saturate(dtype, beyond):
    # A scale of one: 465 is 1.04 times the range of e4m3fn, which would become NaN; 61440 is
    # 1.07 times that of e5m2, which would become Inf.
    cast = Cast(dtype=dtype, tile=(None, None), calibration=FIXED_ONE[dtype])
    x = np.array([[beyond, -beyond, 1.0, 0.0]]) * [[*(LARGEST[dtype],) * 2, 1, 1]]
    for q in (act(x, cast), weight(x[None], cast)):
        np.testing.assert_array_equal(q.scale.ravel(), [1])
        np.testing.assert_array_equal(
            values(q).ravel(), [LARGEST[dtype], -LARGEST[dtype] - (dtype == "int8"), 1, 0]
        )


@pytest.mark.parametrize("magnitude", [1e30, 1e-12, 1e-22, 1e-32])
@pytest.mark.parametrize("name", ["fp8_full", "fp8_blockwise", "mxfp8", "int8"])
def test_no_magnitude_is_lost(name, magnitude):
    """Neither large values nor gradients that a mean over many tokens has made small."""
    x = jax.random.normal(jax.random.key(0), (8, 256))
    cast = RECIPES[name].dlhs_grad
    for q in (act(x * magnitude, cast), weight(x[None] * magnitude, RECIPES[name].weight)):
        got = np.asarray(fp8.dequantize(q), np.float64).reshape(x.shape) / magnitude
        assert reference.relative_error(got, x) < 1.5 * cast.error


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_is_that_of_qwix_to_the_bit(dtype):
    # Every sign, exponent and leading 12 bits of mantissa, with what rounds down, ties, rounds up.
    leading = np.arange(2**20, dtype=np.uint32) << 12
    cast = Cast(dtype=dtype, tile=(None, None), calibration=FIXED_ONE[dtype])
    for last in (0, 1, 0xFFF):
        y = (leading | last).view(np.float32)[None]
        expected = jax.jit(qwix.quantize, static_argnames=("qtype", "calibration_method"))(
            y, qtype=dtype, calibration_method=cast.calibration
        )
        got = act(y, cast)
        np.testing.assert_array_equal(values(got), values(expected))
        signs = np.signbit(values(got)) == np.signbit(values(expected))
        assert signs[~np.isnan(y)].all()


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("tile", [(1, None), (None, None), (1, 2), (2, 2)])
def test_scale_of_zeros_is_one(dtype, tile):
    cast = Cast(dtype=dtype, tile=tile)
    x = np.zeros((4, 6))
    for q in (act(x, cast), weight(np.zeros((2, 6, 4)), cast)):
        assert not values(q).any()
        np.testing.assert_array_equal(q.scale, np.ones_like(q.scale))


@pytest.mark.parametrize("method", ["absmax", "absmax,0.5", "rms,3"])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", LARGEST)
def test_nan_and_inf_leave_scales_finite(dtype, power_of_two, method):
    cast = Cast(dtype=dtype, tile=(1, None), calibration=method, power_of_two=power_of_two)
    x = np.ones((3, 4), np.float32)
    x[0, 1], x[1, 1] = np.nan, np.inf
    for q in (act(x, cast), weight(x.T[None], cast)):
        scale = np.asarray(q.scale).ravel()
        assert np.isfinite(scale).all() and (scale > 0).all()
        got = values(q).reshape((3, 4) if q.ndim == 2 else (4, 3))
        got = got if q.ndim == 2 else got.T
        assert np.isnan(got[0, 1]) if dtype != "int8" else got[0, 1] == 0
        assert got[1, 1] == LARGEST[dtype]  # Inf saturates
        assert np.isfinite(got[2]).all() and (got[2] > 0).all()


EXPONENTS = range(-60, 100, 7)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_power_of_two_scales_are_exact(dtype):
    # One row an amax: exactly a power of two times the range, and the floats next to it.
    exact = np.array([LARGEST[dtype] * 2.0**e for e in EXPONENTS], np.float32)
    amax = np.concatenate([exact, np.nextafter(exact, 0), np.nextafter(exact, np.float32(1e38))])
    cast = Cast(dtype=dtype, tile=(1, None), power_of_two=True)
    expected = [2.0 ** math.ceil(math.log2(float(a) / LARGEST[dtype])) for a in amax]
    expected[len(exact) : 2 * len(exact)] = expected[: len(exact)]
    for q in (
        act(amax[:, None], cast),
        weight(amax[None, None], cast),
    ):
        got = np.asarray(q.scale, np.float64).ravel()
        # amax / range of the floats next to a power of two may round to it: up or not, no loss.
        mantissa, _ = np.frexp(got)
        np.testing.assert_array_equal(mantissa, 0.5)
        np.testing.assert_array_equal(got[: len(exact)], expected[: len(exact)])
        assert (got >= amax / LARGEST[dtype] * (1 - 1e-6)).all()
        assert (got <= 2 * amax / LARGEST[dtype] * (1 + 1e-6)).all()


@pytest.mark.parametrize("shape", [(3, 40), (2, 7), (1, 64)])
@pytest.mark.parametrize("tile", [(1, 32), (32, 32), (None, 32), (2, None)])
def test_blocks_that_divide_no_dim(tile, shape):
    x = reference.spread(np.random.default_rng(0), *shape)
    cast = Cast(dtype=E4M3, tile=tile)
    for q, original in (
        (act(x, cast), x),
        (weight(x.T[None], cast), x.T[None]),
    ):
        block = fp8.tiles(cast, original.shape, q.ndim - 1 if q.ndim == 2 else 1)
        assert q.shape == tuple(-(-s // b) * b for s, b in zip(original.shape, block, strict=True))
        back = np.array(fp8.dequantize(q))
        kept = tuple(slice(0, size) for size in original.shape)
        assert reference.relative_error(back[kept], original) < 1.5 * cast.error
        back[kept] = 0
        assert not back.any()  # the padding


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_blockwise"])
def test_cutting_tiles_anew_loses_only_what_leaves_the_range(recipe):
    cast = RECIPES[recipe].act
    x = reference.spread(np.random.default_rng(1), 256, 128, orders=3.0)
    once = act(x, cast)
    kept = np.asarray(fp8.dequantize(once))
    twice = fp8.quantize(jnp.asarray(kept), cast, contracted=0)
    again = np.asarray(fp8.dequantize(twice))
    normal = np.abs(values(twice)) > 2.0**-6  # others are subnormal, came from one, or flushed
    assert 0.5 < normal.mean() < 1
    np.testing.assert_array_equal(again[normal], kept[normal])
    assert reference.relative_error(again, kept) < 1e-3


@pytest.mark.parametrize("tile", [(None, None), (1, None), (1, 16), (16, None), (16, 16)])
def test_rms_counts_no_padding(tile):
    # Rows 3 ... 22 of 48 count; K = 40 is no multiple of 16.
    x = reference.spread(np.random.default_rng(2), 48, 40)
    alone = np.zeros_like(x)
    alone[3:23] = x[3:23]
    dead = np.ones(48, bool)
    dead[3:23] = False
    cast = Cast(dtype=E4M3, tile=tile, calibration="rms,4")
    q = act(reference.poisoned(x, dead), cast, rows=(jnp.int32(3), jnp.int32(23)))
    rows, columns = fp8.tiles(cast, x.shape, 1)
    scale = np.asarray(q.scale)
    for i, j in np.ndindex(scale.shape):
        tile_of = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        counted = x[tile_of][~dead[tile_of[0]]]
        if counted.size:
            rms = np.sqrt(np.mean(np.square(counted, dtype=np.float64)))
            np.testing.assert_allclose(scale[i, j], 4 * rms / 448, rtol=1e-6)
    w = weight(alone[3:23].T[None], cast)
    block = fp8.tiles(cast, (1, 40, 20), 1)
    last = np.sqrt(
        np.mean(
            np.square(alone[3:23].T[-(40 % block[1] or block[1]) :, -(20 % block[2] or block[2]) :])
        )
    )
    np.testing.assert_allclose(w.scale[0, -1, -1], 4 * last / 448, rtol=1e-6)


# The quantizer of weights and qwix's.


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("method", ["absmax", "absmax,0.7", "rms,3", "fixed,-2,2"])
def test_weights_as_qwix_quantizes_them(method, dtype):
    w = reference.spread(np.random.default_rng(3), 3, 64, 32, dims=(0, 1, 2), orders=1.0)
    w[1, :, 5] = 0
    for tile, settings in (
        ((1, None), {"channelwise_axes": [0, 2]}),
        ((None, None), {"channelwise_axes": [0]}),
        ((1, 16), {"channelwise_axes": [0, 2], "tiled_axes": {1: 16}}),
        ((8, 16), {"channelwise_axes": [0], "tiled_axes": {1: 16, 2: 8}}),
    ):
        ours = weight(w, Cast(dtype=dtype, tile=tile, calibration=method))
        quantize = functools.partial(
            qwix.quantize, qtype=dtype, calibration_method=method, **settings
        )
        theirs = jax.jit(quantize)(w)
        np.testing.assert_array_equal(values(ours), values(theirs))
        np.testing.assert_array_equal(ours.scale, theirs.scale)
        np.testing.assert_array_equal(fp8.dequantize(ours), qwix.dequantize(theirs))


def test_parts_keep_their_own_scales():
    rng = np.random.default_rng(4)
    gate, up = reference.spread(rng, 2, 64, 48), reference.spread(rng, 2, 64, 48) / 300
    for tile in ((None, None), (1, None), (16, 32), (32, 32), (64, 64)):
        cast = Cast(dtype=E4M3, tile=tile)
        q = weight(np.concatenate([gate, up], 2), cast, parts=2)
        halves = [weight(half, cast) for half in (gate, up)]
        if tile == (32, 32):  # 48 is no multiple: the blocks shrink to 16 rather than straddle
            assert q.scale.shape == (2, 2, 6)
            continue
        np.testing.assert_array_equal(values(q), np.concatenate([values(h) for h in halves], 2))
        np.testing.assert_array_equal(q.scale, np.concatenate([h.scale for h in halves], 2))


# Weights on shards, of every type that `shard_map` knows.

EXPLICIT = (AxisType.Explicit,) * 2
TILES = {"tensor": (None, None), "channel": (1, None), "block": (16, 16), "mx": (1, 16)}


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("expert", "fsdp"), axis_types=EXPLICIT)


@pytest.mark.parametrize("method", ["fixed,-2,2", "absmax", "rms,3"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("dim", [1, 2], ids=["K", "N"])
def test_weight_shards(dim, tile, method):
    """A weight sharded over fsdp: quantized before the gather, after it (reduced, varying)."""
    cast = Cast(dtype=E4M3, tile=tile, calibration=method)
    w = reference.spread(np.random.default_rng(5), 2, 64, 64, dims=(0, 1, 2), orders=1.0)
    expected = weight(w, cast)
    gather = functools.partial(lax.all_gather, axis_name="fsdp", axis=dim, tiled=True)
    vary = lambda a: lax.pcast(a, "fsdp", to="varying")  # noqa: E731

    def shard(w):
        before = fp8.quantize_weight(w, cast, axes={dim: ("fsdp",)})
        # The type says that all shards hold the same scale, where one serves the sharded dim.
        spans = tile[1 if dim == 1 else 0] is None or method[0] == "f"
        assert ("fsdp" in jax.typeof(before.scale).mat.varying) != spans
        scale = before.scale if spans else gather(before.scale)
        values = lax.bitcast_convert_type(before.qvalue, jnp.uint8)
        quantized = [(gather(values), scale)]
        for whole in (gather(w, to="reduced"), gather(w)):
            q = fp8.quantize_weight(whole, cast)
            quantized.append((lax.bitcast_convert_type(q.qvalue, jnp.uint8), q.scale))
        # One copy of each on every shard, along a new leading dim.
        return jax.tree.map(
            lambda a: (a if "fsdp" in jax.typeof(a).mat.varying else vary(a))[None], quantized
        )

    spec = P(*("fsdp" if d == dim else None for d in range(3)))
    with jax.set_mesh(mesh()):
        placed = jax.device_put(w, jax.NamedSharding(mesh(), spec))
        copies = jax.jit(jax.shard_map(shard, in_specs=spec, out_specs=P("fsdp")))(placed)
    for value, scale in jax.device_get(copies):
        for copy in range(4):
            got = QArray(jnp.asarray(value[copy]).view(E4M3), jnp.asarray(scale[copy]))
            if method[0] == "r":  # a mean over shards is summed in another order
                np.testing.assert_allclose(got.scale, expected.scale, rtol=1e-6)
                back, whole = fp8.dequantize(got), np.asarray(fp8.dequantize(expected))
                assert reference.relative_error(back, whole) < 2e-3
            else:
                np.testing.assert_array_equal(values(got), values(expected))
                np.testing.assert_array_equal(got.scale, expected.scale)


def test_blocks_that_straddle_shards():
    cast = RECIPES["mxfp8"].weight

    def shard(w):
        return fp8.quantize_weight(w, cast, axes={1: ("fsdp",)}).qvalue

    expected = (
        r"weight blocks of 32 straddle shards of 24 \(dim 1, mesh axes \('fsdp',\)\); gather the "
        "weight first or choose a mesh whose shards they divide"
    )
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match=expected):
        jax.eval_shape(
            jax.shard_map(shard, in_specs=P(None, "fsdp"), out_specs=P(None, "fsdp")),
            jax.ShapeDtypeStruct(
                (2, 96, 64), jnp.float32, sharding=jax.NamedSharding(mesh(), P(None, "fsdp"))
            ),
        )


def test_scales_of_a_dim_that_is_sharded_to_single_channels():
    # Four channels on four shards: each has a scale of its own, none is shared.
    w = reference.spread(np.random.default_rng(6), 2, 16, 4)
    cast = Cast(dtype=E4M3, tile=(1, None))

    def shard(w):
        return fp8.quantize_weight(w, cast, axes={2: ("fsdp",)}).scale

    spec = P(None, None, "fsdp")
    with jax.set_mesh(mesh()):
        placed = jax.device_put(w, jax.NamedSharding(mesh(), spec))
        scale = jax.jit(jax.shard_map(shard, in_specs=spec, out_specs=spec))(placed)
    np.testing.assert_array_equal(jax.device_get(scale), weight(w, cast).scale)


@pytest.mark.parametrize("method", ["absmax", "rms,3"])
def test_activation_scales_agree_on_shards(method):
    """Rows sharded unevenly filled: a scale over rows is that of all rows that count."""
    x = reference.spread(np.random.default_rng(7), 64, 12)
    cast = Cast(dtype=E4M3, tile=(None, None), calibration=method)
    counts = np.array([16, 3, 0, 9])
    live = np.concatenate([x[16 * i : 16 * i + n] for i, n in enumerate(counts)])

    def shard(x, count):
        rows = jnp.int32(0), count[0]
        return fp8.quantize(x, cast, contracted=1, axes={0: ("fsdp",)}, rows=rows).scale

    with jax.set_mesh(mesh()):
        put = lambda a: jax.device_put(a, jax.NamedSharding(mesh(), P("fsdp")))  # noqa: E731
        scale = jax.jit(jax.shard_map(shard, in_specs=P("fsdp"), out_specs=P()))(
            put(x), put(counts)
        )
    np.testing.assert_allclose(jax.device_get(scale), act(live, cast).scale, rtol=1e-6)


# Calibrations and recipes.


@pytest.mark.parametrize(
    ("method", "expected"),
    {
        "absmax": ("absmax", 1.0),
        "absmax,0.5": ("absmax", 0.5),
        "ABSMAX, 2": ("absmax", 2.0),
        "fixed,-224,224": ("fixed", 224.0),
        "fixed,3": ("fixed", 3.0),
        "rms,6.5": ("rms", 6.5),
    }.items(),
)
def test_calibrations(method, expected):
    assert fp8.parse_calibration(method) == expected


@pytest.mark.parametrize(
    "method",
    "|max|minmax|absmax,0|absmax,-1|absmax,1,2|absmax,x|absmax,nan|absmax,inf|rms|rms,0|rms,1,2|"
    "fixed|fixed,-1,2|fixed,1,-1|fixed,-2|fixed,0,0".split("|"),
)
def test_calibrations_that_mean_nothing(method):
    expected = "expected absmax, absmax,F, fixed,-A,A or rms,F (F, A > 0), got "
    with pytest.raises(ValueError) as error:
        fp8.parse_calibration(method)
    assert str(error.value) == expected + repr(method)


def test_budgets_add_in_quadrature():
    full = RECIPES["fp8_full"]
    assert full.budget("out") == pytest.approx(1.5 * math.hypot(0.0265, 0.0265))
    assert (
        full.budget("drhs")
        == full.budget("dlhs")
        == pytest.approx(1.5 * math.hypot(0.0265, 0.0527))
    )
    assert BF16.budget("out") == 0
    assert RECIPES["int8"].budget("drhs") == pytest.approx(0.015)


def test_recipes_are_hashable_and_named():
    assert list(RECIPES) == ["bf16", "fp8_full", "fp8_tensorwise", "fp8_blockwise", "mxfp8", "int8"]
    assert len({hash(recipe) for recipe in RECIPES.values()}) == len(RECIPES)
    assert RECIPES["mxfp8"].merged(2) != RECIPES["mxfp8"]


def test_recipe_of_a_config():
    assert recipe_from_config(QuantizationConfig()) == BF16
    config = QuantizationConfig(
        quantization="fp8_full",
        weight_quantization_calibration_method="fixed,-224,224",
        act_quantization_calibration_method="rms,6",
        bwd_quantization_calibration_method="absmax,0.9",
    )
    recipe = recipe_from_config(config)
    casts = recipe.weight, recipe.act, recipe.dlhs_grad, recipe.drhs_grad
    methods = [cast.calibration for cast in casts]
    assert methods == ["fixed,-224,224", "rms,6", "absmax,0.9", "absmax,0.9"]
    assert [cast.dtype for cast in casts] == [E4M3, E4M3, E5M2, E5M2]


def test_recipe_of_a_file(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(
        "weight: {dtype: float8_e4m3fn, tile: [1, null]}\n"
        "act: {dtype: float8_e5m2, tile: [null, null], calibration: 'rms,6'}\n"
    )
    assert recipe_from_config(QuantizationConfig(quantization=str(path))) == Recipe(
        name="mine",
        weight=Cast(dtype=E4M3, tile=(1, None)),
        act=Cast(dtype=E5M2, tile=(None, None), calibration="rms,6"),
    )


ROW = "weight: {dtype: float8_e4m3fn, tile: [1, null]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is no recipe in YAML: "),
        ("- 1\n", "is no recipe in YAML: "),
        ("a: [", "is no recipe in YAML: while parsing a flow"),
        ("wieght: {}\n", "wieght: Extra inputs are not permitted"),
        ("weight: {dtype: float4, tile: [1, 1]}", "weight.dtype: .*expected one of .*got 'float4'"),
        (ROW + ", calibration: rms}", "weight.calibration: .*expected absmax.*got 'rms'"),
        ("weight: {dtype: int8, tile: [0, null]}", "weight.tile.0: .*greater than 0"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"quantization: {path}:? {expected}") as error:
        recipe_from_config(QuantizationConfig(quantization=str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quantization": "fp9"}, "quantization: expected one of bf16, fp8_full, .*got 'fp9'"),
        ({"quantization": "no.yml"}, "quantization: cannot read no.yml: No such file"),
        (
            {"quantization": "fp8_full", "act_quantization_calibration_method": "fixed"},
            "act_quantization_calibration_method: expected absmax.*got 'fixed'",
        ),
        (
            {"bwd_quantization_calibration_method": "absmax"},
            "bwd_quantization_calibration_method: the recipe bf16 casts no such operand; leave it "
            "empty, got 'absmax'",
        ),
    ],
)
def test_configs_that_name_no_recipe(fields, expected):
    with pytest.raises(UserError, match=expected):
        recipe_from_config(QuantizationConfig(**fields))


def cast(*tile, **settings):
    return Cast(dtype=E4M3, tile=tile, **settings)


@pytest.mark.parametrize(
    ("casts", "expected"),
    [
        (
            {"act": cast(1, 32), "weight": cast(64, 64)},
            "blocks of act and weight meet along K: expected equal contracted tiles or null, got "
            "32 and 64",
        ),
        (
            {"dlhs_grad": cast(1, 32), "weight": cast(64, 64)},
            "blocks of dlhs_grad and weight meet along N: .*got 32 and 64",
        ),
        (
            {"drhs_grad": cast(1, 64), "act": cast(1, 32, power_of_two=True)},
            "blocks of drhs_grad and act meet along M: .*got 64 and 32",
        ),
        (
            {"weight": cast(1, 32), "dlhs_grad": cast(1, 32)},
            r"weight: tile \(1, 32\) is cut anew for dlhs_grad's product, which rounds twice; "
            "expected power_of_two: true, got false",
        ),
    ],
)
def test_recipes_that_cannot_work(casts, expected):
    with pytest.raises(pydantic.ValidationError, match=expected):
        Recipe(name="mine", **casts)
