"""Whatever happens to the machine, a run goes on: killed at any moment, on other devices."""

import itertools
import os
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import training_runs
from training_runs import arguments, assert_same_state, checkpoint_steps, losses, saved, train

SMALL = f"{training_runs.SMALL} eval_interval=-1"


def start(folder, line, base=SMALL, **environment):
    """`octablox train` as a process."""
    command = [sys.executable, "-m", "octablox", *arguments(folder, line, base)]
    env = os.environ | {"PYTHONUNBUFFERED": "1", **environment}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def test_from_eight_devices_to_four_to_one(tmp_path):
    """The same rows in the same order, and the same numbers but for how sums are rounded."""
    assert train(tmp_path / "whole", "steps=6 dtype=float32", SMALL) == 0
    assert train(tmp_path / "moved", "steps=2 dtype=float32", SMALL) == 0
    for line in (
        "steps=4 num_cpu_devices=4 per_device_batch_size=2 use_batch_split_schedule=true "
        "ici_expert_parallelism=2",
        "steps=6 num_cpu_devices=1 per_device_batch_size=4 gradient_accumulation_steps=2 "
        "use_batch_split_schedule=false ici_expert_parallelism=1",
    ):
        # Compiled in half the time, and on as many devices as the line says.
        flags = "--xla_backend_optimization_level=0"
        with start(tmp_path / "moved", line, "", XLA_FLAGS=flags) as process:
            out, _ = process.communicate(timeout=500)
        assert process.returncode == 0, out
        assert "resuming with num_cpu_devices=" in out
    whole, moved = losses(tmp_path / "whole"), losses(tmp_path / "moved")
    assert list(moved) == list(whole) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(moved.values()), list(whole.values()), rtol=1e-5)
    # Other rows would differ by far more.
    assert np.ptp(list(whole.values())) > 1e-3
    assert saved(tmp_path / "moved").data_state == saved(tmp_path / "whole").data_state


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_random(tmp_path, kills):
    """Saved at every step, so that most kills come during a save; some come before any step."""
    steps = 12 * kills  # more than ten lines and a moment bring
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    line = f"steps={steps} checkpoint_period=1"
    assert train(tmp_path / "whole", line, SMALL) == 0
    deaths, leftovers, reached = [], 0, 0
    folder = tmp_path / "killed"
    while len(deaths) < kills:
        with start(folder, line) as process:
            # Every other one after it has made steps.
            printed = kill(process, rng, at_least=0 if len(deaths) % 2 else 6)
        assert process.returncode == -9, printed
        assert "Traceback" not in printed, printed
        resumed = [word for word in printed.splitlines() if word.startswith("resuming ")]
        if reached and "step " in printed:
            assert resumed, printed
        checkpoints = folder / "run" / "checkpoints"
        names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
        leftovers += sum(not name.isdecimal() for name in names)
        now = max((int(name) for name in names if name.isdecimal()), default=0)
        assert now >= reached, "a checkpoint was lost"
        reached = now
        deaths.append(reached)
    print(f"killed after the checkpoints of steps {deaths}; {leftovers} unfinished folders")
    assert reached < steps
    assert train(folder, line, SMALL) == 0
    assert_same_state(saved(folder), saved(tmp_path / "whole"))
    assert losses(folder) == losses(tmp_path / "whole")


def kill(process, rng, at_least):
    """Kills it a moment after a random one of its first lines; returns its output.

    It prints some before the first step, and one for each step.
    """
    lines = list(itertools.islice(process.stdout, rng.randint(at_least, 10)))
    time.sleep(rng.uniform(0, 0.15))
    process.kill()
    return "".join(lines) + process.stdout.read()


def test_a_disk_that_fills_up_loses_nothing_that_was_saved(tmp_path, capsys):
    """One checkpoint fits, not all of four; with more room the run goes on to the same bits."""
    line = "steps=8 checkpoint_period=2 max_num_checkpoints_to_keep=9"
    assert train(tmp_path / "whole", line, SMALL) == 0
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "none", small])
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        assert train(small, line, SMALL) == 2
        error = capsys.readouterr().err
        # How much a save needs beside its arrays depends on what of it runs at the same time.
        failed = int(re.match("error: disk full: the checkpoint of step (.) needs", error)[1])
        good = failed - 2
        assert f"; the checkpoint of step {good} is still good; free some space, or" in error
        assert checkpoint_steps(small) == list(range(2, failed, 2))
        subprocess.run(["mount", "-o", "remount,size=40m", small], check=True)
        assert train(small, line, SMALL) == 0
        assert f"resuming {small / 'run'} from step {good}" in capsys.readouterr().out
        assert_same_state(saved(small), saved(tmp_path / "whole"))
        assert losses(small) == losses(tmp_path / "whole")
    finally:
        subprocess.run(["umount", small], check=True)
