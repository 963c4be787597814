"""A run that was interrupted, killed or finished goes on as if nothing had happened."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from training_runs import (
    arguments,
    assert_same_state,
    at_step,
    checkpoint_steps,
    losses,
    press_ctrl_c,
    rows,
    saved,
    train,
)

from octablox import cli
from octablox.train.step import Trainer

STEPS = "steps=6 checkpoint_period=2 max_num_checkpoints_to_keep=9 eval_interval=3"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of 6 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder, STEPS) == 0
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of the same run, stopped by Ctrl-C in step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 3, press_ctrl_c)
        assert train(folder, STEPS) == 130
    return folder


@pytest.fixture
def copied(stopped, tmp_path):
    """A folder of one's own with the stopped run in it."""
    subprocess.run(["cp", "-r", stopped / "run", tmp_path], check=True)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch):
    """The names of what was compiled."""
    names = []
    for name in ("compile_step", "compile_eval"):
        compile_ = getattr(Trainer, name)
        monkeypatch.setattr(
            Trainer, name, lambda *args, n=name, c=compile_: (names.append(n), c(*args))
        )
    return names


def assert_equals(folder, whole):
    assert_same_state(saved(folder), saved(whole))
    assert losses(folder) == losses(whole)
    evals = [(row["step"], row["eval_loss"]) for row in rows(folder, "eval")]
    assert evals == [(row["step"], row["eval_loss"]) for row in rows(whole, "eval")]


def test_ctrl_c_saves_and_the_command_it_prints_resumes(tmp_path, whole, monkeypatch, capsys):
    folder = tmp_path / "a folder of mine"
    with monkeypatch.context() as patch:
        at_step(patch, 3, press_ctrl_c)
        assert train(folder, STEPS) == 130
    lines = capsys.readouterr().out.splitlines()
    assert "SIGINT: finishing this step, then saving; Ctrl-C again to quit at once" in lines
    saying, command = lines[-1].split("; to resume: ")
    assert saying == "saved step 3"
    assert command == f"octablox train run_name=run 'base_output_directory={folder}'"
    assert checkpoint_steps(folder) == [2, 3]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"]) == ("SIGINT", 3)

    assert cli.main(shlex.split(command)[1:]) == 0
    assert f"resuming {folder / 'run'} from step 3" in capsys.readouterr().out
    assert_equals(folder, whole)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"]) == ("finished", 6)


KILLED = """
import os, signal, sys
from octablox import cli
from octablox.train import loop

log = loop._Run._log

def log_and_die(self, step, *args):
    log(self, step, *args)
    if step == 5:
        self._checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)

loop._Run._log = log_and_die
cli.main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path, whole):
    command = [sys.executable, "-c", KILLED, *arguments(tmp_path, STEPS)]
    died = subprocess.run(command, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert checkpoint_steps(tmp_path) == [2, 4]
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "ki')  # the kill came in the middle of a line
    assert train(tmp_path, "", base="") == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert_equals(tmp_path, whole)


def test_a_signal_to_the_program_itself(tmp_path):
    command = [sys.executable, "-m", "octablox", *arguments(tmp_path, "steps=100000")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout:
            if line.startswith("step 2/100000"):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")
    (step,) = checkpoint_steps(tmp_path)
    command = f"octablox train run_name=run base_output_directory={tmp_path}"
    assert out.splitlines()[-1] == f"saved step {step}; to resume: {command}"


def test_a_second_ctrl_c_quits_at_once_and_loses_no_checkpoint(copied, monkeypatch, capsys, whole):
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda run: (press_ctrl_c(), press_ctrl_c()))
        assert train(copied, "", base="") == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert checkpoint_steps(copied) == [2, 3, 4]
    assert train(copied, "", base="") == 0
    assert_equals(copied, whole)


def test_ctrl_c_without_checkpoints_does_not_promise_one(tmp_path, monkeypatch, capsys):
    at_step(monkeypatch, 2, press_ctrl_c)
    assert train(tmp_path, "steps=6 enable_checkpointing=false") == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "stopped at step 2; enable_checkpointing=false: nothing saved"


def test_onto_another_mesh(copied, whole, capsys):
    assert train(copied, "ici_expert_parallelism=2", base="") == 0
    assert "resuming with ici_expert_parallelism=2 (was 1)" in capsys.readouterr().out
    found, expected = losses(copied), losses(whole)
    assert list(found) == list(expected)
    # bfloat16 sums in another order; one step changes the loss by more than this.
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=3e-3)


def test_a_finished_run_says_so_and_goes_on_with_more_steps(whole, tmp_path, capsys, compiled):
    subprocess.run(["cp", "-r", whole / "run", tmp_path], check=True)
    began = time.monotonic()
    assert train(tmp_path, "", base="") == 0
    assert time.monotonic() - began < 10
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{tmp_path / 'run'} has 6 steps already; to go on, give a larger steps="
    assert compiled == []
    assert train(tmp_path, "steps=8", base="") == 0
    assert "resuming with steps=8 (was 6)" in capsys.readouterr().out
    assert list(losses(tmp_path)) == list(range(1, 9))
    assert {step: losses(tmp_path)[step] for step in range(1, 7)} == losses(whole)
    assert checkpoint_steps(tmp_path) == [2, 4, 6, 8]


def test_a_damaged_checkpoint_costs_some_steps_only(copied, whole, capsys):
    (copied / "run" / "checkpoints" / "3" / "checksums.json").write_text("{")
    assert train(copied, "", base="") == 0
    out = capsys.readouterr().out
    assert "checkpoints/3 is damaged" in out
    assert f"resuming {copied / 'run'} from step 2" in out
    assert_equals(copied, whole)


def test_other_settings_are_refused_by_name(copied, capsys, compiled):
    before = (copied / "run" / "config.yml").read_text()
    assert train(copied, "learning_rate=1 base_moe_mlp_dim=128", base="") == 2
    assert capsys.readouterr().err == (
        f"error: {copied / 'run'} was trained with other settings (base_moe_mlp_dim: 64 there, "
        "128 here, learning_rate: 0.01 there, 1.0 here); leave them out to resume it, choose "
        "another run_name, or write resume_with_changes=true\n"
    )
    assert (copied / "run" / "config.yml").read_text() == before
    assert compiled == []


def test_other_settings_are_taken_when_told(copied, whole, capsys):
    line = "learning_rate=0.02 data_shuffle_seed=5 resume_with_changes=true"
    assert train(copied, line, base="") == 0
    out = capsys.readouterr().out
    assert "resuming with learning_rate=0.02 (was 0.01)" in out
    assert "resuming with data_shuffle_seed=5 (was 0)" in out
    text = (copied / "run" / "config.yml").read_text()
    assert "learning_rate: 0.02\n" in text
    assert "resume_with_changes" not in text
    assert list(losses(copied)) == list(losses(whole))
    assert losses(copied)[4] != losses(whole)[4]


def test_a_step_keeps_its_number_of_sequences(copied, capsys, compiled):
    assert train(copied, "per_device_batch_size=2", base="") == 2
    assert capsys.readouterr().err == (
        f"error: {copied / 'run'} was trained with 8 sequences a step, these devices would take "
        "16; write per_device_batch_size=1, or resume_with_changes=true\n"
    )
    assert compiled == []


def test_another_preset_is_refused(copied, capsys):
    assert train(copied, "model_name=demo", base="") == 2
    assert capsys.readouterr().err == (
        "error: run run has checkpoints of model_name=tiny, got model_name=demo; leave model_name "
        "out to resume it, or choose another run_name\n"
    )


def test_a_checkpoint_of_another_model(copied, capsys, compiled):
    path = copied / "run" / "config.yml"
    path.write_text(path.read_text().replace("base_moe_mlp_dim: 64", "base_moe_mlp_dim: 128"))
    assert train(copied, "", base="") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the checkpoint of step 3 in ")
    assert (
        "is of another model: params.moe_layers.experts.down expected float32[1,8,128,64], found "
        "float32[1,8,64,64]; "
    ) in error
    assert error.endswith(
        "; give another run_name, or the model flags that this run was started with\n"
    )
    assert error.count("\n") == 1
    assert compiled == []
    assert checkpoint_steps(copied) == [2, 3]
