"""Checkpoints of a run by Orbax: asynchronous, atomic, checked, restorable onto another mesh.

A checkpoint is one folder, `<folder>/<step>/`. Orbax writes it under a temporary name and renames
it when it is whole, so that a run killed at any moment leaves only whole checkpoints and a
temporary folder, which the next save removes. In it:

  state/          every leaf of the train state, by name ("params.embed"), as Orbax arrays
  meta/           JSON: the leaves' layout (name -> "float32[8,4]") and the data iterator's state
  checksums.json  CRC-32 of every file above; a damaged file is found before it is used. A run of
                  several processes writes none: one process would have to read all that they wrote

The state is kept as a flat dict of named leaves: another tree is told apart by names that a user
knows, before any array is read.
"""

import errno
import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from octablox.errors import UserError
from octablox.train import checkpoint_files as files

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)

PyTree = Any


class Restored(NamedTuple):
    """What `Checkpoints.restore` found: the step it was saved at, and what was saved."""

    step: int
    state: PyTree
    data_state: Any


class _Pending(NamedTuple):
    """The save under way."""

    step: int
    needed: int  # bytes


def _print_note(text: str) -> None:
    print(text, file=sys.stderr)


class Checkpoints:
    """The checkpoints of one run, in one folder of a file system that this process can write.

    Args:
      folder: made if missing.
      period: steps between two saves, see `due`.
      keep: how many checkpoints stay; an older one goes only after a newer one is whole.
      keep_every: those of steps that are multiples of this stay too; 0: none.
      note: called with one line of text when a damaged checkpoint is passed over.

    Raises:
      UserError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        period: int,
        keep: int,
        keep_every: int = 0,
        note: Callable[[str], None] = _print_note,
    ) -> None:
        if period < 1 or keep < 1:
            raise ValueError(f"period and keep must be 1 or more, got {period} and {keep}")
        self._folder = Path(folder).absolute()
        self._period = period
        self._keep = keep
        self._keep_every = keep_every
        self._note = note
        self._checkpointer: Any = None
        self._pending: _Pending | None = None
        self._unreadable: set[int] = set()
        files.require_writable(self._folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except UserError:
            if error is None:  # the error under way matters more than the save it cut short
                raise

    def due(self, step: int) -> bool:
        """Whether `step` is one of every `period`."""
        return step % self._period == 0

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, ascending; without those found damaged."""
        return [step for step in files.whole_steps(self._folder) if step not in self._unreadable]

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, state: PyTree, data_state: files.DataState, blocking: bool = False
    ) -> None:
        """Starts saving; returns when the state is copied, so its arrays may be donated next.

        Args:
          step: a step that is saved already is left as it is.
          state: any pytree of jax arrays; restored to the bit, dtypes and all.
          data_state: bytes or a JSON-able dict, of process 0; the other processes' is not kept.
          blocking: return only when the checkpoint is whole.

        Raises:
          UserError: this save, or the one before it, failed: disk full or folder not writable.
        """
        self.wait()
        if step not in self.steps():
            self._start(step, _named_leaves(state), files.pack_data_state(data_state))
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Returns when the save under way is whole, and removes checkpoints beyond `keep`.

        Raises:
          UserError: that save failed: disk full or folder not writable.
        """
        if self._pending is None:
            return
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:
            self._fail(error)
        self._pending = None
        self._prune()

    def close(self) -> None:
        """`wait`, then frees Orbax's threads. The object is of no use afterwards."""
        try:
            self.wait()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._checkpointer = None

    def restore(self, abstract_state: PyTree) -> Restored:
        """The newest checkpoint that is undamaged; `note` names those passed over.

        Args:
          abstract_state: the expected tree of ShapeDtypeStruct or jax arrays. A leaf goes to its
            sharding, whatever mesh it was saved from; a leaf without sharding (or a jax array not
            committed to a device) stays uncommitted.

        Raises:
          UserError: none is left, or the newest is of another model.
        """
        self.wait()
        expected = _named_leaves(abstract_state)
        found = self.steps()
        for step in reversed(found):
            meta = self._read_meta(step)
            if meta is not None:
                layout, data_state = meta
                self._require_same_layout(step, expected, layout)
                leaves = self._read_state(step, expected)
                state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
                return Restored(step, state, data_state)
        kind = "readable checkpoint" if found else "checkpoint"
        raise UserError(
            f"expected a {kind} in {self._folder}, got none; give another run_name to start anew"
        )

    # Saving.

    def _start(self, step: int, leaves: dict[str, jax.Array], data_state: dict[str, Any]) -> None:
        ocp = _orbax()
        checkpointer = self._open()
        if jax.process_index() == 0:
            files.remove_temporaries(self._folder)
        self._set_aside(step)
        meta = {"layout": _layout(leaves), "data_state": data_state}
        self._pending = _Pending(step, sum(leaf.nbytes for leaf in leaves.values()))
        try:
            self._require_space(self._pending.needed)
            checkpointer.save(
                self._folder / str(step),
                ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), meta=ocp.args.JsonSave(meta)),
            )
        except Exception as error:
            self._fail(error)

    def _require_space(self, needed: int) -> None:
        """Refuses before the disk is filled: the arrays are written as long as they are."""
        # Several processes must all save or none; there the write itself has to fail.
        if jax.process_count() == 1 and files.free(self._folder) < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> Any:
        if self._checkpointer is None:
            ocp = _orbax()
            self._checkpointer = ocp.AsyncCheckpointer(
                ocp.CompositeCheckpointHandler(
                    # Compressing trained weights saves a tenth and costs the cores that train.
                    state=ocp.PyTreeCheckpointHandler(use_compression=False),
                    meta=ocp.JsonCheckpointHandler(),
                ),
                async_options=ocp.options.AsyncOptions(
                    # Or the writers of a folder that cannot be made wait 5 minutes for it.
                    create_directories_asynchronously=False,
                    # Orbax calls it, in its thread, after the last file and before the rename.
                    post_finalization_callback=self._write_checksums,
                ),
            )
        return self._checkpointer

    def _write_checksums(self) -> None:
        if self._pending is not None and jax.process_count() == 1:
            for folder in self._folder.glob(f"{self._pending.step}{files.TEMPORARY}*"):
                (folder / files.CHECKSUMS).write_text(json.dumps(files.checksums(folder)))

    def _set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint of `step`, to make room for a good one."""
        if step in self._unreadable:
            self._unreadable.discard(step)
            if jax.process_index() == 0:
                aside = self._folder / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self._folder / str(step)).rename(aside)

    def _prune(self) -> None:
        if jax.process_index() == 0:
            for step in self.steps()[: -self._keep]:
                if self._keep_every and step % self._keep_every == 0:
                    continue
                # Renamed first: a removal cut short must not leave half a checkpoint by its name.
                doomed = self._folder / f"{step}{files.TEMPORARY}-old"
                (self._folder / str(step)).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _fail(self, error: Exception) -> NoReturn:
        """Removes what the failed save left, and says what happened and what is still good."""
        pending, self._pending = self._pending, None
        assert pending is not None
        if jax.process_index() == 0:
            files.remove_temporaries(self._folder, pending.step)
        code = files.error_number(error)
        good = self.latest_step()
        kept = "nothing was saved before"
        if good is not None:
            kept = f"the checkpoint of step {good} is still good"
        if code in _DISK_FULL:
            needed, free = (files.size(n) for n in (pending.needed, files.free(self._folder)))
            raise UserError(
                f"disk full: the checkpoint of step {pending.step} needs about {needed} in "
                f"{self._folder}, where {free} are free; {kept}; free some space, or give another "
                "base_output_directory, and run again"
            ) from error
        if code in _NOT_WRITABLE:
            raise UserError(
                f"cannot write the checkpoint of step {pending.step} in {self._folder}: "
                f"{os.strerror(code)}; {kept}; make the folder writable, or give another "
                "base_output_directory, and run again"
            ) from error
        raise error

    # Restoring.

    def _read_meta(self, step: int) -> tuple[dict[str, str], Any] | None:
        """The layout and the data state; None, with a note, of a damaged checkpoint."""
        ocp = _orbax()
        folder = self._folder / str(step)
        try:
            files.check_sums(folder)
            arguments = ocp.args.Composite(meta=ocp.args.JsonRestore())
            meta = self._open().restore(folder, arguments)["meta"]
            return meta["layout"], files.unpack_data_state(meta["data_state"])
        except PermissionError as error:  # not damaged: an older one would lose steps
            raise UserError(
                f"cannot read the checkpoint {folder}: {error.strerror}; make it readable"
            ) from error
        except (ValueError, KeyError, TypeError, OSError) as error:
            self._unreadable.add(step)
            older = self.latest_step()
            then = "there is no older one" if older is None else f"going back to step {older}"
            self._note(f"the checkpoint {folder} is damaged ({files.one_line(error)}); {then}")
            return None

    def _read_state(self, step: int, expected: dict[str, Any]) -> list[jax.Array]:
        ocp = _orbax()
        shardings = {name: _sharding(leaf) for name, leaf in expected.items()}
        restore_args = {
            name: ocp.RestoreArgs(restore_type=np.ndarray)
            if sharding is None
            else ocp.ArrayRestoreArgs(sharding=sharding, global_shape=expected[name].shape)
            for name, sharding in shardings.items()
        }
        arguments = ocp.args.PyTreeRestore(
            item={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in expected.items()},
            restore_args=restore_args,
        )
        restored = self._open().restore(
            self._folder / str(step), ocp.args.Composite(state=arguments)
        )["state"]
        return [
            jnp.asarray(restored[name]) if sharding is None else restored[name]
            for name, sharding in shardings.items()
        ]

    def _require_same_layout(
        self, step: int, expected: dict[str, Any], found: dict[str, str]
    ) -> None:
        differences = _differences(_layout(expected), found)
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UserError(
                f"the checkpoint of step {step} in {self._folder} is of another model: "
                f"{'; '.join(differences[:3])}{more}; give another run_name, or the model flags "
                "that this run was started with"
            )


# Orbax.


@functools.cache
def _orbax() -> Any:
    """`orbax.checkpoint`, imported when first needed (it takes 1 to 2 s) and silent."""
    import orbax.checkpoint as ocp

    # Orbax logs through absl, also each error that it raises as well. Only its own records are
    # dropped. (Before the import "absl" would be made a plain logger, which knows no callers.)
    logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)
    # Writes that fail beside the one whose error is raised; nobody awaits them any more.
    logging.getLogger("asyncio").addFilter(
        lambda record: "exception was never retrieved" not in record.getMessage()
    )
    _ignore_late_writers()
    return ocp


def _ignore_late_writers() -> None:
    """Keeps the terminal clean when a write fails.

    Orbax raises that error and closes its event loop while other writes are still under way.
    These then find the loop closed, which Python would print, a traceback for each.
    """
    previous = sys.unraisablehook

    def hook(caught: Any, /) -> None:
        late = isinstance(caught.exc_value, RuntimeError)
        if not (late and str(caught.exc_value) == "Event loop is closed"):
            previous(caught)

    sys.unraisablehook = hook


# Trees.


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves in order, by names such as "params.layers.0.embed"."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        raise ValueError("two leaves of the state have the same name")
    return named


def _layout(leaves: dict[str, Any]) -> dict[str, str]:
    """Name -> dtype and shape, such as "float32[8,4]"."""
    return {name: f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for name, x in leaves.items()}


def _differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """One text for each leaf that differs, parameters first: users know their names."""
    names = sorted(
        [*expected, *(name for name in found if name not in expected)],
        key=lambda name: not name.startswith("params"),
    )
    return [
        f"{name} expected {expected.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
        for name in names
        if expected.get(name) != found.get(name)
    ]


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    return leaf.sharding if getattr(leaf, "committed", True) else None
