"""`octablox bench moe`: the experts of one MoE layer on one device, weights' casts included.

    h   = silu(x @ gate) * (x @ up)     R rows, D model width, E experts of width F
    out = h @ down

beside the same two grouped matmuls by lax.ragged_dot and qwix, and as dense matmuls of as many
FLOPs. R = tokens of a device x experts a token; they choose their experts at random.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from octablox.bench import gmm
from octablox.bench.timing import interleaved
from octablox.config import Config
from octablox.fp8 import RECIPES
from octablox.mesh import AXES, make_mesh, map_specs, vary
from octablox.moe import experts
from octablox.moe.experts import Experts

RIVALS = {"ragged_dot": gmm.lax_ragged_dot, "qwix": gmm.qwix_ragged_dot}


def measure(config: Config, recipe: str, seconds: float) -> list[dict[str, Any]]:
    """A flat row for each direction, forward and forward+backward."""
    width, moe = config.model.base_emb_dim, config.moe
    tokens = int(config.run.per_device_batch_size) * config.run.max_target_length
    rows = tokens * moe.num_experts_per_tok
    operands = _operands(rows, width, moe.num_experts, moe.base_moe_mlp_dim)
    found = []
    for direction in gmm.DIRECTIONS:
        runs = {
            name: functools.partial(_compiled(function, direction, operands), *operands)
            for name, function in _contenders(config, recipe).items()
        }
        ms = {name: 1e3 * t for name, t in interleaved(runs, rounds=9, seconds=seconds).items()}
        flops = gmm.products_of(direction) * 2 * rows * width * 3 * moe.base_moe_mlp_dim
        dense = min(ms["dense bfloat16"], ms["dense float32"])
        row = {"recipe": recipe, "direction": direction, "rows": rows, "width": width}
        row |= {"experts": moe.num_experts, "expert_width": moe.base_moe_mlp_dim}
        row |= {f"{name}_ms": ms[name] for name in ("octablox", *RIVALS)} | {"dense_ms": dense}
        row["tflops"] = 1e-9 * flops / ms["octablox"]
        row["gb_per_second"] = 1e-6 * _bytes(operands, direction) / ms["octablox"]
        found.append(row | {"of_dense": dense / ms["octablox"]})
    return found


def _operands(rows, width, count, hidden):
    """x [R, D], gate_up [E, D, 2, F], down [E, F, D], rows by expert, d out [R, D]."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (rows, width), (count, width, 2, hidden), (count, hidden, width), (rows, width)
    x, gate_up, down, dout = (
        jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5
        for key, shape in zip(keys, shapes, strict=True)
    )
    chosen = np.random.default_rng(0).integers(count, size=rows)
    sizes = jnp.asarray(np.bincount(chosen, minlength=count), jnp.int32)
    return x, gate_up, down, sizes, dout


def _bytes(operands, direction):
    """Every operand and result once, the hidden rows between the two products included."""
    x, gate_up, down, _, _ = operands
    hidden = x.shape[0] * 3 * down.shape[1]
    return 2 * gmm.products_of(direction) * (2 * x.size + gate_up.size + down.size + hidden)


def _contenders(config: Config, recipe: str) -> dict[str, Callable]:
    found = {"octablox": _ours(config, recipe)}
    for name, multiply in RIVALS.items():
        found[name] = functools.partial(_swiglu, functools.partial(multiply, recipe))
    for dtype in (jnp.bfloat16, jnp.float32):
        one = functools.partial(gmm.dense, dtype, recipe)
        found[f"dense {jnp.dtype(dtype).name}"] = functools.partial(_swiglu, one)
    return found


def _ours(config, recipe):
    """The experts as a model has them, on a mesh of one device."""
    kernel = Experts(config.moe, RECIPES[recipe], jnp.dtype(jnp.bfloat16))
    of_weights = map_specs(
        lambda spec: spec.partition_spec, experts.specs(config.moe, config.model.base_emb_dim)
    )

    def local(weights, x, sizes):
        health = vary(experts.new_health())
        gathered = {
            "gate_up": kernel.gathered("gate_up", weights["gate_up"], health[0]),
            "down": kernel.gathered("down", weights["down"], health[1]),
        }
        ones = vary(jnp.ones(x.shape[0], x.dtype))
        return kernel.apply(gathered, x, ones, sizes, health)

    mesh = make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
    in_specs = of_weights, P(AXES), P(None)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(AXES))

    def run(x, gate_up, down, sizes):
        arrays = {"gate_up": gate_up, "down": down}, x, sizes
        place = lambda a, spec: jax.reshard(a, NamedSharding(mesh, spec))  # noqa: E731
        return sharded(*jax.tree.map(place, arrays, in_specs))

    return run


def _swiglu(multiply, x, gate_up, down, sizes):
    """By another grouped matmul; gate and up in one."""
    count, width, _, hidden = gate_up.shape
    both = multiply(x, gate_up.reshape(count, width, 2 * hidden), sizes)
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=1)
    return multiply((jax.nn.silu(gate) * up).astype(x.dtype), down, sizes)


def _compiled(function, direction, operands):
    def both(x, gate_up, down, sizes, dout):
        out, pull = jax.vjp(lambda *weights: function(*weights, sizes), x, gate_up, down)
        return out, *pull(dout.astype(out.dtype))

    def forward(x, gate_up, down, sizes, dout):
        del dout
        return function(x, gate_up, down, sizes)

    return jax.jit(forward if direction == "forward" else both).lower(*operands).compile()
