"""`octablox calibrate`: ranges from a run, in a recipe that `train` reads."""

import pytest
from training_runs import arguments, rows, train

from octablox import calibrate, cli
from octablox.fp8 import RECIPES, QuantizationConfig, recipe_from_config
from octablox.health import OPERANDS


def calibrated(folder, *options, line="quantization=fp8_full steps=4"):
    _, *keys = arguments(folder, line)
    return cli.main(["calibrate", *options, *keys])


def test_the_recipe_has_the_ranges_of_the_run_and_trains(tmp_path, capsys):
    path = tmp_path / "fixed.yml"
    assert calibrated(tmp_path / "a", "--output", str(path), "--margin=3") == 0
    assert capsys.readouterr().out.endswith(f"octablox train quantization={path}\n")
    seen = calibrate.largest(rows(tmp_path / "a", "health"))
    assert [row["step"] for row in rows(tmp_path / "a", "health")] == [1, 2, 3, 4]
    recipe = recipe_from_config(QuantizationConfig(quantization=str(path)))
    assert recipe.name == "fp8_full-calibrated"
    for operand in OPERANDS:
        cast = getattr(recipe, operand)
        reach = float(cast.calibration.rpartition(",")[2])
        assert reach == pytest.approx(3 * seen[operand], rel=0.01)
        original = getattr(RECIPES["fp8_full"], operand)
        assert cast == original.model_copy(update={"calibration": cast.calibration})
    assert seen["weight"] > 100 * seen["dlhs_grad"] > 0
    # Nothing saturates, and as little is lost as with scales that are found at every step.
    assert train(tmp_path / "b", f"quantization={path} steps=2 enable_checkpointing=false") == 0
    for row in rows(tmp_path / "b", "health"):
        for key, value in row.items():
            if key.endswith(".saturated"):
                assert value == 0, key
            if key.endswith(".sqnr_db"):
                assert value > (28 if "grad" not in key else 22), key


@pytest.mark.parametrize(
    ("options", "line", "message"),
    [
        ("--operands=act,dlhs_grad", "", "dlhs_grad takes over the scales of weight, whose range"),
        (
            "--operands=gradients",
            "",
            "--operands: expected some of weight, act, dlhs_grad",
        ),
        ("--margin=0.5", "", "--margin: expected 1 or more, got 0.5"),
        (
            "",
            "quantization=bf16",
            "calibrate: the recipe bf16 casts none of weight, act,",
        ),
        (
            "",
            "quantization=fp8_full fp8_health=false",
            "calibrate reads a run's health: expected fp8_health=true, got false",
        ),
        (
            "--margn=2",
            "",
            "calibrate: unrecognized arguments: --margn=2; octablox cal",
        ),
    ],
)
def test_mistakes(options, line, message, tmp_path, capsys):
    line = line or "quantization=fp8_full"
    assert calibrated(tmp_path, *options.split(), line=line) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_some_operands_only():
    options = calibrate.Options(("weight", "act"), 2.0, None)
    config = calibrate.settings(["quantization=int8", "--operands=weight,act"])[0].config
    recipe = calibrate.calibrated(config, options, {"weight": 0.5, "act": 3.0})
    assert recipe.weight.calibration == "fixed,-1,1" and recipe.act.calibration == "fixed,-6,6"
    assert recipe.dlhs_grad.calibration == "absmax" and recipe.drhs_grad is None
