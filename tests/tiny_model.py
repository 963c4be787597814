"""A tiny DeepSeek-V3 on a mesh: its config, a packed batch, its loss and its gradients."""

import functools
import math

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from octablox.config import load
from octablox.mesh import AXES, batch_partition, init_params, make_mesh, map_specs, shardings
from octablox.model import transformer
from octablox.train.step import settings_of

# Compiles in half the time; for what need not run as it is shipped.
QUICK = {"xla_backend_optimization_level": 0}
SIZES = {
    "model_name": "tiny",
    "vocab_size": 64,
    "base_num_decoder_layers": 2,
    "first_num_dense_layers": 0,
    "mtp_num_layers": 0,
    "base_moe_mlp_dim": 128,
    "max_target_length": 16,
    "routed_scaling_factor": 2.5,
    "dtype": "float32",
    "learning_rate": 0.01,
    "warmup_steps_fraction": 0,
}


def config(**settings):
    """The tiny config with some settings changed."""
    arguments = SIZES | settings
    return load([f"{key}={_text(value)}" for key, value in arguments.items()]).config


def _text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def mesh(data=1, fsdp=1, expert=1, context=1):
    shape = {"data": data, "fsdp": fsdp, "expert": expert, "context": context}
    return make_mesh(shape, jax.devices()[: math.prod(shape.values())])


def batch(rows, length=16, vocab=64, seed=0):
    """Rows of two documents each and some padding; how much differs from row to row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length), dtype=np.int32)
    segments = np.zeros((rows, length), np.int32)
    positions = np.zeros((rows, length), np.int32)
    for row in range(rows):
        cut = int(rng.integers(2, length - 3))
        end = int(rng.integers(cut + 2, length + 1))
        segments[row, :cut], segments[row, cut:end] = 1, 2
        positions[row, :cut], positions[row, cut:end] = np.arange(cut), np.arange(end - cut)
    targets = np.roll(tokens, -1, axis=1)
    following = np.append(segments[:, 1:], np.zeros((rows, 1), np.int32), axis=1)
    weights = ((segments > 0) & (segments == following)).astype(np.float32)
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": segments,
        "positions": positions,
        "weights": weights,
    }


def params(config, seed=3):
    """Initial parameters as NumPy arrays; the router's biases are made uneven, norms not 1."""
    specs = transformer.parameter_specs(config.model, config.moe)
    values = jax.device_get(init_params(specs, seed, mesh(), jnp.float32))
    rng = np.random.default_rng(seed)

    def changed(path, value):
        name = path[-1].key
        if name == "bias":
            return rng.normal(size=value.shape).astype(np.float32) * 0.05
        if "norm" in name:
            return rng.uniform(0.5, 1.5, value.shape).astype(np.float32)
        return value

    return jax.tree_util.tree_map_with_path(changed, values)


def gradient_function(config, mesh, **compiler_options):
    """A jitted (params, batch) -> loss, its parts, gradients of params, and counts of the casts."""
    settings = settings_of(config)
    specs = transformer.parameter_specs(config.model, config.moe)
    partitions = map_specs(lambda spec: spec.partition_spec, specs)

    def local(params, batch):
        total = jnp.maximum(lax.psum(jnp.sum(batch["weights"]), AXES), 1.0)
        loss = functools.partial(transformer.loss, settings=settings)
        value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        probes = transformer.new_probes(config.model)
        (total_loss, parts), (grads, counts) = value_and_grad(
            params, probes, {**batch, "total_weight": total}
        )
        return {**parts, "total": total_loss}, grads, counts

    on_mesh = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(partitions, batch_partition()),
        out_specs=(P(), partitions, P()),
        check_vma=True,
    )
    return jax.jit(on_mesh, compiler_options=compiler_options or None)


def place(config, mesh, params, batch):
    """Both on the mesh."""
    specs = transformer.parameter_specs(config.model, config.moe)
    where = NamedSharding(mesh, batch_partition())
    return jax.device_put(params, shardings(specs, mesh)), jax.device_put(batch, where)


def gradients(config, mesh, params, batch, **compiler_options):
    """`gradient_function` called once: NumPy arrays."""
    function = gradient_function(config, mesh, **compiler_options)
    return jax.device_get(function(*place(config, mesh, params, batch)))


def names_and_values(tree):
    """(name, float64 array) of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return [(keystr(path), np.asarray(value, np.float64)) for path, value in leaves]


def differing(a, b):
    """Names of the leaves that are not equal bit for bit (NaN equals NaN)."""
    pairs = zip(names_and_values(a), names_and_values(b), strict=True)
    return [name for (name, x), (_, y) in pairs if not np.array_equal(x, y, equal_nan=True)]


def relative_errors(got, expected):
    """name -> Frobenius norm of the difference over that of `expected`, for each leaf."""
    pairs = zip(names_and_values(got), names_and_values(expected), strict=True)
    return {
        name: float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))
        for (name, x), (_, y) in pairs
    }
