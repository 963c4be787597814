"""What a user can get wrong: one line on stderr, exit code 2, and nothing lost that was saved."""

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from training_runs import assert_same_state, at_step, checkpoint_steps, losses, saved, train

from octablox.train import loop
from octablox.train.step import Trainer

# (arguments, what stands in the line on stderr)
LINES = {
    "unknown key": ("lerning_rate=1", "unknown key 'lerning_rate'; did you mean learning_rate"),
    "misspelt value": (
        "dataset_type=synthetik",
        "dataset_type: expected one of embedded, text, jsonl, synthetic, got 'synthetik'; "
        "did you mean synthetic?",
    ),
    "dtype": ("dtype=bf16", "dtype: expected one of bfloat16, float32, got 'bf16'"),
    "recipe": (
        "quantization=fp8_ful",
        "quantization: expected nothing (bf16), one of bf16, fp8_full, fp8_tensorwise, "
        "fp8_blockwise, mxfp8, int8, or a recipe in YAML, got 'fp8_ful'; did you mean fp8_full?",
    ),
    "calibration": (
        "quantization=fp8_full bwd_quantization_calibration_method=fixed,-224,225",
        "bwd_quantization_calibration_method: expected absmax, absmax,F, fixed,-A,A or rms,F "
        "(F, A > 0), got 'fixed,-224,225'",
    ),
    "mesh": (
        "ici_expert_parallelism=3",
        "data 1 x expert 3 = 3 does not divide 8 devices; choose sizes that do, or "
        "num_cpu_devices for virtual ones",
    ),
    "experts": (
        "num_experts=6 n_routing_groups=1 topk_routing_group=1 ici_expert_parallelism=4",
        "num_experts must be a multiple of the expert axis, 4, which shards it "
        "(expert_sharding=expert); got 6",
    ),
    "blocks": (
        "quantization=fp8_blockwise expert_sharding=width ici_expert_parallelism=2",
        "base_moe_mlp_dim must be a multiple of expert axis x weight block = 2 x 128 with "
        "expert_sharding=width and fp8_blockwise, got 64; write expert_sharding=expert, or "
        "choose a recipe without blocks",
    ),
    "split": (
        "use_batch_split_schedule=true per_device_batch_size=3",
        "per_device_batch_size must be a multiple of batch_split_factor = 2, got 3; "
        "write per_device_batch_size=4",
    ),
    "no path": (
        "dataset_type=text dataset_path={here}/none vocab_size=320",
        "expected dataset_path to be a file, a folder or a glob, got {here}/none, which does not "
        "exist: mend the path",
    ),
    "empty folder": (
        "dataset_type=text dataset_path={here}/nothing vocab_size=320",
        "expected files in the folder {here}/nothing, got none: mend dataset_path",
    ),
    "empty file": (
        "dataset_type=text dataset_path={here}/empty vocab_size=320",
        "expected text in {here}/empty, got none: give a dataset_path that has some",
    ),
    "unreadable file": (
        "dataset_type=text dataset_path={here}/unreadable vocab_size=320",
        "expected a readable file, got {here}/unreadable: Permission denied: mend its "
        "permissions or leave it out of dataset_path",
    ),
    "short text": (
        "dataset_type=text dataset_path={here}/short vocab_size=320",
        "expected at least 17 training tokens for one row of max_target_length=16, got ",
    ),
    "no JSON": (
        "dataset_type=jsonl dataset_path={here}/short vocab_size=320",
        "{here}/short:1: expected a line of JSON, got b'too short'",
    ),
    "vocabulary": (
        "dataset_type=embedded vocab_size=64",
        "dataset_type=embedded needs vocab_size of at least 257 (256 bytes and one token that "
        "begins a document), got 64: raise vocab_size or use dataset_type=synthetic",
    ),
    "folder is a file": (
        "base_output_directory={here}/short",
        "expected to write {here}/short/run, got Not a directory: free space or set "
        "base_output_directory elsewhere; what was saved before is kept",
    ),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with what can be wrong about files, where nothing may compile."""
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("too short")
    (tmp_path / "unreadable").write_text("for no one")
    (tmp_path / "unreadable").chmod(0)
    monkeypatch.setattr(Trainer, "compile_step", lambda *_: pytest.fail("it compiles"))
    return tmp_path


@pytest.mark.parametrize("case", LINES)
def test_bad_input_is_one_line_before_anything_compiles(case, here, capsys):
    if case == "unreadable file" and os.access(here / "unreadable", os.R_OK):
        pytest.skip("this user can read everything")
    line, text = (part.format(here=here) for part in LINES[case])
    assert train(here / "runs", line) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert text in error
    assert error.count("\n") == 1 and error.endswith("\n")


def one_error(capsys) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("error: ")
    return error.removeprefix("error: ").rstrip("\n")


# NaN


def test_a_loss_that_is_nan_ends_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, capsys):
    line = "steps=6 checkpoint_period=2 max_num_checkpoints_to_keep=9"
    assert train(tmp_path, f"{line} steps=4") == 0
    before = saved(tmp_path)
    init = loop._Run.restore

    def restore(self):
        init(self)
        state, first = self._restored
        with jax.set_mesh(self._trainer.mesh):
            params = jax.tree.map(lambda param: param * np.nan, state.params)
        self._restored = type(state)(state.step, params, state.opt_state), first

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "restore", restore)
        capsys.readouterr()
        assert train(tmp_path, "steps=6", base="") == 2
    assert one_error(capsys) == (
        "loss and gradient norm must be finite, got nan and nan at step 5 (step 4 is saved); try "
        "another run_name with a lower learning_rate, more warmup_steps_fraction, or "
        "quantization=bf16"
    )
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]
    assert losses(tmp_path)[5] is None  # the step that went wrong is on record
    assert_same_state(saved(tmp_path), before)
    assert train(tmp_path, "steps=6", base="") == 0  # what was saved is good
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_a_learning_rate_that_blows_up(tmp_path, capsys):
    line = "steps=6 learning_rate=1e38 warmup_steps_fraction=0 enable_checkpointing=false"
    assert train(tmp_path, line) == 2
    error = one_error(capsys)
    assert error.startswith("loss and gradient norm must be finite, got ")
    assert " at step 2 (no step was saved yet); try another run_name with a lower " in error


def test_an_eval_loss_that_is_nan_is_not_saved(tmp_path, monkeypatch, capsys):
    evaluate = loop._Run._evaluate

    def broken(self, step, state, *rest):
        nan = lambda params, batch: (np.float32(np.nan), np.float32(1))  # noqa: E731
        self._wait_for_eval()
        monkeypatch.setattr(self._trainer, "eval_sums", nan)
        evaluate(self, step, state, *rest)

    monkeypatch.setattr(loop._Run, "_evaluate", broken)
    assert train(tmp_path, "steps=4 checkpoint_period=2 eval_interval=4") == 2
    error = one_error(capsys)
    assert error.startswith("eval loss must be finite, got nan after step 4 (step 2 is saved); try")
    assert checkpoint_steps(tmp_path) == [2]


# The disk


def mount(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")


@pytest.fixture
def disk(tmp_path):
    """A disk of 12 MiB: a few of the small model's checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder, "size=12m")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def test_a_disk_that_checkpoints_fill(disk, capsys):
    line = "steps=20 checkpoint_period=1 max_num_checkpoints_to_keep=20"
    assert train(disk, line) == 2
    error = one_error(capsys)
    steps = checkpoint_steps(disk)
    last = steps[-1]
    assert steps == list(range(1, last + 1)) and last >= 2
    assert error.startswith(f"disk full: the checkpoint of step {last + 1} needs about ")
    assert f"; the checkpoint of step {last} is still good; free some space, or give " in error
    assert saved(disk).step == last
    command = ["mount", "-o", "remount,size=100m", disk]
    subprocess.run(command, check=True)
    assert train(disk, f"steps={last + 2}", base="") == 0
    assert list(losses(disk)) == list(range(1, last + 3))


def test_a_disk_that_fills_while_metrics_are_written(disk, monkeypatch, capsys):
    line = "steps=59 checkpoint_period=30"
    with monkeypatch.context() as patch:
        # The last page of metrics.jsonl takes some more rows, fewer than up to step 59.
        at_step(patch, 31, lambda run: (run._checkpoints.wait(), fill(disk)))
        assert train(disk, line) == 2
    full = "got No space left on device: free space or set base_output_directory elsewhere; what "
    full += "was saved before is kept"
    assert one_error(capsys) == f"expected to write {disk}/run/metrics.jsonl, {full}"
    before = (disk / "run" / "config.yml").read_text(), saved(disk)
    # Still full: the run cannot go on, and loses nothing by the attempt.
    assert train(disk, "log_period=2", base="") == 2
    assert one_error(capsys) == f"expected to write {disk}/run, {full}"
    assert (disk / "run" / "config.yml").read_text() == before[0]
    assert_same_state(saved(disk), before[1])
    assert before[1].step == 30
    (disk / "filler").unlink()
    assert train(disk, "steps=32", base="") == 0
    assert list(losses(disk)) == list(range(1, 33))


def test_a_folder_that_cannot_be_written(disk, capsys):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert train(disk / "runs", "steps=2") == 2
    assert one_error(capsys) == (
        f"expected to write {disk}/runs/run, got Read-only file system: free space or set "
        "base_output_directory elsewhere; what was saved before is kept"
    )
