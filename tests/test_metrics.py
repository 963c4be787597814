"""What a run leaves behind and shows: metrics.jsonl, events, loss.png, summary, progress."""

import errno
import io
import json
import math
import os
import struct

import numpy as np
import pytest
from rich.console import Console

from octablox.errors import UserError
from octablox.train import metrics
from octablox.train.metrics import MetricsWriter, read_metrics, write_atomically
from octablox.train.progress import Progress
from octablox.train.report import plot_loss, smoothed, summary_table, write_summary


def train_row(step, loss=2.5):
    return {"step": step, "kind": "train", "loss": loss}


def log(folder, steps, **settings):
    with MetricsWriter(folder, settings.pop("tensorboard", False), **settings) as writer:
        for step in steps:
            writer.write(train_row(step))


def steps_in(folder):
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


# metrics.jsonl


def test_rows_are_there_before_the_file_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write({"step": 1, "kind": "train", "loss": 0.1 + 0.2})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "kind": "train", "loss": 0.30000000000000004}\n'
    writer.close()
    writer.close()


def test_values_become_plain_json(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(
            {
                "step": np.int64(3),
                "kind": "train",
                "loss": np.float32(1.5),
                "nan": float("nan"),
                "inf": np.array(np.inf),
                "absent": None,
            }
        )
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 3, "kind": "train", "loss": 1.5, "nan": null, "inf": null, "absent": null}\n'
    )


def test_resume_drops_rows_past_the_checkpoint(tmp_path):
    log(tmp_path, [10, 20, 30, 40])
    log(tmp_path, [30, 40], resume_step=20)
    assert steps_in(tmp_path) == [10, 20, 30, 40]
    before = (tmp_path / "metrics.jsonl").read_text()
    log(tmp_path, [], resume_step=40)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    log(tmp_path, [1])  # from the start: nothing of the old run counts
    assert steps_in(tmp_path) == [1]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]  # no temporary file is left


def test_resume_after_a_line_was_cut_short(tmp_path):
    log(tmp_path, [10, 20])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "ki')
    assert steps_in(tmp_path) == [10, 20]
    log(tmp_path, [30], resume_step=20)
    assert steps_in(tmp_path) == [10, 20, 30]


def test_resume_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    log(tmp_path, [10, 20])
    before = (tmp_path / "metrics.jsonl").read_text()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics.os, "replace", full)
    with pytest.raises(UserError, match=r"metrics\.jsonl, got No space left on device: free space"):
        MetricsWriter(tmp_path, tensorboard=False, resume_step=10)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_broken_and_missing_files_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError, match=r"got .*metrics\.jsonl: No such file or directory"):
        read_metrics(path)
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: expected a JSON object, got b'nons"):
        read_metrics(path)
    path.write_text("3\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: expected a JSON object, got b'3'"):
        read_metrics(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_line(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(train_row(1))
    writer._file.close()
    with open("/dev/full", "ab", buffering=0) as writer._file, pytest.raises(UserError) as caught:
        writer.write(train_row(2))
    writer.close()
    assert str(caught.value) == (
        f"expected to write {tmp_path / 'metrics.jsonl'}, got No space left on device: "
        "free space or set base_output_directory elsewhere; what was saved before is kept"
    )
    assert steps_in(tmp_path) == [1]


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"expected to write .*metrics.jsonl, got No such file"):
        MetricsWriter(tmp_path / "none", tensorboard=False)
    with pytest.raises(UserError, match=r"expected to write .*x\.json, got No such file"):
        write_atomically(tmp_path / "none" / "x.json", b"")


# TensorBoard


def events_in(folder):
    """[(file, event)] of all event files, read as TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length [8], its checksum [4], event, its checksum [4]
            (length,) = struct.unpack("Q", data[:8])
            found.append((path.name, Event.FromString(data[12 : 12 + length])))
            data = data[16 + length :]
    return found


def test_events_mirror_the_numbers(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        row = {"step": 7, "kind": "eval", "eval_loss": 2.25, "bad": math.nan, "tokens": 4}
        writer.write(row)
        events = [event for _, event in events_in(tmp_path)]  # before it is closed
    assert [event.step for event in events] == [0, 7]
    scalars = {value.tag: value.simple_value for value in events[1].summary.value}
    assert scalars == {"eval/eval_loss": 2.25, "eval/tokens": 4.0}


def test_events_of_a_resumed_run_purge_later_steps(tmp_path):
    log(tmp_path, [1, 2, 3], tensorboard=True)
    log(tmp_path, [3], tensorboard=True, resume_step=2)
    events = events_in(tmp_path)
    assert len({name for name, _ in events}) == 2
    starts = [event.step for _, event in events if event.HasField("session_log")]
    assert starts == [3]
    assert [e.step for _, e in events if e.HasField("summary")] == [1, 2, 3, 3]


def test_no_events_unless_asked(tmp_path):
    log(tmp_path, [1])
    assert not (tmp_path / "tensorboard").exists()


# loss.png


def test_loss_picture_shows_the_curves(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (figures.append(f), save(f, *a, **k)))
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (10, 20, 30):
            writer.write(train_row(step, loss=4 - step / 10 if step < 30 else math.nan))
        writer.write({"step": 20, "kind": "eval", "eval_loss": 2.125})
    path = plot_loss(tmp_path, "a title", 2.4152)
    assert path == tmp_path / "loss.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (axes,) = figures[0].axes
    assert axes.get_title(loc="left") == "a title"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss, nats per token")
    raw, _, evaluated, bigram = axes.lines
    assert raw.get_xydata().tolist() == [[10, 3], [20, 2]]  # the NaN is no point
    assert evaluated.get_xydata().tolist() == [[20, 2.125]]
    assert list(bigram.get_ydata()) == [2.4152, 2.4152]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["train (smoothed)", "eval, last 2.125", "bigram entropy, 2.415"]


def test_loss_picture_of_a_run_that_logged_nothing(tmp_path):
    log(tmp_path, [])
    assert plot_loss(tmp_path, "t", 2.0).stat().st_size > 1000


def test_smoothing_keeps_lines_and_removes_noise():
    line = np.linspace(5.0, 2.0, 200)
    np.testing.assert_allclose(smoothed(line), line, atol=1e-12)
    noise = np.where(np.arange(200) % 2, 1.0, -1.0)
    assert np.abs(smoothed(noise)[20:-20]).max() < 0.1
    assert smoothed(np.array([3.0])).tolist() == [3.0]


# The summary


SUMMARY = {
    "run_name": "demo",
    "recipe": "fp8_full",
    "steps": 1200,
    "eval_loss": 2.25,
    "bigram_nats": 2.41518,
    "tokens_per_second": 5123.4,
    "seconds_to_first_step": 33.21,
    "total_seconds": 250.0,
    "peak_memory_bytes": 3 * 2**29,
    "train_loss": math.nan,
    "stopped": "finished",
}


def test_summary_file_is_flat_json(tmp_path):
    path = write_summary(tmp_path, SUMMARY)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == SUMMARY | {"train_loss": None}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_summary_table_has_units():
    console = Console(file=io.StringIO(), width=60)
    console.print(summary_table(SUMMARY))
    lines = console.file.getvalue().splitlines()
    cells = [[c.strip() for c in line.split("│")[1:3]] for line in lines if "│" in line]
    assert lines[0].strip() == "run demo"
    assert cells == [
        ["recipe", "fp8_full"],
        ["steps", "1,200"],
        ["eval loss", "2.2500 nats"],
        ["bigram nats", "2.4152 nats"],
        ["tokens per second", "5,123"],
        ["seconds to first step", "33.2 s"],
        ["total seconds", "250.0 s"],
        ["peak memory", "1.50 GiB"],
        ["train loss", "–"],
        ["stopped", "finished"],
    ]


# Progress

HEALTH = {
    "weight_saturated": 0.0,
    "weight_flushed": 0.0031,
    "act_saturated": 0.00001,
    "act_flushed": 0.012,
    "grad_saturated": 0.0002,
    "grad_flushed": 0.22,
}


def row(step, **more):
    values = {"loss": 3.25, "tokens_per_second": 4999.6, "step_seconds": 0.5}
    return {"step": step, "kind": "train"} | values | more


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_without_a_terminal_each_event_is_one_line():
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    clock = Clock()
    with Progress(400, 0, 2.4152, console, clock) as progress:
        progress.note("compiling the train step…")
        clock.now += 33.2
        progress.update(row(10, **HEALTH))
        clock.now += 5
        progress.update(row(20, weight_saturated=None))
        progress.note("evaluating…")
        progress.eval(2.31, 20)
    assert console.file.getvalue().splitlines() == [
        "compiling the train step…",
        "compiling the train step… took 33.2 s",
        "step 10/400  loss 3.2500  5,000 tokens/s  ETA 0:03:15  fp8 saturated/flushed: "
        "weights 0.000%/0.310% activations 0.001%/1.200% gradients 0.020%/22.000%",
        "step 20/400  loss 3.2500  5,000 tokens/s  ETA 0:03:10",  # 5 s for 10 steps, 380 left
        "evaluating…",
        "step 20/400  eval loss 2.3100 (bigram 2.4152)",
    ]


def screen(progress):
    """The display as text, as it stands now."""
    console = Console(file=io.StringIO(), width=80)
    console.print(progress._render())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_on_a_terminal_one_display_tells_all():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    clock = Clock()
    with Progress(400, 100, 2.4152, console, clock) as progress:
        assert screen(progress)[0].startswith("step 100/400 ━")
        assert screen(progress)[0].endswith("25%")
        progress.note("compiling the train step…")
        clock.now += 12
        assert screen(progress)[1].endswith("compiling the train step… 12 s")
        progress.update(row(110, **HEALTH))
        progress.eval(2.31, 110)
        clock.now += 25  # between two updates the estimate counts down
        assert [line.split() for line in screen(progress)[1:]] == [
            ["loss", "3.2500", "5,000", "tokens/s", "ETA", "0:02:00"],
            ["eval", "loss", "2.3100", "(bigram", "2.4152)"],
            ["FP8", "health", "saturated", "flushed", "to", "zero"],
            ["weights", "0.000%", "0.310%"],
            ["activations", "0.001%", "1.200%"],
            ["gradients", "0.020%", "22.000%"],
        ]
    written = console.file.getvalue()
    assert "compiling the train step…" in written
    assert "\x1b[32meval loss 2.3100 (bigram 2.4152)" in written  # green: below the bigram
    assert written.endswith("\x1b[?25h")  # the cursor is back


def test_the_estimate_leaves_compilation_out():
    clock = Clock()
    with Progress(100, 0, 2.0, Console(file=io.StringIO()), clock) as progress:
        clock.now += 1000
        progress.update(row(10, step_seconds=100.0))
        clock.now += 20
        progress.update(row(20, step_seconds=100.0))
        assert "ETA 0:02:40" in progress._numbers()  # 2 s a step, 80 left


def test_a_recipe_without_fp8_shows_no_health_table():
    progress = Progress(100, 0, 2.0, Console(file=io.StringIO()))
    progress.update(row(10))
    assert len(screen(progress)) == 2


def test_an_exception_gives_the_terminal_back():
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with pytest.raises(KeyboardInterrupt), Progress(100, 0, 2.0, console) as progress:
        progress.note("compiling the train step…")
        raise KeyboardInterrupt
    assert console.file.getvalue().endswith("\x1b[?25h")
