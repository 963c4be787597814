"""The fused attention kernel, interpreted, beside the attention that every platform runs."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from octablox import UserError
from octablox.model import attention, flash_attention
from octablox.model.config import ModelConfig

B, S, H, NOPE, ROPE, V = 2, 256, 2, 32, 16, 24


def operands(dtype):
    rng = np.random.default_rng(0)
    shapes = {"q_nope": (H, NOPE), "q_rope": (H, ROPE), "k_nope": (H, NOPE), "k_rope": (ROPE,)}
    arrays = {name: rng.normal(size=(B, S, *shape)) for name, shape in shapes.items()}
    arrays["v"] = rng.normal(size=(B, S, H, V))
    return {name: jnp.asarray(a, dtype) for name, a in arrays.items()}


@pytest.fixture
def interpreted(monkeypatch):
    plain = flash_attention.flash_attention
    monkeypatch.setattr(
        flash_attention, "flash_attention", lambda *arrays: plain(*arrays, interpret=True)
    )


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("parts", [1, 2])
def test_equals_attention_in_chunks(parts):
    """Outputs and all gradients, with two documents and padding in a row."""
    ids = np.ones((B, S), np.int32)
    ids[0, 100:200], ids[0, 200:] = 2, 0
    dout = jnp.asarray(np.random.default_rng(1).normal(size=(B, S, H, V)), jnp.float32)

    def fused(a, parts):
        """Each part of the queries by itself, as the devices of axis context have them."""
        mix = jax.jit(attention._fused, static_argnums=6)
        q_nope, q_rope = (jnp.split(a[name], parts, axis=1) for name in ("q_nope", "q_rope"))
        keys = a["k_nope"], a["k_rope"], a["v"], jnp.asarray(ids)
        mixed = [mix(q_nope[n], q_rope[n], *keys, 0.3, n) for n in range(parts)]
        return jnp.concatenate(mixed, axis=1)

    def chunked(a):
        keys = a["k_nope"], a["k_rope"], a["v"], jnp.asarray(ids)
        return attention._mix(keys, 0.3, (a["q_nope"], a["q_rope"]), 0)

    def run(function):
        out, vjp = jax.vjp(function, operands(jnp.float32))
        return {"out": out, **vjp(dout)[0]}

    got, expected = jax.jit(lambda: (run(lambda a: fused(a, parts)), run(chunked)))()
    for name, want in expected.items():
        error = np.linalg.norm(got[name] - want) / np.linalg.norm(want)
        assert error < 2e-6, (name, error)


def test_where_the_kernel_does_not_run_it_is_refused():
    config = ModelConfig(attention="flash")
    with pytest.raises(UserError, match="expected a TPU and max_target_length a multiple of 128"):
        attention._is_fused(config, 256)
    assert not attention._is_fused(ModelConfig(), 256)
