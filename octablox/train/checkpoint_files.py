"""The files of checkpoints: which are whole, left over, damaged; what goes into them; errors."""

import base64
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octablox.errors import UserError

TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's own suffix of a folder that is not whole yet
CHECKSUMS = "checksums.json"


DataState = bytes | Mapping[str, Any]  # a mapping must be JSON-able


def whole_steps(folder: Path) -> list[int]:
    """The steps whose folder has its final name, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def remove_temporaries(folder: Path, step: int | None = None) -> None:
    """Removes what a save that did not end has left, of every step or of one."""
    pattern = f"{'*' if step is None else step}{TEMPORARY}*"
    for path in folder.glob(pattern):
        shutil.rmtree(path, ignore_errors=True)


def require_writable(folder: Path) -> None:
    """Makes the folder and tries to write in it; UserError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"expected a folder that can be written for checkpoints, got {folder}: "
            f"{error.strerror}; give another base_output_directory"
        ) from error


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def checksums(folder: Path) -> dict[str, int]:
    """Path inside the folder -> CRC-32, of every file in its subfolders.

    Orbax rewrites its own metadata, beside them, once more when it renames the folder.
    """
    files = sorted(path for path in folder.glob("*/**/*") if path.is_file())
    return {str(path.relative_to(folder)): _crc32(path) for path in files}


def check_sums(folder: Path) -> None:
    """Raises ValueError for the first file that is not as it was written."""
    sums = folder / CHECKSUMS
    if not sums.exists():
        return
    for name, expected in json.loads(sums.read_text()).items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        if _crc32(folder / name) != expected:
            raise ValueError(f"{name} has other contents than were written")


def error_number(error: BaseException | None) -> int:
    """The errno behind `error`, or 0. TensorStore raises ValueError with it in the text only."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        if match := re.search(r"os_error_code='(\d+)'", str(error)):
            return int(match[1])
        error = error.__cause__ or error.__context__
    return 0


def one_line(error: Exception) -> str:
    """Its text, short."""
    return " ".join(str(error).split())[:200]


def pack_data_state(data_state: DataState) -> dict[str, Any]:
    """A JSON-able copy: the iterator goes on while the save is under way."""
    if isinstance(data_state, bytes):
        return {"base64": base64.b64encode(data_state).decode()}
    return {"json": json.loads(json.dumps(data_state))}


def unpack_data_state(packed: dict[str, Any]) -> Any:
    """What `pack_data_state` was given."""
    return base64.b64decode(packed["base64"]) if "base64" in packed else packed["json"]


def free(folder: Path) -> int:
    """Bytes left on the folder's disk."""
    return shutil.disk_usage(folder).free


def size(count: int) -> str:
    """Bytes for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
