"""Settings of the mixture-of-experts layers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class MoeConfig(BaseModel):
    """Routed experts; MaxText's names where the concept is MaxText's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_experts: int = Field(8, ge=1, description="E, the routed experts of a layer")
    num_experts_per_tok: int = Field(2, ge=1, description="experts that a token goes to")
    base_moe_mlp_dim: int = Field(256, ge=1, description="F, the width of an expert's SwiGLU")
    shared_experts: int = Field(1, ge=0, description="experts that every token goes to")
    n_routing_groups: int = Field(1, ge=1, description="groups of experts; 1: no groups")
    topk_routing_group: int = Field(1, ge=1, description="groups that a token may choose from")
    routed_scaling_factor: float = Field(1.0, gt=0, description="factor on the routed output")
    routed_score_func: Literal["sigmoid", "softmax"] = Field(
        "sigmoid", description="what makes scores of the router's logits: DeepSeek-V3's, V2's"
    )
    norm_topk_prob: bool = Field(
        True, description="the weights of a token's experts sum to 1, before the scaling factor"
    )
    routed_bias: bool = Field(True, description="balance the load by a bias on the choice only")
    routed_bias_update_rate: float = Field(0.001, ge=0, description="the bias's change a step")
    merge_gating_gmm: bool = Field(True, description="gate and up projections in one GMM")
    expert_sharding: Literal["expert", "width"] = Field(
        "expert", description="the dim of expert weights that the expert axis shards: E, or F"
    )
    shard_exp_on_fsdp: bool = Field(
        False,
        description="fsdp shards expert weights by expert, not along D: each device then holds "
        "whole experts, and gathers them without a change of layout",
    )
    use_ring_of_experts: bool = Field(
        True,
        description="tokens go to all devices of the expert axis; false: by all-to-all, to those "
        "that hold their experts",
    )
    ragged_buffer_factor: float = Field(
        -1.0,
        description="rows of the buffer of dispatched rows, as a multiple of a device's mean; rows "
        "beyond it cost time, none is dropped. -1: a buffer for the worst case",
    )
    fp8_dispatch: bool = Field(
        False, description="rows cross the expert axis in 8 bits on their way to the experts"
    )
    fp8_dispatch_grad: bool = Field(
        False, description="gradients of rows cross the expert axis in 8 bits (e5m2)"
    )
    grad_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of expert weights' gradients, where they are summed over fsdp"
    )
    fp8_health: bool = Field(
        True,
        description="count how casts fare, for each layer and operand; false saves a pass over "
        "each operand",
    )
    gmm_backend: Literal["auto", "xla", "ragged_dot"] = Field(
        "auto", description="the GMMs' kernels; auto: the best that supports the call"
    )
    gmm_tiles: str = Field(
        "", description="most rows, K and N of the forward GMMs' tiles on TPU, as 512,7168,2048"
    )
    dlhs_tiles: str = Field("", description="the same of the GMMs for the gradients of rows")
    tgmm_tiles: str = Field("", description="the same of the GMMs for the gradients of weights")
