"""The router: who is chosen, by which weights, and what counts as load."""

import jax
import model_reference as reference
import numpy as np
import pytest
from jax import numpy as jnp

from octablox.moe.config import MoeConfig
from octablox.moe.router import route, updated_bias

T, D = 64, 24


def moe(experts=8, groups=1, kept=1, chosen=2, scaling=1.0):
    return MoeConfig(
        num_experts=experts,
        n_routing_groups=groups,
        topk_routing_group=kept,
        num_experts_per_tok=chosen,
        routed_scaling_factor=scaling,
    )


def data(experts, bias=0.3, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(T, D)).astype(np.float32),
        (rng.normal(size=(D, experts)) / 4).astype(np.float32),
        (rng.normal(size=experts) * bias).astype(np.float32),
    )


def call(hidden, gate, bias, config, real=None):
    hidden, gate, bias = map(jnp.asarray, (hidden, gate, bias))
    real = jnp.ones(hidden.shape[0], bool) if real is None else jnp.asarray(real)
    return _route(hidden, gate, bias, config, real)


_route = jax.jit(route, static_argnums=3)


def of_scores(scores, config, bias=None):
    """Routes tokens whose unbiased scores are given [T, E]."""
    scores = np.atleast_2d(np.asarray(scores, np.float64))
    logits = np.log(scores / (1 - scores)).astype(np.float32)
    bias = np.zeros(scores.shape[1]) if bias is None else bias
    identity = np.eye(scores.shape[1], dtype=np.float32)
    return jax.device_get(call(logits, identity, np.asarray(bias, np.float32), config))


@pytest.mark.parametrize(
    "config",
    [
        moe(),
        moe(chosen=1),
        moe(chosen=8, scaling=2.5),
        moe(groups=4, kept=2, scaling=2.5),
        moe(16, 8, 4, 4, 2.5),
        moe(groups=4, kept=4, chosen=3),
        moe(16, chosen=6, scaling=1.5).model_copy(
            update={"routed_score_func": "softmax", "norm_topk_prob": False}
        ),
        moe(groups=8, kept=3, chosen=3),
        moe(experts=12, groups=2, kept=1, chosen=6),
    ],
    ids=lambda c: f"E{c.num_experts}G{c.n_routing_groups}of{c.topk_routing_group}",
)
def test_equals_the_reference(config):
    hidden, gate, bias = data(config.num_experts)
    chosen, weights = jax.device_get(call(hidden, gate, bias, config))
    expected = [reference.route(h.astype(np.float64), gate, bias, config) for h in hidden]
    np.testing.assert_array_equal(chosen, [experts for experts, _ in expected])
    np.testing.assert_allclose(weights, [w for _, w in expected], rtol=2e-6)
    if config.norm_topk_prob:
        np.testing.assert_allclose(weights.sum(1), config.routed_scaling_factor, rtol=1e-6)


def test_the_bias_chooses_and_never_weighs():
    scores = [0.9, 0.8, 0.3, 0.2]
    chosen, weights = of_scores(scores, moe(experts=4), bias=[0, 0, 5, 4])
    np.testing.assert_array_equal(chosen, [[2, 3]])
    np.testing.assert_allclose(weights, [[0.6, 0.4]], rtol=1e-6)


def test_a_bias_common_to_all_changes_nothing():
    hidden, gate, _ = data(8)
    without = call(hidden, gate, np.zeros(8, np.float32), moe())
    with_bias = call(hidden, gate, np.full(8, 0.5, np.float32), moe())
    for a, b in zip(without, with_bias, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_group_scores_by_the_sum_of_its_two_best():
    """By its best alone the first group would win, by the sum of all three the last."""
    scores = np.array([[0.9, 0.1, 0.1], [0.6, 0.6, 0.01], [0.5, 0.45, 0.45]]).ravel()
    chosen, _ = of_scores(scores, moe(experts=9, groups=3, kept=1))
    np.testing.assert_array_equal(chosen, [[3, 4]])


def test_the_bias_counts_in_a_groups_score():
    scores = [0.6, 0.6, 0.5, 0.5]
    chosen, _ = of_scores(scores, moe(experts=4, groups=2, kept=1), bias=[0, 0, 0.2, 0.2])
    np.testing.assert_array_equal(np.sort(chosen), [[2, 3]])


def test_experts_of_other_groups_are_never_chosen():
    """Not even where every biased score is negative, so that a mask of zeros would win."""
    config = moe(16, 4, 2, 4)
    hidden, gate, bias = data(16, bias=1.0)
    chosen, _ = jax.device_get(call(hidden, gate, bias - 10, config))
    groups = [len(set(row // 4)) for row in chosen]
    assert max(groups) == 2
    assert all(len(set(row)) == 4 for row in chosen)


def test_weights_are_right_where_all_scores_vanish():
    """Sigmoids of 1e-30: the 1e-20 of the denominator keeps the weights finite."""
    hidden = np.full((1, 4), -69.0, np.float32)
    _, weights = call(hidden, np.eye(4, dtype=np.float32), np.zeros(4, np.float32), moe(4))
    assert np.isfinite(weights).all() and (np.asarray(weights) >= 0).all()


def test_nothing_is_rounded_to_bfloat16():
    """Logits of bfloat16 hidden states keep float32's precision."""
    hidden, gate, bias = data(8)
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    chosen, weights = jax.device_get(call(hidden, gate, bias, moe()))
    rounded = np.asarray(hidden, np.float64)
    expected = [reference.route(h, gate, bias, moe()) for h in rounded]
    np.testing.assert_array_equal(chosen, [experts for experts, _ in expected])
    np.testing.assert_allclose(weights, [w for _, w in expected], rtol=2e-6)
    assert weights.dtype == np.float32


def bias_gradient(config, real, scale=1.0):
    hidden, gate, bias = map(jnp.asarray, data(config.num_experts))

    def total(bias):
        return jnp.sum(route(hidden, gate, bias, config, jnp.asarray(real))[1] ** 2) * scale

    return np.asarray(jax.grad(total)(bias)), np.asarray(call(hidden, gate, bias, config)[0])


def test_the_gradient_of_the_bias_is_the_load():
    load, chosen = bias_gradient(moe(), np.ones(T, bool))
    np.testing.assert_array_equal(load, np.bincount(chosen.ravel(), minlength=8))


def test_the_load_does_not_scale_with_the_loss():
    np.testing.assert_array_equal(
        bias_gradient(moe(), np.ones(T, bool), scale=1e-3)[0],
        bias_gradient(moe(), np.ones(T, bool))[0],
    )


def test_padding_is_no_load():
    real = np.arange(T) % 3 == 0
    load, chosen = bias_gradient(moe(), real)
    np.testing.assert_array_equal(load, np.bincount(chosen[real].ravel(), minlength=8))
    np.testing.assert_array_equal(bias_gradient(moe(), np.zeros(T, bool))[0], np.zeros(8))


def test_gradients_of_gate_and_hidden_are_those_of_the_reference():
    config = moe(groups=4, kept=2, scaling=2.5)
    hidden, gate, bias = data(8)
    rng = np.random.default_rng(1)
    out, *step = (rng.normal(size=shape) for shape in ((T, 2), hidden.shape, gate.shape))

    def total(hidden, gate):
        return jnp.sum(call(hidden, gate, bias, config)[1] * out.astype(np.float32))

    grads = jax.grad(total, argnums=(0, 1))(jnp.asarray(hidden), jnp.asarray(gate))

    def reference_total(size):
        h, g = hidden + size * step[0], gate + size * step[1]
        weights = [reference.route(row, g, bias, config)[1] for row in h]
        return np.sum(np.array(weights) * out)

    size = 1e-6
    expected = (reference_total(size) - reference_total(-size)) / (2 * size)
    got = sum(np.sum(np.asarray(grad, np.float64) * d) for grad, d in zip(grads, step, strict=True))
    assert got == pytest.approx(expected, rel=1e-5)


def test_updated_bias_moves_against_the_load():
    bias = jnp.array([[0.0, 0.5, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    load = jnp.array([[4.0, 0.0, 2.0, 2.0], [8.0, 0.0, 0.0, 0.0]])
    expected = [[-0.25, 0.75, 1.0, -1.0], [-0.25, 0.25, 0.25, 0.25]]
    np.testing.assert_array_equal(updated_bias(bias, load, 0.25), expected)
