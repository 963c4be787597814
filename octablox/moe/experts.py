"""The experts: SwiGLU in two or three grouped matmuls, and how their weights are gathered.

    h   = silu(x @ gate) * (x @ up)     x [R, D], gate and up [E, D, F]
    out = h @ down                      down [E, F, D]

With merged gating, gate and up are one GMM with 2F output columns, so that small shards of F keep
the hardware busy. Both are always *stored* as one weight [E, D, 2, F]: cutting F then gives every
shard its part of gate and of up.

Over the `expert` axis, experts are cut either by expert (E) or by width (F). With F cut, each
shard computes all experts on its part of F, and `out` is a partial sum over the axis. Over `fsdp`,
weights are stored in parts and gathered: cut along D, or, with `shard_exp_on_fsdp`, by expert.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from octablox import fp8
from octablox.fp8 import QArray, Quantized, Recipe
from octablox.gmm import DimAxes, gmm
from octablox.health import OPERANDS, counts_of, new_counts
from octablox.mesh import AXES, EXPERT_SHARDS, ParamSpec, vary
from octablox.moe.config import MoeConfig

# The grouped matmuls of a layer, gate and up as one; in the order of their health.
GEMMS = ("gate_up", "down")


def new_health() -> Float[Array, "2 4 H"]:
    """Zeros float32, to be differentiated: for each of `GEMMS` what `gmm.new_health` says."""
    return jnp.zeros((len(GEMMS), *new_counts().shape))


def specs(config: MoeConfig, width: int) -> dict[str, ParamSpec]:
    """Parameters: `gate_up` [E, D, 2, F] and `down` [E, F, D]."""
    e, f = config.num_experts, config.base_moe_mlp_dim
    cut_e, cut_f = ("expert", None) if config.expert_sharding == "expert" else (None, "expert")
    if config.shard_exp_on_fsdp:
        both = (cut_e, *EXPERT_SHARDS) if cut_e else EXPERT_SHARDS
        return {
            "gate_up": ParamSpec((e, width, 2, f), (both, None, None, cut_f), 0, fan_in=width),
            "down": ParamSpec((e, f, width), (both, cut_f, None), 0, fan_in=f),
        }
    gate_up = (cut_e, EXPERT_SHARDS, None, cut_f)
    return {
        "gate_up": ParamSpec((e, width, 2, f), gate_up, gather_dim=1, fan_in=width),
        "down": ParamSpec((e, f, width), (cut_e, cut_f, EXPERT_SHARDS), gather_dim=2, fan_in=f),
    }


@dataclasses.dataclass(frozen=True)
class Experts:
    """Expert weights and products under one recipe.

    Attributes:
      config: sizes, merged gating, and which dim the `expert` axis cuts.
      recipe: of gate and up.
      dtype: of unquantized operands.
      down_recipe: of down; None: `recipe`.
    """

    config: MoeConfig
    recipe: Recipe
    dtype: jnp.dtype
    down_recipe: Recipe | None = None

    def gathered(
        self, name: str, shard: Float[Array, "E ..."], health: Float[Array, "4 H"] | None
    ) -> Quantized:
        """One layer's weight `name` of `GEMMS` from its shard: quantized, then gathered over fsdp.

        Args:
          name: of the weight.
          shard: [E', D', 2, F'] of gate_up, [E', F', D'] of down.
          health: see `gmm.new_health`; its gradient counts the weights' casts. None: no counts.

        Returns:
          Gate and up [E, D, 2F]; down [E, F, D].
        """
        return self.gather(name, self.prepare(name, shard, health))

    def prepare(
        self, name: str, shard: Float[Array, "E ..."], health: Float[Array, "4 H"] | None
    ) -> tuple[Quantized | Float[Array, "E ..."], Float[Array, "4 H"] | None]:
        """What of `gathered` can be done before the transfer: what travels, and is counted then."""
        how = self._how(name)
        shard, health = jax.tree.map(vary, (shard.reshape(*shard.shape[:2], -1), health))
        if how.blocks_straddle(shard):
            return shard, health
        return _quantize_shard(how, shard, health), None

    def gather(self, name: str, prepared: tuple) -> Quantized:
        """The rest of `gathered`: the transfer."""
        part, health = prepared
        if isinstance(part, Quantized):
            return _gather(self._how(name), part)
        return _gather_and_quantize(self._how(name), part, health)

    def _how(self, name):
        recipe = self.recipe if name == "gate_up" else self._of_down
        width_dim, parts = (2, 2) if name == "gate_up" else (1, 1)
        dim = 0 if self.config.shard_exp_on_fsdp else 3 - width_dim
        axes = {width_dim: self._width_axes, dim: EXPERT_SHARDS}
        dtypes = jnp.dtype(self.dtype), jnp.dtype(self.config.grad_dtype)
        return _Gather(recipe, *dtypes, dim, tuple(axes.items()), parts)

    def apply(
        self,
        weights: dict[str, Quantized],
        rows: Float[Array, "R D"] | Quantized,
        row_weights: Float[Array, " R"],
        group_sizes: Int[Array, " E"],
        health: Float[Array, "2 4 H"] | tuple[None, None],
    ) -> Float[Array, "R D"]:
        """Rows [R, D] through their experts, times their weights; zero for experts held elsewhere.

        The weights multiply the hidden rows, which are fewer numbers than the results. `health` is
        for each of `GEMMS` what `gmm` takes.
        """
        multiply = functools.partial(gmm, group_sizes=group_sizes, backend=self.config.gmm_backend)
        width = self._width_axes
        row_axes = tuple(axis for axis in AXES if axis not in width)
        into, out_of = DimAxes(m=row_axes, n=width), DimAxes(m=row_axes, k=width)
        if self.config.merge_gating_gmm:
            recipe = self.recipe.merged(2)
            both = multiply(rows, weights["gate_up"], recipe=recipe, axes=into, health=health[0])
            gate, up = jnp.split(both, 2, axis=1)
        else:
            gate, up = (
                multiply(rows, half, recipe=self.recipe, axes=into, health=health[0])
                for half in _halves(weights["gate_up"])
            )
        hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        hidden = (hidden * row_weights[:, None]).astype(self.dtype)
        down = weights["down"]
        return multiply(hidden, down, recipe=self._of_down, axes=out_of, health=health[1])

    @property
    def _of_down(self) -> Recipe:
        return self.down_recipe or self.recipe

    @property
    def _width_axes(self):
        """The mesh axes that cut F; inside `shard_map`."""
        cut = self.config.expert_sharding == "width" and lax.axis_size("expert") > 1
        return ("expert",) if cut else ()


@dataclasses.dataclass(frozen=True)
class _Gather:
    """What is static about gathering one weight: over fsdp along `dim`."""

    recipe: Recipe
    dtype: jnp.dtype
    grad_dtype: jnp.dtype
    dim: int
    axes: tuple[tuple[int, tuple[str, ...]], ...]
    parts: int

    def __hash__(self) -> int:
        return hash((self.recipe.name, self.dtype, self.dim, self.axes, self.parts))

    def blocks_straddle(self, shard: jax.Array) -> bool:
        """Whether the weight's blocks do not fit its shards, so that those are gathered first."""
        cast = self.recipe.weight
        if cast is None:
            return False
        return not fp8.shards_hold_whole_blocks(shard.shape[self.dim], _block(cast, self.dim))

    def over_fsdp(self, x: jax.Array) -> jax.Array:
        """The shards of all devices as one."""
        return lax.all_gather(x, axis_name=EXPERT_SHARDS, axis=self.dim, tiled=True)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the gathered weight, by the shape of a shard."""
        size = shape[self.dim] * lax.axis_size(EXPERT_SHARDS)
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def scattered(self, grad: jax.Array) -> jax.Array:
        """The sum of the weight's gradients over the devices, each its own shard."""
        return lax.psum_scatter(grad, EXPERT_SHARDS, scatter_dimension=self.dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize_shard(how, shard, health):
    return _quantize_shard_forward(how, shard, health)[0]


def _quantize_shard_forward(how, shard, health):
    """Quantizes before the transfer, so that 8 bits travel."""
    cast, counts = how.recipe.weight, new_counts()[0]
    if cast is None:
        value = shard.astype(how.dtype)
    else:
        value = fp8.quantize_weight(shard, cast, axes=dict(how.axes), parts=how.parts)
        counts = counts if health is None else counts_of(shard, value)
        value = jax.tree.map(vary, value)
    counts = None if health is None else vary(counts)
    return fp8.new_quantized(value, shard.shape, how.grad_dtype), (counts, shard)


def _quantize_shard_backward(how, residuals, grad):
    del how
    counts, shard = residuals
    return grad.master.astype(shard.dtype), _of_weight(counts)


_quantize_shard.defvjp(_quantize_shard_forward, _quantize_shard_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how, shard):
    value = shard.q
    if how.recipe.weight is None:
        value = how.over_fsdp(value)
    else:
        is_cut = _scale_is_cut(how.recipe.weight, how.dim)
        scale = how.over_fsdp(value.scale) if is_cut else value.scale
        value = QArray(how.over_fsdp(value.qvalue), scale, None, value.qtype)
    value = jax.tree.map(vary, value)
    return fp8.new_quantized(value, how.whole(shard.shape), how.grad_dtype)


_gather.defvjp(
    lambda how, shard: (_gather(how, shard), None),
    lambda how, residuals, grad: (Quantized(how.scattered(grad.master), None),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_and_quantize(how, shard, health):
    return _gather_and_quantize_forward(how, shard, health)[0]


def _gather_and_quantize_forward(how, shard, health):
    whole, counts = how.over_fsdp(shard), None
    rest = {dim: names for dim, names in how.axes if dim != how.dim}
    value = fp8.quantize_weight(whole, how.recipe.weight, axes=rest, parts=how.parts)
    if health is not None:
        counts = vary(counts_of(whole, value) / lax.axis_size(EXPERT_SHARDS))
    value = jax.tree.map(vary, value)
    return fp8.new_quantized(value, how.whole(shard.shape), how.grad_dtype), (counts, shard)


def _gather_and_quantize_backward(how, residuals, grad):
    counts, shard = residuals
    return how.scattered(grad.master).astype(shard.dtype), _of_weight(counts)


_gather_and_quantize.defvjp(_gather_and_quantize_forward, _gather_and_quantize_backward)


def _of_weight(counts):
    """The gradient [4, H] of a health, of the counts [H] of a weight's cast."""
    if counts is None:
        return None
    return jnp.stack([counts, *[jnp.zeros_like(counts)] * (len(OPERANDS) - 1)])


def _block(cast, dim):
    return (1, cast.tile[1], cast.tile[0])[dim]


def _scale_is_cut(cast, dim):
    """Whether shards along `dim` have scales of their own."""
    return _block(cast, dim) is not None and fp8.parse_calibration(cast.calibration)[0] != "fixed"


def _halves(both: Quantized) -> tuple[Quantized, Quantized]:
    """Gate and up [E, D, F] of the merged weight."""

    def half(n):
        # A scale of one column serves both.
        part = lambda a: a if a.shape[2] == 1 else jnp.split(a, 2, axis=2)[n]  # noqa: E731
        return jax.tree.map(part, both)

    return half(0), half(1)
