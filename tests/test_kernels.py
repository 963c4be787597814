"""Every backend against a float64 loop, by one test body a product."""

import dataclasses
import functools
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest
import reference
from jax import numpy as jnp

from octablox import kernels
from octablox.kernels import Scaled, pallas_tpu_interpret, ragged_dot, xla

E = 4  # experts held here


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend, and how many groups in all its tests have (more than E: it holds a part)."""

    module: object
    groups: int


# A new backend is one line here. The interpreter is slow: test_pallas_tpu.py has its fast cases.
BACKENDS = {
    "xla": Backend(xla, 6),
    "ragged_dot": Backend(ragged_dot, E),
    "pallas_tpu": pytest.param(Backend(pallas_tpu_interpret, 6), marks=pytest.mark.slow),
}

F32, BF16, INT8 = np.float32, ml_dtypes.bfloat16, np.int8
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and type and tile (outer, contracted) of the scale of each operand.

    None as a tile is no scale, None in a tile the whole dim; a tile of three begins with experts.
    """

    m: int
    k: int
    n: int
    lhs: type
    rhs: type
    lhs_tile: tuple | None = None
    rhs_tile: tuple | None = None
    out: type = F32


CASES = {
    "f32": Case(257, 33, 255, F32, F32),
    "bf16": Case(300, 7, 129, BF16, BF16),
    "bf16 out": Case(40, 64, 33, BF16, BF16, out=BF16),
    "one": Case(1, 1, 1, F32, BF16),
    "fp8 unscaled": Case(33, 31, 1, E4M3, E5M2),
    "rows and channels": Case(255, 40, 65, E4M3, E4M3, (1, None), (1, 1, None)),
    "tensor": Case(64, 96, 7, E5M2, E4M3, (None, None), (None, None, None)),
    "expert": Case(90, 9, 36, F32, INT8, None, (1, None, None)),
    "blocks": Case(520, 64, 96, E4M3, E4M3, (1, 32), (1, 32, 32)),
    "blocks and channels": Case(96, 64, 40, E4M3, E5M2, (1, 16), (1, 1, None)),
    "blocks of rows": Case(96, 32, 64, E4M3, E4M3, (32, 32), (1, 32, 1)),
    "large row tiles": Case(2085, 24, 20, E4M3, E4M3, (1, None), (1, 1, None)),
    "int8": Case(260, 31, 17, INT8, INT8, (1, None), (1, 1, None)),
    "weight only": Case(70, 32, 48, BF16, E4M3, None, (1, 16, 16)),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def layouts(rows, groups):
    """(group sizes, group offset): even, some empty, one that holds all, all empty, random."""
    rng = np.random.default_rng(rows)
    last = groups - E
    some = np.bincount(rng.integers(0, groups, rows - rows // 5), minlength=groups)
    one = lambda g: np.eye(groups, dtype=int)[g] * rows  # noqa: E731
    yield np.full(groups, rows // groups), last
    yield np.where(np.arange(groups) % 2, some, 0), 0
    yield some, last // 2
    yield some, last
    yield one(last), last
    yield one(0), last
    yield one(groups - 1), 0
    yield np.zeros(groups, int), 0


def operand(rng, shape, dtype, tile):
    """Random values of spread magnitudes and their scale, as `Scaled` of numpy arrays."""
    if dtype == INT8:
        value = rng.integers(-127, 128, shape).astype(INT8)
    else:
        value = reference.spread(rng, *shape, orders=0.5).astype(dtype)
    if tile is None:
        return Scaled(value)
    counts = [size // (t or size) for size, t in zip(shape, tile, strict=True)]
    return Scaled(value, reference.spread(rng, *counts, orders=1.0).__abs__())


def dequantized(scaled):
    value = np.asarray(scaled.value, np.float64)
    scale = 1.0 if scaled.scale is None else scaled.scale
    for dim, size in enumerate(value.shape if scaled.scale is not None else ()):
        scale = np.repeat(scale, size // scale.shape[dim], axis=dim)
    return value * scale


def poisoned(scaled, rows):
    """Garbage in `rows` of the values, and in their scales where a row has its own."""
    scale = scaled.scale
    if scale is not None and scale.shape[0] == len(rows):
        scale = reference.poisoned(scale, rows)
    return Scaled(reference.poisoned(scaled.value, rows), scale)


def check(got, expected, dtype):
    assert got.dtype == dtype
    assert reference.relative_error(got, expected) < (4e-3 if dtype == BF16 else 2e-6)
    zero = ~expected.any(axis=tuple(range(1, expected.ndim)))
    assert not np.asarray(got)[zero].any()  # and no NaN


def seed(*key):
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


@each_case
@pytest.mark.parametrize("transpose_rhs", [False, True])
@each_backend
def test_gmm(backend, transpose_rhs, case):
    rng = seed(case)
    lhs = operand(rng, (case.m, case.k), case.lhs, case.lhs_tile)
    rhs = operand(rng, (E, case.k, case.n), case.rhs, case.rhs_tile)
    given = jax.tree.map(lambda a: a.swapaxes(1, 2), rhs) if transpose_rhs else rhs
    run = jax.jit(
        functools.partial(backend.module.gmm, transpose_rhs=transpose_rhs, out_dtype=case.out)
    )
    for sizes, offset in layouts(case.m, backend.groups):
        dead = reference.outside(case.m, sizes, offset, E)
        got = run(poisoned(lhs, dead), given, jnp.asarray(sizes), offset)
        expected = reference.gmm(dequantized(lhs), dequantized(rhs), sizes, offset)
        check(got, expected, case.out)
        assert not np.asarray(got)[dead].any()


@each_case
@each_backend
def test_tgmm(backend, case):
    rng = seed(case)
    turn = lambda tile: tile and (tile[-1], tile[-2])  # noqa: E731
    lhs = operand(rng, (case.m, case.k), case.lhs, case.lhs_tile)
    rhs = operand(
        rng, (case.m, case.n), case.rhs, turn(case.rhs_tile) if case.m % 32 == 0 else None
    )
    if case.lhs_tile == (1, None):  # a scale for each row, which this product sums over: both ways
        rhs = operand(rng, (case.m, case.n), case.rhs, (None, 1))
    run = jax.jit(functools.partial(backend.module.tgmm, num_local_groups=E, out_dtype=case.out))
    for sizes, offset in layouts(case.m, backend.groups):
        dead = reference.outside(case.m, sizes, offset, E)
        got = run(poisoned(lhs, dead), poisoned(rhs, dead), jnp.asarray(sizes), offset)
        expected = reference.tgmm(dequantized(lhs), dequantized(rhs), sizes, E, offset)
        check(got, expected, case.out)
        assert not np.asarray(got)[sizes[offset : offset + E] == 0].any()


def test_no_rows():
    rows, zero = Scaled(jnp.ones((0, 3))), jnp.zeros(E, jnp.int32)
    out = xla.gmm(rows, Scaled(jnp.ones((E, 3, 5))), zero, 0, transpose_rhs=False, out_dtype=F32)
    assert out.shape == (0, 5)
    out = xla.tgmm(rows, Scaled(jnp.ones((0, 5))), zero, 0, num_local_groups=E, out_dtype=F32)
    np.testing.assert_array_equal(out, np.zeros((E, 3, 5)))


def call(product, backend, groups):
    lhs = Scaled(jnp.ones((8, 3)))
    sizes, offset = jnp.ones(groups, jnp.int32), jnp.int32(groups - E)
    if product == "tgmm":
        rhs, settings = Scaled(jnp.ones((8, 5))), {"num_local_groups": E}
    else:
        rhs, settings = Scaled(jnp.ones((E, 3, 5))), {"transpose_rhs": False}
    return kernels.run(product, backend, lhs, rhs, sizes, offset, out_dtype=F32, **settings)


@pytest.mark.parametrize("product", ["gmm", "tgmm"])
def test_ragged_dot_refuses_a_part_of_the_groups(product):
    expected = (
        f"no backend supports this {product}: ragged_dot: group_offset: holds 4 of 6 groups, "
        "lax.ragged_dot wants all"
    )
    with pytest.raises(ValueError, match=f"^{expected}$"):
        call(product, "ragged_dot", 6)


def test_auto_takes_the_first_that_supports_the_call(monkeypatch):
    monkeypatch.setattr(kernels, "BACKENDS", {"ragged_dot": ragged_dot, "xla": xla})
    np.testing.assert_array_equal(call("gmm", "auto", 6)[:, 0], [0, 0, 3, 3, 3, 3, 0, 0])


def test_unknown_backend():
    with pytest.raises(
        ValueError, match=r"expected auto or one of .*'pallas_tpu', .*'xla'\], got 'x'"
    ):
        call("gmm", "x", 4)
