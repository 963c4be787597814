"""The TPU kernels: in the interpreter on small shapes, and compiled ahead of time for real chips.

The interpreter raises on a data race and fills memory that nobody wrote with NaN.
"""

import functools

import jax
import numpy as np
import pytest
import reference
import test_kernels
from jax import numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P
from test_kernels import BF16, E4M3, E5M2, Backend, Case, E

import octablox
from octablox import kernels
from octablox.kernels import Scaled, pallas_tpu, pallas_tpu_interpret, static_schedule, tiles
from octablox.kernels.chips import CHIPS
from octablox.kernels.tiles import Gmm, GmmTiles, Tgmm, TgmmTiles

BACKEND = Backend(pallas_tpu_interpret, 6)
# Aligned shapes and small tiles: several tiles along every dim, groups that span tiles, tiles of
# several groups.
ALIGNED = Case(160, 128, 256, E4M3, E5M2, (1, None), (1, None, 1), BF16)


def tiny(k):
    rows = {"rows": 64, "buckets": (32, 64)}
    gmm = GmmTiles(columns=128, contracted=k, **rows)
    return tiles.override(gmm=gmm, dlhs=gmm, tgmm=TgmmTiles(k=128, n=128, chunk_k=None, **rows))


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_gmm_of_many_tiles(transpose_rhs):
    with tiny(128):
        test_kernels.test_gmm(BACKEND, transpose_rhs, ALIGNED)


@pytest.mark.parametrize("out", [np.float32, BF16])
def test_tgmm_of_many_tiles(out):
    """Sums that go on from tile to tile, in the window and, of bfloat16, in what it cannot hold."""
    with tiny(128):
        case = Case(160, 256, 256, E4M3, E5M2, None, (1, 1, None), out)
        test_kernels.test_tgmm(BACKEND, case)


def test_a_long_bfloat16_sum_is_as_good_as_float32():
    """Ten tiles: rounded to bfloat16 after each, the sum would be 0.4% off."""
    rng = np.random.default_rng(5)
    x, dout = (Scaled(rng.normal(size=(640, 128)).astype(E4M3)) for _ in range(2))
    got = []
    for dtype in (jnp.float32, jnp.bfloat16):
        run = functools.partial(pallas_tpu_interpret.tgmm, num_local_groups=1, out_dtype=dtype)
        with tiny(128):
            got.append(np.asarray(jax.jit(run)(x, dout, jnp.array([640]), 0), np.float64))
    assert reference.relative_error(got[1], got[0].astype(BF16).astype(np.float64)) < 1e-3


def test_tgmm_folds_the_last_rows_of_a_group():
    """A group of 28 rows that begins at row 8 of a block, and ends at row 4 of the next."""
    rng = np.random.default_rng(3)
    x, dout = (test_kernels.operand(rng, (160, 128), E4M3, None) for _ in range(2))
    sizes = np.array([40, 28, 0, 60])
    run = functools.partial(pallas_tpu_interpret.tgmm, num_local_groups=E, out_dtype=jnp.bfloat16)
    dead = reference.outside(160, sizes, 0, E)
    with tiny(128):
        poisoned = [test_kernels.poisoned(a, dead) for a in (x, dout)]
        got = jax.jit(run)(*poisoned, jnp.asarray(sizes), 0)
    test_kernels.check(got, reference.tgmm(x.value, dout.value, sizes, E), BF16)


def test_ragged_shape_in_blocks():
    test_kernels.test_gmm(BACKEND, False, Case(45, 64, 33, E4M3, E4M3, (1, 32), (1, 32, 1)))


def test_gated():
    rng = np.random.default_rng(1)
    x = test_kernels.operand(rng, (70, 128), E4M3, (1, None))
    w = test_kernels.operand(rng, (E, 128, 512), E4M3, (1, None, 1))
    sizes, weight = np.array([30, 0, 3, 20]), rng.uniform(0.5, 2, 70).astype(np.float32)
    run = functools.partial(pallas_tpu_interpret.gated_gmm, out_dtype=jnp.float32, save=True)
    dead = reference.outside(70, sizes, 0, E)
    outs = jax.jit(run)(test_kernels.poisoned(x, dead), w, jnp.asarray(sizes), 0, row_weight=weight)
    both = reference.gmm(test_kernels.dequantized(x), test_kernels.dequantized(w), sizes)
    gate, up = both[:, :256], both[:, 256:]
    sigmoid = (1 + np.tanh(gate / 2)) / 2  # which does not overflow
    out = gate * sigmoid * up * weight[:, None]
    for got, expected in zip(outs, [out, gate, up], strict=True):
        test_kernels.check(got, expected, np.float32)
        assert not np.asarray(got)[dead].any()


def test_gated_gradient():
    """Against jax's own derivative, in float32; gate and up hold garbage in dead rows."""
    rng = np.random.default_rng(4)
    dout = test_kernels.operand(rng, (70, 128), E5M2, (1, None))
    w = test_kernels.operand(rng, (E, 200, 128), E4M3, (1, 1, None))
    gate, up = rng.normal(size=(2, 70, 200)).astype(np.float32)
    sizes = np.array([30, 0, 3, 20])
    dead = reference.outside(70, sizes, 0, E)
    run = functools.partial(pallas_tpu_interpret.gated_gmm_grad, out_dtype=jnp.float32)
    given = (reference.poisoned(a, dead) for a in (gate, up))
    got = jax.jit(run)(test_kernels.poisoned(dout, dead), w, *given, jnp.asarray(sizes), 0)
    transposed = test_kernels.dequantized(w).swapaxes(1, 2)
    grad = reference.gmm(test_kernels.dequantized(dout), transposed, sizes)
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    silu = gate * sigmoid
    expected = grad * up * (sigmoid * (1 + gate * (1 - sigmoid))), grad * silu
    for one, other in zip(got, expected, strict=True):
        test_kernels.check(one, other, np.float32)
        assert not np.asarray(one)[dead].any()


def test_scale_of_each_group_and_column():
    rng = np.random.default_rng(2)
    x, dout = (test_kernels.operand(rng, (50, 128), E5M2, None) for _ in range(2))
    sizes, scale = np.array([0, 30, 3, 7]), rng.uniform(0.5, 2, (E, 128)).astype(np.float32)
    run = functools.partial(pallas_tpu_interpret.tgmm, num_local_groups=E, out_dtype=jnp.float32)
    got = jax.jit(run)(x, dout, jnp.asarray(sizes), 0, group_scale=scale)
    expected = reference.tgmm(x.value, dout.value, sizes, E) * scale[:, None, :]
    test_kernels.check(got, expected, np.float32)


def test_gradients_inside_shard_map():
    """All three products under check_vma, against the portable backend."""
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    x, w, dout = (
        jnp.asarray(rng.normal(size=s), BF16) for s in ((64, 128), (4, 128, 128), (64, 128))
    )
    sizes = jnp.array([20, 0, 13, 25], jnp.int32)

    def grads(backend):
        def shard(x, w, dout):
            offset = jax.lax.axis_index("expert") * 2
            run = functools.partial(
                octablox.gmm,
                group_sizes=sizes,
                group_offset=offset,
                recipe=octablox.RECIPES["fp8_full"],
                backend=backend,
            )
            out, vjp = jax.vjp(lambda x, w: jax.lax.psum(run(x, w), "expert"), x, w)
            return out, *vjp(dout)

        specs = (P(), P("expert"), P())
        return jax.jit(
            jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=(P(), P(), P("expert")))
        )(x, w, dout)

    for got, expected in zip(grads("pallas_tpu_interpret"), grads("xla"), strict=True):
        got, expected = (np.asarray(a, np.float32) for a in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())


def test_refuses_another_platform():
    with pytest.raises(ValueError, match=r"pallas_tpu: platform: expected a TPU .*, got cpu"):
        test_kernels.call("gmm", "pallas_tpu", 4)


def test_auto_takes_another_where_there_is_no_tpu():
    assert test_kernels.call("gmm", "auto", 4).shape == (8, 5)
    assert next(iter(kernels.BACKENDS)) == "pallas_tpu"


@pytest.mark.parametrize("argument", ["lhs", "rhs", "out_dtype"])
def test_refuses_a_type(argument):
    types = dict.fromkeys(("lhs", "rhs", "out_dtype"), jnp.bfloat16) | {argument: jnp.float16}
    out = types.pop("out_dtype")
    lhs, rhs = jnp.ones((8, 3), types["lhs"]), jnp.ones((4, 3, 5), types["rhs"])
    with pytest.raises(kernels.Unsupported, match=rf"pallas_tpu: {argument}: expected .*float16"):
        pallas_tpu_interpret.gmm(
            Scaled(lhs), Scaled(rhs), jnp.ones(4, int), 0, transpose_rhs=False, out_dtype=out
        )


CALLS = [
    Gmm("tpu7x", 8192, 7168, 2048, 16, "float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    Gmm("v5p", 16384, 7168, 2048, 16, "bfloat16", "bfloat16", "bfloat16", parts=2),
    Gmm("v6e", 100, 128, 384, 4, "float32", "int8", "float32"),
    Tgmm("tpu7x", 16384, 7168, 2048, 16, "float8_e4m3fn", "float8_e5m2", "bfloat16"),
    Tgmm("v5e", 32, 128, 128, 4, "float32", "float32", "float32"),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_tiles_divide_and_fit(call):
    size = tiles.gmm_vmem if isinstance(call, Gmm) else tiles.tgmm_vmem
    for chosen in tiles.ranked(call)[:20]:
        assert size(call, chosen) <= CHIPS[call.chip].vmem
        assert chosen.rows % 32 == 0
        assert all(bucket % 32 == 0 for bucket in chosen.buckets)
        assert chosen.buckets == tuple(sorted({*chosen.buckets}))
        assert chosen.buckets[-1] == chosen.rows
        if isinstance(call, Gmm):
            assert call.columns % chosen.columns == 0
        else:
            assert call.k % chosen.k == 0 and call.n % chosen.n == 0


def test_override_of_one_product_leaves_the_others():
    mine = GmmTiles(64, 128, 7168, (64,))
    with tiles.override(dlhs=mine):
        assert tiles.choose(CALLS[0]) == tiles.ranked(CALLS[0])[0]
        assert tiles.choose(Gmm(**{**vars(CALLS[0]), "product": "dlhs"})) == mine


def test_k_too_long_for_vmem_is_refused():
    call = Gmm("tpu7x", 64, 1 << 20, 128, 1, "bfloat16", "bfloat16", "bfloat16")
    with pytest.raises(ValueError, match="no tile fits into 61 MiB of VMEM"):
        tiles.ranked(call)


def test_8_bits_gain_where_the_chip_says_so():
    gains = {name: (c.gains("fp8"), c.gains("int8")) for name, c in CHIPS.items()}
    assert gains == {
        "v5e": (False, True),
        "v5p": (False, True),
        "v6e": (False, True),
        "tpu7x": (True, False),
    }


TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# DeepSeek-V3's experts on one of 16 devices: up or gate, both of them merged, down.
EXPERTS, ROWS = 16, (8192, 16384)
MATRICES = ((7168, 2048), (7168, 4096), (2048, 7168))
TYPES = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2),  # activations and weights; gradients
    "int8": (jnp.int8, jnp.int8),
}
PRODUCTS = ("gmm", "gated", "gated_save", "dlhs", "gated_grad", "tgmm")


def product(name, kind, m, k, n):
    """A function of one of the products, and the shapes of its arguments."""
    forward, gradient = TYPES[kind]
    shape, run, settings = jax.ShapeDtypeStruct, pallas_tpu.gmm, {"out_dtype": jnp.bfloat16}
    scale = lambda *sizes: shape(sizes, jnp.float32) if kind != "bf16" else None  # noqa: E731
    weight = Scaled(shape((EXPERTS, k, n), forward), scale(EXPERTS, 1, n))
    x = Scaled(shape((m, k), forward), scale(m, 1))
    operands = x, weight
    if name == "tgmm":
        run, settings["num_local_groups"] = pallas_tpu.tgmm, EXPERTS
        operands = Scaled(x.value), Scaled(shape((m, n), gradient), scale(1, n))
    elif name == "dlhs":
        settings["transpose_rhs"] = True
        operands = Scaled(shape((m, n), gradient), scale(m, 1)), Scaled(weight.value)
    elif name in ("gated", "gated_save"):
        run, settings["save"] = pallas_tpu.gated_gmm, name == "gated_save"
    elif name == "gated_grad":
        saved = shape((m, k), jnp.bfloat16)
        run = pallas_tpu.gated_gmm_grad
        operands = Scaled(shape((m, n), gradient), scale(m, 1)), Scaled(weight.value), saved, saved
    else:
        settings["transpose_rhs"] = False
    arguments = *operands, shape((EXPERTS,), jnp.int32)
    return lambda *args: run(*args, 0, **settings), arguments


@pytest.fixture
def no_cache():
    """JAX can store programs for chips that are not here, but not load them again."""
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def compiled(chip, run, arguments, monkeypatch):
    """The HLO of a chip that is not here, of one kernel: it fits VMEM, or this fails."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # pytest runs several processes
    topology = topologies.get_topology_desc(TOPOLOGIES[chip], "tpu")
    mesh = jax.sharding.Mesh(topology.devices[:1], ("x",))
    here = jax.sharding.NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arguments
        )
        text = jax.jit(run).lower(*arguments).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    return text


@pytest.mark.aot_few
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(
    ("chip", "name", "kind", "m", "matrix"),
    [
        ("tpu7x", "gmm", "fp8", 8192, (7168, 2048)),
        ("tpu7x", "gated", "fp8", 8192, (7168, 4096)),
        ("tpu7x", "tgmm", "fp8", 8192, (7168, 2048)),
        ("v6e", "dlhs", "fp8", 8192, (7168, 2048)),
        ("v5p", "gmm", "bf16", 16384, (2048, 7168)),
        ("v5e", "gated_grad", "int8", 8192, (2048, 7168)),
    ],
)
def test_compiles(chip, name, kind, m, matrix, monkeypatch):
    """Each product and each chip once: what CI can afford of the next test."""
    text = compiled(chip, *product(name, kind, m, *matrix), monkeypatch)
    assert static_schedule.ops_beside(text) == 0


@pytest.mark.aot
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("k", "n"), MATRICES)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_compiles_for_every_chip(chip, name, kind, m, k, n, monkeypatch):
    if name.startswith("gated") and name != "gated_grad" and n != 4096:
        pytest.skip("gate and up are one matrix of 2F columns")
    if name == "gated_grad" and n != 7168:
        pytest.skip("it belongs to the matrix that the gated rows are multiplied by")
    text = compiled(chip, *product(name, kind, m, k, n), monkeypatch)
    assert static_schedule.ops_beside(text) == 0


@pytest.mark.aot
@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(("rows", "block"), [(1, 32), (128, 128)], ids=["mxfp8", "fp8_blockwise"])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_scales_along_k_compile(chip, back, rows, block, monkeypatch):
    """Here XLA repeats the weight's scales for each column beside the kernel."""
    m, k, n = 8192, *((2048, 7168) if back else (7168, 2048))
    shape = jax.ShapeDtypeStruct
    weight, scales = (EXPERTS, k, n), (EXPERTS, k // block, n // rows)
    if back:
        weight, scales = (EXPERTS, n, k), (EXPERTS, n // rows, k // block)
    e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
    lhs = Scaled(shape((m, k), e4m3), shape((m, k // block), f32))
    arguments = lhs, Scaled(shape(weight, e4m3), shape(scales, f32)), shape((EXPERTS,), jnp.int32)
    settings = {"transpose_rhs": back, "out_dtype": jnp.bfloat16}
    run = lambda lhs, rhs, sizes: pallas_tpu.gmm(lhs, rhs, sizes, 0, **settings)  # noqa: E731
    compiled(chip, run, arguments, monkeypatch)
