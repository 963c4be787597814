"""All settings of octablox, composed of the owners' configs; their keys are flat and unique."""

import pydantic

from octablox.fp8 import QuantizationConfig
from octablox.mesh import MeshConfig
from octablox.model.config import ModelConfig
from octablox.moe.config import MoeConfig
from octablox.schedule import ScheduleConfig
from octablox.training_config import (
    DataConfig,
    HostsConfig,
    LaunchConfig,
    OptimizerConfig,
    RunConfig,
    TargetConfig,
)

Value = str | int | float | bool

OWNERS: dict[str, type[pydantic.BaseModel]] = {
    "model": ModelConfig,
    "moe": MoeConfig,
    "quantization": QuantizationConfig,
    "schedule": ScheduleConfig,
    "mesh": MeshConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "run": RunConfig,
    "target": TargetConfig,
    "hosts": HostsConfig,
    "launch": LaunchConfig,
}
# What is said of one launch, and not of the run that it starts or resumes.
OF_A_LAUNCH = ("target", "hosts", "launch")
# What a checkpoint's weights are made for: the sizes, and the constants beside them.
ARCHITECTURE_KEYS: tuple[str, ...] = (
    *("vocab_size", "base_emb_dim", "base_mlp_dim", "base_num_decoder_layers"),
    *("first_num_dense_layers", "base_num_query_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "normalization_layer_epsilon"),
    *("rope_max_timescale", "rope_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mtp_num_layers"),
    *("num_experts", "num_experts_per_tok", "base_moe_mlp_dim", "shared_experts"),
    *("n_routing_groups", "topk_routing_group", "routed_scaling_factor"),
    *("routed_score_func", "norm_topk_prob", "routed_bias"),
)
# key -> the owner it belongs to
KEYS: dict[str, str] = {key: name for name, owner in OWNERS.items() for key in owner.model_fields}
if len(KEYS) != sum(len(owner.model_fields) for owner in OWNERS.values()):
    raise AssertionError("two owners have a setting of the same name")


class Config(pydantic.BaseModel):
    """All settings, each with its owner; checked one by one and together."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    model_name: str = pydantic.Field("demo", description="the preset that the sizes start from")
    model: ModelConfig = ModelConfig()
    moe: MoeConfig = MoeConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    target: TargetConfig = TargetConfig()
    hosts: HostsConfig = HostsConfig()
    launch: LaunchConfig = LaunchConfig()


def dump(config: Config) -> dict[str, Value]:
    """Every key and its value, flat, in the order of `octablox train --help`."""
    flat: dict[str, Value] = {"model_name": config.model_name}
    for owner in OWNERS:
        flat.update(getattr(config, owner).model_dump())
    return flat


def of_a_run(flat: dict[str, Value]) -> dict[str, Value]:
    """`dump`'s keys less those of a launch."""
    return {key: value for key, value in flat.items() if KEYS.get(key) not in OF_A_LAUNCH}


def difference(a: Config, b: Config) -> dict[str, tuple[Value, Value]]:
    """The keys of a run whose values differ: key -> (a's value, b's value)."""
    left, right = of_a_run(dump(a)), of_a_run(dump(b))
    return {key: (left[key], right[key]) for key in left if left[key] != right[key]}
