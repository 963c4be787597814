"""The two kinds of layers as stages: with a dense MLP, and with a mixture of experts.

    dense:  attention                      -> mlp
    moe:    attention -> route -> dispatch -> experts -> combine

A carry is a dict of this micro-batch's arrays on this device; `x` is the residual stream
[B, S, D]. Stages other than dispatch and combine need no network.

Shapes: B sequences, S tokens, D model width, T = B*S tokens of this device, R rows.
"""

import dataclasses

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from octablox.fp8 import Recipe
from octablox.mesh import ParamSpec, gather, norm_weight, vary, weight
from octablox.model import attention
from octablox.model.attention import rms_norm
from octablox.model.config import ModelConfig
from octablox.moe import experts, router
from octablox.moe.config import MoeConfig
from octablox.moe.dispatch import combine, dispatch, sort_copies
from octablox.moe.experts import Experts
from octablox.schedule import Layer, ScheduleConfig, Stage


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that shapes the computation of a model."""

    model: ModelConfig
    moe: MoeConfig
    recipe: Recipe
    schedule: ScheduleConfig

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations."""
        return jnp.dtype(self.model.dtype)


def mlp_specs(width: int, hidden: int) -> dict[str, ParamSpec]:
    """Parameters of a SwiGLU: `gate_up` [D, 2, F] and `down` [F, D]."""
    return {
        "gate_up": weight(width, 2, hidden),
        "down": weight(hidden, width, gather_dim=1),
    }


def dense_layer_specs(config: ModelConfig) -> dict:
    """Parameters of a layer with a dense MLP."""
    d = config.base_emb_dim
    return {
        "attention": attention.specs(config),
        "mlp": {"norm": norm_weight(d), **mlp_specs(d, config.base_mlp_dim)},
    }


def moe_layer_specs(config: ModelConfig, moe: MoeConfig) -> dict:
    """Parameters of a layer with experts."""
    d = config.base_emb_dim
    shared = mlp_specs(d, moe.shared_experts * moe.base_moe_mlp_dim)
    return {
        "attention": attention.specs(config),
        "router": {"norm": norm_weight(d), **router.specs(moe, d)},
        "experts": experts.specs(moe, d),
        **({"shared": shared} if moe.shared_experts else {}),
    }


def dense_layer(settings: Settings) -> Layer:
    """Stages of a layer with a dense MLP."""
    eps = settings.model.normalization_layer_epsilon
    save = settings.schedule.remat_policy == "none"

    def mlp(weights, context, carry):
        del context
        h = rms_norm(carry["x"], weights["mlp"]["norm"], eps)
        return {"x": carry["x"] + swiglu(weights["mlp"], h)}

    stages = (_attention_stage(settings, save), Stage("mlp", mlp, ("mlp",), save=save))
    specs = dense_layer_specs(settings.model)

    def open_weights(shards):
        return gather(specs, shards, settings.dtype)

    return Layer(stages, open_weights, settings.schedule.order(len(stages)))


def moe_layer(settings: Settings) -> Layer:
    """Stages of a layer with experts."""
    model, moe = settings.model, settings.moe
    kernel = Experts(moe, settings.recipe, settings.dtype)
    policy = settings.schedule.remat_policy
    eps = model.normalization_layer_epsilon

    def route(weights, context, carry):
        h = rms_norm(carry["x"], weights["router"]["norm"], eps).reshape(-1, model.base_emb_dim)
        real = context["real"].reshape(-1)
        gate, bias = weights["router"]["gate"], weights["router"]["bias"]
        chosen, mix = router.route(h, gate, bias, moe, real)
        return {"x": carry["x"], "h": h, "chosen": chosen, "mix": mix}

    def send(weights, context, carry):
        del weights, context
        h, chosen, mix = (_all_gather(carry[name]) for name in ("h", "chosen", "mix"))
        order = sort_copies(chosen, moe.num_experts, _first_expert(moe))
        return {
            "x": carry["x"],
            "h": carry["h"],
            "rows": dispatch(h, order),
            "mix": mix,
            "order": order,
        }

    def compute(weights, context, carry):
        del context
        x = carry["x"]
        if moe.shared_experts:
            x = x + swiglu(weights["shared"], carry["h"]).reshape(x.shape)
        sizes = carry["order"].group_sizes
        rows = kernel.apply(weights["experts"], carry["rows"], sizes, weights["health"])
        return {"x": x, "rows": rows, "mix": carry["mix"], "order": carry["order"]}

    def receive(weights, context, carry):
        del weights, context
        tokens = combine(carry["rows"], carry["mix"], carry["order"])
        tokens = lax.psum_scatter(tokens, "expert", scatter_dimension=0, tiled=True)
        return {"x": carry["x"] + tokens.reshape(carry["x"].shape)}

    none, minimal = policy == "none", policy in ("none", "minimal")
    shared = ("shared",) if moe.shared_experts else ()
    stages = (
        _attention_stage(settings, none),
        Stage("route", route, ("router",), save=none),
        Stage("dispatch", send, (), "communication", save=minimal),
        Stage("experts", compute, ("experts", "health", *shared), save=none),
        Stage("combine", receive, (), "communication", save=none),
    )
    specs = moe_layer_specs(model, moe)

    def open_weights(shards):
        weights, health = shards
        return {
            **{n: gather(specs[n], weights[n], settings.dtype) for n in ("attention", *shared)},
            "router": gather(specs["router"], weights["router"], jnp.float32),
            "experts": kernel.gather(weights["experts"], health),
            "health": vary(health),
        }

    return Layer(stages, open_weights, settings.schedule.order(len(stages)))


def swiglu(weights: dict[str, jax.Array], x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """silu(x @ gate) * (x @ up) @ down, for x [..., D]."""
    both = jnp.einsum("...d,dpf->...pf", x, weights["gate_up"])
    gate, up = both[..., 0, :], both[..., 1, :]
    return (jax.nn.silu(gate) * up) @ weights["down"]


def _attention_stage(settings, save):
    def attend(weights, context, carry):
        x = carry["x"]
        rotation = context["cos"], context["sin"]
        update = attention.attend(
            weights["attention"], rotation, context["segment_ids"], x, settings.model
        )
        return {"x": x + update}

    return Stage("attention", attend, ("attention",), save=save)


def _all_gather(x):
    return lax.all_gather(vary(x), "expert", tiled=True)


def _first_expert(moe):
    if moe.expert_sharding == "width":
        return 0
    return lax.axis_index("expert") * (moe.num_experts // lax.axis_size("expert"))
