"""Settings of the DeepSeek-V3 model."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelConfig(BaseModel):
    """Sizes of the model; MaxText's names. Every number is that of the whole model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    vocab_size: int = Field(320, ge=1, description="rows of the embedding and of the output head")
    base_emb_dim: int = Field(256, ge=1, description="D, the model width")
    base_mlp_dim: int = Field(512, ge=1, description="width of the dense layers' SwiGLU")
    base_num_decoder_layers: int = Field(4, ge=1, description="all layers, dense and MoE")
    first_num_dense_layers: int = Field(1, ge=0, description="of those, how many are dense")
    base_num_query_heads: int = Field(4, ge=1, description="attention heads")
    q_lora_rank: int = Field(64, ge=0, description="latent width of queries; 0: no latent")
    kv_lora_rank: int = Field(64, ge=1, description="latent width of keys and values")
    qk_nope_head_dim: int = Field(32, ge=1, description="width of a key's part without position")
    qk_rope_head_dim: int = Field(16, ge=2, description="width of a key's rotated part, even")
    v_head_dim: int = Field(32, ge=1, description="width of a head's values")
    normalization_layer_epsilon: float = Field(1e-6, gt=0, description="RMSNorm's epsilon")
    rope_max_timescale: float = Field(10000.0, gt=0, description="RoPE's theta")
    rope_factor: float = Field(1.0, ge=1, description="YaRN's context extension; 1: plain RoPE")
    original_max_position_embeddings: int = Field(
        4096, ge=1, description="context in tokens that YaRN extends from"
    )
    beta_fast: float = Field(32.0, gt=0, description="YaRN: rotations above this are kept")
    beta_slow: float = Field(1.0, gt=0, description="YaRN: rotations below this are stretched")
    mscale: float = Field(1.0, ge=0, description="YaRN: strength of the softmax scale's growth")
    mtp_num_layers: int = Field(0, ge=0, le=1, description="multi-token prediction layers")
    mtp_loss_scaling_factor: float = Field(0.1, ge=0, description="weight of the MTP loss")
    attention: Literal["autoselected", "dot_product", "flash"] = Field(
        "autoselected",
        description="flash: one fused kernel, on TPU; autoselected: that where it runs",
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="of activations")
    weight_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the stored parameters"
    )
