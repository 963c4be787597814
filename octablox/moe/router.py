"""The router: which experts each token goes to, with which weights.

DeepSeek-V3 (2024), section 2.1.2: sigmoid scores; a bias, moved by load instead of by a loss,
helps to choose but never weighs; experts come in groups, of which a token may use a few.
DeepSeek-V2 (2024), section 2.2, has a softmax over all experts instead, and no bias.
Everything here is float32 and never quantized.

Shapes: T tokens, D model width, E experts, G groups of experts, k experts a token.
"""

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from octablox.mesh import ParamSpec, weight
from octablox.moe.config import MoeConfig
from octablox.moe.probe import counted

_SCORES = {"sigmoid": jax.nn.sigmoid, "softmax": jax.nn.softmax}


def specs(config: MoeConfig, width: int) -> dict[str, ParamSpec]:
    """Parameters: `gate` [D, E] and `bias` [E]."""
    bias = ParamSpec((config.num_experts,), (None,), init="zeros")
    return {"gate": weight(width, config.num_experts), "bias": bias}


def route(
    hidden: Float[Array, "T D"],
    gate: Float[Array, "D E"],
    bias: Float[Array, " E"],
    config: MoeConfig,
    real: Bool[Array, " T"],
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Chooses experts.

    Args:
      hidden: [T, D], any float dtype.
      gate: float32 [D, E].
      bias: float32 [E]; its "gradient" is the load: how many real tokens chose each expert.
      config: routing sizes.
      real: bool [T], false for padding, which is routed but does not count as load.

    Returns:
      Chosen experts int32 [T, k] and their weights float32 [T, k].
    """
    logits = jnp.dot(hidden.astype(jnp.float32), gate, precision=lax.Precision.HIGHEST)
    scores = _SCORES[config.routed_score_func](logits)
    chosen = _choose(lax.stop_gradient(scores + bias), config)
    is_chosen = chosen[:, :, None] == lax.broadcasted_iota(jnp.int32, (1, 1, scores.shape[1]), 2)
    weights = jnp.sum(jnp.where(is_chosen, scores[:, None, :], 0), axis=2)
    if config.norm_topk_prob:
        weights /= jnp.sum(weights, axis=1, keepdims=True) + 1e-20
    load = jnp.sum(is_chosen & real[:, None, None], axis=(0, 1), dtype=jnp.float32)
    return chosen, counted(weights * config.routed_scaling_factor, bias, load)


def updated_bias(
    bias: Float[Array, "*L E"], load: Float[Array, "*L E"], rate: float
) -> Float[Array, "*L E"]:
    """The bias [..., E] after a step: up where the load is below its mean, down where above."""
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def _choose(scores, config):
    """int32 [T, k]: the best experts of the groups whose two best scores sum highest."""
    tokens, experts = scores.shape
    groups, kept = config.n_routing_groups, config.topk_routing_group
    if kept < groups:
        grouped = scores.reshape(tokens, groups, experts // groups)
        best, _ = lax.top_k(grouped, min(2, experts // groups))
        _, kept_groups = lax.top_k(jnp.sum(best, axis=2), kept)
        group = lax.broadcasted_iota(jnp.int32, (1, groups, 1), 1)
        is_kept = jnp.any(kept_groups[:, None, :] == group, axis=2, keepdims=True)
        scores = jnp.where(is_kept, grouped, -jnp.inf).reshape(tokens, experts)
    return lax.top_k(scores, config.num_experts_per_tok)[1]
