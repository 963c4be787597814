"""`octablox compile`: its options, its progress line, its output."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from octablox.aot.compiler import DoesNotFit, Options, compile_report
from octablox.aot.report import print_report
from octablox.config import Config
from octablox.errors import UserError

_PATHS = "--json", "--save-hlo", "--timeline"


def run(config: Config, flags: Sequence[tuple[str, str]]) -> int:
    """Compiles, prints the report and writes it where the flags say.

    Args:
      config: with `compile_topology`.
      flags: (name, value) as given, names with their dashes.
    """
    options, json_path = read_flags(flags)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width that a table must fit
    try:
        with _Working() as working:
            report = compile_report(config, options, working.note)
    except DoesNotFit as error:
        sizes = {"needed_bytes": error.needed, "available_bytes": error.available}
        _write_json(json_path, {"fits": False, **sizes})
        raise
    _write_json(json_path, report.to_json())
    print_report(report, console)
    return 0


def read_flags(flags: Sequence[tuple[str, str]]) -> tuple[Options, Path | None]:
    """The options, and where the JSON goes.

    Raises:
      UserError: a value that cannot be.
    """
    xla: dict[str, str] = {}
    single: dict[str, str] = {}
    for name, value in flags:
        if name == "--xla":
            option, equals, setting = value.partition("=")
            if not equals or not option:
                raise UserError(f"--xla: expected OPTION=VALUE, got {value!r}")
            xla[option.removeprefix("--")] = setting
        else:
            single[name] = value
    numbers = {name: _number(name, single.get(name)) for name in ("--link-gbps", "--clock-ghz")}
    paths = {name: Path(path) for name, path in single.items() if name in _PATHS}
    options = Options(
        xla=xla,
        ring_gbps=numbers["--link-gbps"],
        clock_ghz=numbers["--clock-ghz"],
        save_hlo=paths.get("--save-hlo"),
        timeline=paths.get("--timeline"),
    )
    return options, paths.get("--json")


def _number(name: str, text: str | None) -> float | None:
    try:
        number = None if text is None else float(text)
    except ValueError:
        number = -1.0
    if number is not None and not 0 < number < float("inf"):
        raise UserError(f"{name}: expected a number above 0, got {text!r}")
    return number


def _write_json(path: Path | None, value: dict) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json: cannot write {str(path)!r}: {error.strerror}") from error


class _Working:
    """A line that says what is being done and for how long; on a terminal it moves."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> "_Working":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def note(self, text: str) -> None:
        """Shows what begins now."""
        if not self._console.is_terminal:
            print(text, file=sys.stderr, flush=True)
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=None)
