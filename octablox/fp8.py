"""All of quantization.

A training step multiplies three times with each expert weight (x [M,K] activations, w [E,K,N]
weights, dout [M,N] gradients; every product is grouped by expert):

    out  = x    @ w        contracts K     forward
    dlhs = dout @ w^T      contracts N     gradient of the activations
    drhs = x^T  @ dout     contracts M     gradient of the weights

FP8 has 8 bits a value, so each operand is stored as `value * scale`: `value` in an 8-bit type,
`scale` in float32, one for each *tile* of the operand. A tile is written (outer, contracted):
how many elements along the dim that survives the product, and along the dim that it sums over,
share a scale. `None` means all of them.

    (1, None)     one scale per row of x, per output channel of w     fp8_full, int8
    (None, None)  one scale per matrix                                fp8_tensorwise
    (1, 128)      one per 128 neighbours of a row                     fp8_blockwise, activations
    (128, 128)    one per square block                                fp8_blockwise, weights
    (1, 32)       the same with 32 and powers of two (e8m0)           mxfp8

A scale that is constant along the contracted dim leaves the sum: it multiplies the finished
product once. A scale that varies along it must be applied to each partial sum.

**Why the backward needs no second copy of x and w.** In `out`, w's scale runs along N, outside
the sum. In `dlhs` N is summed over, so the scale moves to the other operand: dout is multiplied
by w's scale *before* dout is quantized, and w's 8-bit values serve unchanged. The same holds for
x's row scales in `drhs`. Square blocks serve in both directions as they are. Tiles like (1, 128)
must be cut anew along the other dim; their scales are powers of two, so that this second cast
moves exponents and rounds nothing but values that leave the range.

**Which type.** e4m3 has 3 bits of mantissa and reaches 448; e5m2 has 2 and reaches 57344, with
twice the rounding error and far more range, which gradients need when one scale serves many.
Casts saturate. A scale is never 0, NaN or Inf; a NaN stays a NaN in the value (in int8, which
has none, it becomes 0; the counts of `health` show it as saturated).

**Who quantizes.** qwix does activations and gradients. Weights are quantized here, because qwix
cannot handle an array whose type says `reduced` (an FSDP-gathered weight inside `shard_map`), and
because a shard's scale must come from the whole weight: `absmax` is taken over every mesh axis
that shards the scale's dims. So a weight can be quantized *before* it is gathered, and 8 bits
travel instead of 16.

Sources: Micikevicius et al., "FP8 formats for deep learning" (2022); DeepSeek-V3 technical report
(2024), section 3.3; OCP Microscaling Formats v1.0 (2023).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pydantic
import qwix
import yaml
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

# The calibrate step of `qwix.quantize` alone: after it the absmax is shared across shards, which
# the public function has no place for.
from qwix._src.core import qarray as qwix_core
from qwix._src.core.qarray import QArray

from octablox.errors import UserError
from octablox.kernels import vary_like

Tile = tuple[pydantic.PositiveInt | None, pydantic.PositiveInt | None]

# Relative Frobenius error of a cast, measured on values of spread magnitudes.
CAST_ERROR = {"float8_e4m3fn": 0.0265, "float8_e5m2": 0.0527, "int8": 0.01}


class Cast(pydantic.BaseModel):
    """How one operand becomes 8 bits.

    Attributes:
      dtype: `float8_e4m3fn`, `float8_e5m2` or `int8`.
      tile: (outer, contracted) elements that share a scale; None means the whole dim.
      calibration: `absmax`, `absmax,F` (F times the absmax), `fixed,-A,A`, or `rms,F`.
      power_of_two: round scales up to powers of two, as e8m0 holds them.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    dtype: str
    tile: Tile
    calibration: str = "absmax"
    power_of_two: bool = False

    @pydantic.field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str) -> str:
        if dtype not in CAST_ERROR:
            raise ValueError(f"expected one of {', '.join(CAST_ERROR)}, got {dtype!r}")
        return dtype

    @pydantic.field_validator("calibration")
    @classmethod
    def _known_calibration(cls, calibration: str) -> str:
        parse_calibration(calibration)
        return calibration

    @property
    def error(self) -> float:
        """Relative Frobenius error to expect of this cast."""
        return CAST_ERROR[self.dtype]

    @property
    def recut(self) -> bool:
        """Whether its tiles do not serve when the other dim is contracted, see `Recipe`."""
        return None not in self.tile and self.tile[0] != self.tile[1]


class Recipe(pydantic.BaseModel):
    """The cast of each operand of the three products; None leaves an operand as it is.

    Attributes:
      weight, act: w and x in `out`, and again in the gradients.
      dlhs_grad, drhs_grad: dout in `dlhs` (contracts N) and in `drhs` (contracts M).
      column_parts: the output columns come as that many equal parts, and no scale serves columns
        of two of them: 2 when gate and up are merged.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    name: str
    weight: Cast | None = None
    act: Cast | None = None
    dlhs_grad: Cast | None = None
    drhs_grad: Cast | None = None
    column_parts: int = pydantic.Field(1, ge=1)

    @pydantic.model_validator(mode="after")
    def _tiles_meet(self) -> "Recipe":
        for dim, a, b in (
            ("K", "act", "weight"),
            ("N", "dlhs_grad", "weight"),
            ("M", "drhs_grad", "act"),
        ):
            blocks = [cast.tile[1] for cast in (getattr(self, a), getattr(self, b)) if cast]
            if None not in blocks and len(set(blocks)) > 1:
                raise ValueError(
                    f"blocks of {a} and {b} meet along {dim}: expected equal contracted tiles "
                    f"or null, got {blocks[0]} and {blocks[1]}"
                )
        for operand, gradient in (("weight", "dlhs_grad"), ("act", "drhs_grad")):
            cast = getattr(self, operand)
            if cast and getattr(self, gradient) and cast.recut and not cast.power_of_two:
                raise ValueError(
                    f"{operand}: tile {cast.tile} is cut anew for {gradient}'s product, which "
                    "rounds twice; expected power_of_two: true, got false"
                )
        return self

    def merged(self, parts: int) -> "Recipe":
        """This recipe for `parts` weights side by side in one GMM."""
        return self.model_copy(update={"column_parts": parts})

    def budget(self, product: str) -> float:
        """Relative Frobenius error that `out`, `dlhs` or `drhs` may have against float64."""
        pair = {
            "out": (self.act, self.weight),
            "dlhs": (self.dlhs_grad, self.weight),
            "drhs": (self.act, self.drhs_grad),
        }[product]
        return 1.5 * math.sqrt(sum(cast.error**2 for cast in pair if cast))


def _recipe(name, weight, act, dlhs_grad, drhs_grad) -> Recipe:
    return Recipe(name=name, weight=weight, act=act, dlhs_grad=dlhs_grad, drhs_grad=drhs_grad)


def _uniform(name: str, tile: Tile, forward: str, backward: str | None, **kwargs) -> Recipe:
    e = Cast(dtype=forward, tile=tile, **kwargs)
    g = Cast(dtype=backward, tile=tile, **kwargs) if backward else None
    return _recipe(name, e, e, g, g)


_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
# Of weights under fp8_blockwise, as DeepSeek's checkpoints hold them.
SQUARE_BLOCKS = Cast(dtype=_E4M3, tile=(128, 128))
_BLOCK_ROW = Cast(dtype=_E4M3, tile=(1, 128), power_of_two=True)
_INT8 = Cast(dtype="int8", tile=(1, None))

BF16 = Recipe(name="bf16")
RECIPES = {
    recipe.name: recipe
    for recipe in (
        BF16,
        _uniform("fp8_full", (1, None), _E4M3, _E5M2),
        _uniform("fp8_tensorwise", (None, None), _E4M3, _E5M2),
        _recipe("fp8_blockwise", SQUARE_BLOCKS, _BLOCK_ROW, _BLOCK_ROW, _BLOCK_ROW),
        _uniform("mxfp8", (1, 32), _E4M3, _E4M3, power_of_two=True),
        # The rows that drhs sums over differ by orders of magnitude, which one integer scale per
        # column cannot hold: that product keeps its gradient operand unquantized.
        _recipe("int8", _INT8, _INT8, _INT8, None),
    )
}


# Of gradients that cross the `expert` axis in 8 bits.
WIRE_GRAD = Cast(dtype=_E5M2, tile=(1, None))


def wire_cast(recipe: Recipe) -> Cast:
    """The cast of tokens that cross the `expert` axis in 8 bits.

    It is the recipe's own cast of activations, so that nothing is rounded twice, where its scales
    are those of single rows; else one e4m3 scale for each row.
    """
    if recipe.act and recipe.act.tile[0] == 1:
        return recipe.act
    return Cast(dtype=_E4M3, tile=(1, None))


class QuantizationConfig(pydantic.BaseModel):
    """The recipe by name (or a YAML file), and the calibration of each kind of operand."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    quantization: str = pydantic.Field(
        "",
        description="recipe of the expert GMMs: bf16 (or empty), fp8_full, fp8_tensorwise, "
        "fp8_blockwise, mxfp8, int8, or the path of a recipe in YAML",
    )
    use_qwix_quantization: bool = pydantic.Field(
        True, description="activations and gradients are quantized by qwix; always true"
    )
    use_manual_quantization: bool = pydantic.Field(
        True, description="weights are quantized by octablox's own quantizer; always true"
    )
    weight_quantization_calibration_method: str = pydantic.Field(
        "", description="absmax | absmax,F | fixed,-A,A | rms,F; empty: the recipe's own"
    )
    act_quantization_calibration_method: str = pydantic.Field(
        "", description="the same for activations"
    )
    bwd_quantization_calibration_method: str = pydantic.Field(
        "", description="the same for gradients"
    )
    quantization_skip: str = pydantic.Field(
        "",
        description="casts that stay in dtype, patterns with commas between: layers.3, "
        "*.down.drhs_grad, mtp.*; a name is LAYER.GEMM.OPERAND, as in a run's health",
    )
    quantization_warmup_steps: int = pydantic.Field(
        0, ge=0, description="so many first steps train without any cast"
    )


def recipe_from_config(config: QuantizationConfig) -> Recipe:
    """The recipe that a config names, with the calibrations it sets.

    Raises:
      UserError: an unknown recipe, an unreadable or invalid YAML file, an invalid calibration.
    """
    name = config.quantization or "bf16"
    recipe = _read_recipe(Path(name)) if name.endswith((".yml", ".yaml")) else RECIPES.get(name)
    if recipe is None:
        raise UserError(
            f"quantization: expected one of {', '.join(RECIPES)} or a .yml file, got {name!r}"
        )
    casts: dict[str, Cast] = {}
    for kind, fields in (
        ("weight", ("weight",)),
        ("act", ("act",)),
        ("bwd", ("dlhs_grad", "drhs_grad")),
    ):
        key = f"{kind}_quantization_calibration_method"
        if method := getattr(config, key):
            casts |= _with_calibration(recipe, fields, key, method)
    return recipe.model_copy(update=casts)


def _with_calibration(recipe, fields, key, method) -> dict[str, Cast]:
    try:
        parse_calibration(method)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None
    casts = {field: getattr(recipe, field) for field in fields if getattr(recipe, field)}
    if not casts:
        raise UserError(
            f"{key}: the recipe {recipe.name} casts no such operand; leave it empty, got {method!r}"
        )
    return {field: cast.model_copy(update={"calibration": method}) for field, cast in casts.items()}


def _read_recipe(path: Path) -> Recipe:
    try:
        fields = yaml.safe_load(path.read_text())
        return Recipe(**{"name": path.stem, **fields})
    except OSError as error:
        raise UserError(f"quantization: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, TypeError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"quantization: {path} is no recipe in YAML: {reason}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"quantization: {path}: {where}: {first['msg']}") from None


def parse_calibration(method: str) -> tuple[str, float]:
    """`method` as its kind (absmax, rms, fixed) and its number: a factor, or A of `fixed,-A,A`."""
    expected = "expected absmax, absmax,F, fixed,-A,A or rms,F (F, A > 0)"
    kind, *numbers = method.lower().replace(" ", "").split(",")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        raise ValueError(f"{expected}, got {method!r}") from None
    number = values[-1] if values else 1.0
    forms = {
        "absmax": ([], [number]),
        "rms": ([number],),
        "fixed": ([number], [-number, number]),
    }
    if values not in forms.get(kind, ()) or not 0 < number < math.inf:
        raise ValueError(f"{expected}, got {method!r}")
    return kind, number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An operand that was quantized before it reached its GMM.

    Attributes:
      master: stands for the operand in differentiation: its shape, and the dtype of its gradient.
        Its values are never read.
      q: the 8-bit values and their scale; or, under a recipe that does not cast the operand, its
        values.

    As any pytree it may hold other leaves in place of its arrays, such as partition specs.
    """

    master: Any
    q: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the operand: [E, K, N] of a weight, [M, K] of activations."""
        return self.master.shape

    def split_by_gradient(self) -> tuple["Quantized", "Quantized"]:
        """The part that is differentiated, and the rest."""
        return Quantized(self.master, None), Quantized(None, self.q)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedGrad:
    """An array whose gradient is quantized: the mirror image of `Quantized`.

    Attributes:
      value: the array [R, D].
      grad: stands for it in differentiation: 8-bit values and scales of the gradient's shape, never
        read. Of a gradient they are what there is, and `value` is None.
    """

    value: Any
    grad: Any

    def split_by_gradient(self) -> tuple["QuantizedGrad", "QuantizedGrad"]:
        """The part that is differentiated, and the rest."""
        return QuantizedGrad(None, self.grad), QuantizedGrad(self.value, None)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Master:
    """What is left of what only stands for something, and is not held as an array."""

    shape: tuple[int, ...]
    dtype: jnp.dtype


def without_masters(tree: Any) -> Any:
    """`tree` with all that only stands for something in differentiation reduced to its shape.

    Nobody reads it, but XLA holds every array that a loop carries.
    """

    def drop(node):
        if isinstance(node, Quantized) and node.q is not None:  # a gradient has no `q`
            return Quantized(_Master(node.master.shape, jnp.dtype(node.master.dtype)), node.q)
        if isinstance(node, QuantizedGrad) and node.value is not None:
            return QuantizedGrad(node.value, _Master(node.value.shape, jnp.dtype(WIRE_GRAD.dtype)))
        return node

    return jax.tree.map(drop, tree, is_leaf=_stands_for)


def with_masters(tree: Any) -> Any:
    """The inverse of `without_masters`: zeros."""

    def make(node):
        if isinstance(node, Quantized) and isinstance(node.master, _Master):
            return new_quantized(node.q, node.master.shape, node.master.dtype)
        if isinstance(node, QuantizedGrad) and isinstance(node.grad, _Master):
            return new_quantized_grad(node.value)
        return node

    return jax.tree.map(make, tree, is_leaf=_stands_for)


def new_quantized(
    q: QArray | jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> Quantized:
    """`q` with a master of the operand's shape and its gradient's dtype."""
    return Quantized(vary_like(tuple(jax.tree.leaves(q)), jnp.zeros(shape, dtype)), q)


def new_quantized_grad(value: Float[Array, "R D"]) -> QuantizedGrad:
    """`value`, with zeros that stand for its gradient; not differentiable, see `quantize_grads`."""
    like = jax.eval_shape(quantize_grad, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return QuantizedGrad(
        value, jax.tree.map(lambda a: vary_like((value,), jnp.zeros(a.shape, a.dtype)), like)
    )


def quantize_grad(grad: Float[Array, "R D"]) -> QArray:
    """A gradient as it crosses the `expert` axis: e5m2, with a scale for each row."""
    return quantize(grad, WIRE_GRAD, contracted=1)


@jax.custom_vjp
def quantize_grads(x: Float[Array, "R D"]) -> QuantizedGrad:
    """`x`, whose gradient comes quantized, and is dequantized here."""
    return new_quantized_grad(x)


quantize_grads.defvjp(
    lambda x: (quantize_grads(x), None),
    lambda residuals, grad: (dequantize(grad.grad).astype(grad.value.dtype),),
)


def _stands_for(node):
    return isinstance(node, Quantized | QuantizedGrad)


def tiles(cast: Cast, shape: tuple[int, ...], contracted: int, parts: int = 1) -> tuple[int, ...]:
    """Elements of each dim of an operand that share one scale.

    The operand's last two dims are its outer and its contracted dim; a leading dim (experts)
    never shares. A dim that its tile does not divide must be padded. No tile holds elements of
    two of the outer dim's `parts`: a block that does not divide a part shrinks until it does.
    """
    outer = _outer_dim(len(shape), contracted)
    part = shape[outer] // parts
    tile = [1] * len(shape)
    tile[outer] = min(cast.tile[0] or part, part)
    if parts > 1:
        tile[outer] = math.gcd(tile[outer], part)
    tile[contracted] = min(cast.tile[1] or shape[contracted], shape[contracted])
    return tuple(tile)


def quantize(
    x: Float[Array, "_ _"],
    cast: Cast,
    *,
    contracted: int,
    axes: Mapping[int, tuple[str, ...]] | None = None,
    rows: tuple[jax.Array, jax.Array] | None = None,
    parts: int = 1,
) -> QArray:
    """Quantizes activations or gradients with qwix.

    Args:
      x: [M, K] or [M, N], any float dtype. Blocks that do not divide a dim pad it with zeros.
      cast: how.
      contracted: the dim that the product sums over.
      axes: per dim, the mesh axes that shard it; a scale that spans such a dim is made to agree.
      rows: first and one past the last row that count; the others become zero unread.
      parts: see `Recipe.column_parts`.

    Returns:
      8-bit values and float32 scales that obey qwix's rule: each scale dim divides its dim.
    """
    counted: list[tuple[Any, Any]] = [(0, size) for size in x.shape]
    x = x.astype(jnp.float32)
    if rows is not None:
        row = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
        x = jnp.where((row >= rows[0]) & (row < rows[1]), x, 0)
        counted[0] = rows
    tile = tiles(cast, x.shape, contracted, parts)
    x = _pad(x, tile)
    how = qwix_core.HowToQuantize(
        qtype=cast.dtype,
        channelwise_axes=[dim for dim, t in enumerate(tile) if t == 1],
        tiled_axes={d: t for d, t in enumerate(tile) if 1 < t < x.shape[d]},
        calibration_method=cast.calibration,
    )
    amax = qwix_core.calibrate(x, how)["absmax"]
    spanned = _spanned_axes(cast, x.ndim, contracted, axes or {})
    kind, _ = parse_calibration(cast.calibration)
    if kind == "absmax":
        amax = _pmax(amax, spanned)
    elif kind == "rms":
        total = jnp.square(amax) * math.prod(tile)
        amax = jnp.sqrt(_mean(total, tile, counted, spanned))
    # Not qwix's own scale, which gives up below 1e-19: a gradient of 1e-12 that has taken over a
    # weight's scale would become zero.
    scale = _safe_scale(amax / scale_bound(cast.dtype), cast)
    return _scaled_down(x, scale, cast.dtype)


def quantize_weight(
    w: Float[Array, "E K N"],
    cast: Cast,
    *,
    axes: Mapping[int, tuple[str, ...]] | None = None,
    parts: int = 1,
) -> QArray:
    """Quantizes expert weights, whole or a shard of them, of any sharding type.

    Args:
      w: [E, K, N]; inside `shard_map` it may be varying, replicated or `reduced` (gathered).
      cast: how; K is its contracted dim.
      axes: per dim, the mesh axes that shard it. A scale that spans such a dim is the same on all
        of its shards. Blocks must then divide the shard.
      parts: see `Recipe.column_parts`.

    Returns:
      8-bit values, varying where `w` was reduced, and float32 scales, varying where they differ.

    Raises:
      ValueError: a block straddles two shards.
    """
    axes = axes or {}
    for dim, block in ((1, cast.tile[1]), (2, cast.tile[0])):
        if axes.get(dim) and not shards_hold_whole_blocks(w.shape[dim], block):
            raise ValueError(
                f"weight blocks of {block} straddle shards of {w.shape[dim]} (dim {dim}, mesh axes "
                f"{axes[dim]}); gather the weight first or choose a mesh whose shards they divide"
            )
    counted = [(0, size) for size in w.shape]
    tile = tiles(cast, w.shape, 1, parts)
    w = _pad(as_varying(w), tile)
    e, k, n = (size // t for size, t in zip(w.shape, tile, strict=True))
    blocks = w.reshape(e, k, tile[1], n, tile[2])
    spanned = _spanned_axes(cast, 3, 1, axes)
    kind, number = parse_calibration(cast.calibration)
    if kind == "fixed":
        amax = jnp.full((1, 1, 1), number, jnp.float32)
    elif kind == "rms":
        total = jnp.sum(jnp.square(blocks.astype(jnp.float32)), (2, 4))
        amax = jnp.sqrt(_mean(total, tile, counted, spanned)) * number
    else:
        # Exact in any dtype, and XLA:CPU would write a float32 copy of a bfloat16 weight.
        largest = jnp.max(jnp.abs(blocks), (2, 4)).astype(jnp.float32)
        amax = _pmax(largest, spanned) * number
    scale = _safe_scale(amax / scale_bound(cast.dtype), cast)
    return _scaled_down(w.astype(jnp.float32), scale, cast.dtype)


def shards_hold_whole_blocks(shard_size: int, block: int | None) -> bool:
    """Whether blocks of that size can be cut from a dim's shards one by one."""
    return block is None or shard_size % block == 0


def dequantize(q: QArray) -> Float[Array, "..."]:
    """`value * scale` in float32, of the padded shape."""
    return qwix.dequantize(q)


def as_varying(x: jax.Array) -> jax.Array:
    """`x` with `reduced` mesh axes as varying ones: no communication, only the type changes.

    Its transpose makes the cotangent `unreduced`, as JAX demands of a reduced primal.
    """
    reduced = tuple(sorted(jax.typeof(x).mat.reduced))
    return lax.pcast(x, reduced, to="varying") if reduced else x


def _pad(x, tile):
    """`x` with zeros up to whole tiles."""
    pad = [(0, -size % t) for size, t in zip(x.shape, tile, strict=True)]
    return jnp.pad(x, pad) if any(after for _, after in pad) else x


def _outer_dim(rank, contracted):
    return (rank - 1) + (rank - 2) - contracted


def _spanned_axes(cast, rank, contracted, axes):
    """Mesh axes over which a scale must agree: those that shard a dim which one scale spans."""
    tile = {_outer_dim(rank, contracted): cast.tile[0], contracted: cast.tile[1]}
    spanned = [dim for dim, block in tile.items() if block is None]
    return {axis for dim in spanned for axis in axes.get(dim, ())}


def _mean(total, tile, counted, axes):
    """`total` of each tile over its elements that count, of all shards on `axes` together.

    `counted` holds, per dim, the first and one past the last element that count.
    """
    count = jnp.ones((1,) * total.ndim)
    for dim, (t, (first, end)) in enumerate(zip(tile, counted, strict=True)):
        start = lax.broadcasted_iota(jnp.int32, total.shape, dim) * t
        inside = jnp.minimum(end, start + t) - jnp.maximum(first, start)
        count = count * jnp.maximum(inside, 0)
    return _psum(total, axes) / jnp.maximum(_psum(vary_like((total,), count), axes), 1)


def _ordered(axes, x):
    return tuple(sorted(axes & jax.typeof(x).mat.varying))


def _pmax(x, axes):
    axes = _ordered(axes, x)
    return lax.pmax(x, axes) if axes else x


def _psum(x, axes):
    axes = _ordered(axes, x)
    return lax.psum(x, axes) if axes else x


def _safe_scale(scale, cast):
    scale = jnp.where(jnp.isfinite(scale) & (scale >= jnp.finfo(jnp.float32).tiny), scale, 1.0)
    if not cast.power_of_two:
        return scale
    mantissa, exponent = jnp.frexp(scale)
    return jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5))


def _scaled_down(x, scale, dtype) -> QArray:
    """`x / scale` in 8 bits."""
    # qwix's broadcast, unlike one over blocks, leaves XLA:CPU a loop that it vectorizes.
    y = qwix_core.call_with_generic_broadcast(jnp.divide, x, scale)
    convert = functools.partial(qwix_core.numerics.convert_to, qtype=dtype)
    if dtype == "int8":
        return QArray(convert(y), scale, None, dtype)
    value = lax.platform_dependent(
        y, cpu=functools.partial(_float8_by_bits, dtype=dtype), default=convert
    )
    return QArray(value, scale, None, dtype)


def _float8_by_bits(y, dtype):
    """The saturating cast of float32 `y`, to the bit what XLA's is, in integer operations.

    XLA:CPU does not vectorize its own conversion: this one is 3.5 times as fast.
    """
    info = jnp.finfo(dtype)
    bias, dropped = 1 - int(info.minexp), 23 - info.nmant
    as_int = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
    bits = as_int(y)
    magnitude = bits & 0x7FFFFFFF
    kept = jnp.minimum(magnitude, as_int(jnp.float32(info.max)))
    # Round to nearest, ties to even: half of the dropped part, less one where the kept is even.
    normal = (kept + (1 << dropped - 1) - 1 + ((kept >> dropped) & 1)) >> dropped
    normal -= (127 - bias) << info.nmant
    # A float of this magnitude holds the smallest subnormal in its last bit.
    unit = jnp.float32(2.0 ** (24 - bias - info.nmant))
    subnormal = as_int(jnp.abs(y) + unit) - as_int(unit)
    code = jnp.where(jnp.abs(y) < info.smallest_normal.astype(jnp.float32), subnormal, normal)
    code = jnp.where(jnp.isnan(y), jnp.uint32(0x7F), code) | (bits >> 24) & 0x80
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.dtype(dtype))


@functools.cache
def scale_bound(dtype: str) -> float:
    """The magnitude that an absmax is scaled to: the largest that the type holds, or near it."""
    return float(qwix_core.numerics.get_symmetric_bound(dtype))


@functools.cache
def half_smallest(dtype: str) -> float:
    """The largest magnitude that rounds to zero."""
    return 0.5 if dtype == "int8" else float(jnp.finfo(dtype).smallest_subnormal) / 2
