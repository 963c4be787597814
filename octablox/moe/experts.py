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

    def gather_gate_up(
        self, shard: Float[Array, "E D 2 F"], health: Float[Array, "4 H"] | None
    ) -> Quantized:
        """One layer's gate and up [E, D, 2F] from its shard: quantized, then gathered over `fsdp`.

        Args:
          shard: [E', D', 2, F'].
          health: see `gmm.new_health`; its gradient counts the weights' casts. None: no counts.
        """
        e, d, _, f = shard.shape
        both = shard.reshape(e, d, 2 * f)
        return self._gather(self.recipe, both, health, width_dim=2, parts=2)

    def gather_down(
        self, shard: Float[Array, "E F D"], health: Float[Array, "4 H"] | None
    ) -> Quantized:
        """One layer's down [E, F, D] from its shard [E', F', D'], see `gather_gate_up`."""
        return self._gather(self._of_down, shard, health, width_dim=1, parts=1)

    def _gather(self, recipe, shard, health, *, width_dim, parts):
        dim = 0 if self.config.shard_exp_on_fsdp else 3 - width_dim
        axes = {width_dim: self._width_axes, dim: EXPERT_SHARDS}
        dtypes = jnp.dtype(self.dtype), jnp.dtype(self.config.grad_dtype)
        how = _Gather(recipe, *dtypes, dim, tuple(axes.items()), parts)
        return _quantize_and_gather(how, *jax.tree.map(vary, (shard, health)))

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize_and_gather(how, shard, health):
    return _quantize_and_gather_forward(how, shard, health)[0]


def _quantize_and_gather_forward(how, shard, health):
    """Quantizes first, so that 8 bits travel; blocks that straddle shards are gathered first."""
    all_gather = functools.partial(
        lax.all_gather, axis_name=EXPERT_SHARDS, axis=how.dim, tiled=True
    )
    cast, axes, counts = how.recipe.weight, dict(how.axes), new_counts()[0]
    if cast is None:
        value = all_gather(shard.astype(how.dtype))
    elif _blocks_fit(cast, shard.shape[how.dim], how.dim):
        q = fp8.quantize_weight(shard, cast, axes=axes, parts=how.parts)
        counts = counts if health is None else counts_of(shard, q)
        scale = all_gather(vary(q.scale)) if _scale_is_cut(cast, how.dim) else q.scale
        value = QArray(all_gather(q.qvalue), scale, None, q.qtype)
    else:
        whole = all_gather(shard)
        rest = {dim: names for dim, names in axes.items() if dim != how.dim}
        value = fp8.quantize_weight(whole, cast, axes=rest, parts=how.parts)
        if health is not None:
            counts = counts_of(whole, value) / lax.axis_size(EXPERT_SHARDS)
    shape = list(shard.shape)
    shape[how.dim] *= lax.axis_size(EXPERT_SHARDS)
    value = jax.tree.map(vary, value)
    counts = None if health is None else vary(counts)
    return fp8.new_quantized(value, tuple(shape), how.grad_dtype), (counts, shard)


def _quantize_and_gather_backward(how, residuals, grad):
    counts, shard = residuals
    scattered = lax.psum_scatter(grad.master, EXPERT_SHARDS, scatter_dimension=how.dim, tiled=True)
    grad = scattered.astype(shard.dtype)
    if counts is None:
        return grad, None
    rest = [jnp.zeros_like(counts)] * (len(OPERANDS) - 1)
    return grad, jnp.stack([counts, *rest])


_quantize_and_gather.defvjp(_quantize_and_gather_forward, _quantize_and_gather_backward)


def _block(cast, dim):
    return (1, cast.tile[1], cast.tile[0])[dim]


def _blocks_fit(cast, shard_size, dim):
    return fp8.shards_hold_whole_blocks(shard_size, _block(cast, dim))


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
