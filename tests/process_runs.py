"""Training runs of several processes on this machine, each started as a user starts it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from training_runs import SMALL, arguments


def start(
    folder: Path, line: str, processes: int, *, base: str = SMALL, **environment: str
) -> list[subprocess.Popen]:
    """Starts `octablox train` on that many processes, which share the devices of `line`."""
    coordinator = f"coordinator_address=localhost:{free_port()} num_processes={processes}"
    of_each = [f"{coordinator} process_id={process}" for process in range(processes)]
    program = sys.executable, "-m", "octablox"
    # XLA_FLAGS would give each process eight devices.
    env = os.environ | {"XLA_FLAGS": ""} | environment
    return [
        subprocess.Popen(
            [*program, *arguments(folder, f"{hosts} {line}", base)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for hosts in (of_each if processes > 1 else [""])
    ]


def finish(started: list[subprocess.Popen], timeout: float = 240) -> list[tuple[int, str, str]]:
    """Waits for all; of each the exit code, stdout and stderr."""
    try:
        return [
            (p.returncode, *output) for p in started for output in [p.communicate(None, timeout)]
        ]
    finally:
        for process in started:
            process.kill()


def run(folder: Path, line: str, processes: int, **settings) -> list[tuple[int, str, str]]:
    """`start` and `finish`."""
    return finish(start(folder, line, processes, **settings))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]
