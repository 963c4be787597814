"""The model one token after the other, with a cache; of one device, forward only.

A layer's cache is what MLA needs of the tokens before: their normalized latents and rotated keys,
both shared by all heads. Queries go to the latents' space instead of the latents to each head's:

    scores = (q_nope @ k_b^T) @ latent^T + q_rope @ key^T        kv_b = [k_b | v_b], for each head
    mixed  = (softmax(scores) @ latent) @ v_b

All else is the training stages themselves, on weights that are gathered once.

Shapes: B sequences, Q new tokens, S places of the cache, D model width, V vocabulary, L layers.
"""

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from octablox import fp8
from octablox.mesh import gather, vary
from octablox.model import transformer
from octablox.model.attention import (
    LATENT_EPSILON,
    rms_norm,
    rotary_angles,
    rotate,
    softmax_scale,
)
from octablox.model.layers import (
    Settings,
    dense_layer,
    dense_layer_specs,
    moe_layer,
    moe_layer_specs,
)
from octablox.moe.experts import Experts, new_health

# A layer's cache: latents [B, S, kv_lora] and keys [B, S, rope].
Cache = dict[str, jax.Array]
KINDS = ("dense_layers", "moe_layers")


def new_cache(settings: Settings, sequences: int, length: int) -> dict[str, Cache]:
    """Empty caches for each kind of layers, layers first: zeros that nothing sees."""
    model = settings.model
    dense = model.first_num_dense_layers
    layers = {"dense_layers": dense, "moe_layers": model.base_num_decoder_layers - dense}
    widths = {"latent": model.kv_lora_rank, "key": model.qk_rope_head_dim}

    def zeros(count, width):
        return jnp.zeros((count, sequences, length, width), settings.dtype)

    return {
        kind: {name: zeros(count, width) for name, width in widths.items()}
        for kind, count in layers.items()
        if count
    }


def prepare(params: dict, experts: dict[str, Any] | None, settings: Settings) -> dict:
    """Weights as the stages read them, in `settings.dtype`, inside a `shard_map` over one device.

    Args:
      params: as `transformer.parameter_specs`; without `moe_layers.experts` if `experts` is given.
      experts: `gate_up` [L, E, D, 2F] and `down` [L, E, F, D], quantized before; or None.
      settings: the model.
    """
    specs = transformer.parameter_specs(settings.model, settings.moe)
    top = {name: gather(specs[name], params[name], settings.dtype) for name in transformer.TOP}
    prepared: dict[str, Any] = {"top": top}
    if "dense_layers" in params:
        of_layer = dense_layer_specs(settings.model)
        prepared["dense_layers"] = lax.map(
            lambda shards: gather(of_layer, shards, settings.dtype), params["dense_layers"]
        )
    if "moe_layers" in params:
        layers = params["moe_layers"]
        one = lambda shards: _moe_weights(shards, settings)  # noqa: E731
        prepared["moe_layers"] = lax.map(one, layers) | (experts or {})
    return prepared


def _moe_weights(shards, settings):
    specs = moe_layer_specs(settings.model, settings.moe)
    names = [name for name in ("attention", "shared") if name in shards]
    weights = gather({n: specs[n] for n in names}, {n: shards[n] for n in names}, settings.dtype)
    weights["router"] = gather(specs["router"], shards["router"], jnp.float32)
    weights |= {"health": vary(new_health()), "overflow": vary(jnp.zeros(()))}
    if "experts" in shards:
        kernel = Experts(settings.moe, settings.recipe, settings.dtype)
        of_experts = shards["experts"]
        quantized = {
            "gate_up": kernel.gathered("gate_up", of_experts["gate_up"], weights["health"][0]),
            "down": kernel.gathered("down", of_experts["down"], weights["health"][1]),
        }
        weights |= fp8.without_masters(quantized)
    return weights


def forward(
    weights: dict,
    caches: dict[str, Cache],
    tokens: Int[Array, "B Q"],
    first: Int[Array, ""],
    settings: Settings,
) -> tuple[Float[Array, "B V"], dict[str, Cache]]:
    """What follows the last of the new tokens, inside a `shard_map` over one device.

    Args:
      weights: see `prepare`.
      caches: of the tokens before; see `new_cache`.
      tokens: int32 [B, Q].
      first: the place of the first of them; first + Q is at most the caches' length.
      settings: the model.

    Returns:
      Logits float32 [B, V] after the last token, and the caches with the new tokens.
    """
    top, model = weights["top"], settings.model
    positions = first + jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cos, sin = rotary_angles(positions, model)
    context = {"cos": cos, "sin": sin, "real": jnp.ones(tokens.shape, bool)}
    context = jax.tree.map(vary, context)
    x = vary(jnp.take(top["embedding"], tokens, axis=0))
    caches = jax.tree.map(vary, caches)
    after = {}
    for kind, layer in zip(KINDS, (dense_layer(settings), moe_layer(settings)), strict=True):
        if kind not in weights:
            continue

        def one(x, layer_and_cache, stages=layer.stages[1:]):  # the first is attention
            of_layer, cache = layer_and_cache
            of_layer = fp8.with_masters(of_layer)
            update, cache = _attend(of_layer["attention"], context, cache, first, x, model)
            carry = {"x": x + update}
            for stage in stages:
                read = {name: of_layer[name] for name in stage.weights}
                carry = stage.fn(read, context, carry)
            return carry["x"], cache

        x, after[kind] = lax.scan(one, x, (weights[kind], caches[kind]))
    last = rms_norm(x[:, -1], top["final_norm"], model.normalization_layer_epsilon)
    return jnp.dot(last, top["head"], preferred_element_type=jnp.float32), after


def _attend(weights, context, cache, first, x, model):
    """The residual update [B, Q, D] of the new tokens, and the cache with them."""
    nope, heads = model.qk_nope_head_dim, model.base_num_query_heads
    x = rms_norm(x, weights["norm"], model.normalization_layer_epsilon)
    if model.q_lora_rank:
        q = rms_norm(x @ weights["q_a"], weights["q_norm"], LATENT_EPSILON) @ weights["q_b"]
    else:
        q = x @ weights["q"]
    q_nope, q_rope = jnp.split(q.reshape(*q.shape[:-1], heads, -1), [nope], axis=-1)
    latent, key = jnp.split(x @ weights["kv_a"], [model.kv_lora_rank], axis=-1)
    rotation = context["cos"], context["sin"]
    q_rope, key = rotate(q_rope, *rotation), rotate(key[:, :, None], *rotation)[:, :, 0]
    new = {"latent": rms_norm(latent, weights["kv_norm"], LATENT_EPSILON), "key": key}
    cache = {
        name: lax.dynamic_update_slice_in_dim(cache[name], values, first, axis=1)
        for name, values in new.items()
    }
    k_b, v_b = jnp.split(weights["kv_b"].reshape(model.kv_lora_rank, heads, -1), [nope], axis=-1)
    q_latent = jnp.einsum("bqhn,lhn->bqhl", q_nope, k_b)
    multiply = lambda how, a, b: jnp.einsum(how, a, b, preferred_element_type=jnp.float32)  # noqa: E731
    scores = multiply("bqhl,bsl->bhqs", q_latent, cache["latent"])
    scores += multiply("bqhr,bsr->bhqs", q_rope, cache["key"])
    query, place = (lax.broadcasted_iota(jnp.int32, scores.shape[2:], dim) for dim in (0, 1))
    scores = jnp.where(place <= query + first, scores * softmax_scale(model), -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhqs,bsl->bqhl", probabilities, cache["latent"])
    values = jnp.einsum("bqhl,lhv->bqhv", mixed, v_b)
    return values.reshape(*x.shape[:-1], -1) @ weights["out"], cache
