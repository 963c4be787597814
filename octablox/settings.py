"""All settings of octablox, composed of the owners' configs; their keys are flat and unique."""

import pydantic

from octablox.fp8 import QuantizationConfig
from octablox.mesh import MeshConfig
from octablox.model.config import ModelConfig
from octablox.moe.config import MoeConfig
from octablox.schedule import ScheduleConfig
from octablox.training_config import DataConfig, OptimizerConfig, RunConfig, TargetConfig

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
}
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


def dump(config: Config) -> dict[str, Value]:
    """Every key and its value, flat, in the order of `octablox train --help`."""
    flat: dict[str, Value] = {"model_name": config.model_name}
    for owner in OWNERS:
        flat.update(getattr(config, owner).model_dump())
    return flat


def difference(a: Config, b: Config) -> dict[str, tuple[Value, Value]]:
    """The keys whose values differ: key -> (a's value, b's value)."""
    left, right = dump(a), dump(b)
    return {key: (left[key], right[key]) for key in left if left[key] != right[key]}
