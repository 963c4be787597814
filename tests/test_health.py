"""Counts of casts, and what they say."""

import functools

import jax
import numpy as np
import pytest
import reference
from jax import numpy as jnp

from octablox import fp8, health
from octablox.fp8 import RECIPES, Cast

E4M3 = "float8_e4m3fn"


@functools.partial(jax.jit, static_argnums=1, static_argnames="contracted")
def counts(x, cast, unscaled=None, contracted=1):
    q = fp8.quantize(x.astype(jnp.float32), cast, contracted=contracted)
    return health.counts_of(x, q, unscaled)


def test_elements_are_counted():
    cast = Cast(dtype=E4M3, tile=(None, None), calibration="fixed,-448,448")
    tiny = 2.0**-10  # half the smallest value: rounds to zero
    x = np.array([[0, 0, 1, -448, 448.2, -1000], [tiny, -tiny, tiny * 1.1, np.nan, np.inf, 2]])
    np.testing.assert_array_equal(counts(x, cast)[:3], [3, 2, 10])


def test_counts_line_up_with_padding():
    x = np.ones((2, 40), np.float32)
    got = counts(x, RECIPES["mxfp8"].act)
    np.testing.assert_array_equal(got[:3], [0, 0, 80])
    assert got[3] == 40 * 256**2 and got[4] == 0  # of the first row; 1 is held as 256 / 256


def test_what_int8_makes_zero_is_counted():
    cast = Cast(dtype="int8", tile=(None, None), calibration="fixed,-127.5,127.5")
    x = np.array([[0.5, 0.51, -0.5, 127.5, 128, np.nan]])
    np.testing.assert_array_equal(counts(x, cast)[:3], [2, 2, 6])


@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("name", ["fp8_full", "fp8_blockwise", "mxfp8"])
def test_sqnr_is_that_of_the_cast(name, contracted):
    """From an eighth of the rows, within half a decibel of the error of the whole in float64."""
    x = reference.spread(np.random.default_rng(0), 512, 256, orders=0.5)
    for cast in (RECIPES[name].act, RECIPES[name].dlhs_grad):
        q = fp8.quantize(jnp.asarray(x), cast, contracted=contracted)
        error = reference.relative_error(fp8.dequantize(q), x)
        got = health.summary(np.asarray(counts(x, cast, contracted=contracted)))
        assert got["sqnr_db"] == pytest.approx(-20 * np.log10(error), abs=0.5)
        assert got["sqnr_db"] > -20 * np.log10(1.5 * cast.error)


def test_a_lost_scale_shows():
    x = reference.spread(np.random.default_rng(0), 64, 64)
    q = fp8.quantize(jnp.asarray(x), RECIPES["fp8_full"].act, contracted=1)
    twice = fp8.QArray(q.qvalue, 2 * q.scale, None, q.qtype)
    got = health.summary(np.asarray(health.counts_of(jnp.asarray(x), twice)))
    assert got["sqnr_db"] == pytest.approx(0, abs=0.1)  # the error is as large as the signal


@pytest.mark.parametrize("amax", [1e-11, 3.7e-5, 1.0, 448.0, 3e6])
def test_amax_is_known_to_a_quarter_of_an_octave(amax):
    x = np.array([[0, -amax, amax / 2]], np.float32)
    several = counts(x, RECIPES["fp8_full"].act) + counts(x / 100, RECIPES["fp8_full"].act)
    found = health.summary(np.asarray(several))["amax"]
    assert amax * (1 - 1e-6) <= found <= amax * 2**0.25 * (1 + 1e-6)


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (np.nan, np.inf), (np.inf, np.inf)])
def test_amax_of_what_is_no_magnitude(value, expected):
    x = np.array([[value, 0]], np.float32)
    assert health.summary(np.asarray(counts(x, RECIPES["fp8_full"].act)))["amax"] == expected


def test_amax_is_of_what_has_taken_over_no_scale():
    x = np.full((2, 4), 8.0, np.float32)
    found = health.summary(np.asarray(counts(x, RECIPES["fp8_full"].act, x / 8)))
    assert found["amax"] == 1


def test_where_nothing_was_cast_there_is_nothing_to_say():
    assert all(np.isnan(v).all() for v in health.summary(np.asarray(health.new_counts())).values())
