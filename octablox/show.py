"""What a command's settings come to, before anything runs: mesh, parameters, FLOPs, GEMMs.

M rows, K contracted, N output columns, E experts held by one device; D model width, F expert width,
S tokens of a sequence. FLOPs count a multiply-add as two.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from typing import Any

import jax
from jax import numpy as jnp
from rich.console import Console
from rich.table import Table

from octablox import checks, fp8, kernels
from octablox.config import KEYS, Resolved, dump
from octablox.kernels import Scaled, pallas_tpu, tiles
from octablox.kernels.chips import chip_of_topology
from octablox.kernels.tiles import GmmTiles, TgmmTiles
from octablox.mesh import is_spec
from octablox.model import skip, transformer
from octablox.moe.overflow import buffer_rows
from octablox.settings import Config


def show(resolved: Resolved, device_count: int, *, as_json: bool = False) -> None:
    """Prints the report, as tables or as one JSON object."""
    report = make_report(resolved, device_count)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)


def described_chip(config: Config) -> contextlib.AbstractContextManager[None]:
    """Where the GMMs are those of the chip that `compile_topology` names, if there is that key."""
    chip = chip_of_topology(str(dump(config).get("compile_topology", "")))
    return pallas_tpu.target(chip.name) if chip else contextlib.nullcontext()


def make_report(resolved: Resolved, device_count: int) -> dict[str, Any]:
    """Everything that `octablox show` says, of JSON's types.

    Keys: config (key -> value, source), mesh (axis -> devices), batch, parameters (part -> number,
    total, active_per_token), flops (forward_per_token: part -> FLOPs; forward_per_step,
    per_step), gemms (one row for each GEMM and product).
    """
    config = resolved.config
    axes = checks.resolve_mesh_shape(config, device_count)
    sources = resolved.sources
    sequences = checks.global_batch_size(config, device_count)
    tokens = sequences * config.run.max_target_length
    per_token = flops_per_token(config)
    forward = tokens * sum(per_token.values())
    return {
        "config": {
            key: {"value": value, "source": sources[key]} for key, value in dump(config).items()
        },
        "mesh": axes,
        "batch": {
            "sequences": sequences,
            "tokens": tokens,
            "micro_batches": config.schedule.micro_batches,
            "tokens_per_micro_batch_and_device": _tokens(config),
        },
        "parameters": parameters(config),
        "flops": {
            "forward_per_token": per_token,
            "forward_per_step": forward,
            "per_step": 3 * forward,
        },
        "gemms": [gemm.describe(config) for gemm in gemms(config, axes)],
    }


def _tokens(config: Config) -> int:
    """Tokens of one micro-batch on one device."""
    run = config.run
    return round(run.per_device_batch_size * run.max_target_length) // config.schedule.micro_batches


def parameters(config: Config) -> dict[str, int]:
    """Parameters by part, `total`, and `active_per_token`: all but the experts not chosen."""
    specs = transformer.parameter_specs(config.model, config.moe)
    parts: dict[str, int] = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        part = _part(jax.tree_util.keystr(path, simple=True, separator="."))
        parts[part] = parts.get(part, 0) + spec.size
    total = sum(parts.values())
    routed = parts.get("routed experts", 0)
    idle = routed * (config.moe.num_experts - config.moe.num_experts_per_tok)
    active = total - idle // config.moe.num_experts
    return {**parts, "total": total, "active_per_token": active}


# A word of a parameter's path -> the part of the model that it belongs to; the first that fits.
_PARTS = {
    "experts": "routed experts",
    "shared": "shared experts",
    "router": "routers",
    "attention": "attention",
    "mlp": "dense MLPs",
    "projection": "MTP projection",
    "embedding": "embedding",
    "head": "output head",
}


def _part(path: str) -> str:
    """The part of the model that a parameter's path names; all norms are one part."""
    words = path.split(".")
    if words[-1].endswith("norm"):
        return "norms"
    return next((part for word, part in _PARTS.items() if word in words), "other")


def flops_per_token(config: Config) -> dict[str, float]:
    """FLOPs of one token's forward pass, by part; the backward pass is twice that.

    Attention is causal: in the mean a token attends to (S + 1) / 2 tokens.
    """
    model, moe = config.model, config.moe
    d, heads = model.base_emb_dim, model.base_num_query_heads
    qk = model.qk_nope_head_dim + model.qk_rope_head_dim
    query = model.q_lora_rank * (d + heads * qk) if model.q_lora_rank else d * heads * qk
    keys_values = d * (model.kv_lora_rank + model.qk_rope_head_dim)
    keys_values += model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    projections = query + keys_values + heads * model.v_head_dim * d
    scores = (config.run.max_target_length + 1) / 2 * heads * (qk + model.v_head_dim)
    mtp = model.mtp_num_layers
    dense = model.first_num_dense_layers
    sparse = model.base_num_decoder_layers - dense + mtp
    expert = 3 * d * moe.base_moe_mlp_dim
    multiply_adds = {
        "attention projections": (dense + sparse) * projections,
        "attention scores": (dense + sparse) * scores,
        "dense MLPs": dense * 3 * d * model.base_mlp_dim,
        "routers": sparse * d * moe.num_experts,
        "routed experts": sparse * expert * moe.num_experts_per_tok,
        "shared experts": sparse * expert * moe.shared_experts,
        "MTP projection": mtp * 2 * d * d,
        "output head": (1 + mtp) * d * model.vocab_size,
    }
    return {part: 2.0 * number for part, number in multiply_adds.items() if number}


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One of the three products of one expert GMM, on one device for one micro-batch.

    Attributes:
      gemm: "gate_up", "gate", "up" or "down".
      product: "out", "dlhs" or "drhs"; M, K and N are always those of `out`.
      groups: experts in all, E or more.
      busy: rows that this device works on in the mean; the others are other devices' experts'.
      recipe: the casts of all three products.
      layers: that have these casts, where `quantization_skip` makes a difference; else "".
    """

    gemm: str
    product: str
    E: int
    M: int
    K: int
    N: int
    groups: int
    busy: int
    recipe: fp8.Recipe
    layers: str = ""

    def describe(self, config: Config) -> dict[str, Any]:
        """The row of the report."""
        left, right = self._casts()
        backend, refusals, chosen = self._backend(config)
        return {
            "gemm": self.gemm,
            "product": self.product,
            "layers": self.layers,
            **{dim: getattr(self, dim) for dim in "EMKN"},
            "busy_rows": self.busy,
            "flops": 2 * self.busy * self.K * self.N,
            "lhs": _say(left, config),
            "rhs": _say(right, config),
            "error_budget": round(self.recipe.budget(self.product), 4),
            "backend": backend,
            "refused_by": refusals,
            "tiles": _tiles(backend, self.M) if chosen is None else str(chosen),
            "no_gain": _no_gain(left, right),
        }

    def _casts(self) -> tuple[fp8.Cast | None, fp8.Cast | None]:
        recipe = self.recipe
        return {
            "out": (recipe.act, recipe.weight),
            "dlhs": (recipe.dlhs_grad, recipe.weight),
            "drhs": (recipe.act, recipe.drhs_grad),
        }[self.product]

    def _backend(self, config: Config) -> tuple[str, list[str], GmmTiles | TgmmTiles | None]:
        """The backend that takes this product, what those before it refused, and TPU tiles."""
        wanted = config.moe.gmm_backend
        refusals: list[str] = []
        for name, backend in kernels.BACKENDS.items():
            if wanted in ("auto", name):
                try:
                    with tiles.record() as chosen:
                        self._trace(backend, config)
                    return name, refusals, chosen[-1] if chosen else None
                except kernels.Unsupported as refusal:
                    refusals.append(str(refusal))
        return "none", refusals, None

    def _trace(self, backend, config: Config) -> None:
        """Runs the product on shapes alone."""
        left, right = self._casts()
        shapes = {
            "out": ((self.M, self.K), 1, (self.E, self.K, self.N), 1),
            "dlhs": ((self.M, self.N), 1, (self.E, self.K, self.N), 2),
            "drhs": ((self.M, self.K), 0, (self.M, self.N), 0),
        }
        lhs_shape, lhs_contracted, rhs_shape, rhs_contracted = shapes[self.product]
        lhs = _operand(left, lhs_shape, lhs_contracted, config)
        rhs = _operand(right, rhs_shape, rhs_contracted, config)
        out_dtype = jnp.dtype(config.model.dtype)
        if self.product == "drhs":
            settings = {"num_local_groups": self.E, "out_dtype": out_dtype}
        else:
            settings = {"transpose_rhs": self.product == "dlhs", "out_dtype": out_dtype}
        run = backend.tgmm if self.product == "drhs" else backend.gmm
        sizes = jax.ShapeDtypeStruct((self.groups,), jnp.int32)
        offset = jax.ShapeDtypeStruct((), jnp.int32)
        jax.eval_shape(functools.partial(run, **settings), lhs, rhs, sizes, offset)


def gemms(config: Config, axes: dict[str, int]) -> list[Gemm]:
    """The GEMMs of one MoE layer on one device, for one micro-batch."""
    model, moe, ep = config.model, config.moe, axes["expert"]
    if model.base_num_decoder_layers == model.first_num_dense_layers:
        return []
    by_expert = moe.expert_sharding == "expert"
    experts = moe.num_experts // ep if by_expert else moe.num_experts
    width = moe.base_moe_mlp_dim if by_expert else moe.base_moe_mlp_dim // ep
    # Dispatch gathers the tokens of all devices along the expert axis, a copy for each choice.
    copies = _tokens(config) * ep * moe.num_experts_per_tok
    rows = buffer_rows(moe, copies, ep)
    busy = copies // ep if by_expert else copies
    names = {"gate_up": 2 * width} if moe.merge_gating_gmm else {"gate": width, "up": width}
    shapes = {name: (model.base_emb_dim, columns) for name, columns in names.items()}
    shapes["down"] = (width, model.base_emb_dim)
    return [
        Gemm(
            *(name, product, experts, rows, *shape),
            groups=moe.num_experts,
            busy=busy,
            recipe=recipe.merged(2) if name == "gate_up" else recipe,
            layers=layers,
        )
        for layers, recipes in _recipes(config).items()
        for name, shape in shapes.items()
        for recipe in [recipes[name == "down"]]
        for product in ("out", "dlhs", "drhs")
    ]


def _recipes(config: Config) -> dict[str, tuple[fp8.Recipe, ...]]:
    """Layers -> their recipes of gate and up and of down; "" stands for all layers."""
    recipe = fp8.recipe_from_config(config.quantization)
    patterns = skip.parse(config.quantization.quantization_skip)
    layers: dict[tuple[fp8.Recipe, ...], list[str]] = {}
    for name in itertools.chain(*transformer.moe_layer_names(config.model).values()):
        layers.setdefault(skip.recipes_of(recipe, patterns, name), []).append(name)
    if len(layers) == 1:
        return {"": next(iter(layers))}
    return {", ".join(names): recipes for recipes, names in layers.items()}


def _operand(cast: fp8.Cast | None, shape: tuple[int, ...], contracted: int, config: Config):
    """An operand of that shape, without values."""
    if cast is None:
        return Scaled(jax.ShapeDtypeStruct(shape, jnp.dtype(config.model.dtype)))
    tile = fp8.tiles(cast, shape, contracted)
    # A scale that spans the contracted dim in tiles is kept as it is; see fp8.tiles.
    padded = tuple(-(-size // t) * t for size, t in zip(shape, tile, strict=True))
    scale = tuple(size // t for size, t in zip(padded, tile, strict=True))
    return Scaled(
        jax.ShapeDtypeStruct(padded, jnp.dtype(cast.dtype)),
        jax.ShapeDtypeStruct(scale, jnp.float32),
    )


def _say(cast: fp8.Cast | None, config: Config) -> str:
    """A cast in words: its dtype, its tile (outer × contracted), its calibration."""
    if cast is None:
        return config.model.dtype
    tile = "×".join("all" if size is None else str(size) for size in cast.tile)
    power = ", powers of two" if cast.power_of_two else ""
    return f"{cast.dtype} {tile} {cast.calibration}{power}"


def _tiles(backend: str, rows: int) -> str:
    """The tiles of a product, in words."""
    sizes = getattr(kernels.BACKENDS.get(backend), "ROW_TILES", None)
    if sizes is None:
        return "XLA's own"
    return f"{min(rows, max(sizes))} rows, all of K and N"


def _no_gain(left: fp8.Cast | None, right: fp8.Cast | None) -> str:
    """Says so where the chip multiplies these 8-bit types no faster than bfloat16."""
    chip = pallas_tpu.chip()
    if chip is None or left is None or right is None:
        return ""
    kind = chip.kind(left.dtype, right.dtype)
    eight_bits = kind in ("fp8", "int8") and not chip.gains(kind)
    return f"{chip.name} multiplies {kind} no faster than bf16" if eight_bits else ""


def _print(report: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width that a table must fit
    console.print(_config_table(report["config"]))
    axes = " × ".join(f"{axis} {size}" for axis, size in report["mesh"].items())
    console.print(f"[bold]mesh[/]  {axes} = {math.prod(report['mesh'].values())} devices")
    batch = report["batch"]
    console.print(
        f"[bold]batch[/]  {batch['sequences']:,} sequences, {batch['tokens']:,} tokens a step; "
        f"on each device {batch['micro_batches']} micro-batches of "
        f"{batch['tokens_per_micro_batch_and_device']:,} tokens\n"
    )
    console.print(_number_table("parameters", report["parameters"]))
    console.print(_flops_table(report["flops"]))
    if report["gemms"]:
        console.print(_gemm_table(report["gemms"]))


def _config_table(config: dict[str, Any]) -> Table:
    table = Table(title="settings", title_justify="left", box=None)
    for column in ("key", "value", "source"):
        table.add_column(column)
    owner = None
    for key, entry in config.items():
        if KEYS.get(key) != owner:
            owner = KEYS[key]
            table.add_row(f"[bold]{owner}[/]")
        value = str(entry["value"]).lower() if isinstance(entry["value"], bool) else entry["value"]
        style = "dim" if entry["source"] == "default" else ""
        table.add_row(f"  {key}", str(value), entry["source"], style=style)
    return table


def _number_table(title: str, numbers: dict[str, int]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, number in numbers.items():
        table.add_row(name.replace("_", " "), f"{number:,}")
    return table


def _flops_table(flops: dict[str, Any]) -> Table:
    per_token = {part: round(number) for part, number in flops["forward_per_token"].items()}
    table = _number_table("FLOPs of a token's forward pass", per_token)
    table.add_row("all of them", f"{sum(per_token.values()):,}")
    table.add_row("a step's forward pass", f"{flops['forward_per_step']:.3e}")
    table.add_row("a step, with the backward pass (3×)", f"{flops['per_step']:.3e}")
    return table


def _gemm_table(rows: list[dict[str, Any]]) -> Table:
    title = "GEMMs of a MoE layer, on one device for one micro-batch"
    table = Table(title=title, title_justify="left", box=None)
    layers = ["layers"] if any(row["layers"] for row in rows) else []
    columns = [*layers, "gemm", "product", *"EMKN", "busy_rows", "lhs", "rhs", "backend", "tiles"]
    for column in columns:
        is_number = column in "EMKN" or column == "busy_rows"
        table.add_column(column.replace("_", " "), justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    refusals = {refusal for row in rows for refusal in row["refused_by"]}
    notes = [f"refused: {'; '.join(sorted(refusals))}"] if refusals else []
    notes += sorted({row["no_gain"] for row in rows} - {""})
    table.caption = "\n".join(notes) or None
    return table
