"""Training runs of several processes on this machine, each started as a user starts it."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from training_runs import SMALL, arguments

# Generous: the processes compile at the same time, and may share few cores with others.
TIMEOUT = 500


@contextlib.contextmanager
def running(folder: Path, line: str, processes: int) -> Iterator[list[subprocess.Popen]]:
    """`octablox train` on that many processes, which share the devices of `line`."""
    coordinator = f"coordinator_address=localhost:{free_port()} num_processes={processes}"
    of_each = [f"{coordinator} process_id={process}" for process in range(processes)]
    program = sys.executable, "-m", "octablox"
    # XLA_FLAGS would give each process eight devices.
    env = os.environ | {"XLA_FLAGS": ""}
    started = [
        subprocess.Popen(
            [*program, *arguments(folder, f"{hosts} {line}", SMALL)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for hosts in of_each
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def finish(started: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Waits for all; of each the exit code, stdout and stderr."""
    outputs = [process.communicate(None, TIMEOUT) for process in started]
    return [(p.returncode, *output) for p, output in zip(started, outputs, strict=True)]


def run(folder: Path, line: str, processes: int) -> list[tuple[int, str, str]]:
    """`running`, to the end."""
    with running(folder, line, processes) as started:
        return finish(started)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]
