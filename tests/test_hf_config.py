"""What a config.json says, and what of it octablox has not, by name."""

import pytest
from hf_checkpoints import FP8, GROUPED

from octablox import config
from octablox.errors import UserError
from octablox.hf import architecture, layout
from octablox.settings import ARCHITECTURE_KEYS

# The published config.json's, less what is of no model.
DEEPSEEK_V3 = GROUPED | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "rope_scaling": GROUPED["rope_scaling"]
    | {"factor": 40, "original_max_position_embeddings": 4096},
    "num_nextn_predict_layers": 1,
    "quantization_config": FP8,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "moe_layer_freq": 1,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
}
MOONLIGHT = DEEPSEEK_V3 | {
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"factor": 32, "beta_fast": 1},
    "num_nextn_predict_layers": 0,
}


def test_deepseek_v3_is_the_preset():
    built = architecture.parse(DEEPSEEK_V3)
    preset = config.load(["model_name=deepseek3-671b"]).config
    settings = built.model.model_dump() | built.moe.model_dump()
    expected = preset.model.model_dump() | preset.moe.model_dump()
    assert [key for key in settings if settings[key] != expected[key]] == []
    assert (built.fp8, built.power_of_two, built.unknown) == (True, False, ())
    assert len(layout.entries(built.model, built.moe)) == 3 + 3 * 12 + 58 * 782 + (782 + 6)


PUBLISHED = {
    "v2-lite": DEEPSEEK_V2_LITE,
    "v3": DEEPSEEK_V3,
    "moonlight": MOONLIGHT,
    "k2": KIMI_K2,
}


def test_deepseek_v2_lite_is_the_preset_but_for_its_router():
    built = architecture.parse(DEEPSEEK_V2_LITE)
    preset = config.load(["model_name=deepseek2-16b"]).config
    settings = built.model.model_dump() | built.moe.model_dump()
    expected = preset.model.model_dump() | preset.moe.model_dump()
    differing = {key: settings[key] for key in settings if settings[key] != expected[key]}
    assert differing == {"routed_score_func": "softmax", "norm_topk_prob": False}
    assert len(layout.entries(built.model, built.moe)) == 3 + (7 + 3) + 26 * (7 + 1 + 192 + 3)


@pytest.mark.parametrize("sizes", PUBLISHED.values(), ids=PUBLISHED)
def test_a_config_comes_back(sizes):
    built = architecture.parse(sizes)
    written = architecture.to_json(built, "bfloat16")
    assert architecture.parse(written) == built
    for key in architecture.KEYS:
        assert written[key] == sizes[key], key
    assert written["rope_scaling"] == sizes["rope_scaling"]
    assert written["rope_theta"] == sizes["rope_theta"]


def test_rope_as_transformers_5_writes_it():
    rope = {**DEEPSEEK_V3["rope_scaling"], "rope_theta": 10000.0, "rope_type": "yarn"}
    sizes = {k: v for k, v in DEEPSEEK_V3.items() if k not in ("rope_scaling", "rope_theta")}
    del rope["type"]
    built = architecture.parse(sizes | {"rope_parameters": rope})
    assert built == architecture.parse(DEEPSEEK_V3)


@pytest.mark.parametrize(
    "changes, names",
    [
        (
            {"model_type": "deepseek_v32"},
            ["model_type 'deepseek_v32' (expected deepseek_v3 or kimi_k2 or deepseek_v2)"],
        ),
        (
            {"scoring_func": "softmax", "topk_method": "greedy"},
            ["scoring_func 'softmax' (expected 'sigmoid')", "topk_method 'greedy'"],
        ),
        (
            DEEPSEEK_V2_LITE | {"topk_method": "group_limited_greedy"},
            ["topk_method 'group_limited_greedy' (expected 'greedy')"],
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling.type 'linear'"]),
        (
            {"rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.5}},
            ["rope_scaling.mscale 0.5 (expected mscale_all_dim, 1.0"],
        ),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings True (expected False)"]),
        (
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            [
                "quantization_config.quant_method 'compressed-tensors' (expected 'fp8')",
                "quantization_config.weight_block_size None (expected [128, 128])",
            ],
        ),
        ({"kv_lora_rank": None, "hidden_size": None}, ["hidden_size missing, kv_lora_rank miss"]),
        ({"num_nextn_predict_layers": 2}, ["mtp_num_layers"]),
    ],
)
def test_what_is_not_supported_is_named(changes, names):
    with pytest.raises(UserError, match=r"config\.json is not supported: ") as caught:
        architecture.parse(DEEPSEEK_V3 | changes)
    for name in names:
        assert name in str(caught.value)


def test_the_folder_says_all_that_config_json_said():
    """Each setting that the table of keys has goes into a converted folder's config.yml."""
    ours = {ours for ours, _ in (architecture.KEYS | architecture.YARN).values()}
    ours |= {"rope_max_timescale", "routed_score_func", "norm_topk_prob", "routed_bias"}
    assert ours == set(ARCHITECTURE_KEYS)
