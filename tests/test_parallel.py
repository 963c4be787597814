"""The model on eight devices: schedules agree bit for bit, meshes to within rounding."""

import functools
import itertools

import jax
import numpy as np
import pytest
import tiny_model

from octablox.fp8 import RECIPES
from octablox.train.step import Trainer

POLICIES = "full", "minimal", "none"
SHARDINGS = "expert", "width"
# Blocks of 128 must fit the shards of F under width sharding.
WIDTH = {1: 128, 2: 256, 4: 512}


def config(recipe, **settings):
    return tiny_model.config(quantization=recipe, max_target_length=8, **settings)


# ---- batch split against sequential -------------------------------------------------------------

DEFAULT_SPLITS = [
    ("bf16", "full", 2, "expert", 2),
    ("fp8_full", "minimal", 2, "expert", 4),
    ("fp8_tensorwise", "full", 2, "width", 2),
    ("fp8_blockwise", "none", 2, "width", 2),
    ("mxfp8", "minimal", 4, "expert", 1),
    ("int8", "none", 2, "expert", 2),
]
EVERY_SPLIT = [
    (*case, 2)
    for case in itertools.product(RECIPES, POLICIES, (2, 4), SHARDINGS)
    if (*case, 2) not in DEFAULT_SPLITS
]


def with_schedule(recipe, policy, factor, sharding, ways, split, **settings):
    """The config of one side of the comparison."""
    return config(
        recipe,
        remat_policy=policy,
        batch_split_factor=factor,
        use_batch_split_schedule=split,
        per_device_batch_size=factor,
        expert_sharding=sharding,
        base_moe_mlp_dim=WIDTH[ways],
        **settings,
    )


@pytest.mark.parametrize(
    "case",
    [*DEFAULT_SPLITS, *(pytest.param(case, marks=pytest.mark.slow) for case in EVERY_SPLIT)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_batch_split_equals_sequential(case):
    """Loss, gradients, loads and counts of casts, bit for bit."""
    _, _, factor, _, ways = case
    batch = tiny_model.batch(8 * factor, length=8)
    mesh = tiny_model.mesh(fsdp=8 // ways, expert=ways)
    results = []
    for split in (False, True):
        sizes = with_schedule(*case, split=split)
        params = tiny_model.params(sizes)
        results.append(tiny_model.gradients(sizes, mesh, params, batch, **tiny_model.QUICK))
    assert tiny_model.differing(*results) == []
    assert np.isfinite(results[0][0]["total"])


@pytest.mark.parametrize(
    "recipe", ["fp8_full", *(pytest.param(r, marks=pytest.mark.slow) for r in RECIPES)]
)
def test_two_steps_give_the_same_state(recipe):
    """As shipped, MTP and accumulation included: parameters, moments, biases and metrics."""
    batches = [tiny_model.batch(64, length=8, seed=seed) for seed in (0, 1)]
    mesh = tiny_model.mesh(fsdp=4, expert=2)
    results = []
    for split in (False, True):
        sizes = with_schedule(
            recipe,
            "minimal",
            2,
            "expert",
            2,
            split,
            mtp_num_layers=1,
            gradient_accumulation_steps=2,
        )
        trainer = Trainer(sizes, mesh)
        state, seen = trainer.init(), []
        for batch in batches:
            state, metrics = trainer.step(state, trainer.place(batch))
            seen.append(metrics)
        results.append(jax.device_get((state, seen)))
    assert tiny_model.differing(*results) == []
    (state, metrics), _ = results
    assert state.step == 2
    assert metrics[1]["learning_rate"] > 0
    assert metrics[0]["loss"] != metrics[1]["loss"]


# ---- meshes against one device ------------------------------------------------------------------

# recipe, expert_sharding, data, EP, merged
DEFAULT_MESHES = [
    ("bf16", "expert", 1, 1, True),
    ("bf16", "width", 2, 2, False),
    ("fp8_full", "expert", 1, 2, True),
    ("fp8_full", "width", 1, 4, True),
    ("fp8_tensorwise", "expert", 2, 2, False),
    ("fp8_blockwise", "width", 1, 2, True),
    ("mxfp8", "expert", 1, 4, True),
    ("int8", "width", 2, 1, True),
]
EVERY_MESH = [
    case
    for case in itertools.product(RECIPES, SHARDINGS, (1, 2), (1, 2, 4), (True, False))
    if case not in DEFAULT_MESHES
]


def sizes_of(recipe, sharding, ways, merged, rows):
    return config(
        recipe,
        expert_sharding=sharding,
        base_moe_mlp_dim=512,
        merge_gating_gmm=merged,
        per_device_batch_size=rows,
    )


BATCH = tiny_model.batch(16, length=8)


@functools.cache
def params():
    return tiny_model.params(sizes_of("bf16", "expert", 1, True, 1))


@functools.cache
def one_device(recipe, merged):
    """The gradients, and how far last-bit noise of the parameters moves them."""
    sizes, mesh = sizes_of(recipe, "expert", 1, merged, 16), tiny_model.mesh()
    function = tiny_model.gradient_function(sizes, mesh, **tiny_model.QUICK)
    run = lambda values: jax.device_get(  # noqa: E731
        function(*tiny_model.place(sizes, mesh, values, BATCH))
    )
    exact = run(params())
    rng = np.random.default_rng(0)
    noisy = lambda a: (a * (1 + 2.0**-22 * rng.normal(size=a.shape))).astype(a.dtype)  # noqa: E731
    moved = [distance(run(jax.tree.map(noisy, params())), exact) for _ in range(6)]
    return exact, max(moved)


def distance(got, expected):
    """The largest relative error of any parameter's gradient."""
    return max(tiny_model.relative_errors(got[1], expected[1]).values())


@pytest.mark.parametrize(
    "case",
    [*DEFAULT_MESHES, *(pytest.param(case, marks=pytest.mark.slow) for case in EVERY_MESH)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_a_mesh_equals_one_device(case):
    recipe, sharding, data, ways, merged = case
    sizes = sizes_of(recipe, sharding, ways, merged, 2)
    mesh = tiny_model.mesh(data, 8 // data // ways, ways)
    got = tiny_model.gradients(sizes, mesh, params(), BATCH, **tiny_model.QUICK)
    expected, noise = one_device(recipe, merged)
    print(
        case,
        "loss",
        got[0]["total"] / expected[0]["total"] - 1,
        "distance",
        distance(got, expected),
        "noise",
        noise,
    )
