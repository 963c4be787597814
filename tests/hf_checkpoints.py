"""Small Hugging Face checkpoints of DeepSeek-V3's family, written without octablox.

Names, shapes and the 128x128 FP8 blocks are spelled out from the published description; files are
written by the package `safetensors`.
"""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

GROUPED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 128,
    "num_nextn_predict_layers": 0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
# As Moonlight and Kimi-K2: no groups of experts, another theta, epsilon and YaRN.
UNGROUPED = GROUPED | {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "num_hidden_layers": 2,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-3,
    "rope_theta": 50000.0,
    "rope_scaling": GROUPED["rope_scaling"]
    | {"factor": 32.0, "beta_fast": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707},
}
# As DeepSeek-V2-Lite: a softmax over all experts, neither a bias nor weights that sum to 1.
SOFTMAX = UNGROUPED | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.5,
}
WITH_MTP = GROUPED | {"num_nextn_predict_layers": 1}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def shapes(config):
    """Name -> shape of every tensor of a checkpoint."""
    c = config
    d, heads, experts = c["hidden_size"], c["num_attention_heads"], c["n_routed_experts"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    layers = c["num_hidden_layers"]
    found = {"model.embed_tokens.weight": (c["vocab_size"], d)}

    def mlp(prefix, width):
        found[f"{prefix}.gate_proj.weight"] = (width, d)
        found[f"{prefix}.up_proj.weight"] = (width, d)
        found[f"{prefix}.down_proj.weight"] = (d, width)

    def layer(n):
        at = f"model.layers.{n}"
        found[f"{at}.input_layernorm.weight"] = (d,)
        attention = f"{at}.self_attn"
        if c["q_lora_rank"]:
            found[f"{attention}.q_a_proj.weight"] = (c["q_lora_rank"], d)
            found[f"{attention}.q_a_layernorm.weight"] = (c["q_lora_rank"],)
            found[f"{attention}.q_b_proj.weight"] = (heads * qk, c["q_lora_rank"])
        else:
            found[f"{attention}.q_proj.weight"] = (heads * qk, d)
        latent = c["kv_lora_rank"]
        kv = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        found[f"{attention}.kv_a_proj_with_mqa.weight"] = (latent + c["qk_rope_head_dim"], d)
        found[f"{attention}.kv_a_layernorm.weight"] = (latent,)
        found[f"{attention}.kv_b_proj.weight"] = (kv, latent)
        found[f"{attention}.o_proj.weight"] = (d, heads * c["v_head_dim"])
        found[f"{at}.post_attention_layernorm.weight"] = (d,)
        if n < c["first_k_dense_replace"]:
            mlp(f"{at}.mlp", c["intermediate_size"])
            return
        width = c["moe_intermediate_size"]
        found[f"{at}.mlp.gate.weight"] = (experts, d)
        if c["scoring_func"] == "sigmoid":
            found[f"{at}.mlp.gate.e_score_correction_bias"] = (experts,)
        for e in range(experts):
            mlp(f"{at}.mlp.experts.{e}", width)
        mlp(f"{at}.mlp.shared_experts", width * c["n_shared_experts"])

    for n in range(layers):
        layer(n)
    found["model.norm.weight"] = (d,)
    found["lm_head.weight"] = (c["vocab_size"], d)
    if c["num_nextn_predict_layers"]:
        layer(layers)
        at = f"model.layers.{layers}"
        found |= {f"{at}.enorm.weight": (d,), f"{at}.hnorm.weight": (d,)}
        found |= {f"{at}.eh_proj.weight": (d, 2 * d), f"{at}.shared_head.norm.weight": (d,)}
        found[f"{at}.embed_tokens.weight"] = (c["vocab_size"], d)
        found[f"{at}.shared_head.head.weight"] = (c["vocab_size"], d)
    return found


def random_tensors(config, seed=0, dtype=np.float32):
    """Name -> array: deviation 1/sqrt(inputs), norms around 1, biases that change the choice."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        if "norm" in name:
            values = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("bias"):
            values = rng.uniform(0, 0.5, shape)
        elif name.endswith("embed_tokens.weight"):
            values = rng.normal(size=shape)
        else:
            values = rng.normal(size=shape) / np.sqrt(shape[-1])
        tensors[name] = values.astype(np.float32 if name.endswith("bias") else dtype)
    if config["num_nextn_predict_layers"]:
        at = f"model.layers.{config['num_hidden_layers']}"
        tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"]
    return tensors


def write(folder, config, tensors, shard_of=None):
    """A checkpoint's folder; `shard_of(name)` numbers the file of each tensor, from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shard_of is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    file_of = {name: f"model-{shard_of(name):05}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        save_file({n: t for n, t in tensors.items() if file_of[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder


def bits(array):
    """Its dtype, shape and bytes."""
    return str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()


E4M3 = ml_dtypes.float8_e4m3fn
# Every kind of ragged edge: 160 columns are a block and a quarter, kv_a has 576 rows (4.5 blocks),
# q_a 129 and the dense MLP 257 (a last block of one row), experts 96 (less than a block).
BLOCKS = GROUPED | {
    "hidden_size": 160,
    "intermediate_size": 257,
    "moe_intermediate_size": 96,
    "q_lora_rank": 129,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": FP8,
}
_FLOATS = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")


def in_blocks(weight, power_of_two=False):
    """e4m3 [N, K] and float32 scales, block by block in float64; a block of zeros has scale 1."""
    weight = weight.astype(np.float64)
    grid = tuple(-(-size // 128) for size in weight.shape)
    values, scales = np.zeros(weight.shape, E4M3), np.ones(grid, np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            largest = np.abs(weight[at]).max()
            if largest > 0:
                scale = largest / 448
                scales[i, j] = 2 ** np.ceil(np.log2(scale)) if power_of_two else scale
            scaled = np.clip(weight[at] / np.float64(scales[i, j]), -448, 448)
            values[at] = scaled.astype(np.float32).astype(E4M3)
    return values, scales


def from_blocks(values, scales):
    """float64 [N, K]: each element times the scale of its block."""
    out = values.astype(np.float64)
    for i, row in enumerate(scales):
        for j, scale in enumerate(row):
            out[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= np.float64(scale)
    return out


def fp8_tensors(config, seed=0, power_of_two=False):
    """As DeepSeek-V3's: linear weights of layers in FP8 blocks, the rest in bfloat16.

    Magnitudes differ from block to block by orders of magnitude, and some blocks are zeros.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, values in random_tensors(config, seed).items():
        if name.endswith("bias"):
            tensors[name] = values
        elif any(word in name for word in _FLOATS):
            tensors[name] = values.astype(ml_dtypes.bfloat16)
        else:
            grid = tuple(-(-size // 128) for size in values.shape)
            loud = np.exp(rng.uniform(-6, 2, grid)).repeat(128, 0).repeat(128, 1)
            values = values * loud[: values.shape[0], : values.shape[1]]
            if grid[1] > 1 and rng.random() < 0.5:
                values[:128, :128] = 0
            tensors[name], scales = in_blocks(values, power_of_two)
            tensors[f"{name}_scale_inv"] = scales
    return tensors
