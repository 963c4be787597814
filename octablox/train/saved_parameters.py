"""The parameters of a run's newest checkpoint, read without the rest of its state."""

from pathlib import Path
from typing import Any

from octablox.errors import UserError
from octablox.train import checkpoint_files as files
from octablox.weights.folder import stack_of

# Bytes that TensorStore keeps of chunks it has read: a chunk is read as a whole.
_CACHE = 256 << 20


class SavedParameters:
    """See `weights.folder.Parameters`; of the newest checkpoint in a run's folder.

    Attributes:
      step: that it was saved at.

    Raises:
      UserError: the run has no checkpoint, or a damaged one.
    """

    def __init__(self, run: Path):
        import tensorstore

        self._open, self._context = (
            tensorstore.open,
            tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}}),
        )
        steps = files.whole_steps(run / "checkpoints")
        if not steps:
            raise UserError(f"expected a run with a checkpoint, got {run}, which has none")
        self.step = steps[-1]
        self._folder = run / "checkpoints" / str(self.step)
        try:
            files.check_sums(self._folder)
        except ValueError as error:
            raise UserError(
                f"the checkpoint {self._folder} is damaged: {error}; delete it to take an older one"
            ) from error
        self._arrays: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """See `Parameters`."""
        try:
            self.array(name)
        except UserError:
            return False
        return True

    def array(self, name: str) -> Any:
        """See `Parameters`."""
        path, layer = stack_of(name)
        if path not in self._arrays:
            store = {
                "driver": "ocdbt",
                "base": (self._folder / "state").absolute().as_uri() + "/",
                "path": f"params.{path}/",
            }
            try:
                spec = {"driver": "zarr", "kvstore": store, "recheck_cached_data": "open"}
                self._arrays[path] = self._open(
                    spec, open=True, read=True, context=self._context
                ).result()
            except ValueError as error:
                raise UserError(f"{self._folder} has no parameter {path}") from error
        array = self._arrays[path]
        return array if layer is None else array[layer]

    def scale(self, name: str) -> None:
        """See `Parameters`: a run's parameters are floats."""
        del name

    def release(self) -> None:
        """See `Parameters`: the cache is bounded."""
