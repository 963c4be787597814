"""A Hugging Face `config.json` as settings of octablox, and back.

The family is DeepSeek-V3's architecture: DeepSeek-V3, R1 and V3.1, Moonlight, Kimi-K2; and that of
DeepSeek-V2-Lite, whose router differs. Whatever in a config.json would make another function of the
weights is refused by its name.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octablox.errors import UserError
from octablox.fp8_blocks import BLOCK
from octablox.model.config import ModelConfig
from octablox.moe.config import MoeConfig

# Key of config.json -> ours, and what it is where it is left out (None: it must be there).
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("base_emb_dim", None),
    "intermediate_size": ("base_mlp_dim", None),
    "num_hidden_layers": ("base_num_decoder_layers", None),
    "first_k_dense_replace": ("first_num_dense_layers", None),
    "num_attention_heads": ("base_num_query_heads", None),
    "q_lora_rank": ("q_lora_rank", 0),
    "kv_lora_rank": ("kv_lora_rank", None),
    "qk_nope_head_dim": ("qk_nope_head_dim", None),
    "qk_rope_head_dim": ("qk_rope_head_dim", None),
    "v_head_dim": ("v_head_dim", None),
    "rms_norm_eps": ("normalization_layer_epsilon", 1e-6),
    "num_nextn_predict_layers": ("mtp_num_layers", 0),
    "n_routed_experts": ("num_experts", None),
    "num_experts_per_tok": ("num_experts_per_tok", None),
    "moe_intermediate_size": ("base_moe_mlp_dim", None),
    "n_shared_experts": ("shared_experts", 0),
    "n_group": ("n_routing_groups", 1),
    "topk_group": ("topk_routing_group", 1),
    "routed_scaling_factor": ("routed_scaling_factor", 1.0),
}
# Key of `rope_scaling` -> ours, and what it is where it is left out.
YARN: dict[str, tuple[str, Any]] = {
    "factor": ("rope_factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale_all_dim": ("mscale", None),
}
# What makes another model if it is anything else. Left out, it is that.
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleave": True,
}
# The same, by `model_type`.
_V3 = {"scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc"}
_V2 = {"scoring_func": "softmax", "norm_topk_prob": False, "topk_method": "greedy"}
ROUTERS: dict[str, dict[str, Any]] = {"deepseek_v3": _V3, "kimi_k2": _V3, "deepseek_v2": _V2}
# Facts of training, of serving and of the file, which change no value of the model.
OTHERS = frozenset(
    """
    architectures attention_dropout auto_map aux_loss_alpha bos_token_id dtype eos_token_id ep_size
    head_dim initializer_range max_position_embeddings model_type num_key_value_heads
    output_router_logits pad_token_id pretraining_tp qk_head_dim
    quantization_config rope_parameters rope_scaling rope_theta router_aux_loss_coef seq_aux
    torch_dtype transformers_version use_cache
    """.split()
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a config.json says.

    Attributes:
      model, moe: the settings.
      power_of_two: whether an FP8 checkpoint's scales are powers of two ("ue8m0").
      fp8: whether the weights are in FP8 blocks.
      unknown: keys that say nothing to octablox.
    """

    model: ModelConfig
    moe: MoeConfig
    fp8: bool = False
    power_of_two: bool = False
    unknown: tuple[str, ...] = ()


def read(path: Path) -> Architecture:
    """What a config.json says.

    Raises:
      UserError: it cannot be read; or all that it says and octablox has not, by name.
    """
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except OSError as error:
        raise UserError(
            f"expected a checkpoint's config.json, got {path}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise UserError(f"expected JSON, got {path}: {error}") from error
    return parse(config, str(path))


def parse(config: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """The architecture of a config.json's contents; UserError as `read`."""
    kind = str(config.get("model_type"))
    router = ROUTERS.get(kind, _V3)
    wrong = [] if kind in ROUTERS else [f"model_type {kind!r} (expected {' or '.join(ROUTERS)})"]
    wrong += [
        f"{key} {config[key]!r} (expected {only!r})"
        for key, only in (ONLY | router).items()
        if key in config and config[key] != only
    ]
    fp8, power_of_two = _quantization(config, wrong)
    values = _values(config, KEYS, "", wrong) | _rope(config, wrong)
    values |= {
        "routed_score_func": router["scoring_func"],
        "norm_topk_prob": router["norm_topk_prob"],
    }
    if router["topk_method"] == "greedy":  # whatever n_group says
        values |= {"n_routing_groups": 1, "topk_routing_group": 1, "routed_bias": False}
    if wrong:
        raise UserError(f"{where} is not supported: {', '.join(wrong)}")
    model = {key: value for key, value in values.items() if key in ModelConfig.model_fields}
    moe = {key: value for key, value in values.items() if key in MoeConfig.model_fields}
    try:
        settings = ModelConfig.model_validate(model), MoeConfig.model_validate(moe)
    except ValueError as error:
        raise UserError(f"{where} is not supported: {' '.join(str(error).split())}") from None
    known = KEYS.keys() | ONLY.keys() | router.keys() | OTHERS
    return Architecture(*settings, fp8, power_of_two, tuple(sorted(config.keys() - known)))


def to_json(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """A config.json of these settings; `dtype` is that of the weights that are not in FP8."""
    settings = architecture.model.model_dump() | architecture.moe.model_dump()
    version = 3 if settings["routed_score_func"] == "sigmoid" else 2
    kind = f"deepseek_v{version}"
    config: dict[str, Any] = {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": kind,
        **{theirs: settings[ours] for theirs, (ours, _) in KEYS.items()},
        **ONLY,
        **ROUTERS[kind],
        "num_key_value_heads": settings["base_num_query_heads"],
        "rope_theta": settings["rope_max_timescale"],
        "rope_scaling": None,
        "torch_dtype": dtype,
    }
    config["q_lora_rank"] = config["q_lora_rank"] or None
    factor, original = settings["rope_factor"], settings["original_max_position_embeddings"]
    config["max_position_embeddings"] = int(factor * original)
    if factor > 1:
        yarn = {theirs: settings[ours] for theirs, (ours, _) in YARN.items()}
        config["rope_scaling"] = {"type": "yarn", **yarn, "mscale": yarn["mscale_all_dim"]}
    if architecture.fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            **({"scale_fmt": "ue8m0"} if architecture.power_of_two else {}),
        }
    return config


def _values(config, keys, prefix, wrong) -> dict[str, Any]:
    """Ours by theirs; what is missing is added to `wrong`."""
    values = {}
    for theirs, (ours, default) in keys.items():
        value = config.get(theirs)
        value = default if value is None else value
        if value is None:
            wrong.append(f"{prefix}{theirs} missing")
        else:
            values[ours] = value
    return values


def _rope(config, wrong) -> dict[str, Any]:
    """The settings of rotary embeddings: transformers 5 has them all in `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_max_timescale": theta}
    if kind != "yarn":
        wrong.append(f"rope_scaling.type {kind!r} (expected yarn)")
        return {}
    known = YARN.keys() | {"type", "rope_type", "mscale", "rope_theta"}
    wrong += [f"rope_scaling.{key} (unknown)" for key in sorted(rope.keys() - known)]
    if not rope.get("mscale") or rope["mscale"] != rope.get("mscale_all_dim"):
        wrong.append(
            f"rope_scaling.mscale {rope.get('mscale')!r} (expected mscale_all_dim, "
            f"{rope.get('mscale_all_dim')!r}, so that cos and sin have factor 1)"
        )
        return {}
    return {"rope_max_timescale": theta, **_values(rope, YARN, "rope_scaling.", wrong)}


def _quantization(config, wrong) -> tuple[bool, bool]:
    """Whether the weights are in FP8 blocks, and their scales powers of two."""
    quantization = config.get("quantization_config")
    if not quantization:
        return False, False
    expected = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    for key, value in expected.items():
        if quantization.get(key, value if key == "fmt" else None) != value:
            got = quantization.get(key)
            wrong.append(f"quantization_config.{key} {got!r} (expected {value!r})")
    form = quantization.get("scale_fmt", "float")
    if form not in ("float", "ue8m0"):
        wrong.append(f"quantization_config.scale_fmt {form!r} (expected ue8m0 or none)")
    return True, form == "ue8m0"
