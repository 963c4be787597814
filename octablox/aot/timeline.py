"""A compiled step as text: what its compute is, and what each long loop does and waits for."""

import collections
import re
from collections.abc import Iterable, Sequence

from octablox.aot.overlap import Event, Schedule

# Of a loop's body: shorter work is left out, and loops whose bodies take a smaller part of a step.
_SHORTEST_SECONDS = 50e-6
_SMALLEST_PART = 0.02
_WORK_LINES = 40


def timeline_text(schedule: Schedule) -> str:
    """What takes the TensorCore's time, most first; then each long loop's body, line by line."""
    lines = [*_work(schedule), ""]
    for name in dict.fromkeys(event.computation for event in schedule.events):
        events = [event for event in schedule.events if event.computation == name]
        seconds, times = max(event.end for event in events), events[0].times
        if seconds * times >= _SMALLEST_PART * schedule.seconds:
            lines += [*_body(name, events, seconds, times), ""]
    return "\n".join(lines)


def _work(schedule: Schedule) -> Iterable[str]:
    """The table of work, instructions of one kind and origin together."""
    totals: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for event in schedule.events:
        if event.kind == "works":
            key = event.phase, re.sub(r"(\.(\d+|clone))+$", "", event.name), _origin(event.what)
            totals[key] += (event.end - event.begin) * event.times  # type: ignore[assignment]
    yield f"work of a step of {schedule.seconds * 1e3:.1f} ms, on one device"
    yield f"{'ms':>10}  {'phase':<8}  {'instruction':<40}  from"
    for (phase, name, origin), seconds in totals.most_common(_WORK_LINES):
        yield f"{seconds * 1e3:10.2f}  {phase:<8}  {name[:40]:<40}  {origin}"
    rest = sum(seconds for _, seconds in totals.most_common()[_WORK_LINES:])
    yield f"{rest * 1e3:10.2f}  {'':<8}  all other"


def _body(name: str, events: Sequence[Event], seconds: float, times: int) -> Iterable[str]:
    yield f"{name}: {seconds * 1e3:.2f} ms, {times} times a step"
    yield f"{'begin':>10} {'end':>10}  {'':<5}  ms"
    for event in events:
        if event.kind == "works" and event.end - event.begin < _SHORTEST_SECONDS:
            continue
        took = "" if event.kind == "sends" else f"{(event.end - event.begin) * 1e3:.3f}"
        what = _origin(event.what) if event.kind == "works" else event.what
        yield (
            f"{event.begin * 1e3:10.3f} {event.end * 1e3:10.3f}  {event.kind:<5}  {took:>7}  "
            f"{what}  ({event.name})"
        )


def _origin(op_name: str) -> str:
    """Where an instruction comes from, less what JAX wraps around everything."""
    parts = []
    for part in op_name.split("/"):
        inner = re.sub(r"^(?:(?:jvp|transpose|vmap|jit)\()+|\)+$", "", part)
        if inner and inner not in ("_step", "shard_map", "while", "body", "cond", "eval_jaxpr"):
            parts.append(inner)
    return "/".join(parts[-3:])
