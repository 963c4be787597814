"""Whole training runs through the command line: what they print and what they leave behind."""

import json
import math
import struct

import jax
import pytest
from training_runs import checkpoint_steps, losses, rows, train

from octablox import cli, config
from octablox.errors import UserError
from octablox.fp8 import RECIPES
from octablox.health import OPERANDS
from octablox.moe.experts import GEMMS
from octablox.train import loop


def first_loss(vocabulary):
    """Of an untrained model, whose logits are normal with variance 1: log V + 1/2."""
    return math.log(vocabulary) + 0.5


TRAIN_KEYS = {
    *("step", "kind", "loss", "mtp_loss", "learning_rate", "grad_norm", "tokens", "step_seconds"),
    *("tokens_per_second", "expert_load_max_over_mean", "buffer_overflows"),
}
HEALTH_KEYS = {f"{x}_{y}" for x in ("weight", "act", "grad") for y in ("saturated", "flushed")}
SUMMARY_KEYS = {
    *("recipe", "schedule", "steps", "train_loss", "eval_loss", "bigram_nats", "run_name"),
    *("tokens_per_second", "step_seconds", "seconds_to_first_step", "total_seconds", "stopped"),
    *("peak_memory_bytes", "parameters", "devices"),
}

# MaxText's batch-split FP8 launch line as it stands, on a model that a test can train.
LAUNCH_LINE = """
model_name=tiny use_batch_split_schedule=true shard_mode=explicit quantization=fp8_full
use_qwix_quantization=true use_manual_quantization=true merge_gating_gmm=true
weight_quantization_calibration_method=fixed,-224,224
act_quantization_calibration_method=fixed,-224,224
bwd_quantization_calibration_method=absmax ici_fsdp_parallelism=-1 ici_expert_parallelism=2
per_device_batch_size=2 max_target_length=16 steps=4
"""
SMALLER = """
base_num_decoder_layers=2 dataset_type=synthetic learning_rate=0.01 log_period=2 eval_interval=2
eval_steps=2 checkpoint_period=3 jax_cache_dir=
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of the launch line's run and what it printed."""
    folder = tmp_path_factory.mktemp("launched")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("rich.console.Console.print", printer(lines))
        assert train(folder, SMALLER, LAUNCH_LINE) == 0
    return folder, "\n".join(lines)


def printer(lines):
    from rich.console import Console

    plain = Console(width=100)
    original = Console.print

    def print_(self, *args, **kwargs):
        with plain.capture() as captured:
            original(plain, *args, **kwargs)
        lines.append(captured.get().rstrip("\n"))

    return print_


def test_the_launch_line_trains(launched):
    folder, _ = launched
    logged = rows(folder, "train")
    assert [row["step"] for row in logged] == [1, 2, 4]
    for row in logged:
        assert set(row) == TRAIN_KEYS | HEALTH_KEYS
        assert all(math.isfinite(v) for v in row.values() if not isinstance(v, str)), row
        assert row["mtp_loss"] > 1  # tiny predicts a second token too
        assert 200 < row["tokens"] <= 256  # 16 rows of 16, less the ends of documents
        assert row["weight_saturated"] == 0
    assert [row["step"] for row in rows(folder, "eval")] == [2, 4]
    assert losses(folder)[1] == pytest.approx(first_loss(320), rel=0.08)


def test_the_casts_of_each_layer_are_logged(launched):
    """At the first step and before evaluations; with `fixed` calibrations nothing is in doubt."""
    folder, _ = launched
    logged = rows(folder, "health")
    assert [row["step"] for row in logged] == [1, 2, 4]
    for row in logged:
        names = {key.rsplit(".", 1)[0] for key in row if "." in key}
        layers = ("layers.1", "mtp.0")  # the first of two layers is dense
        assert names == {f"{x}.{y}.{z}" for x in layers for y in GEMMS for z in OPERANDS}
        for name in names:
            cast = getattr(RECIPES["fp8_full"], name.rsplit(".", 1)[1])
            assert row[f"{name}.saturated"] == 0
            assert 0 <= row[f"{name}.flushed"] < 0.2
            assert row[f"{name}.sqnr_db"] > -20 * math.log10(1.5 * cast.error)
            assert 0 < row[f"{name}.amax"] < 10


def test_a_run_leaves_its_files(launched):
    folder, _ = launched
    run = folder / "run"
    assert {path.name for path in run.iterdir()} == {
        *("config.yml", "metrics.jsonl", "summary.json", "loss.png", "tensorboard", "checkpoints")
    }
    settings = config.read(run / "config.yml")
    assert (settings.run.steps, settings.schedule.micro_batches) == (4, 2)
    png = (run / "loss.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 800 and height > 400
    assert checkpoint_steps(folder) == [3, 4]
    (events,) = (run / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()
    assert b"eval/eval_loss" in events.read_bytes()


def test_the_summary(launched):
    folder, _ = launched
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["recipe"] == "fp8_full"
    assert (summary["schedule"], summary["stopped"]) == ("batch_split", "finished")
    assert (summary["steps"], summary["devices"], summary["run_name"]) == (4, 8, "run")
    assert summary["eval_loss"] == rows(folder, "eval")[-1]["eval_loss"]
    assert summary["train_loss"] == rows(folder, "train")[-1]["loss"]
    assert 0 < summary["seconds_to_first_step"] < summary["total_seconds"]
    assert summary["peak_memory_bytes"] > 2**26
    assert summary["parameters"] > 100_000


def test_what_a_run_prints(launched):
    folder, printed = launched
    lines = printed.splitlines()
    assert lines[0] == f"run folder: {folder / 'run'}"
    assert "compiling the train step" in lines
    bigram = json.loads((folder / "run" / "summary.json").read_text())["bigram_nats"]
    last = rows(folder, "eval")[-1]["eval_loss"]
    assert f"step 4/4  eval loss {last:.4f} (bigram {bigram:.4f})" in lines
    (line,) = (line for line in lines if line.startswith("step 2/4  loss"))
    assert "fp8 saturated/flushed: weights 0.000%/" in line
    table = "\n".join(lines[-20:])
    for text in ("eval loss", "bigram nats", "tokens per second", "peak memory", "batch_split"):
        assert text in table
    assert lines[-1] == str(folder / "run" / "loss.png")


def test_the_loss_falls_and_a_bf16_run_has_no_fp8_health(tmp_path, capsys):
    assert train(tmp_path, "steps=40 enable_checkpointing=false eval_interval=-1") == 0
    curve = losses(tmp_path)
    assert curve[1] == pytest.approx(first_loss(64), rel=0.08)
    assert min(curve[39], curve[40]) < curve[1] - 1
    assert set(rows(tmp_path, "train")[0]) == TRAIN_KEYS
    assert rows(tmp_path, "eval")[-1]["eval_loss"] < curve[1] - 1
    assert rows(tmp_path, "health") == []
    assert "fp8" not in capsys.readouterr().out
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


SMOKE = {
    "accumulation": "gradient_accumulation_steps=2 dtype=float32 quantization=int8",
    "width": "expert_sharding=width ici_expert_parallelism=4 weight_dtype=bfloat16 "
    "quantization=fp8_tensorwise merge_gating_gmm=false",
    "long sequences": "ici_context_parallelism=4 ici_expert_parallelism=2 quantization=fp8_full "
    "fp8_health=false per_device_batch_size=1",
}
SLOW_SMOKE = {
    "no experts": "first_num_dense_layers=1 quantization=fp8_full",
    "data axis": "ici_data_parallelism=2 ici_expert_parallelism=2 quantization=fp8_blockwise",
    "mtp": "mtp_num_layers=1 quantization=mxfp8",
    "full remat": "remat_policy=full gradient_clipping_threshold=0 quantization=fp8_full",
    "no remat": "remat_policy=none routed_bias=false warmup_steps_fraction=1",
    "no latent": "q_lora_rank=0 shared_experts=0 n_routing_groups=1 topk_routing_group=1",
    "accumulated split": "use_batch_split_schedule=true per_device_batch_size=2 "
    "gradient_accumulation_steps=2 quantization=fp8_full mtp_num_layers=1",
    "ragged_dot": "gmm_backend=ragged_dot",
}


@pytest.mark.parametrize(
    "line",
    [
        *(pytest.param(line, id=name) for name, line in SMOKE.items()),
        *(pytest.param(x, id=name, marks=pytest.mark.slow) for name, x in SLOW_SMOKE.items()),
    ],
)
def test_options_train(line, tmp_path):
    assert train(tmp_path, f"steps=2 enable_checkpointing=false {line}") == 0
    curve = losses(tmp_path)
    assert curve[1] == pytest.approx(first_loss(64), rel=0.08)
    assert math.isfinite(curve[2])
    accumulated = 2 if "gradient_accumulation_steps=2" in line else 1
    split = 2 if "per_device_batch_size=2" in line else 1
    tokens = 8 * 16 * accumulated * split
    logged = rows(tmp_path, "train")[0]
    assert 0.8 * tokens < logged["tokens"] <= tokens
    health = "quantization" in line and "fp8_health=false" not in line
    assert bool(rows(tmp_path, "health")) == health == bool(HEALTH_KEYS & logged.keys())
    if "mtp_num_layers=1" in line:
        assert logged["mtp_loss"] > 1


def test_a_run_without_a_name_gets_one(tmp_path, monkeypatch, capsys):
    def stop(config, shape):
        raise UserError(f"{config.run.run_name} {shape}")

    monkeypatch.setattr("octablox.train.loop._read_data", stop)
    line = ["model_name=tiny", "per_device_batch_size=2", "gradient_accumulation_steps=3"]
    assert cli.main(["train", *line, f"base_output_directory={tmp_path}"]) == 2
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("tiny-20")
    assert capsys.readouterr().err == f"error: {folder.name} (48, 64)\n"


def test_a_process_holds_whole_sequences(monkeypatch):
    settings = config.load(["model_name=tiny", "ici_context_parallelism=4"]).config
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    with pytest.raises(UserError, match="the context axis, 4, must divide the devices of a proc"):
        loop._make_mesh(settings)
