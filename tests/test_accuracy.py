"""`octablox check`: what is right passes, what is wrong fails and is named."""

import json

import numpy as np
import pytest

from octablox import accuracy, cli, fp8
from octablox.fp8 import RECIPES, QArray


def test_the_data_have_what_they_are_named_for():
    made = {case.name: case for case in accuracy.cases()}
    assert len(made) == 6
    for case in made.values():
        used = case.sizes.sum()
        assert (case.sizes == 0).any() and used <= accuracy.M
        assert np.isfinite(case.x[:used].astype(float)).all()
        assert np.isnan(case.x[used:].astype(float)).all()
    size = {name: np.nanmax(np.abs(case.x.astype(float))) for name, case in made.items()}
    assert size["tiny"] < 1e-9 and size["huge"] > 1e12
    assert size["outliers"] > 3 * size["spread, ragged"]


@pytest.mark.parametrize("recipe", ["fp8_full", "int8"])
def test_a_machine_that_is_right(recipe, tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert cli.main(["check", "--recipe", recipe, "--backend", "xla", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["product"] for row in rows] == ["out", "dlhs", "drhs"]
    for row in rows:
        assert 0.2 * row["budget"] < row["error"] < row["budget"], row
        assert row["passed"] is True
    assert "3 of 3 products within their budget" in capsys.readouterr().out


def test_a_backend_that_refuses_says_why(capsys):
    assert cli.main(["check", "--recipe", "bf16", "--backend", "pallas_tpu"]) == 0
    out = capsys.readouterr().out
    assert "pallas_tpu: platform: expected a TPU v5e, v5p, v6e or 7x, got cpu" in out
    assert "0 of 0 products" in out


def test_a_wrong_scale_fails(monkeypatch, capsys):
    quantize = fp8.quantize_weight

    def misplaced(*args, **kwargs):
        q = quantize(*args, **kwargs)
        return QArray(q.qvalue, q.scale[::-1], None, q.qtype)  # another expert's

    accuracy._run.clear_cache()
    monkeypatch.setattr(fp8, "quantize_weight", misplaced)
    assert cli.main(["check", "--recipe", "fp8_full", "--backend", "xla"]) == 1
    accuracy._run.clear_cache()
    out = capsys.readouterr().out
    assert "FAIL fp8_full out on xla (" in out and "more than 6.01%" in out
    # drhs multiplies no weight, only what has taken over its scale
    assert "1 of 3 products within their budget" in out


def test_rows_of_nobody_must_be_zero(monkeypatch):
    run = accuracy._run

    def touched(*args, **kwargs):
        out, dlhs, drhs = run(*args, **kwargs)
        return out.at[-1, 0].set(1e-30), dlhs, drhs

    monkeypatch.setattr(accuracy, "_run", touched)
    rows = accuracy.rows_of(RECIPES["bf16"], "xla", accuracy.cases()[:1])
    assert [row.note for row in rows] == ["rows of no expert are not zero", "", ""]
    assert [row.passed for row in rows] == [False, True, True]


def test_mistakes(capsys):
    assert cli.main(["check", "--recipe", "fp9"]) == 2
    assert "check: argument --recipe: invalid choice: 'fp9'" in capsys.readouterr().err
