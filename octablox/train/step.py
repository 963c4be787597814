"""One optimizer step: gradients on the mesh, AdamW, the router's bias, and what is logged.

Gradients are taken inside one `shard_map` over the whole mesh; optimizer and state are plain
sharded arrays outside.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import optax
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octablox import fp8
from octablox.config import Config
from octablox.health import COUNTS
from octablox.kernels.chips import chip_of
from octablox.mesh import (
    AXES,
    batch_partition,
    check_divisible,
    init_params,
    map_specs,
    shardings,
)
from octablox.model import skip, transformer
from octablox.model.layers import Settings
from octablox.moe.router import updated_bias
from octablox.train.pretrained import load_params
from octablox.training_config import OptimizerConfig

BATCH_KEYS = ("tokens", "targets", "segment_ids", "positions", "weights")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    Attributes:
      step: int32 [], optimizer steps done.
      params: see `transformer.parameter_specs`.
      opt_state: optax's.
    """

    step: Any  # as any pytree's, the leaves may be what jax puts in their place
    params: dict
    opt_state: Any


def settings_of(config: Config) -> Settings:
    """What of a config shapes the model's computation."""
    recipe = fp8.recipe_from_config(config.quantization)
    skipped = skip.parse(config.quantization.quantization_skip)
    return Settings(config.model, config.moe, recipe, config.schedule, skipped)


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then a cosine to the final fraction, then constant."""
    if config.learning_rate_schedule_steps > 0:
        steps = config.learning_rate_schedule_steps
    peak = config.learning_rate
    warmup = int(steps * config.warmup_steps_fraction)
    if warmup >= steps:
        return optax.linear_schedule(0.0, peak, steps)
    return optax.warmup_cosine_decay_schedule(
        0.0 if warmup else peak,
        peak,
        warmup,
        steps,
        end_value=peak * config.cosine_learning_rate_final_fraction,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW; weight decay only on matrices."""
    clip = config.gradient_clipping_threshold
    return optax.chain(
        optax.clip_by_global_norm(clip) if clip else optax.identity(),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.adam_weight_decay,
            mask=functools.partial(jax.tree_util.tree_map_with_path, _is_matrix),
        ),
    )


def _is_matrix(path, leaf):
    del leaf
    return not any(word in str(path[-1].key) for word in ("norm", "bias"))


class Trainer:
    """The compiled functions of one config on one mesh.

    Attributes:
      mesh: explicit axes `data`, `fsdp`, `expert`.
      specs: of the parameters.
    """

    def __init__(self, config: Config, mesh: Mesh):
        """Raises UserError if the mesh does not divide a parameter."""
        self.config, self.mesh = config, mesh
        self.specs = transformer.parameter_specs(config.model, config.moe)
        check_divisible(self.specs, mesh)
        self._settings = settings_of(config)
        self._optimizer = make_optimizer(config.optimizer, config.run.steps)
        self._accumulation = config.optimizer.gradient_accumulation_steps
        # Jitted; `compile_step` and `compile_eval` put the compiled programs in their place.
        self.step: Any = jax.jit(self._step, donate_argnums=0)
        self.eval_sums: Any = jax.jit(self._eval_sums)

    def lower_step(self, batch_shape: tuple[int, int]) -> jax.stages.Lowered:
        """`step` for batches [B, S], traced and lowered for the mesh's devices."""
        with jax.set_mesh(self.mesh):
            return self.step.lower(self.abstract_state(), self._abstract_batch(batch_shape))

    def compile_step(self, batch_shape: tuple[int, int]) -> None:
        """Compiles `step` for batches [B, S]; may run in a thread while data is being read."""
        lowered = self.lower_step(batch_shape)
        with jax.set_mesh(self.mesh):
            self.step = lowered.compile(self.compiler_options)

    def compile_eval(self, batch_shape: tuple[int, int]) -> None:
        """Compiles `eval_sums`; see `compile_step`."""
        with jax.set_mesh(self.mesh):
            params, batch = self.abstract_state().params, self._abstract_batch(batch_shape)
            lowered = self.eval_sums.lower(params, batch)
            self.eval_sums = lowered.compile(self.compiler_options)

    @property
    def compiler_options(self) -> dict[str, bool]:
        """XLA's options that differ from its defaults.

        On CPU, bfloat16 is rounded wherever the program says so. XLA may keep what it fuses in
        float32, and fuses one schedule otherwise than another: with this their losses are equal to
        the bit.

        On TPU7x the SparseCore changes no layouts under the batch-split schedule. It does one thing
        after the other: a transfer that ends later than such a change would have to begin after it,
        and so would run under little of a step.
        """
        device = self.mesh.devices.flat[0]
        if device.platform == "cpu":
            return {"xla_allow_excess_precision": False}
        chip = chip_of(device.device_kind)
        split = self.config.schedule.use_batch_split_schedule
        if split and chip is not None and chip.name == "tpu7x":
            return {"xla_tpu_enable_offloading_copy_to_sparsecore": False}
        return {}

    def init(self) -> TrainState:
        """A new state; the same for every mesh.

        Raises:
          UserError: `load_parameters_path` has not the parameters of this model.
        """
        dtype = jnp.dtype(self.config.model.weight_dtype)
        run = self.config.run
        if run.load_parameters_path:
            params = load_params(self.specs, self.mesh, dtype, Path(run.load_parameters_path))
        else:
            params = init_params(self.specs, run.init_weights_seed, self.mesh, dtype)
        with jax.set_mesh(self.mesh):
            params = _map_biases(lambda bias: bias.astype(jnp.float32), params)
            opt_state = jax.jit(self._optimizer.init)(_trainable(params)[0])
            step = jax.device_put(jnp.zeros((), jnp.int32), self._replicated)
            return TrainState(step, params, opt_state)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of `init()`, without computing it."""
        dtype = jnp.dtype(self.config.model.weight_dtype)
        params = map_specs(
            lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding),
            self.specs,
            shardings(self.specs, self.mesh),
        )
        params = _map_biases(lambda bias: bias.update(dtype=jnp.float32), params)
        with jax.set_mesh(self.mesh):
            opt_state = jax.eval_shape(self._optimizer.init, _trainable(params)[0])
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)

        def on_devices(leaf):  # eval_shape knows no devices, and no sharding of scalars
            spec = leaf.sharding.spec if leaf.sharding else PartitionSpec()
            return leaf.update(sharding=NamedSharding(self.mesh, spec))

        return TrainState(step, params, jax.tree.map(on_devices, opt_state))

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _abstract_batch(self, shape):
        sharding = NamedSharding(self.mesh, batch_partition())
        types = dict.fromkeys(BATCH_KEYS, jnp.int32) | {"weights": jnp.float32}
        return {n: jax.ShapeDtypeStruct(shape, t, sharding=sharding) for n, t in types.items()}

    def place(self, batch: dict) -> dict[str, jax.Array]:
        """A host's rows of a global batch, on the mesh: each [B, S]."""
        sharding = NamedSharding(self.mesh, batch_partition())
        return {
            name: jax.make_array_from_process_local_data(sharding, batch[name])
            for name in BATCH_KEYS
        }

    def _step(self, state: TrainState, batch: dict) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step: the new state, and what to log: scalars, and `health` by layers."""
        grads, metrics = self._on_mesh(self._grads, (self._param_specs(), PartitionSpec()))(
            state.params, batch
        )
        trainable, biases = _trainable(state.params)
        grads, loads = _trainable(grads)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, trainable)
        rate = self.config.moe.routed_bias_update_rate if self.config.moe.routed_bias else 0.0
        biases = jax.tree.map(lambda bias, load: updated_bias(bias, load, rate), biases, loads)
        schedule = learning_rate_schedule(self.config.optimizer, self.config.run.steps)
        metrics |= {
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(state.step),
            "expert_load_max_over_mean": _imbalance(jax.tree.leaves(loads)),
        }
        params = _merge(optax.apply_updates(trainable, updates), biases)
        return TrainState(state.step + 1, params, opt_state), metrics

    def _eval_sums(self, params: dict, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Sum over the batch's counted tokens of their loss, and their number."""

        def local(params, batch):
            probes = transformer.new_probes(self.config.model)
            ones = {**batch, "total_weight": jnp.ones(())}
            _, parts = transformer.loss(params, probes, ones, self._settings)
            return parts["loss"], lax.psum(jnp.sum(batch["weights"]), AXES)

        return self._on_mesh(local, PartitionSpec())(params, batch)

    def _grads(self, params, batch):
        """On one device: gradients as the params are cut, and scalars equal on all devices."""
        probes = transformer.new_probes(self.config.model)
        total = jnp.maximum(lax.psum(jnp.sum(batch["weights"]), AXES), 1.0)

        def grads_of(rows):
            loss = functools.partial(transformer.loss, settings=self._settings)
            grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
            return grad(params, probes, {**rows, "total_weight": total})

        if self._accumulation == 1:
            (grads, counts), parts = grads_of(batch)
        else:
            cut = lambda a: a.reshape(self._accumulation, -1, *a.shape[1:])  # noqa: E731
            add = lambda total, rows: (jax.tree.map(jnp.add, total, grads_of(rows)), None)  # noqa: E731
            zeros = {"loss": jnp.zeros(()), "mtp_loss": jnp.zeros(())}
            start = jax.tree.map(jnp.zeros_like, ((params, probes), zeros))
            ((grads, counts), parts), _ = lax.scan(add, start, jax.tree.map(cut, batch))
        return grads, {**parts, "tokens": total, **_counts_to_log(counts)}

    def _on_mesh(self, fn, out_specs):
        in_specs = self._param_specs(), batch_partition()
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )

    def _param_specs(self):
        return map_specs(lambda spec: spec.partition_spec, self.specs)


def _is_bias(path) -> bool:
    return path[-1].key == "bias"


def _map_biases(fn, params):
    """`fn` of the router's biases: they are float32 always, since their steps are small."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fn(leaf) if _is_bias(path) else leaf, params
    )


def _trainable(params):
    """`params` less the router's biases, and the biases alone; None where a leaf went."""
    is_bias = jax.tree_util.tree_map_with_path(lambda path, _: _is_bias(path), params)
    trainable = jax.tree.map(lambda bias, leaf: None if bias else leaf, is_bias, params)
    biases = jax.tree.map(lambda bias, leaf: leaf if bias else None, is_bias, params)
    return trainable, biases


def _merge(trainable, biases):
    return jax.tree.map(
        lambda a, b: b if a is None else a, trainable, biases, is_leaf=lambda node: node is None
    )


def _counts_to_log(probes):
    """What the probes counted: fractions of casts, and how often rows did not fit their buffer.

    Fractions are of the nonzero elements of all weights, activations and gradients that were cast;
    `health` holds the counts of each layer. Empty where no layer has experts.
    """
    if not probes:
        return {}
    weight, act, *grads = sum(jnp.sum(layers["health"], axis=(0, 1)) for layers in probes.values())
    overflows = sum(jnp.sum(layers["overflow"]) for layers in probes.values())
    return {
        f"{operand}_{what}": counts[column] / jnp.maximum(counts[COUNTS.index("nonzero")], 1.0)
        for operand, counts in (("weight", weight), ("act", act), ("grad", sum(grads)))
        for column, what in enumerate(("saturated", "flushed"))
    } | {
        "buffer_overflows": overflows / lax.axis_size(AXES),
        "health": {stack: layers["health"] for stack, layers in probes.items()},
    }


def _imbalance(loads):
    """The busiest expert's load over the mean load, averaged over layers."""
    if not loads:
        return jnp.ones(())
    ratios = [jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1.0) for load in loads]
    return jnp.mean(jnp.concatenate(ratios))
