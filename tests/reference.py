"""Grouped matmuls in float64, group by group, and data that shows mistakes.

Shapes: M rows, K contracted, N output columns, E experts held here, G groups in all (G >= E).
"""

import numpy as np


def bounds(sizes, offset, experts):
    """First row and one past the last row of each of the `experts` groups from `offset`."""
    ends = np.cumsum(sizes)
    return list(zip(ends - sizes, ends, strict=True))[offset : offset + experts]


def outside(rows, sizes, offset, experts):
    """Bool [M]: rows of no local group."""
    groups = bounds(sizes, offset, experts)
    row = np.arange(rows)
    return (row < groups[0][0]) | (row >= groups[-1][1])


def gmm(x, w, sizes, offset=0):
    """out[M, N] = x[M, K] @ w[E, K, N]; zero outside."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    out = np.zeros((x.shape[0], w.shape[2]))
    for g, (start, end) in enumerate(bounds(sizes, offset, w.shape[0])):
        out[start:end] = x[start:end] @ w[g]
    return out


def tgmm(x, dout, sizes, experts, offset=0):
    """drhs[E, K, N] = x[M, K]^T @ dout[M, N] over the rows of each group."""
    x, dout = np.asarray(x, np.float64), np.asarray(dout, np.float64)
    groups = bounds(sizes, offset, experts)
    return np.stack([x[start:end].T @ dout[start:end] for start, end in groups])


def products(x, w, dout, sizes, offset=0):
    """out, dlhs and drhs by their names."""
    return {
        "out": gmm(x, w, sizes, offset),
        "dlhs": gmm(dout, np.swapaxes(w, 1, 2), sizes, offset),
        "drhs": tgmm(x, dout, sizes, w.shape[0], offset),
    }


def relative_error(got, expected):
    """Frobenius norm of the difference over that of `expected`; NaN if `got` holds one."""
    got = np.asarray(got, np.float64)
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-300)


def spread(rng, *shape, dims=(0, -1), orders=2.0):
    """Float32 Gaussians whose magnitudes differ by e^orders from index to index of `dims`.

    A scale that is put to the wrong row, channel or expert shows on such data. `orders` is one
    for all `dims`, or one for each.
    """
    value = rng.normal(size=shape)
    for dim, order in zip(dims, np.broadcast_to(orders, len(dims)), strict=True):
        along = [1] * len(shape)
        along[dim] = shape[dim]
        value = value * np.exp(order * rng.normal(size=along))
    return value.astype(np.float32)


def poisoned(a, rows):
    """A copy of `a` whose `rows` (bool [M]) hold NaN, Inf and 1e30, as far as its type has them."""
    a = np.array(a)
    garbage = np.array([np.nan, np.inf, 1e30, -np.inf], np.float32)
    if a.dtype.kind in "iu":
        garbage = np.array([127, -128, 127, 1])
    at = np.flatnonzero(rows)
    a[at] = np.resize(garbage, at.size).astype(a.dtype)[:, None]
    return a
