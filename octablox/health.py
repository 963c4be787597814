"""How casts fare: counts that a GMM returns, and what they say.

Counts leave the layers as gradients (`moe.probe`), so they must be sums: over micro-batches,
devices, accumulation steps. A maximum is no sum, so of each cast's absmax only the *bucket* is
counted, and the highest bucket that is not empty holds the largest one.

Shapes: H counts of a cast: `COUNTS`, then the buckets.
"""

import numpy as np
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float
from qwix._src.core.qarray import QArray, call_with_generic_broadcast

from octablox.fp8 import half_smallest, scale_bound

# The casts of a GMM in the order of its counts, by their names in `fp8.Recipe`.
OPERANDS = ("weight", "act", "dlhs_grad", "drhs_grad")
# Elements that saturated, became zero, were not zero; and in units of their scales, of a sample,
# the sum of their squares and that of their errors' squares.
COUNTS = ("saturated", "flushed", "nonzero", "signal", "noise")
# What `summary` makes of them.
FIGURES = ("saturated", "flushed", "sqnr_db", "amax")
# Every eighth row: a cast's noise is known well enough from so many, at a small part of the cost.
_SAMPLED = 8
# Buckets are quarters of an octave, the first from 2^-40 down and the last for NaN and Inf.
_BUCKETS, _PER_OCTAVE, _LOWEST = 256, 4, -40


def new_counts() -> Float[Array, "4 H"]:
    """Zeros float32 [operands, H]."""
    return jnp.zeros((len(OPERANDS), len(COUNTS) + _BUCKETS), jnp.float32)


def counts_of(
    x: Float[Array, "..."], q: QArray, unscaled: Float[Array, "..."] | None = None
) -> Float[Array, " H"]:
    """How one cast fared, float32 [H].

    Args:
      x: what was cast, of two or more dims, whose elements line up with `q`'s when it is padded
        with zeros. NaN and Inf count as saturated.
      q: what became of it.
      unscaled: whose absmax is counted, where `x` has taken over another operand's scale.
    """
    dtype = str(jnp.dtype(q.qtype))
    padding = [(0, b - a) for a, b in zip(x.shape, q.shape, strict=True)]
    y = jnp.pad(x.astype(jnp.float32), padding)
    y = call_with_generic_broadcast(jnp.divide, y, q.scale)
    magnitude = jnp.abs(y)
    count = lambda condition: jnp.sum(jnp.where(condition, 1.0, 0.0))  # noqa: E731
    nonzero = magnitude != 0
    # A hair above the bound: absmax / (absmax / bound) may round up.
    saturated = ~(magnitude <= scale_bound(dtype) * 1.001)
    flushed = nonzero & (magnitude <= half_smallest(dtype))
    some = y[..., ::_SAMPLED, :]
    error = some - q.qvalue[..., ::_SAMPLED, :].astype(jnp.float32)
    squares = [jnp.sum(jnp.where(jnp.isfinite(some), a * a, 0)) for a in (some, error)]
    sums = jnp.stack([count(saturated), count(flushed), count(nonzero), *squares])
    # Alone behind a barrier, so that other sums do not become part of these: the same bits wherever
    # a schedule adds them up.
    sums = lax.optimization_barrier(sums)
    return jnp.concatenate([sums, _bucket(x if unscaled is None else unscaled)])


def _bucket(x):
    """Float32 [buckets]: one in the bucket of the largest magnitude."""
    x = x.astype(jnp.float32)
    # A maximum may pass over NaN on CPU.
    amax = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)))
    number = jnp.ceil(_PER_OCTAVE * (jnp.log2(amax) - _LOWEST))
    number = jnp.where(jnp.isfinite(amax), jnp.clip(number, 0, _BUCKETS - 2), _BUCKETS - 1)
    return jnp.where(lax.iota(jnp.float32, _BUCKETS) == number, 1.0, 0.0)


def summary(counts: np.ndarray) -> dict[str, np.ndarray]:
    """What counts [..., H] say, each of `FIGURES` [...]; NaN where nothing was cast.

    `saturated` and `flushed` are fractions of the elements that were not zero. `sqnr_db` is the
    signal's power over the noise's in decibels, each element in units of its scale. `amax` is the
    largest magnitude, or up to 19% more; it is infinite where a magnitude was not finite.
    """
    saturated, flushed, nonzero, signal, noise = np.moveaxis(
        np.asarray(counts[..., : len(COUNTS)], np.float64), -1, 0
    )
    buckets = np.asarray(counts[..., len(COUNTS) :]) > 0
    highest = np.where(buckets, np.arange(_BUCKETS), -1).max(-1)
    amax = 2.0 ** (_LOWEST + highest / _PER_OCTAVE)
    amax = np.select(
        [highest < 0, highest == 0, highest == _BUCKETS - 1], [np.nan, 0, np.inf], amax
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        figures = saturated / nonzero, flushed / nonzero, 10 * np.log10(signal / noise), amax
    return dict(zip(FIGURES, map(np.asarray, figures), strict=True))
