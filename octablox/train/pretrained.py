"""Parameters of a converted checkpoint, or of another run, as the beginning of a run."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from octablox.errors import UserError
from octablox.mesh import ParamSpec, is_spec, map_specs, shardings
from octablox.train.saved_parameters import SavedParameters
from octablox.weights import folder as weights
from octablox.weights.folder import Parameters, Weights


def open_parameters(folder: Path) -> Parameters:
    """The parameters of a folder that `octablox convert` wrote, or of a run's newest checkpoint.

    Raises:
      UserError: it is neither.
    """
    if (folder / weights.COMPLETE).exists():
        return Weights(folder)
    if (folder / "checkpoints").is_dir():
        return SavedParameters(folder)
    raise UserError(
        f"expected a folder that octablox convert has finished, or a run's folder, got {folder}"
    )


def load_params(specs: dict, mesh: Mesh, dtype: np.dtype, folder: Path) -> dict:
    """The parameters on the mesh; each process reads its own shards.

    Args:
      specs: of the parameters, as `transformer.parameter_specs`.
      mesh: where they go.
      dtype: of all but the router's biases, which are float32.
      folder: see `open_parameters`.

    Raises:
      UserError: a parameter that is not there, or has another shape.
    """
    parameters = open_parameters(folder)
    paths = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="."),
        specs,
        is_leaf=is_spec,
    )

    def load(spec: ParamSpec, path: str, sharding: jax.sharding.Sharding) -> jax.Array:
        is_bias = path.endswith(".bias")
        of_leaf = np.dtype(np.float32) if is_bias else dtype
        if is_bias and not weights.has(parameters, path):  # DeepSeek-V2's router has none
            return jax.make_array_from_callback(
                spec.shape, sharding, lambda index: np.zeros(spec.shape, np.float32)[index]
            )
        _require_shape(parameters, path, spec.shape, folder)

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            parts = index or (slice(None),) * len(spec.shape)
            whole = tuple(
                slice(*part.indices(size)) for part, size in zip(parts, spec.shape, strict=True)
            )
            return weights.read(parameters, path, whole, of_leaf)

        array = jax.make_array_from_callback(spec.shape, sharding, read)
        parameters.release()
        return array

    return map_specs(load, specs, paths, shardings(specs, mesh))


def _require_shape(parameters, path, expected, folder):
    got = weights.shape(parameters, path)
    if got != expected[-len(got) :]:
        raise UserError(
            f"{folder} has {path} {list(got)} for a layer, expected {list(expected[-len(got) :])}; "
            "leave sizes out on the command line, they come with the parameters"
        )
