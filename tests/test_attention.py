"""Attention against float64: MLA, YaRN, rotary embeddings, segments."""

import functools

import jax
import model_reference as reference
import numpy as np
import pytest
from jax import numpy as jnp

from octablox.mesh import init_params, make_mesh
from octablox.model import attention
from octablox.model.config import ModelConfig

B, S = 2, 12
SMALL = ModelConfig(
    base_emb_dim=32,
    base_num_query_heads=3,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=16,
    v_head_dim=12,
)
YARN = SMALL.model_copy(update={"rope_factor": 40.0, "original_max_position_embeddings": 4096})
PLAIN_QUERIES = SMALL.model_copy(update={"q_lora_rank": 0})
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12], np.int32)


def weights_of(config):
    mesh = make_mesh({"data": 1, "fsdp": 1, "expert": 1}, jax.devices()[:1])
    weights = init_params(attention.specs(config), 0, mesh, jnp.float32)
    rng = np.random.default_rng(0)
    values = {
        name: rng.uniform(0.5, 2, w.shape) if "norm" in name else 2 * np.asarray(w)
        for name, w in weights.items()
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def inputs(seed=0):
    x = np.random.default_rng(seed).normal(size=(B, S, 32)).astype(np.float32)
    return x, np.broadcast_to(np.arange(S, dtype=np.int32), (B, S)).copy()


def attend(config, weights, x, positions, segment_ids=SEGMENTS):
    return _attend(config, weights, *map(jnp.asarray, (x, positions, segment_ids)))


@functools.partial(jax.jit, static_argnums=0)
def _attend(config, weights, x, positions, segment_ids):
    rotation = attention.rotary_angles(positions, config)
    return attention.attend(weights, rotation, segment_ids, x, config)


@pytest.mark.parametrize("config", [SMALL, YARN, PLAIN_QUERIES], ids=["mla", "yarn", "q_lora=0"])
@pytest.mark.parametrize("start", [0, 5000, 100_000])
def test_equals_the_reference(config, start):
    """Also beyond the original context of 4096, where YaRN is made for."""
    weights, (x, positions) = weights_of(config), inputs()
    positions += start
    got = attend(config, weights, x, positions)
    for b in range(B):
        expected = reference.attention(
            weights, x[b].astype(np.float64), positions[b], SEGMENTS[b], config
        )
        # Angles are float32, so they are right to within position * 2^-24.
        bound = 2e-6 + (start + S) * 2**-24
        error = np.linalg.norm(got[b] - expected) / np.linalg.norm(expected)
        assert error < bound, f"{error:.2e}"


def test_only_differences_of_positions_count():
    weights, (x, positions) = weights_of(YARN), inputs()
    a, b = (attend(YARN, weights, x, positions + start) for start in (0, 777))
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert not np.allclose(a, attend(YARN, weights, x, positions * 2), atol=1e-2)


def test_yarn_stretches_slow_turns_and_keeps_fast_ones():
    real = ModelConfig(qk_rope_head_dim=64, rope_factor=40.0)
    found = attention.frequencies(real)
    np.testing.assert_allclose(found, reference.frequencies(real), rtol=1e-6)
    plain = attention.frequencies(real.model_copy(update={"rope_factor": 1.0}))
    np.testing.assert_array_equal(found[:10], plain[:10])
    np.testing.assert_allclose(found[-8:], plain[-8:] / 40, rtol=1e-6)
    blended = (found < plain) & (found > plain / 39.9)
    assert 10 < blended.sum() < 16
    assert plain[0] == 1
    assert plain[-1] == pytest.approx(10000 ** (-62 / 64))


def test_softmax_scale_of_deepseek_v3():
    real = ModelConfig(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_factor=40.0)
    assert attention.softmax_scale(real) * 192**0.5 == pytest.approx(1.8739, abs=1e-4)
    plain = real.model_copy(update={"rope_factor": 1.0})
    assert attention.softmax_scale(plain) == 192**-0.5


def test_rotary_embedding_turns_pairs_of_neighbours():
    """Not halves: (2i, 2i+1) turn by one angle, and lengths stay."""
    quarter = jnp.full((1, 1, 2), np.pi / 2)
    x = jnp.arange(1.0, 5.0).reshape(1, 1, 1, 4)
    got = attention.rotate(x, jnp.cos(quarter), jnp.sin(quarter))
    np.testing.assert_allclose(got.ravel(), [-2, 1, -4, 3], atol=1e-6)


@pytest.mark.parametrize("changed", [2, 7, 10])
def test_a_token_reaches_only_later_tokens_of_its_segment(changed):
    weights, (x, positions) = weights_of(SMALL), inputs()
    before = attend(SMALL, weights, x, positions)
    x[0, changed] += 1
    after = attend(SMALL, weights, x, positions)
    differs = np.flatnonzero(np.abs(before - after)[0].max(axis=1))
    same_segment = np.flatnonzero(SEGMENTS[0] == SEGMENTS[0, changed])
    np.testing.assert_array_equal(differs, same_segment[same_segment >= changed])
    np.testing.assert_array_equal(before[1], after[1])


def test_a_row_of_padding_makes_no_nan():
    weights, (x, positions) = weights_of(SMALL), inputs()
    nothing = np.zeros((B, S), np.int32)

    def total(weights, x):
        return jnp.sum(attend(SMALL, weights, x, positions, nothing) ** 2)

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(weights, jnp.asarray(x))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((value, grads)))


def test_bfloat16_stays_close_and_keeps_its_dtype():
    weights, (x, positions) = weights_of(YARN), inputs()
    expected = np.asarray(attend(YARN, weights, x, positions), np.float64)
    low = {name: w if "norm" in name else w.astype(jnp.bfloat16) for name, w in weights.items()}
    got = attend(YARN, low, x.astype(jnp.bfloat16), positions)
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 0.02


def test_rms_norm_is_float32_inside():
    """In bfloat16 the mean of squares of 300 would lose half of its digits."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4096)) * 300, jnp.bfloat16)
    got = attention.rms_norm(x, jnp.full(4096, 2.0), 1e-6)
    expected = reference.rms_norm(np.asarray(x, np.float64), np.full(4096, 2.0), 1e-6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2**-8)
