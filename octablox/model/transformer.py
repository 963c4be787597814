"""DeepSeek-V3 as a language model: parameters, and the loss of a batch on one device's shards.

Multi-token prediction (MTP, DeepSeek-V3 section 2.2): one more layer sees the hidden state of
token i, after the final norm, and the embedding of token i+1, and predicts token i+2 with the
shared embedding and head.

Shapes: B sequences, S tokens, D model width, V vocabulary, N micro-batches.
"""

import dataclasses
import itertools
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from octablox.layer_scan import run_layers
from octablox.mesh import (
    AXES,
    gather,
    map_specs,
    norm_weight,
    sequence_axis,
    vary_uncut,
    weight,
)
from octablox.model import skip
from octablox.model.attention import rms_norm, rotary_angles
from octablox.model.config import ModelConfig
from octablox.model.layers import (
    Settings,
    dense_layer,
    dense_layer_specs,
    moe_layer,
    moe_layer_specs,
    moe_shards,
)
from octablox.moe.config import MoeConfig
from octablox.moe.experts import new_health

# Tokens whose logits exist at the same time.
LOSS_CHUNK = 2048
# Parameters outside the layers.
TOP = ("embedding", "final_norm", "head")


def parameter_specs(model: ModelConfig, moe: MoeConfig) -> dict:
    """Every parameter of the model; layers of a kind are stacked."""
    d, dense = model.base_emb_dim, model.first_num_dense_layers
    sparse = model.base_num_decoder_layers - dense
    moe_specs = moe_layer_specs(model, moe)
    specs: dict[str, Any] = {
        # Of deviation 1, or the layers' first updates would drown what token it is.
        "embedding": dataclasses.replace(weight(model.vocab_size, d, gather_dim=1), fan_in=1),
        "final_norm": norm_weight(d),
        "head": weight(d, model.vocab_size),
    }
    if dense:
        specs["dense_layers"] = _stacked(dense_layer_specs(model), dense)
    if sparse:
        specs["moe_layers"] = _stacked(moe_specs, sparse)
    if model.mtp_num_layers:
        specs["mtp"] = {
            "embedding_norm": norm_weight(d),
            "hidden_norm": norm_weight(d),
            "projection": weight(2 * d, d, gather_dim=1),
            "layers": _stacked(moe_specs, model.mtp_num_layers),
            "final_norm": norm_weight(d),
        }
    return specs


def new_probes(model: ModelConfig) -> dict[str, dict[str, jax.Array]]:
    """Zeros whose gradients are counts, for each kind of MoE layers (layers L first).

    `health` [L, 2, 4, H]: how casts fared, see `experts.new_health`.
    `overflow` [L]: micro-batches whose rows did not fit the buffer, see `moe.overflow`.
    """
    one = new_health()
    return {
        stack: {"health": jnp.stack([one] * len(names)), "overflow": jnp.zeros(len(names))}
        for stack, names in moe_layer_names(model).items()
    }


def moe_layer_names(model: ModelConfig) -> dict[str, list[str]]:
    """What the MoE layers of each stack are called: `layers.3` is the model's fourth layer."""
    first, layers = model.first_num_dense_layers, model.base_num_decoder_layers
    names = {
        "moe_layers": [f"layers.{n}" for n in range(first, layers)],
        "mtp": [f"mtp.{n}" for n in range(model.mtp_num_layers)],
    }
    return {stack: found for stack, found in names.items() if found}


def loss(
    params: dict, probes: dict, batch: dict[str, jax.Array], settings: Settings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean loss of a global batch, computed on this device's part inside `shard_map`.

    Args:
      params: shards, as `parameter_specs`.
      probes: see `new_probes`.
      batch: `tokens`, `targets`, `segment_ids`, `positions` int32 [B, S], `weights` [B, S] (S: what
        this device has of a sequence), and
        `total_weight` [], what the sum over all devices is divided by.
      settings: the model.

    Returns:
      Scalar to be minimized, and its parts `loss` and `mtp_loss`, nats a token (both divided by the
      same total), equal on every device.
    """
    model, total = settings.model, batch["total_weight"]
    top = _gather_some(params, parameter_specs(model, settings.moe), settings, TOP)
    micro_batches = _split(batch, settings.schedule.micro_batches)
    contexts = [_context(micro, model) for micro in micro_batches]
    hidden = [_embed(top["embedding"], micro["tokens"]) for micro in micro_batches]
    hidden = _trunk(params, probes, contexts, hidden, settings)
    main = _head_loss(top["final_norm"], top["head"], hidden, micro_batches, settings)
    parts = {"loss": lax.psum(main, AXES) / total, "mtp_loss": jnp.zeros(())}
    if model.mtp_num_layers:
        hidden = _mtp(params["mtp"], probes, contexts, hidden, top, micro_batches, settings)
        later = [_one_later(micro) for micro in micro_batches]
        mtp = _head_loss(params["mtp"]["final_norm"], top["head"], hidden, later, settings)
        parts["mtp_loss"] = lax.psum(mtp, AXES) / total
    return parts["loss"] + model.mtp_loss_scaling_factor * parts["mtp_loss"], parts


def logits(
    params: dict, probes: dict, batch: dict[str, jax.Array], settings: Settings
) -> jax.Array:
    """What the main model says of each next token, float32 [B, S, V], inside `shard_map`.

    Arguments as `loss` takes them; the targets are not read. All logits exist at the same time:
    for evaluation of short batches.
    """
    top = _gather_some(params, parameter_specs(settings.model, settings.moe), settings, TOP)
    context, hidden = _context(batch, settings.model), _embed(top["embedding"], batch["tokens"])
    (hidden,) = _trunk(params, probes, [context], [hidden], settings)
    hidden = rms_norm(hidden, top["final_norm"], settings.model.normalization_layer_epsilon)
    return jnp.dot(hidden, top["head"], preferred_element_type=jnp.float32)


def _trunk(params, probes, contexts, hidden, settings):
    """The main model's layers: [B, S, D] per micro-batch -> the same."""
    carries = [{"x": h} for h in hidden]
    specs = parameter_specs(settings.model, settings.moe)
    if "dense_layers" in params:
        shards = vary_uncut(specs["dense_layers"], params["dense_layers"])
        carries = run_layers(dense_layer(settings), shards, contexts, carries)
    if "moe_layers" in params:
        weights = vary_uncut(specs["moe_layers"], params["moe_layers"])
        shards = moe_shards(weights, **probes["moe_layers"])
        carries = _run_moe_layers("moe_layers", shards, contexts, carries, settings)
    return [carry["x"] for carry in carries]


def _run_moe_layers(stack, shards, contexts, carries, settings):
    """A stack of MoE layers, those with the same recipes together under one scan."""
    names = moe_layer_names(settings.model)[stack]
    recipes = [skip.recipes_of(settings.recipe, settings.skip, name) for name in names]
    groups = [(found, len(list(alike))) for found, alike in itertools.groupby(recipes)]
    first = 0
    for (recipe, down_recipe), count in groups:
        some = lambda a, at=first, n=count: lax.slice_in_dim(a, at, at + n)  # noqa: E731
        part = jax.tree.map(some, shards) if len(groups) > 1 else shards
        alike = dataclasses.replace(settings, recipe=recipe, down_recipe=down_recipe)
        carries = run_layers(moe_layer(alike), part, contexts, carries)
        first += count
    return carries


def _mtp(params, probes, contexts, hidden, top, micro_batches, settings):
    """The MTP layer: hidden states [B, S, D] per micro-batch -> its own."""
    specs = parameter_specs(settings.model, settings.moe)["mtp"]
    weights = _gather_some(params, specs, settings, ("embedding_norm", "hidden_norm", "projection"))
    eps = settings.model.normalization_layer_epsilon
    carries = []
    for h, micro in zip(hidden, micro_batches, strict=True):
        # The paper leaves open whether the main model's last norm comes before this one. In
        # DeepSeek's published model it does, and its weights are made for that.
        h = rms_norm(h, top["final_norm"], eps)
        following = _embed(top["embedding"], micro["targets"])
        following = rms_norm(following, weights["embedding_norm"], eps)
        both = jnp.concatenate([following, rms_norm(h, weights["hidden_norm"], eps)], axis=-1)
        carries.append({"x": both @ weights["projection"]})
    # Where no next token is known, its embedding is garbage, and no load of the router.
    contexts = [
        {**context, "real": micro["weights"] > 0}
        for context, micro in zip(contexts, micro_batches, strict=True)
    ]
    shards = moe_shards(vary_uncut(specs["layers"], params["layers"]), **probes["mtp"])
    carries = _run_moe_layers("mtp", shards, contexts, carries, settings)
    return [carry["x"] for carry in carries]


def _head_loss(norm, head, hidden, micro_batches, settings):
    """Sum over this device's tokens of weight * -log p(target)."""
    eps = settings.model.normalization_layer_epsilon
    total = jnp.zeros(())
    for h, micro in zip(hidden, micro_batches, strict=True):
        tokens = rms_norm(h, norm, eps).reshape(-1, h.shape[-1])
        chunks = max(tokens.shape[0] // LOSS_CHUNK, 1)
        cut = lambda a, n=chunks: a.reshape(n, -1, *a.shape[1:]) if a.shape[0] % n == 0 else a[None]  # noqa: E731
        targets, weights = micro["targets"].reshape(-1), micro["weights"].reshape(-1)
        one_chunk = jax.checkpoint(lambda chunk: _cross_entropy(head, *chunk))
        total += jnp.sum(lax.map(one_chunk, (cut(tokens), cut(targets), cut(weights))))
    return total


def _cross_entropy(head, tokens, targets, weights):
    logits = jnp.dot(tokens, head, preferred_element_type=jnp.float32)
    is_target = targets[:, None] == lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1)
    target_logit = jnp.sum(jnp.where(is_target, logits, 0), axis=1)
    return jnp.sum((jax.nn.logsumexp(logits, axis=1) - target_logit) * weights)


def _one_later(micro):
    """Targets one token further on, within the same segment."""
    later = {name: _following(micro[name]) for name in ("targets", "weights", "segment_ids")}
    same = later["segment_ids"] == micro["segment_ids"]
    return {"targets": later["targets"], "weights": later["weights"] * micro["weights"] * same}


def _following(x):
    """For each token of `x` [B, S] what the next one of its sequence has; for the last, zero."""
    axis = sequence_axis()
    last = jnp.zeros_like(x[:, :1])
    if axis:
        # Nothing is sent to the last part of a sequence, and zeros arrive there.
        last = lax.ppermute(x[:, :1], axis, [(n, n - 1) for n in range(1, lax.axis_size(axis))])
    return jnp.concatenate([x[:, 1:], last], axis=1)


def _embed(table, tokens):
    return jnp.take(table, tokens, axis=0)


def _context(micro, model):
    cos, sin = rotary_angles(micro["positions"], model)
    ids, axis = micro["segment_ids"], sequence_axis()
    whole = lax.all_gather(ids, axis, axis=1, tiled=True) if axis else ids
    return {"cos": cos, "sin": sin, "segment_ids": whole, "real": ids > 0}


def _split(batch, micro_batches):
    """This device's rows in `micro_batches` equal parts."""
    rows = {name: values for name, values in batch.items() if values.ndim == 2}
    parts = {name: jnp.split(values, micro_batches) for name, values in rows.items()}
    return [{name: parts[name][m] for name in rows} for m in range(micro_batches)]


def _gather_some(params, specs, settings, names):
    return gather({n: specs[n] for n in names}, {n: params[n] for n in names}, settings.dtype)


def _stacked(specs, layers):
    return map_specs(lambda spec: spec.stacked(layers), specs)
