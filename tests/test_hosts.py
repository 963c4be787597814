"""Several processes: how they find each other, and that together they are one run."""

import json
import signal
import time

import process_runs
import pytest
import training_runs
from tiny_model import relative_errors

from octablox.errors import UserError
from octablox.train import hosts
from octablox.training_config import HostsConfig

QUICK = "ici_expert_parallelism=2 eval_interval=4 dtype=float32"
FULL = (
    "ici_expert_parallelism=2 eval_interval=4 quantization=fp8_full use_batch_split_schedule=true "
    "per_device_batch_size=2"
)
# The devices of all processes together are as many as the test's own process has.
SHARED = "num_cpu_devices=8"


@pytest.mark.parametrize(
    ("keys", "environment", "expected"),
    [
        ({}, {}, {}),
        ({}, {"JAX_COORDINATOR_ADDRESS": ""}, {}),
        (
            {"coordinator_address": "h:1", "num_processes": 2, "process_id": 0},
            {},
            {"coordinator_address": "h:1", "num_processes": 2, "process_id": 0},
        ),
        (
            {"process_id": 1},
            {
                "JAX_COORDINATOR_ADDRESS": "h:1",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "0",
            },
            {"coordinator_address": "h:1", "num_processes": 2, "process_id": 1},
        ),
        # Slurm says the rest.
        (
            {"coordinator_address": "h:1"},
            {"SLURM_STEP_NUM_TASKS": "2"},
            {"coordinator_address": "h:1"},
        ),
    ],
)
def test_what_keys_and_environment_say(keys, environment, expected):
    assert hosts._given(HostsConfig(**keys), environment) == expected


@pytest.mark.parametrize(
    ("keys", "environment", "line"),
    [
        (
            {"coordinator_address": "h:1"},
            {},
            "several processes need coordinator_address, num_processes and process_id; "
            "num_processes and process_id is missing, as a key or as JAX_NUM_PROCESSES, "
            "JAX_PROCESS_ID in the environment",
        ),
        (
            {"coordinator_address": "h", "num_processes": 2, "process_id": 0},
            {},
            "coordinator_address: expected HOST:PORT, got 'h'",
        ),
        (
            {"coordinator_address": "h:1", "num_processes": 2, "process_id": 2},
            {},
            "process_id: expected 0 to num_processes - 1 = 1, got 2",
        ),
        (
            {},
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "JAX_NUM_PROCESSES: expected a whole number, got 'two'",
        ),
    ],
)
def test_settings_that_do_not_suffice(keys, environment, line):
    with pytest.raises(UserError) as error:
        hosts._given(HostsConfig(**keys), environment)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"MEGASCALE_NUM_SLICES": "2"}, True),
    ],
)
def test_launchers(environment, launched):
    assert hosts._launched({"JAX_PLATFORMS": "cpu"} | environment) is launched


def test_a_plain_process_does_not_join_any(monkeypatch):
    monkeypatch.setattr(hosts.jax.distributed, "initialize", lambda **settings: pytest.fail())
    assert hosts.start(HostsConfig(), {"JAX_PLATFORMS": "cpu"}) == 1
    skipped = HostsConfig(skip_jax_distributed_system=True, coordinator_address="h:1")
    assert hosts.start(skipped, {"SLURM_STEP_NUM_TASKS": "4"}) == 1


def test_processes_that_do_not_come_are_a_users_error(monkeypatch):
    def nobody(**settings):
        raise RuntimeError("DEADLINE_EXCEEDED: nobody came\nand a trace")

    monkeypatch.setattr(hosts.jax.distributed, "initialize", nobody)
    config = HostsConfig(coordinator_address="h:1", num_processes=2, process_id=0)
    with pytest.raises(UserError, match="within 300 s: DEADLINE_EXCEEDED: nobody came; check"):
        hosts.start(config, {})


def test_alone_everything_is_ones_own():
    assert hosts.is_main()
    assert hosts.largest(3) == 3
    assert hosts.mains("a name") == "a name"
    assert hosts.on_main(lambda: "done") == "done"

    def fails():
        raise UserError("disk full")

    with pytest.raises(UserError, match="disk full"):
        hosts.on_main(fails)


def test_a_lost_process_is_a_users_error(monkeypatch):
    def lose(text):
        with hosts.lost_peers():
            raise hosts.jax.errors.JaxRuntimeError(text)

    with pytest.raises(hosts.jax.errors.JaxRuntimeError):
        lose("UNAVAILABLE: alone")
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"lost another process of this run \(UNAVAILABLE: x\)"):
        lose("UNAVAILABLE: x\nand a trace")
    with pytest.raises(hosts.jax.errors.JaxRuntimeError):
        lose("RESOURCE_EXHAUSTED: out of memory")


def test_devices_are_shared_evenly(monkeypatch, capsys):
    from octablox import cli

    monkeypatch.setattr(hosts, "start", lambda config: 3)
    assert cli.main(["train", "model_name=tiny", "num_cpu_devices=8"]) == 2
    assert capsys.readouterr().err == (
        "error: num_cpu_devices must be a multiple of the number of processes, 3, which share "
        "them; got 8\n"
    )


# One process and several add gradients in different orders. In float32 that stays small; in bf16
# it soon sends a token to another expert.
ROUNDING = 1e-5


def assert_close(folder, whole, relative=ROUNDING):
    """The losses of both runs, as far as both went, and the parameters where both ended."""
    got, expected = training_runs.losses(folder), training_runs.losses(whole)
    common = got.keys() & expected.keys()
    close = {step: pytest.approx(expected[step], rel=relative) for step in common}
    assert {step: got[step] for step in common} == close
    ours, theirs = training_runs.saved(folder), training_runs.saved(whole)
    if ours.step == theirs.step:
        assert ours.data_state == theirs.data_state
        errors = relative_errors(ours.state.params, theirs.state.params)
        assert max(errors.values()) < 100 * relative, errors


def wait_for_step(folder, step, started):
    """Returns when the run has logged that step."""
    metrics = folder / "run" / "metrics.jsonl"
    until = time.monotonic() + process_runs.TIMEOUT
    while time.monotonic() < until:
        assert all(process.poll() is None for process in started), process_runs.finish(started)
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within {process_runs.TIMEOUT} s")


def test_two_processes_compute_what_one_does_and_stop_together(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    assert training_runs.train(whole, f"{QUICK} steps=4") == 0
    # The processes stop because the one that does not write was asked to.
    with process_runs.running(folder, f"{QUICK} {SHARED} steps=100000", processes=2) as started:
        wait_for_step(folder, 2, started)
        started[1].send_signal(signal.SIGTERM)
        ended = process_runs.finish(started)
    assert [code for code, _, _ in ended] == [130, 130], ended
    (_, out, _), (_, others, _) = ended
    (step,) = training_runs.checkpoint_steps(folder)[-1:]
    assert f"saved step {step}" in out
    assert "step 1/" not in others and "saved step" not in others
    assert json.loads((folder / "run" / "summary.json").read_text())["stopped"] == "SIGTERM"
    assert max(training_runs.losses(folder)) == step >= 2
    assert_close(folder, whole)
    # The checkpoint is whole, and of the layout that one process resumes from.
    assert training_runs.saved(folder).step == step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "line", "relative"), [(2, FULL, 1e-3), (2, QUICK, ROUNDING), (4, QUICK, ROUNDING)]
)
def test_several_processes_train_the_run_of_one(tmp_path, processes, line, relative):
    whole, folder = tmp_path / "whole", tmp_path / "several"
    ended = process_runs.run(folder, f"{line} {SHARED} steps=8", processes)
    assert [code for code, _, _ in ended] == [0] * processes, ended
    assert training_runs.train(whole, f"{line} steps=8") == 0
    assert_close(folder, whole, relative)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_whose_processes_are_killed_goes_on_from_its_last_checkpoint(tmp_path, victim):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    line = f"{QUICK} {SHARED} checkpoint_period=2"
    with process_runs.running(folder, f"{line} steps=100000", processes=2) as started:
        wait_for_step(folder, 5, started)
        started[victim].kill()
        time.sleep(0.5)  # then all, by leaving
    saved = training_runs.checkpoint_steps(folder)[-1]
    assert saved >= 2
    for one in (folder, whole):
        ended = process_runs.run(one, f"{line} steps={saved + 4}", processes=2)
        assert [code for code, _, _ in ended] == [0, 0], ended
        resumed = f"from step {saved}" in ended[0][1]
        assert resumed == (one == folder)
    # To the bit: the same number of processes adds in the same order.
    assert training_runs.losses(folder) == training_runs.losses(whole)
    training_runs.assert_same_state(training_runs.saved(folder), training_runs.saved(whole))
