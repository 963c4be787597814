"""Every source of a value, every refusal before anything compiles."""

import pathlib

import pytest

from octablox import checks, config, maxtext
from octablox.errors import UserError

LAUNCH_LINE = """
model_name=demo use_batch_split_schedule=true shard_mode=explicit quantization=fp8_full
use_qwix_quantization=true use_manual_quantization=true merge_gating_gmm=true
weight_quantization_calibration_method=fixed,-224,224
act_quantization_calibration_method=fixed,-224,224
bwd_quantization_calibration_method=absmax ici_fsdp_parallelism=-1 ici_expert_parallelism=2
per_device_batch_size=2 max_target_length=128 steps=7
""".split()


def test_a_maxtext_launch_line_is_taken_as_it_is():
    resolved = config.load(LAUNCH_LINE)
    settings = resolved.config
    assert settings.schedule.use_batch_split_schedule is True
    assert settings.schedule.micro_batches == 2
    assert settings.quantization.quantization == "fp8_full"
    assert settings.quantization.act_quantization_calibration_method == "fixed,-224,224"
    assert settings.mesh.ici_expert_parallelism == 2
    assert settings.run.steps == 7
    assert resolved.sources["steps"] == "command line"


def test_later_sources_win_and_are_named(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(
        "# a comment\nmodel_name: tiny\nsteps: 5\nnum_experts: 16\nlearning_rate: 1e-2\n"
    )
    resolved = config.load([f"config={file}", "steps=9"])
    sources, settings = resolved.sources, resolved.config
    assert (settings.run.steps, sources["steps"]) == (9, "command line")
    assert (settings.moe.num_experts, sources["num_experts"]) == (16, f"config {file}")
    assert settings.optimizer.learning_rate == 0.01
    assert (settings.model.base_emb_dim, sources["base_emb_dim"]) == (64, "preset tiny")
    assert (settings.model_name, sources["model_name"]) == ("tiny", f"config {file}")
    assert (settings.run.log_period, sources["log_period"]) == (10, "default")
    assert not resolved.resuming


@pytest.mark.parametrize("spelling", ["true", "True", "1"])
def test_spellings_of_true(spelling):
    assert config.load([f"merge_gating_gmm={spelling}"]).config.moe.merge_gating_gmm is True
    assert config.load([f"scan_layers={spelling}"]).config == config.load([]).config


@pytest.mark.parametrize("name", config.preset_names())
def test_every_preset_is_a_valid_config(name):
    assert config.load([f"model_name={name}"]).config.model_name == name


def test_presets_have_the_published_sizes():
    big = config.load(["model_name=deepseek3-671b"]).config
    assert (big.model.base_emb_dim, big.model.base_num_decoder_layers) == (7168, 61)
    assert (big.moe.num_experts, big.moe.num_experts_per_tok) == (256, 8)
    assert (big.moe.n_routing_groups, big.moe.topk_routing_group) == (8, 4)
    assert (big.moe.routed_scaling_factor, big.model.rope_factor) == (2.5, 40)
    small = config.load(["model_name=deepseek2-16b"]).config
    assert (small.model.q_lora_rank, small.model.mscale) == (0, 0.707)
    assert (small.moe.num_experts_per_tok, small.moe.shared_experts) == (6, 2)


REFUSALS = [
    ("stepz=3", "unknown key 'stepz'; did you mean steps"),
    ("--steps=3", "unknown key '--steps'; did you mean steps"),
    ("zzzzzz=3", "unknown key 'zzzzzz'"),
    ("steps", "expected key=value, got 'steps'; write steps=VALUE"),
    ("base.yml", "leave MaxText's base.yml out"),
    ("steps=1 steps=2", "steps is given twice: '1' and '2'"),
    ("steps=1e3", "steps: expected a whole number, got '1e3'; write steps=1000"),
    ("steps=many", "steps: expected a whole number, got 'many'"),
    ("steps=0", "steps: expected at least 1, got '0'"),
    ("steps=", "steps: expected a whole number, got ''"),
    ("learning_rate=fast", "learning_rate: expected a number, got 'fast'"),
    ("learning_rate=nan", "learning_rate: expected a finite number, got 'nan'"),
    ("adam_weight_decay=inf", "adam_weight_decay: expected a finite number, got 'inf'"),
    ("eval_fraction=1", "eval_fraction: expected less than 1.0, got '1'"),
    ("merge_gating_gmm=maybe", "merge_gating_gmm: expected true or false, got 'maybe'"),
    ("expert_sharding=Expert", "one of expert, width, got 'Expert'; did you mean expert?"),
    ("model_name=dmo", "got 'dmo'; did you mean demo?"),
    ("quantization=fp8_ful", "got 'fp8_ful'; did you mean fp8_full?"),
    ("quantization=none.yml", "cannot read none.yml: No such file"),
    ("quantization=fp8_full act_quantization_calibration_method=absmx", "got 'absmx'"),
    ("act_quantization_calibration_method=absmax", "recipe bf16 casts no such operand"),
    ("num_experts_per_tok=9", "num_experts_per_tok must be at most num_experts = 8, got 9"),
    ("n_routing_groups=3", "n_routing_groups must divide num_experts = 8, got 3"),
    ("topk_routing_group=2", "topk_routing_group must be at most n_routing_groups = 1, got 2"),
    ("n_routing_groups=4 num_experts_per_tok=3", "at most 2, the experts in 1 of 4 groups; got 3"),
    ("n_routing_groups=8 topk_routing_group=2", "n_routing_groups must be at most 4; got 8"),
    ("first_num_dense_layers=5", "at most base_num_decoder_layers = 4, got 5"),
    ("qk_rope_head_dim=15", "qk_rope_head_dim must be even (RoPE rotates pairs), got 15"),
    ("use_batch_split_schedule=true batch_split_factor=1", "must be 2 or more"),
    ("dataset_type=text", "dataset_type=text needs dataset_path="),
    ("dataset_path=a.txt", "dataset_path is read with dataset_type=text or jsonl only"),
    ("jsonl_text_key=body", "jsonl_text_key is read with dataset_type=jsonl only"),
    ("eval_interval=0", "eval_interval: expected -1 or at least 1, got 0"),
    ("learning_rate_schedule_steps=0", "learning_rate_schedule_steps: expected -1 or at least 1"),
    ("run_name=a/b", "run_name must be the name of one folder, got 'a/b'"),
    ("run_name=..", "run_name must be the name of one folder, got '..'"),
    ("base_output_directory=", "base_output_directory: expected a folder, got ''"),
    ("config=absent.yml", "config: cannot read 'absent.yml': No such file"),
]


@pytest.mark.parametrize(("line", "text"), REFUSALS, ids=[line for line, _ in REFUSALS])
def test_what_cannot_work_is_refused(line, text):
    with pytest.raises(UserError) as error:
        config.load(line.split())
    assert text in str(error.value)
    assert "\n" not in str(error.value)


DEVICE_REFUSALS = [
    ("ici_fsdp_parallelism=3", "the mesh data 1 x fsdp 3 x expert 1 = 3 must have as many places"),
    ("ici_expert_parallelism=3", "data 1 x expert 3 = 3 does not divide 8 devices"),
    ("ici_data_parallelism=-1", "at most one mesh axis can be -1 (what is left), got -1 for data"),
    ("ici_data_parallelism=0", "ici_data_parallelism: expected -1 or at least 1, got 0"),
    (
        "base_emb_dim=100",
        "must be a multiple of fsdp x expert = 8 x 1 = 8, which shard it; got 100",
    ),
    ("num_experts=6 ici_expert_parallelism=4", "num_experts must be a multiple of the expert axis"),
    (
        "expert_sharding=width base_moe_mlp_dim=6 ici_expert_parallelism=4",
        "base_moe_mlp_dim must be a multiple of the expert axis, 4",
    ),
    (
        "use_batch_split_schedule=true batch_split_factor=3 per_device_batch_size=4",
        "must be a multiple of batch_split_factor = 3, got 4; write per_device_batch_size=6",
    ),
    (
        "gmm_backend=ragged_dot ici_expert_parallelism=2",
        "gmm_backend=ragged_dot needs all experts on each device, got an expert axis of 2",
    ),
    ("per_device_batch_size=1.5", "1.5 x 8 devices = 12 sequences do not divide evenly"),
    (
        "ici_context_parallelism=2 per_device_batch_size=0.75",
        "per_device_batch_size x context = 0.75 x 2 must be whole: 0.75 x 8 devices = 6",
    ),
    (
        "ici_context_parallelism=4 per_device_batch_size=0.25 use_batch_split_schedule=true",
        "0.25 x 4 must be a multiple of batch_split_factor = 2, got 1; write "
        "per_device_batch_size=0.5",
    ),
    (
        "ici_context_parallelism=8 max_target_length=100",
        "max_target_length must be a multiple of the context axis, 8, which shards sequences",
    ),
    (
        "base_emb_dim=100 ici_context_parallelism=2",
        "must be a multiple of fsdp x expert x context = 4 x 1 x 2 = 8, which shard it; got 100",
    ),
]


@pytest.mark.parametrize(("line", "text"), DEVICE_REFUSALS, ids=[x for x, _ in DEVICE_REFUSALS])
def test_what_does_not_fit_the_devices_is_refused(line, text):
    settings = config.load(line.split()).config
    with pytest.raises(UserError) as error:
        checks.check_devices(settings, 8)
    assert text in str(error.value)
    with pytest.raises(UserError):
        config.load([*line.split(), "num_cpu_devices=8"])


def test_the_mesh_takes_what_is_left():
    settings = config.load(["ici_expert_parallelism=2"]).config
    shape = {"data": 1, "fsdp": 4, "expert": 2, "context": 1}
    assert checks.resolve_mesh_shape(settings, 8) == shape
    fixed = config.load(["ici_data_parallelism=2", "ici_fsdp_parallelism=2"]).config
    shape = {"data": 2, "fsdp": 2, "expert": 1, "context": 1}
    assert checks.resolve_mesh_shape(fixed, 4) == shape


def test_a_batch_is_counted_as_maxtext_counts_it():
    line = ["per_device_batch_size=2", "gradient_accumulation_steps=3", "model_name=tiny"]
    assert checks.global_batch_size(config.load(line).config, 8) == 48
    half = ["per_device_batch_size=0.5", "ici_context_parallelism=2", "num_cpu_devices=8"]
    assert checks.global_batch_size(config.load(half).config, 8) == 4


def test_a_written_config_reads_back_and_differs_nowhere(tmp_path):
    before = config.load([*LAUNCH_LINE, "learning_rate=1e-5", "run_name=007"]).config
    config.write(before, tmp_path / "config.yml")
    after = config.read(tmp_path / "config.yml")
    assert after == before
    assert config.difference(before, after) == {}
    assert set(config.dump(before)) == {"model_name", *config.KEYS}
    other = config.load([*LAUNCH_LINE[:-1], "steps=8", "learning_rate=1e-5", "run_name=007"]).config
    assert config.difference(before, other) == {"steps": (7, 8)}


def _run_folder(tmp_path: pathlib.Path, *steps: str) -> list[str]:
    folder = tmp_path / "old"
    (folder / "checkpoints").mkdir(parents=True)
    for step in steps:
        (folder / "checkpoints" / step).mkdir()
    saved = config.load(["model_name=tiny", "steps=20", "num_experts=16"]).config
    config.write(saved, folder / "config.yml")
    return ["run_name=old", f"base_output_directory={tmp_path}"]


def test_a_resumed_run_brings_its_settings(tmp_path):
    line = _run_folder(tmp_path, "10")
    resolved = config.load([*line, "steps=30"])
    assert resolved.resuming
    assert resolved.config.model_name == "tiny"
    assert resolved.sources["num_experts"] == "run folder"
    assert resolved.config.moe.num_experts == 16
    assert (resolved.config.run.steps, resolved.sources["steps"]) == (30, "command line")
    assert resolved.config.run.base_output_directory == str(tmp_path)


def test_a_run_without_a_checkpoint_starts_anew(tmp_path):
    resolved = config.load(_run_folder(tmp_path, "10.incomplete"))
    assert not resolved.resuming
    assert resolved.config.moe.num_experts == 8


def test_a_run_of_another_model_is_not_resumed(tmp_path):
    line = _run_folder(tmp_path, "10")
    with pytest.raises(UserError, match="run old has checkpoints of model_name=tiny, got model_na"):
        config.load([*line, "model_name=demo"])


FILES = [
    ("steps: [1, 2]", "line 1: steps: expected one value, got a sequence"),
    ("steps: 1\nsteps: 2", "line 2: steps is given twice"),
    ("- steps", "expected lines of `key: value`, got a sequence"),
    ("steps: 1\nrun_name: 'a", "is not YAML: expected lines of `key: value`"),
    ("stepz: 1", "bad.yml: unknown key 'stepz'; did you mean steps"),
    ("steps: many", "steps: expected a whole number, got 'many' (config "),
    ("scan_layers: false", "bad.yml: expected scan_layers=true"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[text for text, _ in FILES])
def test_a_bad_file_is_refused_with_its_name(tmp_path, text, message):
    file = tmp_path / "bad.yml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        config.load([f"config={file}"])
    assert message in str(error.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    file = tmp_path / "bad.yml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not text"):
        config.load([f"config={file}"])


MAXTEXT = [
    ("scan_layers=false", "expected scan_layers=true, or nothing (layers run under a scan)"),
    ("use_qwix_quantization=false", "expected use_qwix_quantization=true"),
    ("ici_tensor_parallelism=2", "expected ici_tensor_parallelism=1"),
    ("dcn_tensor_parallelism=4", "octablox shards over data, fsdp, expert and context only"),
    ("num_slices=2", "the devices know their slices; dcn_ keys lay axes over them"),
    ("dataset_type=grain", "write dataset_type=text or dataset_type=jsonl"),
    ("grain_train_files=/data/*", "write dataset_type=text or dataset_type=jsonl"),
    ("hf_path=some/set", "write dataset_type=text or dataset_type=jsonl"),
    ("tokenizer_type=tiktoken", "write tokenizer_path=FOLDER with a tokenizer.json"),
    ("wo_tile_drhs_mlp_dim=512", "leave it out: the backend picks each GMM's tiles"),
    ("load_parameters_path=gs://x", "expected a folder that octablox convert has finished, or a"),
    ("compile_xla_flags=--a=1", "write octablox compile ... --xla OPTION=VALUE"),
    ("quantization=fp8", "write quantization=fp8_full"),
    ("model_name=deepseek3-671b-batchsplit", "model_name=deepseek3-671b use_batch_split_sch"),
    ("n_routing_groups=-1", "write n_routing_groups=1, which is no groups"),
]


@pytest.mark.parametrize(("arg", "text"), MAXTEXT, ids=[arg for arg, _ in MAXTEXT])
def test_what_maxtext_says_otherwise_is_refused_with_what_to_write(arg, text):
    with pytest.raises(UserError) as error:
        config.load([arg])
    assert text in str(error.value)


@pytest.mark.parametrize(
    "arg",
    [
        "capacity_factor=-1.0",
        'mlp_activations=["silu","linear"]',
        "megablox=True",
        "dcn_data_parallelism=-1",
        "ici_tensor_parallelism=1",
    ],
)
def test_what_octablox_always_does_is_accepted_and_changes_nothing(arg):
    assert config.load([arg]).config == config.load([]).config


def test_the_tables_hide_no_setting():
    fixed = {"shard_mode", "use_qwix_quantization", "use_manual_quantization"}
    assert set(config.KEYS) & set(maxtext.ALWAYS) <= fixed
    assert [key for key in config.KEYS if key in maxtext.INSTEAD] == []
    wild = tuple(key[:-1] for key in maxtext.INSTEAD if key.endswith("*"))
    assert [key for key in config.KEYS if key.startswith(wild)] == []
    shared = {key for key, _ in maxtext.VALUES}
    assert shared <= {*config.KEYS, "model_name"}


def test_every_key_says_what_it_is():
    undescribed = [
        key
        for owner in config.OWNERS.values()
        for key, field in owner.model_fields.items()
        if not field.description
    ]
    assert undescribed == []
