"""The text of a compiled step: what takes the time, and the body of each long loop."""

import hlo_modules as hm
from test_overlap import GATHERED, gather, lines, read

from octablox.aot.timeline import timeline_text

TRIPS = 5


def loop_of(*instructions):
    body = "\n".join(instructions)
    entry = lines(hm.while_line("jit(_step)/shard_map/jvp()"))
    return read(hm.module(entry, gather(), hm.loop(body)))


def test_the_work_of_a_loop_counts_for_each_trip():
    schedule = loop_of(hm.product("p.1"), hm.product("p.2"))
    work = timeline_text(schedule).split("\n\n")[0].splitlines()
    assert work[0] == f"work of a step of {schedule.seconds * 1e3:.1f} ms, on one device"
    # The two of one kind and origin are one line.
    (line,) = [line for line in work if " p " in line]
    assert float(line.split()[0]) == round(schedule.seconds * 1e3, 2)
    assert line.split()[1] == "forward"
    assert work[-1].split() == ["0.00", "all", "other"]


def test_a_body_shows_when_a_transfer_begins_and_what_waits():
    schedule = loop_of(
        *(hm.start("g", "gathers"), hm.product("p"), hm.update("g"), hm.done("g")),
    )
    body = timeline_text(schedule).split("\n\n")[1].splitlines()
    assert f"{schedule.seconds / TRIPS * 1e3:.2f} ms, {TRIPS} times a step" in body[0]
    words = [line.split()[2] for line in body[2:]]
    assert words == ["works", "sends", "waits"]
    size = f"all-gather over fsdp, {GATHERED / 1e6:.1f} MB"
    assert size in body[3] and size in body[4] and "(g-update)" in body[4]
    begin, end = map(float, body[4].split()[:2])
    assert end > begin == float(body[3].split()[0])


def test_loops_that_take_little_of_the_step_are_left_out():
    entry = lines(
        hm.while_line("jit(_step)/shard_map/jvp()"), *(hm.product(f"q{n}") for n in range(300))
    )
    schedule = read(hm.module(entry, gather(), hm.loop(hm.product("p"))))
    assert "body" not in timeline_text(schedule)
