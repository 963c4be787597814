"""The benchmarks measure what they say; what they find is not tested."""

import dataclasses
import json
import os
import sys
import time

import numpy as np
import pytest

from benchmarks import step
from octablox.bench import gmm
from octablox.bench.step import random_batch

# Prints what MaxText prints, spends 0.2 CPU-seconds on each step, and twice as long on none.
FAKE_MAXTEXT = """
import sys, time
keys = dict(word.split("=", 1) for word in sys.argv[1:])
assert keys["base_emb_dim"] == "256" and keys["quantization"] == "fp8_full", keys
print("some other line, loss: 3")
for number in range(int(keys["steps"])):
    end = time.process_time() + 0.2
    while time.process_time() < end: pass
    time.sleep(0.2)
    print(f"I0101 x.py:1] completed step: {number}, seconds: 0.001, TFLOP/s/device: 0.1, "
          f"Tokens/s/device: 9.1, total_weights: 2048, loss: {8 - number}.125, lm_loss: 1.000")
"""


def test_maxtext_is_watched_from_outside():
    found = step.measure_maxtext("fp8", 4, [sys.executable, "-c", FAKE_MAXTEXT])
    assert found.losses == (8.125, 7.125, 6.125, 5.125)
    assert found.cpu_seconds == pytest.approx(0.2, abs=0.05)  # neither wall time nor what it says
    assert 0.4 < found.seconds_to_first_step < 30
    assert 5 < found.peak_mib < 500


def test_a_maxtext_that_fails_is_shown():
    command = [sys.executable, "-c", "import sys; print('no such key'); sys.exit(3)"]
    with pytest.raises(SystemExit) as caught:
        step.measure_maxtext("bf16", 4, command)
    assert str(caught.value).startswith(
        "error: expected 4 steps of MaxText, got 0 and exit code 3; its last lines:"
    )
    assert str(caught.value).endswith("\nno such key")


def test_the_sizes_are_those_of_maxtext():
    from octablox import config

    ours = config.dump(config.load([f"{k}={v}" for k, v in step.SHARED.items()]).config)
    theirs = step.MAXTEXT | {"adam_weight_decay": "0.1", "adam_b1": "0.9", "adam_b2": "0.95"}
    theirs["gradient_clipping_threshold"] = "1.0"
    shared = {key: theirs[key] for key in theirs.keys() & ours.keys()}
    # Where octablox has another name, or says it otherwise.
    for key in (
        "attention",  # on CPU the same: no fused kernel
        "dataset_type",
        "run_name",
        "ici_fsdp_parallelism",
        "log_period",
        "enable_checkpointing",
        "skip_jax_distributed_system",
    ):
        del shared[key]
    assert len(shared) > 20
    for key, value in shared.items():
        here = str(ours[key]).lower()
        same = here == value or (value[0].isdecimal() and float(here) == float(value))
        assert same, f"{key}: {here} here, {value} there"
    assert ours["cosine_learning_rate_final_fraction"] == 0.1


def test_the_batch_is_one_document_a_row():
    from octablox import config

    settings = config.load(["model_name=maxtext-small"]).config
    batch = random_batch(settings, 8)
    assert {array.shape for array in batch.values()} == {(16, 128)}
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert batch["weights"].sum() == 2048
    assert (batch["segment_ids"] == 1).all() and (batch["positions"][3] == range(128)).all()


def test_the_shape_of_a_curve():
    recorded = step.RECORDED["bf16"].losses
    assert step.same_shape([1.2 * loss - 2 for loss in recorded], recorded) is True
    assert step.same_shape(step.RECORDED["fp8"].losses, recorded) is True
    flat = [recorded[0]] * len(recorded)
    assert step.same_shape(flat, recorded) is False
    straight = [recorded[0] + (recorded[-1] - recorded[0]) * i / 9 for i in range(10)]
    assert step.same_shape(straight, recorded) is False
    assert step.same_shape([float("nan")] * len(recorded), recorded) is False
    assert step.same_shape(recorded[:5], recorded) is None  # another schedule


def test_the_rows_are_the_table(monkeypatch, tmp_path, capsys):
    ours = step.Measured(4.0, 20.0, 900.0, step.RECORDED["bf16"].losses)
    theirs = dataclasses.replace(ours, cpu_seconds=20.0, seconds_to_first_step=100.0)
    monkeypatch.setattr(step, "measure_octablox", lambda case, steps: ours)
    monkeypatch.setattr(step, "measure_maxtext", lambda case, steps, command: theirs)
    path = tmp_path / "rows.json"
    step.main(["--json", str(path), "--maxtext", "python"])
    rows = json.loads(path.read_text())
    programs = [(row["program"], row["recipe"], row["schedule"]) for row in rows]
    assert programs == [
        ("octablox", "bf16", "sequential"),
        ("MaxText", "bf16", "sequential"),
        ("MaxText 0.2.5, recorded", "bf16", "sequential"),
        ("octablox", "fp8_full", "sequential"),
        ("MaxText", "fp8_full", "sequential"),
        ("MaxText 0.2.5, recorded", "fp8_full", "sequential"),
        ("octablox", "fp8_full", "batch_split"),
        ("MaxText 0.2.5, recorded", "fp8_full", "sequential"),
    ]
    assert all(not isinstance(value, list | dict) for row in rows for value in row.values())
    assert [row["cpu_ratio"] for row in rows[:3]] == [1.0, 5.0, 23.5 / 4]
    assert [row["seconds_ratio"] for row in rows[:3]] == [1.0, 5.0, 106 / 20]
    assert rows[2]["peak_mib"] is None
    assert {row["same_shape"] for row in rows} == {True}
    assert rows[0]["losses"].split()[:3] == ["8.105", "8.105", "6.591"]
    out = capsys.readouterr().out
    assert "bf16: MaxText / octablox: 5.0x the CPU-seconds a step (target: 6x or more)" in out


def test_one_step_cannot_be_measured(capsys):
    with pytest.raises(SystemExit):
        step.main(["--steps", "1"])
    assert "expected 2 or more, since the first is left out, got 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("case", step.CASES)
def test_a_step_of_octablox_is_measured(case):
    found = step.measure_octablox(case, 3)
    assert len(found.losses) == 3
    assert found.losses[0] == found.losses[1]  # warm-up begins at 0
    assert 7 < found.losses[0] < 9
    assert 0.1 < found.cpu_seconds < 100
    assert found.peak_mib > 300


def test_our_own_cpu_time_is_all_threads():
    before, end = step._cpu_seconds(), time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert step._cpu_seconds() - before == pytest.approx(0.1, abs=0.04)
    assert step._cpu_seconds_of(os.getpid()) == pytest.approx(step._cpu_seconds(), abs=0.1)


@pytest.mark.parametrize("split", gmm.SPLITS)
@pytest.mark.parametrize("experts", [8, 64])
def test_group_sizes_hold_all_rows(split, experts):
    sizes = gmm.group_sizes(split, experts, 4096)
    assert (sizes.shape, sizes.sum()) == ((experts,), 4096)
    assert (sizes == 0).sum() == (experts // 2 if split == "half empty" else 0)
    assert (sizes.max() > 2 * sizes.mean()) == (split == "skewed")
