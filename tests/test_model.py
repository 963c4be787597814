"""The whole model and its optimizer step: against float64, losses, accumulation, what is logged."""

import dataclasses
import functools

import jax
import model_reference as reference
import numpy as np
import optax
import pytest
import tiny_model
from jax import numpy as jnp

from octablox.mesh import count
from octablox.model import transformer
from octablox.train.step import Trainer

WHOLE = {
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "mtp_num_layers": 1,
    "rope_factor": 40,
    "original_max_position_embeddings": 16,
    "max_target_length": 12,
    "per_device_batch_size": 2,
}
BATCH = tiny_model.batch(4, length=12, seed=5)
MESH = {"fsdp": 2}


@functools.cache
def gradient_function(**settings):
    config = tiny_model.config(**(WHOLE | settings))
    return config, tiny_model.gradient_function(config, tiny_model.mesh(**MESH), **tiny_model.QUICK)


def gradients(params, batch, **settings):
    config, function = gradient_function(**settings)
    placed = tiny_model.place(config, tiny_model.mesh(**MESH), params, batch)
    return jax.device_get(function(*placed))


@functools.cache
def params():
    return tiny_model.params(tiny_model.config(**WHOLE))


def expected_losses(batch):
    config = tiny_model.config(**WHOLE)
    return reference.loss(params(), batch, config.model, config.moe)


def test_losses_equal_the_reference():
    """Dense and MoE layers, YaRN, groups, shared experts, MTP, packed documents, padding."""
    losses, _, _ = gradients(params(), BATCH)
    main, mtp = expected_losses(BATCH)
    assert losses["loss"] == pytest.approx(main, rel=2e-6)
    assert losses["mtp_loss"] == pytest.approx(mtp, rel=2e-6)
    assert losses["total"] == pytest.approx(main + 0.1 * mtp, rel=2e-6)
    assert 1 < mtp < main


def test_gradients_are_the_slope_of_the_reference():
    """Along a random direction, by differences of float64 losses."""
    config = tiny_model.config(**WHOLE)
    _, grads, _ = gradients(params(), BATCH)
    rng = np.random.default_rng(2)

    def direction(path, a):
        return rng.normal(size=a.shape) * a.std() * (path[-1].key != "bias")

    step = jax.tree_util.tree_map_with_path(direction, params())

    def total(size):
        moved = jax.tree.map(lambda a, d: a.astype(np.float64) + size * d, params(), step)
        main, mtp = reference.loss(moved, BATCH, config.model, config.moe)
        return main + 0.1 * mtp

    slope = (total(1e-6) - total(-1e-6)) / 2e-6
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(step), strict=True)
    assert sum(np.sum(g * d) for g, d in pairs) == pytest.approx(slope, rel=1e-4)


def test_padding_and_other_documents_change_nothing():
    """Tokens of padding, and the targets that have no weight, are never seen."""
    _, grads, _ = gradients(params(), BATCH)
    padding = BATCH["segment_ids"] == 0
    assert padding.any()
    changed = dict(BATCH)
    changed["tokens"] = np.where(padding, 63 - BATCH["tokens"], BATCH["tokens"])
    changed["targets"] = np.where(BATCH["weights"] == 0, 63 - BATCH["targets"], BATCH["targets"])
    losses, changed_grads, _ = gradients(params(), changed)
    assert losses["loss"] == pytest.approx(expected_losses(BATCH)[0], rel=2e-6)
    assert losses["mtp_loss"] == pytest.approx(expected_losses(BATCH)[1], rel=2e-6)
    assert max(tiny_model.relative_errors(changed_grads, grads).values()) < 1e-5


def test_mtp_asks_only_within_a_document():
    """Two documents of 4 and 3 tokens ask for the next token 3 + 2 times, one later 2 + 1 times."""
    segments = np.array([[1] * 4 + [2] * 3 + [0] * 5] * 4, np.int32)
    following = np.append(segments[:, 1:], np.zeros((4, 1), np.int32), axis=1)
    batch = BATCH | {
        "segment_ids": segments,
        "weights": ((segments > 0) & (segments == following)).astype(np.float32),
        "positions": np.array([[*range(4), *range(3), *range(5)]] * 4, np.int32),
    }
    # An output head of zeros makes every token cost log(64).
    losses, _, _ = gradients(params() | {"head": np.zeros_like(params()["head"])}, batch)
    assert losses["loss"] == pytest.approx(np.log(64), rel=1e-6)
    assert losses["mtp_loss"] == pytest.approx(np.log(64) * 3 / 5, rel=1e-6)


def test_weights_are_what_the_batch_says_not_its_segments():
    batch = BATCH | {"segment_ids": np.where(BATCH["segment_ids"] > 0, BATCH["segment_ids"] * 7, 0)}
    same, _, _ = gradients(params(), batch)
    assert same == gradients(params(), BATCH)[0]
    halves = BATCH | {"weights": BATCH["weights"] * (np.arange(12) % 2)}
    losses, _, _ = gradients(params(), halves)
    assert losses["loss"] == pytest.approx(expected_losses(halves)[0], rel=2e-6)


def test_a_batch_of_no_counted_tokens_has_loss_zero():
    batch = BATCH | {"weights": np.zeros_like(BATCH["weights"])}
    losses, grads, _ = gradients(params(), batch)
    assert losses["loss"] == losses["mtp_loss"] == 0
    assert not any(
        np.any(g) for name, g in tiny_model.names_and_values(grads) if "bias" not in name
    )


def test_mtp_weighs_as_it_is_told_and_can_be_absent():
    config = tiny_model.config(**(WHOLE | {"mtp_num_layers": 0}))
    specs = transformer.parameter_specs(config.model, config.moe)
    assert "mtp" not in specs and "mtp" not in transformer.new_probes(config.model)
    with_mtp = tiny_model.config(**WHOLE)
    assert count(transformer.parameter_specs(with_mtp.model, with_mtp.moe)) > count(specs)


# ---- the optimizer step -------------------------------------------------------------------------

SMALL = {
    "max_target_length": 8,
    "base_num_decoder_layers": 1,
    "per_device_batch_size": 2,
    "gradient_clipping_threshold": 0,
}


@functools.cache
def trainer(devices=2, **settings):
    return Trainer(tiny_model.config(**(SMALL | settings)), tiny_model.mesh(fsdp=devices))


def step(trainer, batch, state=None):
    state = trainer.init() if state is None else state
    return jax.device_get(trainer.step(state, trainer.place(batch)))


def moments(state):
    """Adam's first moment, (1 - b1) times the gradient after a first step."""
    adam = [s for s in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(s)]
    return adam[0].mu


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def test_accumulation_equals_the_whole_batch_at_once():
    """Halves with unequal numbers of counted tokens: a mean of means would be wrong."""
    rows = tiny_model.batch(4, length=8, seed=1)
    rows["weights"][::2, 1:] = 0  # every device's first half
    halves, whole = trainer(gradient_accumulation_steps=2, per_device_batch_size=1), trainer()
    (a, metrics), (b, expected) = step(halves, rows), step(whole, rows)
    counted = rows["weights"].reshape(2, 2, -1).sum(axis=(0, 2))
    assert counted[0] < counted[1] / 2
    assert max(tiny_model.relative_errors(moments(a), moments(b)).values()) < 1e-5
    for name in ("loss", "grad_norm", "tokens", "expert_load_max_over_mean"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    np.testing.assert_array_equal(*(s.params["moe_layers"]["router"]["bias"] for s in (a, b)))


def test_the_bias_moves_against_the_load_of_all_devices():
    rows = tiny_model.batch(4, length=8, seed=1)
    state, metrics = step(trainer(), rows)
    config = trainer().config
    first = jax.device_get(trainer().init().params)
    _, grads, _ = tiny_model.gradients(config, tiny_model.mesh(fsdp=2), first, rows)
    load = grads["moe_layers"]["router"]["bias"]
    assert load.sum() == 2 * np.count_nonzero(rows["segment_ids"])
    expected = 0.001 * np.sign(load.mean(axis=-1, keepdims=True) - load)
    np.testing.assert_allclose(state.params["moe_layers"]["router"]["bias"], expected, rtol=1e-6)
    assert metrics["expert_load_max_over_mean"] == pytest.approx(load.max() / load.mean())
    assert metrics["tokens"] == rows["weights"].sum()


@pytest.mark.parametrize("name", ["head", "final_norm"])
def test_a_nan_is_seen_in_the_metrics(name):
    """Nothing turns it into a number on its way."""
    rows = tiny_model.batch(4, length=8)
    state = trainer().init()
    bad = np.array(state.params[name])
    bad.ravel()[3] = np.nan
    bad = jax.device_put(bad, state.params[name].sharding)
    state = dataclasses.replace(state, params=state.params | {name: bad})
    _, metrics = step(trainer(), rows, state)
    assert np.isnan(metrics["loss"]) and np.isnan(metrics["grad_norm"])


def test_eval_sums_are_sums():
    rows = tiny_model.batch(4, length=8, seed=1)
    state = trainer().init()
    loss, tokens = jax.device_get(trainer().eval_sums(state.params, trainer().place(rows)))
    assert tokens == rows["weights"].sum()
    _, metrics = step(trainer(), rows, state)
    assert loss / tokens == pytest.approx(metrics["loss"], rel=1e-6)


def test_a_model_of_dense_layers_alone_trains():
    alone = trainer(first_num_dense_layers=1)
    assert "moe_layers" not in alone.specs
    _, metrics = step(alone, tiny_model.batch(4, length=8))
    assert np.isfinite(metrics["loss"])
    assert not [name for name in metrics if "flushed" in name or "saturated" in name]
    assert metrics["expert_load_max_over_mean"] == 1


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_weights_have_the_weight_dtype_and_biases_float32(name):
    other = {"bfloat16": "float32", "float32": "bfloat16"}[name]
    state = trainer(weight_dtype=name, dtype=other).init()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        assert leaf.dtype == jnp.dtype("float32" if path[-1].key == "bias" else name), path


def test_initial_loss_is_that_of_guessing():
    """Logits of variance about 1: log(64) + 1/2."""
    _, metrics = step(trainer(), tiny_model.batch(4, length=8))
    assert metrics["loss"] == pytest.approx(np.log(64) + 0.5, abs=0.5)


@pytest.mark.parametrize("recipe", ["fp8_full", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_a_bfloat16_model_learns(recipe):
    """Ten steps on one batch take most of the loss away, casts and all."""
    settings = {"gradient_clipping_threshold": 1, "routed_bias": False}
    learner = trainer(dtype="bfloat16", quantization=recipe, **settings)
    rows, state, losses = tiny_model.batch(4, length=8), learner.init(), []
    for _ in range(10):
        state, metrics = learner.step(state, learner.place(rows))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0], losses
    assert all(0 <= float(metrics[f"{kind}_flushed"]) < 0.05 for kind in ("weight", "act", "grad"))
    assert not np.any(state.params["moe_layers"]["router"]["bias"])  # routed_bias=false
