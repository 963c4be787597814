"""MaxText's keys that octablox knows but has no setting for.

A key of MaxText means here what it means there, or is refused with a line that says what to write
instead; none is accepted and ignored. Keys that octablox shares with MaxText are settings of their
owners and are not listed here. Three tables:

- `ALWAYS`: octablox does one thing, and only the value that says so is accepted;
- `INSTEAD`: octablox says it otherwise, or not yet;
- `VALUES`: values of shared keys that octablox spells otherwise.
"""

from octablox.errors import UserError

_AXES = "octablox shards over data, fsdp, expert and context only"
_OTHER_AXES = (
    *("sequence", "context_usp_ulysses", "context_autoregressive", "tensor"),
    *("tensor_sequence", "fsdp_transpose", "pipeline", "autoregressive", "diloco"),
)
_MESH = "ici_data_, ici_fsdp_, ici_expert_ and ici_context_parallelism"
_YARN = "YaRN as DeepSeek publishes it; rope_factor says how far"

# key -> (the values accepted, what octablox always does)
ALWAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "shard_mode": (("explicit",), "every array's sharding is part of its type"),
    "use_qwix_quantization": (("true",), "every recipe's numerics are qwix's"),
    "use_manual_quantization": (("true",), "the GMMs quantize forward and backward by themselves"),
    "scan_layers": (("true",), "layers run under a scan"),
    "megablox": (("true",), "experts run as grouped matmuls"),
    "sparse_matmul": (("true",), "experts run as grouped matmuls"),
    "capacity_factor": (("-1",), "no token is ever dropped"),
    "use_random_routing": (("false",), "the router routes"),
    "use_tokamax_gmm": (("false",), "gmm_backend chooses the kernels"),
    "use_gmm_v2": (("false",), "gmm_backend chooses the kernels"),
    "use_2d_fsdp_sharding": (
        ("false",),
        "shard_exp_on_fsdp and expert_sharding say what fsdp and expert shard",
    ),
    "decoder_block": (("deepseek",), "the model is DeepSeek's"),
    "attention_type": (("mla",), "attention is MLA"),
    "mlp_activations": (("silu,linear",), "every MLP is a SwiGLU"),
    "enable_dropout": (("false",), "there is no dropout"),
    "dropout_rate": (("0",), "there is no dropout"),
    "logits_via_embedding": (("false",), "the head has weights of its own"),
    "cast_logits_to_fp32": (("true",), "the loss is computed in float32"),
    "float32_gate_logits": (("true",), "the router computes in float32"),
    "load_balance_loss_weight": (("0",), "routed_bias balances the load, without a loss"),
    "rope_type": (("yarn",), _YARN),
    "rope_interleave": (("true",), _YARN),
    "rope_truncate": (("true",), _YARN),
    "rope_attention_scaling": (("false",), _YARN),
    "global_parameter_scale": (("1",), "sizes are those of the base_ keys"),
    "override_model_config": (("true",), "the command line overrides the preset"),
    "opt_type": (("adamw",), "the optimizer is AdamW"),
    "adam_eps_root": (("0",), "AdamW has one epsilon"),
    "lr_schedule_type": (("cosine",), "the schedule is a cosine"),
    "z_loss_multiplier": (("0",), "there is no z-loss"),
    "packing": (("true",), "documents are packed into rows"),
    "context_parallel_strategy": (
        ("all_gather",),
        "latents of keys and values are gathered over axis context",
    ),
    "context_parallel_load_balance": (
        ("false",),
        "each device of axis context has one piece of a sequence",
    ),
    "num_slices": (("-1",), "the devices know their slices; dcn_ keys lay axes over them"),
    **{
        f"{network}_{axis}_parallelism": (("1",), _AXES)
        for network in ("ici", "dcn")
        for axis in _OTHER_AXES
    },
}

_TILES = "leave it out: the backend picks each GMM's tiles; `octablox show` prints them"
_DATA = "dataset_type=text or dataset_type=jsonl, and dataset_path=FILE, FOLDER or GLOB"
_TOKENS = "tokenizer_path=FOLDER with a tokenizer.json, or leave it out: bytes are tokens"

# key, or the beginning of keys that ends in * -> what to write instead
INSTEAD: dict[str, str] = {
    "hf_*": _DATA,
    "grain_*": _DATA,
    "olmo_*": _DATA,
    "dataset_name": _DATA,
    "eval_dataset_name": "eval_fraction=0.05, the part of the documents that is held out",
    "train_split": "eval_fraction=0.05, the part of the documents that is held out",
    "eval_split": "eval_fraction=0.05, the part of the documents that is held out",
    "tokenizer_type": _TOKENS,
    "tokenize_*": "leave it out: text is tokenized",
    "add_bos": "leave it out: every document begins with the tokenizer's BOS",
    "add_eos": "leave it out: every document begins with the tokenizer's BOS",
    "eval_per_device_batch_size": "leave it out: evaluation takes per_device_batch_size",
    "reuse_example_batch": "dataset_type=synthetic",
    "learning_rate_final_fraction": "cosine_learning_rate_final_fraction=0.1",
    "load_full_state_path": "run_name=NAME of the run to resume",
    "compile_xla_flags": "octablox compile ... --xla OPTION=VALUE, once for each option",
    "hardware": "JAX_PLATFORMS=tpu in the environment, or num_cpu_devices=8 for virtual devices",
    "quant_cfg_path": "quantization=FILE.yml, a recipe of your own",
    "profiler": "leave it out: octablox writes no profile yet",
    "skip_first_n_steps_for_profiler": "leave it out: octablox writes no profile yet",
    "profiler_steps": "leave it out: octablox writes no profile yet",
    "head_dim": "qk_nope_head_dim, qk_rope_head_dim and v_head_dim",
    "base_num_kv_heads": "base_num_query_heads: in MLA each head has keys and values of its own",
    "max_position_embeddings": "max_target_length, and rope_factor for YaRN",
    "wi_tile_*": _TILES,
    "wo_tile_*": _TILES,
    "sa_*": "leave it out: the length of the sequence chooses the blocks of attention=flash",
    "custom_mesh*": _MESH,
    "mesh_axes": _MESH,
    "logical_axis_rules": "expert_sharding=expert or expert_sharding=width",
    "decoder_layer_input": "remat_policy=full, minimal, minimal_offloaded or none",
    "mlpw*": "remat_policy=full, minimal, minimal_offloaded or none",
    "moe_mlpw*": "remat_policy=full, minimal, minimal_offloaded or none",
}

# (key, value) -> what to write instead
VALUES: dict[tuple[str, str], str] = {
    **{
        ("dataset_type", value): _DATA
        for value in ("tfds", "hf", "grain", "c4_mlperf", "olmo_grain")
    },
    ("model_name", "default"): "model_name=demo",
    ("model_name", "deepseek3-671b-batchsplit"): (
        "model_name=deepseek3-671b use_batch_split_schedule=true"
    ),
    ("quantization", "fp8"): "quantization=fp8_full",
    ("quantization", "fp8_gpu"): "quantization=fp8_full",
    ("quantization", "fp8_nanoo"): "quantization=fp8_full",
    ("remat_policy", "custom"): "remat_policy=full, minimal, minimal_offloaded or none",
    ("n_routing_groups", "-1"): "n_routing_groups=1, which is no groups",
    ("topk_routing_group", "-1"): "topk_routing_group=1 with n_routing_groups=1",
    ("eval_steps", "-1"): "eval_steps=8, the batches of one evaluation",
    ("steps", "-1"): "steps=1000, a number of steps",
}


def accepts(key: str, value: str) -> bool:
    """Whether `key` is one of MaxText's whose `value` says what octablox always does.

    Returns False for a key that is not MaxText's or that octablox has a setting for.

    Raises:
      UserError: the key, or this value of it, has to be written otherwise.
    """
    plain = _plain(value)
    if (key, plain) in VALUES:
        raise UserError(f"{key}={value} is not known here; write {VALUES[key, plain]}")
    if key in ALWAYS:
        accepted, reason = ALWAYS[key]
        if plain in accepted or {"1": "true", "0": "false"}.get(plain) in accepted:
            return True
        wanted = " or ".join(f"{key}={one}" for one in accepted)
        raise UserError(f"expected {wanted}, or nothing ({reason}), got {key}={value}")
    instead = _instead(key)
    if instead:
        verb = "" if instead.startswith("leave") else "write "
        raise UserError(f"{key} is MaxText's and not octablox's; {verb}{instead}")
    return False


def _instead(key: str) -> str:
    """What to write instead of `key`, or "" where the table has nothing."""
    if key in INSTEAD:
        return INSTEAD[key]
    patterns = (one for one in INSTEAD if one.endswith("*") and key.startswith(one[:-1]))
    return next((INSTEAD[one] for one in patterns), "")


def _plain(value: str) -> str:
    """`value` as the tables spell it: True is true, -1.0 is -1, ["silu","linear"] silu,linear."""
    text = value.strip().strip("[]").replace('"', "").replace("'", "").replace(" ", "")
    try:
        return f"{float(text):g}"
    except ValueError:
        return text.lower()
