"""What a run measures, kept as it goes: metrics.jsonl and TensorBoard events.

metrics.jsonl has one flat JSON object a line. Each has "step" (int, steps done) and "kind"
("train" or "eval"); a number that is NaN or infinite is null.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octablox.errors import UserError

METRICS_FILE = "metrics.jsonl"


def plain(value: Any) -> Any:
    """`value` as JSON has it: scalars of numpy or jax become Python's, NaN and inf become None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def cannot_write(path: str | os.PathLike, error: OSError) -> UserError:
    """The error of a full disk, or of a folder that is not ours."""
    return UserError(
        f"expected to write {os.fspath(path)}, got {error.strerror}: free space or set "
        "base_output_directory elsewhere; what was saved before is kept"
    )


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces `path`; a reader sees the old content or the new, never a part. UserError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order; a last line cut short by a kill is left out.

    Raises UserError where the file is missing or another line is no JSON object.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"expected the metrics of a run, got {os.fspath(path)}: {error.strerror}: "
            "give the folder of a run that has logged a step"
        ) from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: a cut line
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(
                f"{os.fspath(path)}:{number}: expected a JSON object, got {line[:40]!r}: "
                "remove the line"
            )
        rows.append(row)
    return rows


class MetricsWriter:
    """Appends rows to <folder>/metrics.jsonl and their numbers to TensorBoard events.

    A row is in the file when `write` returns, whatever becomes of the process. Use as a context
    manager, or call `close`.
    """

    def __init__(self, folder: str | os.PathLike, tensorboard: bool, resume_step: int = 0):
        """Begins, or goes on after, a log.

        Args:
            folder: of the run; it exists.
            tensorboard: whether to write events to <folder>/tensorboard too.
            resume_step: steps done before. A killed run may have logged past its checkpoint:
                rows of later steps are dropped. 0 drops all.

        Raises:
            UserError: the folder cannot be written, or holds a broken metrics.jsonl.
        """
        self._path = Path(folder) / METRICS_FILE
        if self._path.exists():
            _drop_later_rows(self._path, resume_step)
        try:
            # Unbuffered: a row is one write, so nothing is left to fail when closing.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._events = _Events(Path(folder) / "tensorboard", resume_step) if tensorboard else None

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends `row`, which has "step" and "kind". Raises UserError when the disk is full."""
        values = {key: plain(value) for key, value in row.items()}
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        try:
            while line:  # a nearly full disk may take a part
                line = line[self._file.write(line) :]
        except OSError as error:
            raise cannot_write(self._path, error) from error
        if self._events:
            self._events.write(values)

    def close(self) -> None:
        """Closes the files; a second call does nothing."""
        self._file.close()
        if self._events:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoWriter(MetricsWriter):
    """The writer of a process that leaves the writing to another."""

    def __init__(self) -> None:
        pass

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Nothing is open."""


def _drop_later_rows(path: Path, resume_step: int) -> None:
    rows = [row for row in read_metrics(path) if resume_step and row["step"] <= resume_step]
    write_atomically(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))


class _Events:
    """TensorBoard scalars, written in this thread.

    tensorboardX's SummaryWriter writes in a thread of its own, which a full disk kills, and then
    waits for it for ever; its EventsWriter raises where it is called.
    """

    def __init__(self, folder: Path, resume_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder = folder
        try:
            folder.mkdir(exist_ok=True)
            # A second run within a second must not replace the first one's file.
            suffix = f".{os.getpid()}.{resume_step}"
            self._writer = EventsWriter(str(folder / "events"), suffix)
            if resume_step:  # TensorBoard forgets what earlier files say of this step and later
                start = SessionLog(status=SessionLog.START)
                self._writer.write_event(Event(step=resume_step + 1, session_log=start))
                self._writer.flush()
        except OSError as error:
            raise cannot_write(folder, error) from error

    def write(self, values: Mapping[str, Any]) -> None:
        """One event with every number of the row, tagged kind/key."""
        from time import time

        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        numbers = {
            key: float(value)
            for key, value in values.items()
            if key != "step" and isinstance(value, int | float)
        }
        summary = Summary(
            value=[
                Summary.Value(tag=f"{values['kind']}/{key}", simple_value=number)
                for key, number in numbers.items()
            ]
        )
        event = Event(step=values["step"], wall_time=time(), summary=summary)
        try:
            self._writer.write_event(event)
            self._writer.flush()
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            raise cannot_write(self._folder, error) from error
