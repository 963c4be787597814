"""`octablox bench step`: a whole training step, under each recipe, on random tokens.

Steps of all recipes are timed in turn, compilation is not. TFLOP/s counts the model's own FLOPs
(three times the forward pass), whatever is computed again; beside it stands a dense matmul.
"""

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from octablox import config as configs
from octablox import show
from octablox.bench.timing import interleaved
from octablox.checks import global_batch_size, resolve_mesh_shape
from octablox.config import Config
from octablox.mesh import make_mesh
from octablox.train.step import Trainer

_DENSE = 2048  # rows, columns and depth of the dense matmul


def measure(keys: list[str], recipes: list[str], seconds: float) -> list[dict[str, Any]]:
    """A flat row for each recipe.

    Args:
      keys: settings of the step, but for `quantization`.
      recipes: names, or YAML files.
      seconds: to spend on timing, at least.
    """
    runs, made = {}, {}
    for recipe in recipes:
        config = configs.load([*keys, f"quantization={recipe}"]).config
        made[recipe] = config, _Step(config)
        runs[recipe] = made[recipe][1]
    dense = jax.jit(lambda a: a @ a)
    a = jnp.ones((_DENSE, _DENSE), jnp.bfloat16)
    taken = interleaved({**runs, "dense": lambda: dense(a)}, rounds=9, seconds=seconds)
    dense_tflops = 1e-12 * 2 * _DENSE**3 / taken["dense"]
    rows = []
    for recipe, (config, step) in made.items():
        tokens = global_batch_size(config, jax.device_count()) * config.run.max_target_length
        tflops = 3e-12 * sum(show.flops_per_token(config).values()) * tokens / taken[recipe]
        rows.append(
            {
                "recipe": recipe,
                "schedule": step.schedule,
                "devices": jax.device_count(),
                "tokens": tokens,
                "step_ms": 1e3 * taken[recipe],
                "tokens_per_second": tokens / taken[recipe],
                "tflops": tflops,
                "of_dense": tflops / dense_tflops,
                "of_bf16": taken[recipe] / taken.get("bf16", np.nan),
                "temporary_mib": step.temporary_bytes / 2**20,
            }
        )
    return [{k: v for k, v in row.items() if v == v} for row in rows]  # NaN: no bf16 to compare


class _Step:
    """A compiled step and its state: each call trains one step on the same batch."""

    def __init__(self, config: Config):
        mesh = make_mesh(resolve_mesh_shape(config, jax.device_count()))
        self._trainer = Trainer(config, mesh)
        host = random_batch(config, jax.device_count())
        self._trainer.compile_step(host["tokens"].shape)
        with jax.set_mesh(mesh):
            self._state, self._batch = self._trainer.init(), self._trainer.place(host)
        memory = self._trainer.step.memory_analysis()
        self.temporary_bytes = memory.temp_size_in_bytes
        split = config.schedule.use_batch_split_schedule
        self.schedule = "batch_split" if split else "sequential"

    def __call__(self) -> Any:
        self._state, metrics = self._trainer.step(self._state, self._batch)
        return self._state.step, metrics["loss"]


def random_batch(config: Config, devices: int) -> dict[str, np.ndarray]:
    """Random tokens, each row one document: numpy [B, S]."""
    rows, length = global_batch_size(config, devices), config.run.max_target_length
    shape = rows, length + 1
    drawn = jax.random.randint(jax.random.PRNGKey(0), shape, 0, config.model.vocab_size)
    tokens = np.asarray(drawn, np.int32)
    ones = np.ones((rows, length), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": ones,
        "positions": ones * np.arange(length, dtype=np.int32),
        "weights": ones.astype(np.float32),
    }
