"""The two kinds of layers as stages: with a dense MLP, and with a mixture of experts.

    dense:  attention                      -> mlp
    moe:    attention -> route -> permute -> dispatch -> experts -> combine -> unpermute

A carry is a dict of this micro-batch's arrays on this device; `x` is the residual stream
[B, S, D]. Dispatch and combine are transfers and nothing else; the other stages need no network
but for a few bytes (permute: how many tokens go where, and which).

Shapes: B sequences, S tokens, D model width, T = B*S tokens of this device, R rows.
"""

import dataclasses
import functools
import math
import operator

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from octablox import fp8
from octablox.fp8 import Quantized, Recipe
from octablox.mesh import (
    ParamSpec,
    gather_over_first,
    gather_over_others,
    norm_weight,
    sequence_axis,
    vary,
    weight,
)
from octablox.model import attention
from octablox.model.attention import rms_norm
from octablox.model.config import ModelConfig
from octablox.moe import all_to_all, exchange, experts, router
from octablox.moe.config import MoeConfig
from octablox.moe.dispatch import (
    combine,
    combine_for_quantized_grad,
    dispatch,
    sort_copies,
    weights_of_rows,
    window,
)
from octablox.moe.experts import GEMMS, Experts
from octablox.moe.overflow import buffer_rows, sum_over_windows, windows_for
from octablox.moe.probe import counted
from octablox.schedule import Layer, ScheduleConfig, Stage, WeightGroup
from octablox.vjp import merge_by_gradient, split_by_gradient


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that shapes the computation of a model, or of layers that are alike.

    Attributes:
      recipe: of the experts' GMMs.
      skip: patterns of casts that are left out, see `skip`.
      down_recipe: of the GMM with `down`, where it differs.
    """

    model: ModelConfig
    moe: MoeConfig
    recipe: Recipe
    schedule: ScheduleConfig
    skip: tuple[str, ...] = ()
    down_recipe: Recipe | None = None

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
    groups = (_group({name: specs[name]}, settings.dtype) for name in ("mlp", "attention"))
    return Layer(stages, tuple(groups), settings.schedule)


def moe_layer(settings: Settings) -> Layer:
    """Stages of a layer with experts."""
    policy = settings.schedule.remat_policy
    none, minimal = policy == "none", policy != "full"
    offload = policy == "minimal_offloaded"
    moe = _MoeStages(settings)
    shared = ("shared",) if settings.moe.shared_experts else ()
    probes = "health", "overflow"
    stages = (
        _attention_stage(settings, none, offload, ("attention", "attention_out")),
        Stage("route", moe.route, ("router",), save=none),
        Stage("permute", moe.permute, ("health",), save=minimal, offload=offload),
        Stage("dispatch", moe.dispatch, (), "communication", minimal, offload),
        Stage("experts", moe.experts, ("gate_up", "down", *probes, *shared), save=none),
        # Linear: these keep nothing but who goes where.
        Stage("combine", moe.combine, (), "communication", save=True),
        Stage("unpermute", moe.unpermute, (), save=True),
    )
    return Layer(
        stages,
        _weight_groups(settings, probes),
        settings.schedule,
        idle=moe.idle,
        pack=fp8.without_masters,
        unpack=fp8.with_masters,
    )


def moe_shards(weights: dict, health: jax.Array, overflow: jax.Array) -> dict:
    """The shards of `moe_layer`'s stack: of its parameters, and its probes."""
    shards = {**_split_attention(weights), **weights["experts"]}
    del shards["experts"]
    return shards | {"health": vary(health), "overflow": vary(overflow)}


def _split_attention(tree):
    """A layer's weights, or their specs, with attention's largest weight apart from the others."""
    rest = dict(tree["attention"])
    return {**tree, "attention_out": {"out": rest.pop("out")}, "attention": rest}


def _weight_groups(settings, probes):
    """The experts' two weights, the smaller one first; the shared expert's; attention's in two.

    As they travel under the steps of two micro-batches, those of a kind by turns, each step has
    about as much to hide as any other.
    """
    specs = _split_attention(moe_layer_specs(settings.model, settings.moe))
    kernel = _kernel(settings)

    def of_experts(n, name):
        def prepare(shards):
            return kernel.prepare(name, shards[name], _health(settings, shards)[n])

        gather = lambda prepared: {name: kernel.gather(name, prepared)}  # noqa: E731
        return WeightGroup((name, "health"), (name,), prepare, gather)

    gate_up, down = (of_experts(n, name) for n, name in enumerate(GEMMS))
    shared = (_group({"shared": specs["shared"]}, settings.dtype),) if "shared" in specs else ()
    out = _group({"attention_out": specs["attention_out"]}, settings.dtype)
    in_dtype, in_float32 = ({name: specs[name]} for name in ("attention", "router"))
    rest = _group(in_dtype, settings.dtype, in_float32, probes)
    return down, gate_up, *shared, out, rest


def _group(specs, dtype, in_float32=(), uncut=()):
    """Weights outside the experts that travel together: all that `specs` has, in `dtype`.

    Those of `in_float32` travel too, and what is named by `uncut` is here already.
    """
    every = specs | dict(in_float32)

    def prepare(shards):
        parts = gather_over_others(specs, _pick(shards, specs), dtype)
        if in_float32:
            parts |= gather_over_others(in_float32, _pick(shards, in_float32), jnp.float32)
        return parts | _pick(shards, uncut)

    def gather(parts):
        return gather_over_first(every, _pick(parts, every)) | _pick(parts, uncut)

    names = (*every, *uncut)
    return WeightGroup(names, names, prepare, gather)


def _pick(tree, names):
    return {name: tree[name] for name in names}


def _health(settings, of):
    """What counts the casts of each GEMM, if they are counted."""
    return of["health"] if settings.moe.fp8_health else (None,) * len(GEMMS)


def _kernel(settings):
    return Experts(settings.moe, settings.recipe, settings.dtype, settings.down_recipe)


@dataclasses.dataclass(frozen=True)
class _MoeStages:
    """The stages of a MoE layer after attention; see `Stage.fn`."""

    settings: Settings

    def route(self, weights, context, carry):
        """Chooses each token's experts."""
        model, moe = self.settings.model, self.settings.moe
        x, eps = carry["x"], model.normalization_layer_epsilon
        h = rms_norm(x, weights["router"]["norm"], eps).reshape(-1, model.base_emb_dim)
        gate, bias = weights["router"]["gate"], weights["router"]["bias"]
        chosen, mix = router.route(h, gate, bias, moe, context["real"].reshape(-1))
        return {"x": x, "h": h, "chosen": chosen, "mix": mix}

    def permute(self, weights, context, carry):
        """Puts tokens where they leave from, and finds out in which order those that come will be.

        The copies of the tokens that come are sorted by expert before they are there.
        """
        del context
        moe, h = self.settings.moe, carry["h"]
        way, chosen = self._way(carry["chosen"])
        cast = fp8.wire_cast(self.settings.recipe) if moe.fp8_dispatch else None
        order = sort_copies(chosen, moe.num_experts, _first_expert(moe))
        rows = self._buffer_rows(h.shape[0])
        few = rows < order.copy_of_row.shape[0]
        return {
            "x": carry["x"],
            "h": h,
            "tokens": exchange.permute(h, way, cast, _health(self.settings, weights)[0]),
            "mix": exchange.permute(carry["mix"], way, None),
            "way": way,
            "order": order,
            "windows": windows_for(_local_rows(order, moe), rows) if few else None,
        }

    def dispatch(self, weights, context, carry):
        """Tokens and how much each of their experts counts, to the devices of their experts."""
        del weights, context
        sent = {name: exchange.dispatch(carry[name], carry["way"]) for name in ("tokens", "mix")}
        return carry | sent

    def experts(self, weights, context, carry):
        """The shared expert, and this device's experts on their rows."""
        del context
        x, h = carry["x"], carry["h"]
        if self.settings.moe.shared_experts:
            x = x + swiglu(weights["shared"], h).reshape(x.shape)
        floats, others = split_by_gradient(
            {
                "weights": {name: weights[name] for name in ("gate_up", "down", "health")},
                "tokens": carry["tokens"],
                "mix": carry["mix"],
                "order": carry["order"],
            }
        )
        windows, sent = carry["windows"], {"x": x, "way": carry["way"]}
        once = functools.partial(self._window, h.shape[0])
        if windows is None:
            tokens = once(0, floats, others)
        else:
            tokens = sum_over_windows(once, windows, floats, others)
            overflowed = (windows > 1).astype(jnp.float32)
            tokens = counted(tokens, weights["overflow"], vary(overflowed))
        return {**sent, "tokens": tokens}

    def combine(self, weights, context, carry):
        """Results back to the devices whose tokens they are of."""
        del weights, context
        return carry | {"tokens": exchange.combine(carry["tokens"], carry["way"])}

    def unpermute(self, weights, context, carry):
        """Adds to each token its results."""
        del weights, context
        update = exchange.unpermute(carry["tokens"], carry["way"])
        return {"x": carry["x"] + update.reshape(carry["x"].shape)}

    def idle(self, carry):
        """A carry of which `combine` and `unpermute` make `carry`."""
        x = carry["x"]
        local = math.prod(x.shape[:-1])
        tokens = vary(jnp.zeros((local * lax.axis_size("expert"), x.shape[-1]), x.dtype))
        k = self.settings.moe.num_experts_per_tok
        way = exchange.Ring() if self._is_ring() else all_to_all.idle(local, k)
        if self.settings.moe.fp8_dispatch_grad:
            tokens = fp8.quantize_grads(tokens)
        return {"x": x, "way": way, "tokens": tokens}

    def _is_ring(self):
        return self.settings.moe.use_ring_of_experts or lax.axis_size("expert") == 1

    def _way(self, chosen):
        """How tokens cross the expert axis, and the experts of those that come here."""
        if self._is_ring():
            return exchange.Ring(), exchange.gather_over_experts(chosen)
        return all_to_all.plan(chosen, self.settings.moe.num_experts // lax.axis_size("expert"))

    def _window(self, local_tokens, n, floats, others):
        """Window n of the rows through the experts: their part of all tokens [T, D]."""
        of = merge_by_gradient(floats, others)
        rows = self._buffer_rows(local_tokens)
        order = window(of["order"], n * rows, rows)
        tokens = dispatch(of["tokens"], order)
        kernel = _kernel(self.settings)
        recipe = self.settings.recipe
        if isinstance(tokens, Quantized) and fp8.wire_cast(recipe) != recipe.act:
            tokens = exchange.dequantized(tokens)
        mix = weights_of_rows(of["mix"], order)
        health = _health(self.settings, of["weights"])
        rows = kernel.apply(of["weights"], tokens, mix, order.group_sizes, health)
        if self.settings.moe.fp8_dispatch_grad:
            return combine_for_quantized_grad(rows, order)
        return combine(rows, order)

    def _buffer_rows(self, local_tokens):
        moe, shards = self.settings.moe, lax.axis_size("expert")
        return buffer_rows(moe, local_tokens * shards * moe.num_experts_per_tok, shards)


def swiglu(weights: dict[str, jax.Array], x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """silu(x @ gate) * (x @ up) @ down, for x [..., D]."""
    both = jnp.einsum("...d,dpf->...pf", x, weights["gate_up"])
    gate, up = both[..., 0, :], both[..., 1, :]
    return (jax.nn.silu(gate) * up) @ weights["down"]


def _attention_stage(settings, save, offload=False, names=("attention",)):
    def attend(weights, context, carry):
        x = carry["x"]
        rotation = context["cos"], context["sin"]
        ids, axis = context["segment_ids"], sequence_axis()
        weights = functools.reduce(operator.or_, (weights[name] for name in names))
        update = attention.attend(weights, rotation, ids, x, settings.model, axis)
        return {"x": x + update}

    return Stage("attention", attend, names, save=save, offload=offload)


def _first_expert(moe):
    if moe.expert_sharding == "width":
        return 0
    return lax.axis_index("expert") * (moe.num_experts // lax.axis_size("expert"))


def _local_rows(order, moe):
    """Rows of the experts that this device holds, which come first."""
    held = moe.num_experts // (lax.axis_size("expert") if moe.expert_sharding == "expert" else 1)
    return jnp.sum(order.group_sizes[:held])
