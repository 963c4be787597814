"""Multi-head latent attention (MLA) with rotary embeddings, extended by YaRN.

Queries and key-values pass through low-rank bottlenecks; a small part of each key carries the
position and is shared by all heads. DeepSeek-V2 (2024), section 2.1; YaRN: Peng et al. (2023).

Shapes: B sequences, S tokens, D model width, H heads, `nope`/`rope` the parts of a head's query
and key without and with a position, V a head's value width.
"""

import functools
import math

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from octablox.errors import UserError
from octablox.mesh import ParamSpec, norm_weight, weight
from octablox.model import flash_attention
from octablox.model.config import ModelConfig

# Queries whose scores with all keys exist at the same time.
QUERY_CHUNK = 512
# Of the norms of latents. DeepSeek's published model has it so whatever `rms_norm_eps` is, and
# Moonlight, whose other norms have 1e-5, was made for that.
LATENT_EPSILON = 1e-6


def specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Parameters of one attention block."""
    d, heads = config.base_emb_dim, config.base_num_query_heads
    q_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    kv_width = heads * (config.qk_nope_head_dim + config.v_head_dim)
    queries = {"q": weight(d, q_width)}
    if config.q_lora_rank:
        queries = {
            "q_a": weight(d, config.q_lora_rank),
            "q_norm": norm_weight(config.q_lora_rank),
            "q_b": weight(config.q_lora_rank, q_width, gather_dim=1),
        }
    return {
        "norm": norm_weight(d),
        **queries,
        "kv_a": weight(d, config.kv_lora_rank + config.qk_rope_head_dim),
        "kv_norm": norm_weight(config.kv_lora_rank),
        "kv_b": weight(config.kv_lora_rank, kv_width, gather_dim=1),
        "out": weight(heads * config.v_head_dim, d),
    }


def attend(
    weights: dict[str, jax.Array],
    rotation: tuple[Float[Array, "B S _"], Float[Array, "B S _"]],
    segment_ids: Int[Array, "B W"],
    x: Float[Array, "B S D"],
    config: ModelConfig,
    axis: str | None = None,
) -> Float[Array, "B S D"]:
    """One attention block without its residual connection.

    Args:
      weights: as `specs`, gathered.
      rotation: cos and sin, see `rotary_angles`.
      segment_ids: int32 [B, W] of whole sequences; a token sees earlier tokens of its own segment.
      x: [B, S, D].
      config: sizes.
      axis: inside `shard_map`, the mesh axis that cuts the sequences of `rotation` and `x`, if one
        does. What it gathers is the latent of keys and values, a fraction of these.

    Returns:
      [B, S, D] in x's dtype.
    """
    eps, nope = config.normalization_layer_epsilon, config.qk_nope_head_dim
    heads = config.base_num_query_heads
    split_heads = lambda a: a.reshape(*a.shape[:-1], heads, -1)  # noqa: E731
    x = rms_norm(x, weights["norm"], eps)
    if config.q_lora_rank:
        q = rms_norm(x @ weights["q_a"], weights["q_norm"], LATENT_EPSILON) @ weights["q_b"]
    else:
        q = x @ weights["q"]
    q_nope, q_rope = jnp.split(split_heads(q), [nope], axis=-1)
    latent, k_rope = jnp.split(x @ weights["kv_a"], [config.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, weights["kv_norm"], LATENT_EPSILON)
    q_rope, k_rope = rotate(q_rope, *rotation), rotate(k_rope[:, :, None, :], *rotation)[:, :, 0]
    part = lax.axis_index(axis) if axis else 0
    if axis:
        both = jnp.concatenate([latent, k_rope], axis=-1)
        both = lax.all_gather(both, axis, axis=1, tiled=True)
        latent, k_rope = jnp.split(both, [config.kv_lora_rank], axis=-1)
    k_nope, v = jnp.split(split_heads(latent @ weights["kv_b"]), [nope], axis=-1)
    scale = softmax_scale(config)
    if _is_fused(config, x.shape[1]):
        mixed = _fused(q_nope, q_rope, k_nope, k_rope, v, segment_ids, scale, part)
    else:
        mix = functools.partial(_mix, (k_nope, k_rope, v, segment_ids), scale)
        mixed = _in_query_chunks(mix, (q_nope, q_rope), part * x.shape[1])
    return mixed.reshape(*x.shape[:-1], -1) @ weights["out"]


def _is_fused(config, sequence):
    runs = flash_attention.runs_on_target(sequence)
    if config.attention == "flash" and not runs:
        raise UserError(
            f"attention=flash: expected a TPU and max_target_length a multiple of "
            f"{flash_attention.BLOCKS[-1]} on each device of axis context, got "
            f"{jax.devices()[0].platform} and {sequence} tokens; write attention=autoselected"
        )
    return runs and config.attention != "dot_product"


def _fused(q_nope, q_rope, k_nope, k_rope, v, segment_ids, scale, part):
    """The same as `_mix` of that part's queries, by the kernel, which knows one part of a head."""
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    shared = jnp.broadcast_to(k_rope[:, :, None, :], (*k_nope.shape[:3], k_rope.shape[-1]))
    k = jnp.concatenate([k_nope, shared], axis=-1)
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))  # [B, H, S, _]
    return jnp.swapaxes(flash_attention.flash_attention(q, k, v, segment_ids, part), 1, 2)


def _mix(keys, scale, queries, first):
    """What each query sees, mixed: [B, Q, H, V], for queries `first` to `first` + Q."""
    (q_nope, q_rope), (k_nope, k_rope, v, segments) = queries, keys
    scores = jnp.einsum("bqhd,bkhd->bhqk", q_nope, k_nope, preferred_element_type=jnp.float32)
    scores += jnp.einsum("bqhd,bkd->bhqk", q_rope, k_rope, preferred_element_type=jnp.float32)
    shape = (1, 1, q_nope.shape[1], k_nope.shape[1])
    query, key = (lax.broadcasted_iota(jnp.int32, shape, dim) for dim in (2, 3))
    # Same segment, not later. A token always sees itself.
    of_queries = lax.dynamic_slice_in_dim(segments, first, q_nope.shape[1], axis=1)
    visible = of_queries[:, None, :, None] == segments[:, None, None, :]
    visible &= key <= query + first
    scores = jnp.where(visible, scores * scale, -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)


def _in_query_chunks(mix, queries, first):
    """`mix` of all queries [B, S, ...], a chunk of S at a time, each again in the backward pass."""
    sequence = queries[0].shape[1]
    if sequence <= QUERY_CHUNK or sequence % QUERY_CHUNK:
        return mix(queries, first)
    chunks = sequence // QUERY_CHUNK

    def cut(a):
        return jnp.moveaxis(a.reshape(a.shape[0], chunks, QUERY_CHUNK, *a.shape[2:]), 1, 0)

    firsts = first + jnp.arange(chunks, dtype=jnp.int32) * QUERY_CHUNK
    one_chunk = jax.checkpoint(lambda chunk: mix(*chunk))
    mixed = jnp.moveaxis(lax.map(one_chunk, (jax.tree.map(cut, queries), firsts)), 0, 1)
    return mixed.reshape(mixed.shape[0], sequence, *mixed.shape[3:])


def rms_norm(
    x: Float[Array, "*N D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*N D"]:
    """RMSNorm over the last dim, in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def rotary_angles(
    positions: Int[Array, "B S"], config: ModelConfig
) -> tuple[Float[Array, "B S _"], Float[Array, "B S _"]]:
    """cos and sin float32 [B, S, rope/2] of int32 positions [B, S]."""
    angles = positions[:, :, None].astype(jnp.float32) * jnp.asarray(frequencies(config))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B S H rope"], cos: Float[Array, "B S _"], sin: Float[Array, "B S _"]
) -> Float[Array, "B S H rope"]:
    """Rotates pairs of neighbours: x [B, S, H, rope], in x's dtype.

    (a, b) -> (a cos - b sin, a sin + b cos) is x cos + y sin, with y of pairs (-b, a): a product
    with a matrix of 0, 1 and -1, which is exact. A TPU would change layouts to pick every other
    number.
    """
    twice = lambda angles: jnp.repeat(angles, 2, axis=-1)[:, :, None, :]  # noqa: E731
    swap = np.kron(np.eye(x.shape[-1] // 2), [[0, 1], [-1, 0]]).astype(np.float32)
    wide = x.astype(jnp.float32)
    swapped = jnp.matmul(wide, swap, precision=lax.Precision.HIGHEST)
    return (wide * twice(cos) + swapped * twice(sin)).astype(x.dtype)


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position, float32 [rope/2]; slow ones stretched by YaRN.

    A frequency that turns more than `beta_fast` times within the original context stays as it is,
    one that turns less than `beta_slow` times is divided by the factor, in between they blend.
    """
    dim, base = config.qk_rope_head_dim, config.rope_max_timescale
    plain = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.rope_factor == 1:
        return plain.astype(np.float32)
    original = config.original_max_position_embeddings

    def dim_of_turns(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of_turns(config.beta_fast)), 0)
    high = min(math.ceil(dim_of_turns(config.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return (plain * (1 - ramp) + plain / config.rope_factor * ramp).astype(np.float32)


def softmax_scale(config: ModelConfig) -> float:
    """What attention scores are multiplied by: 1/sqrt(head width), sharpened for YaRN."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    sharpening = 0.1 * config.mscale * math.log(config.rope_factor) + 1
    return scale * sharpening**2
