"""The TPU kernels: in the interpreter on small shapes, and compiled ahead of time for real chips.

The interpreter raises on a data race and fills memory that nobody wrote with NaN.
"""

import functools
import re

import jax
import numpy as np
import pytest
import reference
import test_kernels
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
from test_kernels import BF16, E4M3, E5M2, Backend, Case, E

import octablox
from octablox import kernels
from octablox.kernels import Scaled, pallas_tpu, pallas_tpu_interpret, tiles
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


def test_tgmm_of_many_tiles():
    with tiny(128):
        test_kernels.test_tgmm(BACKEND, Case(160, 256, 256, E4M3, E5M2, None, (1, 1, None)))


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
        assert size(call, chosen) <= tiles.CHIPS[call.chip].vmem
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
    gains = {name: (c.gains("fp8"), c.gains("int8")) for name, c in tiles.CHIPS.items()}
    assert gains == {
        "v5e": (False, True),
        "v5p": (False, True),
        "v6e": (False, True),
        "tpu7x": (True, False),
    }


TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
M, K, N, EXPERTS = 8192, 7168, 2048, 16  # DeepSeek-V3's experts on one of 16 devices


def product(name, lhs, rhs):
    """A function of one of the products, and the shapes of its arguments."""
    f32, shape = jnp.float32, jax.ShapeDtypeStruct
    settings = {"out_dtype": jnp.bfloat16}
    if name == "tgmm":
        run, settings["num_local_groups"] = pallas_tpu.tgmm, EXPERTS
        operands, scales = (shape((M, K), lhs), shape((M, N), rhs)), (None, shape((1, N), f32))
    elif name == "dlhs":
        run, settings["transpose_rhs"] = pallas_tpu.gmm, True
        operands = shape((M, N), lhs), shape((EXPERTS, K, N), rhs)
        scales = shape((M, 1), f32), None
    else:
        run, columns = pallas_tpu.gated_gmm, 2 * N
        if name == "gmm":
            run, columns, settings["transpose_rhs"] = pallas_tpu.gmm, N, False
        operands = shape((M, K), lhs), shape((EXPERTS, K, columns), rhs)
        scales = shape((M, 1), f32), shape((EXPERTS, 1, columns), f32)
    if jnp.dtype(lhs).itemsize > 1:
        scales = None, None
    arguments = (*map(Scaled, operands, scales), shape((EXPERTS,), jnp.int32))
    return lambda lhs, rhs, sizes: run(lhs, rhs, sizes, 0, **settings), arguments


FP8, FP8_GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.mark.aot
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize(
    ("name", "lhs", "rhs"),
    [
        ("gmm", FP8, FP8),
        ("dlhs", FP8_GRADIENT, FP8),
        ("tgmm", FP8, FP8_GRADIENT),
        ("gated", FP8, FP8),
        ("gmm", jnp.bfloat16, jnp.bfloat16),
        ("tgmm", jnp.bfloat16, jnp.bfloat16),
    ],
    ids=["gmm-fp8", "dlhs-fp8", "tgmm-fp8", "gated-fp8", "gmm-bf16", "tgmm-bf16"],
)
def test_compiles_for(chip, name, lhs, rhs, monkeypatch):
    """At full size, within VMEM, and nothing but the kernel runs."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    topology = topologies.get_topology_desc(TOPOLOGIES[chip], "tpu")
    mesh = jax.sharding.Mesh(topology.devices[:1], ("x",))
    here = jax.sharding.NamedSharding(mesh, P())
    run, arguments = product(name, lhs, rhs)
    with jax.set_mesh(mesh):
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arguments
        )
        text = jax.jit(run).lower(*arguments).compile().as_text()
    ops = re.findall(r"= \S+ ([a-z][\w-]*)\(", text[text.index("\nENTRY") :])
    assert ops.count("custom-call") == 1
    assert set(ops) <= {"custom-call", "parameter", "bitcast", "constant"}
