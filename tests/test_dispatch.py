"""Dispatch and combine: every copy goes to its expert and comes back, without scatters."""

import re

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from octablox import kernels
from octablox.moe import dispatch as moe_dispatch
from octablox.moe.dispatch import combine, dispatch, sort_copies, weights_of_rows, window

T, D, E, K = 20, 6, 8, 3
LOADS = "random", "one expert", "half the experts", "one copy a token", "all experts"


def choices(load):
    """int32 [T, k]; a token's experts differ, as a router's do."""
    rng = np.random.default_rng(0)
    draw = lambda experts, k: np.stack([rng.permutation(experts)[:k] for _ in range(T)])  # noqa: E731
    chosen = {
        "random": draw(E, K),
        "one expert": np.full((T, 1), 5),
        "half the experts": draw(E // 2, K) * 2,
        "one copy a token": draw(E, 1),
        "all experts": draw(E, E),
    }[load]
    return chosen.astype(np.int32)


def arrays(k, seed=1):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return draw(T, D), draw(T, k), draw(E, D)


def weighted(rows, weights, order):
    """Tokens: the sum of their copies' rows, each times its weight."""
    return combine(rows * weights_of_rows(weights, order)[:, None], order)


@pytest.mark.parametrize("first", [0, 4, 6])
@pytest.mark.parametrize("load", LOADS)
def test_copies_are_sorted_by_expert(load, first):
    chosen = choices(load)
    order = jax.device_get(sort_copies(jnp.asarray(chosen), E, first))
    from_first = (chosen.ravel() - first) % E
    # Stable: rows of one expert keep the order of their tokens.
    np.testing.assert_array_equal(order.copy_of_row, np.argsort(from_first, kind="stable"))
    np.testing.assert_array_equal(order.group_sizes, np.bincount(from_first, minlength=E))
    at = order.row_of_copy.ravel()
    np.testing.assert_array_equal(order.copy_of_row[at], np.arange(chosen.size))
    assert order.row_of_copy.shape == chosen.shape


@pytest.mark.parametrize("load", LOADS)
def test_dispatch_and_combine(load):
    chosen = choices(load)
    tokens, weights, _ = arrays(chosen.shape[1])
    order = sort_copies(jnp.asarray(chosen), E, 0)
    rows = np.asarray(dispatch(tokens, order))
    owners = [t for e in range(E) for t in range(T) for c in chosen[t] if c == e]
    np.testing.assert_array_equal(rows, np.asarray(tokens)[owners])
    back = weighted(jnp.asarray(rows), weights, order)
    expected = np.asarray(tokens) * np.asarray(weights, np.float64).sum(1, keepdims=True)
    np.testing.assert_allclose(back, expected, rtol=1e-5, atol=1e-6)


def through_rows(chosen, tokens, weights, scales):
    """Each expert multiplies by its own scale [E, D]; the copies are sorted, sent and combined."""
    order = sort_copies(chosen, E, 3)
    rows = dispatch(tokens, order)
    expert_of_row = chosen.reshape(-1)[order.copy_of_row]
    is_expert = jax.nn.one_hot(expert_of_row, E, dtype=jnp.float32)
    return weighted(jnp.tanh(rows * (is_expert @ scales)), weights, order)


def dense(chosen, tokens, weights, scales):
    """The same: every expert on every token, masked."""
    every = jnp.tanh(tokens[:, None] * scales[None])
    mix = jnp.sum(jax.nn.one_hot(chosen, E) * weights[:, :, None], axis=1)
    return jnp.einsum("te,ted->td", mix, every)


@pytest.mark.parametrize("load", LOADS)
def test_gradients_are_those_of_a_dense_formulation(load):
    chosen = jnp.asarray(choices(load))
    operands = arrays(chosen.shape[1])
    out_grad = arrays(1, seed=2)[0]

    def value_and_grads(f):
        out, pull = jax.vjp(lambda *operands: f(chosen, *operands), *operands)
        return out, *pull(out_grad)

    got, expected = value_and_grads(through_rows), value_and_grads(dense)
    for name, a, b in zip(("out", "tokens", "weights", "scales"), got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


def test_rows_move_by_gathers_alone():
    chosen = jnp.asarray(choices("random"))
    order = sort_copies(chosen, E, 0)
    tokens, weights, _ = arrays(K)

    def both(tokens, weights, chosen):
        order = sort_copies(chosen, E, 0)
        return jnp.sum(weighted(jnp.tanh(dispatch(tokens, order)), weights, order) ** 2)

    program = jax.jit(jax.value_and_grad(both, argnums=(0, 1))).lower(tokens, weights, chosen)
    assert "stablehlo.gather" in program.as_text()
    assert "stablehlo.scatter" not in program.as_text()
    # XLA:CPU makes a scatter of the sort that inverts the permutation; of indices, never of rows.
    assert set(scattered_types(program)) <= {"s32"}
    naive = jax.jit(jax.grad(lambda tokens: jnp.sum(tokens[order.copy_of_row // K] ** 2)))
    naive = naive.lower(tokens)
    assert "stablehlo.scatter" in naive.as_text()
    assert scattered_types(naive) == ["f32"]


def scattered_types(program):
    return re.findall(r"= (\w+)\[[^=]* scatter\(", program.compile().as_text())


def test_copies_are_summed_in_float32():
    """In bfloat16 256 + 1 + 1 is 256."""
    order = sort_copies(jnp.array([[0, 1, 2]], jnp.int32), 3, 0)
    rows = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)
    assert float(combine(rows, order)[0, 0]) == 258
    grad = jax.vjp(lambda tokens: dispatch(tokens, order), jnp.ones((1, 1), jnp.bfloat16))[1](rows)
    assert float(grad[0][0, 0]) == 258
    assert grad[0].dtype == jnp.bfloat16


def test_a_nan_row_reaches_only_its_own_token():
    chosen = jnp.asarray(choices("random"))
    tokens, weights, _ = arrays(K)
    order = sort_copies(chosen, E, 0)
    rows = dispatch(tokens.at[7].set(jnp.nan), order)
    bad = np.isnan(np.asarray(weighted(rows, weights, order))).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(bad), [7])


@pytest.mark.parametrize("rows", [7, 16, 59, 64])
@pytest.mark.parametrize("load", LOADS)
def test_windows_add_up_to_the_whole(load, rows):
    """Each row lies in one window; value and gradients of the sum are those of all rows at once."""
    chosen = choices(load)
    order = sort_copies(jnp.asarray(chosen), E, 0)
    tokens, weights, scales = arrays(chosen.shape[1])
    windows = -(-chosen.size // rows)

    def part(tokens, weights, order):
        rows = dispatch(tokens, order)
        ends = jnp.cumsum(order.group_sizes)
        expert = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
        rows = jnp.where((expert < E)[:, None], rows * scales[jnp.minimum(expert, E - 1)], 0)
        return weighted(jnp.tanh(rows), weights, order)

    def by_windows(tokens, weights):
        parts = (part(tokens, weights, window(order, n * rows, rows)) for n in range(windows))
        return jnp.sum(sum(parts) ** 2)

    whole = lambda tokens, weights: jnp.sum(part(tokens, weights, order) ** 2)  # noqa: E731
    got = jax.value_and_grad(by_windows, (0, 1))(tokens, weights)
    expected = jax.value_and_grad(whole, (0, 1))(tokens, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
    sizes = [window(order, n * rows, rows).group_sizes for n in range(windows)]
    np.testing.assert_array_equal(sum(sizes), order.group_sizes)
    assert max(int(size.sum()) for size in sizes) <= rows


@pytest.mark.parametrize("backend", ["xla", "pallas_tpu_interpret"])
@pytest.mark.parametrize("load", LOADS)
def test_sums_as_a_grouped_matmul(load, backend, monkeypatch):
    """The same sums; rows of no copy are not read."""
    monkeypatch.setattr(moe_dispatch, "SUM_BLOCK", 4)
    monkeypatch.setattr(kernels, "BACKENDS", {backend: kernels.BACKENDS[backend]})
    whole = sort_copies(jnp.asarray(choices(load)), E, 2)
    count, size = whole.copy_of_row.shape[0], 16
    rng = np.random.default_rng(3)
    for first in range(0, count, size):
        order = window(whole, first, size)
        rows = rng.normal(size=(size, D))
        rows[max(count - first, 0) :] = np.nan
        rows = jnp.asarray(rows, jnp.bfloat16)
        expected = moe_dispatch._sums_of_gathers(rows, order)
        got = jax.jit(moe_dispatch._sums_as_products)(rows, order)
        assert got.dtype == jnp.bfloat16 and got.shape == (T, D)
        np.testing.assert_allclose(
            got.astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-7, atol=1e-6
        )


def test_a_tpu_sums_as_a_grouped_matmul_where_copies_are_few(monkeypatch):
    """Chosen by sizes and dtype, and differentiable as the other way is."""
    monkeypatch.setattr(moe_dispatch, "chip", lambda: "tpu7x")
    monkeypatch.setattr(moe_dispatch, "SUM_BLOCK", 4)
    chosen = []
    products = moe_dispatch._sums_as_products
    monkeypatch.setattr(
        moe_dispatch,
        "_sums_as_products",
        lambda rows, order: chosen.append(rows.shape) or products(rows, order),
    )
    whole = sort_copies(jnp.asarray(choices("all experts")), E, 0)
    for size, dtype in ((16, jnp.bfloat16), (16, jnp.float32), (96, jnp.bfloat16)):
        order = window(whole, 0, size)
        rows = jnp.ones((size, D), dtype)
        grad = jax.grad(lambda rows, o=order: combine(rows, o).astype(jnp.float32).sum())(rows)
        np.testing.assert_array_equal(grad, rows)
    assert chosen == [(16, D)]
