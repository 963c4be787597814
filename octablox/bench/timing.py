"""Timing functions side by side on a machine that other work shares."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def interleaved(
    runs: Mapping[str, Callable[[], Any]], *, rounds: int = 5, seconds: float | None = None
) -> dict[str, float]:
    """Median seconds of each function, all of them timed in turn.

    A slow spell of the machine then hits every function alike. Every other round goes backwards,
    so that none always runs after the same one.

    Args:
      runs: what to time, by name. Results are waited for before the clock is read.
      rounds: how often each runs; the first run, which may compile, is not counted.
      seconds: stop after the round in which this much time is spent, at the earliest after two.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    spent: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    for round_ in range(rounds):
        for name in list(runs) if round_ % 2 == 0 else reversed(list(runs)):
            before = time.perf_counter()
            jax.block_until_ready(runs[name]())
            spent[name].append(time.perf_counter() - before)
        if seconds is not None and round_ and time.perf_counter() - start > seconds:
            break
    return {name: statistics.median(times) for name, times in spent.items()}
