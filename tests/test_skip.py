"""Casts that are left out: by pattern, and in a run's first steps."""

import json

import jax
import numpy as np
import pytest
import reference
import tiny_model
from jax import numpy as jnp
from training_runs import losses, rows, train

from octablox import cli
from octablox.errors import UserError
from octablox.fp8 import BF16, RECIPES
from octablox.gmm import gmm
from octablox.health import OPERANDS
from octablox.model import skip

FULL = RECIPES["fp8_full"]


def test_patterns_name_casts_gemms_and_layers():
    def left(patterns, layer="layers.3"):
        recipes = skip.recipes_of(FULL, skip.parse(patterns), layer)
        return [[name for name in OPERANDS if getattr(recipe, name)] for recipe in recipes]

    every = list(OPERANDS)
    assert left("") == [every, every]
    assert left("layers.3") == left("layers.3.*, mtp.0") == [[], []]
    assert left("layers.30") == left("layers.2.*") == [every, every]
    assert left("layers.*.down") == [every, []]
    assert left("*.drhs_grad") == [every[:3], every[:3]]
    assert left("layers.3.gate_up.act,*_grad", "layers.3") == [["weight"], ["weight", "act"]]


def test_a_pattern_that_names_nothing_is_refused(capsys):
    skip.require_matches(["layers.4", "*.down.act"], ["layers.4", "mtp.0"])
    with pytest.raises(
        UserError, match=r"such as layers\.4\.down\.weight or .*got 'layers\.4\.dwn"
    ):
        skip.require_matches(["layers.4.dwn.weight"], ["layers.4"])
    base = ["train", "model_name=demo", "quantization=fp8_full"]
    assert cli.main([*base, "quantization_skip=layers.0"]) == 2
    assert "got 'layers.0', which names none" in capsys.readouterr().err  # it is dense
    for key in ("quantization_skip=layers.1", "quantization_warmup_steps=3"):
        assert cli.main(["train", "quantization=bf16", key]) == 2
        error = capsys.readouterr().err
        assert f"{key.partition('=')[0]}: the recipe bf16 casts nothing" in error


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", ["fp8_full", "fp8_tensorwise", "fp8_blockwise", "mxfp8"])
def test_products_without_one_cast(name, operand):
    """Each within the smaller budget that is left to it."""
    rng = np.random.default_rng(0)
    x, dout = (reference.spread(rng, 60, n, orders=(1, 0.5)) for n in (72, 64))
    w, sizes = reference.spread(rng, 4, 72, 64, orders=(1, 0.5)), np.array([20, 0, 30, 8])
    x[58:] = dout[58:] = np.nan
    (recipe, _) = skip.recipes_of(RECIPES[name], (f"*.{operand}",), "layers.1")
    assert getattr(recipe, operand) is None

    @jax.jit
    def run(x, w, dout):
        out, pull = jax.vjp(lambda x, w: gmm(x, w, jnp.asarray(sizes), recipe=recipe), x, w)
        return out, *pull(dout)

    expected = reference.products(x[:58], w, dout[:58], sizes)
    for (product, value), got in zip(expected.items(), run(x, w, dout), strict=True):
        error = reference.relative_error(got[: len(value)], value)
        assert error <= max(recipe.budget(product), 1e-5), (product, error)


def model(patterns="", recipe="fp8_full"):
    config = tiny_model.config(quantization=recipe, quantization_skip=patterns)
    mesh, params = tiny_model.mesh(fsdp=4, expert=2), tiny_model.params(config)
    return tiny_model.gradients(config, mesh, params, tiny_model.batch(8), **tiny_model.QUICK)


def test_a_model_without_some_casts():
    """What is left out is not counted; what is left is counted in every layer of its own scan."""
    _, _, counts = model("layers.1,layers.0.gate_up.act")
    cast = counts["moe_layers"]["health"][..., 2] > 0  # [layers, GEMMs, operands]
    assert cast.tolist() == [[[True, False, True, True], [True] * 4], [[False] * 4] * 2]


def test_a_model_without_any_cast_is_bf16():
    without, bf16 = model("*"), model(recipe="bf16")
    assert tiny_model.differing(without, bf16) == []


WARMUP = "quantization=fp8_full quantization_warmup_steps=2 eval_interval=3"


def test_a_warmup_is_bf16_and_then_is_not(tmp_path):
    """The first steps are those of bf16 to the bit; later ones are not."""
    line = "steps=4 enable_checkpointing=false"
    assert train(tmp_path / "bf16", f"{line} eval_interval=3") == 0
    assert train(tmp_path / "fp8", f"{line} {WARMUP}") == 0
    bf16, fp8 = (losses(tmp_path / name) for name in ("bf16", "fp8"))
    assert [fp8[n] == bf16[n] for n in range(1, 5)] == [True, True, False, False]
    assert [row["step"] for row in rows(tmp_path / "fp8", "health")] == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 3])
def test_a_resumed_warmup(tmp_path, cut):
    line = f"checkpoint_period=1 {WARMUP}"
    assert train(tmp_path / "whole", f"steps=4 {line}") == 0
    assert train(tmp_path / "parts", f"steps={cut} {line}") == 0
    assert train(tmp_path / "parts", "steps=4", base="") == 0
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_show_says_what_is_left(capsys):
    line = ["show", "--json", "model_name=demo", "quantization=fp8_full"]
    assert cli.main([*line, "quantization_skip=*.down.act"]) == 0
    rows = json.loads(capsys.readouterr().out)["gemms"]
    found = {(row["gemm"], row["product"]): row["lhs"] for row in rows}
    assert len(found) == len(rows) == 6
    assert "float8" in found["gate_up", "out"] and "float8" not in found["down", "out"]
    assert {row["layers"] for row in rows} == {""}
    assert cli.main([*line, "quantization_skip=layers.2"]) == 0
    rows = json.loads(capsys.readouterr().out)["gemms"]
    cast = {row["layers"]: "float8" in row["lhs"] for row in rows}
    assert cast == {"layers.1, layers.3": True, "layers.2": False}


def test_bf16_is_what_is_left_of_a_recipe():
    for recipe in RECIPES.values():
        (left, _) = skip.recipes_of(recipe, ("*",), "layers.0")
        assert left.model_copy(update={"name": "bf16"}) == BF16
