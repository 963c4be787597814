"""Comparisons: which runs, what they come to, the report, and faults that it must show."""

import base64
import html
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import jax
import pytest
import training_runs
from jax import numpy as jnp

from octablox import cli, fp8
from octablox.compare import command, figures, page, plan, results
from octablox.errors import UserError
from octablox.fp8 import RECIPES, QArray
from octablox.train.step import Trainer

# Two layers with experts, in bfloat16, on eight devices.
SMALL = [
    *training_runs.SMALL.replace("base_num_decoder_layers=1", "base_num_decoder_layers=2").split(),
    *"per_device_batch_size=2 batch_split_factor=2".split(),
    *"steps=12 eval_interval=4 eval_steps=2".split(),
]
PNG = b"\x89PNG\r\n\x1a\n"


def arguments(folder, line=""):
    keys = dict(word.split("=", 1) for word in [*SMALL, f"base_output_directory={folder}"])
    return [*line.split(), *(f"{key}={value}" for key, value in keys.items()), "run_name=cmp"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """bf16, and fp8_full under both schedules, as a user runs them: arguments, code, output."""
    folder = tmp_path_factory.mktemp("compare")
    args = arguments(folder, "--recipes=fp8_full --seeds=1 --threshold=30")
    args += ["--variant", "split quantization=fp8_full use_batch_split_schedule=true"]
    done = subprocess.run(
        [sys.executable, "-m", "octablox", "compare", *args], capture_output=True, text=True
    )
    assert done.stderr == ""
    return args, done.returncode, done.stdout


def report_of(args):
    """What the runs in the folder come to, without training."""
    return results.read(plan.make([*args, "--report-only"]))


# Runs, results, report.


def test_a_comparison_trains_and_passes(compared):
    args, code, out = compared
    assert code == 0, out
    found = report_of(args)
    assert [result.variant.name for result in found.variants] == ["bf16", "fp8_full", "split"]
    assert all(run.finished for result in found.variants for run in result.runs)
    for name in ("fp8_full", "split"):
        assert f"{name}: pass: eval-loss gap to bf16 " in out
        assert f"{name}-seed0:  12/12  loss " in out
    gaps = found.variants[1].gaps
    assert list(gaps) == [4, 8, 12]
    assert 0 < max(abs(gap.mean) for gap in gaps.values()) < 30
    assert not list((found.plan.folder).glob("*/checkpoints"))  # of finished runs


def test_batch_split_is_sequential_to_the_last_bit(compared):
    args, _, out = compared
    said = "fp8_full and split: all 15 logged losses are equal to the last bit"
    assert said in out
    assert said in (report_of(args).plan.folder / command.REPORT).read_text()


def test_the_report_needs_nothing_else_and_has_its_pictures(compared):
    args, _, _ = compared
    folder = report_of(args).plan.folder
    report = (folder / command.REPORT).read_text()
    assert not re.findall(r'(?:src|href|srcset)="(?!data:)', report)
    assert "http" not in report and "url(" not in report
    embedded = re.findall(r'(?:src|srcset)="data:image/png;base64,([^"]+)"', report)
    names = ["train_loss", "eval_loss", "gap", "cost"]
    names += [f"{x}-{variant}" for variant in ("fp8_full", "split") for x in ("health", "layers")]
    assert sorted(path.stem for path in folder.glob("*.png")) == sorted(names)
    assert len(embedded) == 2 * len(names)
    wide, narrow = ({_width(png) for png in embedded[n::2]} for n in (1, 0))
    assert min(wide) > 1200 and max(narrow) < 600
    for text in ("Which layer loses most: fp8_full", "Gap to bf16", "Made by", "layers.1"):
        assert text in report


def _width(text):
    png = base64.b64decode(text)
    assert png[:8] == PNG
    return struct.unpack(">I", png[16:20])[0]


def test_the_table_is_json_too(compared):
    args, _, _ = compared
    written = json.loads((report_of(args).plan.folder / command.TABLE).read_text())
    rows = written["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", "fp8_full", "fp8_full"]
    assert [row["schedule"] for row in rows] == ["sequential", "sequential", "batch_split"]
    assert rows[1]["gap_percent"] == rows[2]["gap_percent"] != 0
    assert rows[1]["gap_half_interval"] is None  # of one seed
    assert rows[1]["passed"] is True and rows[0]["passed"] is None
    assert rows[1]["worst_layer"] in ("layers.0", "layers.1")
    assert all(not isinstance(value, list | dict) for row in rows for value in row.values())
    assert len(written["evaluations"]) == 3 * 3


def test_a_finished_comparison_trains_nothing_again(compared, capsys):
    args, _, _ = compared
    before = {path: path.stat().st_mtime for path in report_of(args).plan.folder.glob("*/*.jsonl")}
    assert cli.main(["compare", *args]) == 0
    assert {path: path.stat().st_mtime for path in before} == before
    assert "training" not in capsys.readouterr().out


def test_other_settings_are_refused(compared, capsys):
    args, _, _ = compared
    assert cli.main(["compare", *args, "learning_rate_schedule_steps=41"]) == 2
    assert "is given twice" in capsys.readouterr().err
    changed = [a.replace("learning_rate=0.01", "learning_rate=0.02") for a in args]
    assert cli.main(["compare", *changed]) == 2
    error = capsys.readouterr().err
    assert "was trained with other settings (learning_rate: 0.01 there, 0.02 here)" in error


def test_the_exit_code_follows_the_verdict(compared, capsys, monkeypatch):
    args, _, _ = compared
    monkeypatch.setattr(figures, "draw", lambda found: [])  # drawn by other tests
    gap = report_of(args).variants[1].final_gap.mean
    threshold = gap / 2 if gap > 0 else 1e-6
    strict = [a for a in args if "threshold" not in a] + [f"--threshold={threshold}"]
    assert cli.main(["compare", *strict, "--report-only"]) == (1 if gap > 0 else 0)
    out = capsys.readouterr().out
    assert ("FAIL" in out) == (gap > 0)


# Faults.


@pytest.fixture
def with_fault(compared, tmp_path):
    """Trains one more variant beside copies of the good runs; returns what the report says."""

    def add(name, *keys, fault=None, code=0):
        args, _, _ = compared
        source = report_of(args).plan.folder
        shutil.copytree(source / "bf16-seed0", tmp_path / "cmp" / "bf16-seed0")
        dropped = "base_output_directory", "--recipes", "--variant", "split "
        base = [a for a in args if not a.startswith(dropped)]
        base += [f"base_output_directory={tmp_path}", "--recipes=bf16"]
        base += ["--variant", f"{name} {' '.join(keys)}"]
        (run,) = (run for run in plan.make(base).runs if run.variant.name == name)
        with pytest.MonkeyPatch.context() as patch:
            if fault:
                fault(patch)
            assert cli.main(list(run.args)) == code
        with pytest.MonkeyPatch.context() as patch:
            if not code:  # of a run that stopped early they are drawn
                patch.setattr(figures, "draw", lambda found: [])
            assert cli.main(["compare", *base, "--report-only"]) == 1
        found = report_of(base)
        (verdict,) = found.verdicts
        assert not verdict.passed
        report = html.unescape((found.plan.folder / command.REPORT).read_text())
        assert verdict.line.removeprefix(f"{name}: FAIL: ") in report
        assert (found.plan.folder / "train_loss.png").exists() == bool(code)
        return verdict, found.variants[-1]

    return add


def test_a_scale_misplaced_by_two_is_seen(with_fault):
    """Of the weights: the products are twice as large, which training would hide."""

    def fault(patch):
        quantize = fp8.quantize_weight

        def misplaced(*args, **kwargs):
            q = quantize(*args, **kwargs)
            return QArray(q.qvalue, 2 * q.scale, None, q.qtype)

        patch.setattr(fp8, "quantize_weight", misplaced)

    verdict, result = with_fault("misplaced", "quantization=fp8_full", fault=fault)
    assert ".weight has an SQNR of 0.0 dB, its type allows 22.0 dB (one of 4 casts" in verdict.line
    assert result.losses_by_layer()[0][1] > 100  # percent of the signal


@pytest.mark.slow  # it compiles a step of its own
def test_gradients_that_saturate_are_seen(with_fault, tmp_path):
    """In e4m3, with `fixed` at about a hundredth of their range."""
    recipe = RECIPES["fp8_full"].model_dump(mode="json", exclude={"name", "column_parts"})
    # Where weights and activations have fixed scales too, gradients take over none of theirs.
    ranges = {"weight": 1, "act": 16, "dlhs_grad": 2e-5, "drhs_grad": 2e-5}
    for operand, reach in ranges.items():
        recipe[operand] |= {"dtype": "float8_e4m3fn", "calibration": f"fixed,-{reach},{reach}"}
    path = tmp_path / "narrow.yml"
    path.write_text(json.dumps(recipe))
    verdict, result = with_fault("narrow", f"quantization={path}")
    assert re.search(r"d[lr]hs_grad has an SQNR of \d\.\d dB, its type allows 22.0", verdict.line)
    assert "(one of 8 casts below" in verdict.line
    saturated = result.typical("layers.1.down.dlhs_grad", "saturated")
    assert saturated > 0.1
    assert result.typical("layers.1.down.act", "saturated") == 0


def test_nan_in_one_expert_is_seen(with_fault):
    def fault(patch):
        compile_step = Trainer.compile_step

        def compile_and_plant(self, shape):
            compile_step(self, shape)
            step, count = self.step, iter(range(100))

            def planted(state, batch):
                if next(count) == 5:
                    down = state.params["moe_layers"]["experts"]["down"]
                    with jax.set_mesh(self.mesh):
                        bad = jax.jit(_with_nan, donate_argnums=0)(down)
                    state.params["moe_layers"]["experts"]["down"] = bad
                return step(state, batch)

            self.step = planted

        patch.setattr(Trainer, "compile_step", compile_and_plant)

    verdict, _ = with_fault("nan", "quantization=fp8_full", fault=fault, code=2)
    assert verdict.line == (
        "nan: FAIL: nan-seed0 stopped at step 6: its loss is not finite, first in "
        "layers.1.down.weight"
    )


def _with_nan(down):
    """One value of one expert of the second layer."""
    at = [jax.lax.broadcasted_iota(jnp.int32, down.shape, dim) for dim in range(4)]
    return jnp.where((at[0] == 1) & (at[1] == 3) & (at[2] == 5) & (at[3] == 0), jnp.nan, down)


# Numbers.


def test_the_interval_is_students():
    gap = results.gap_of({0: 0.1, 1: 0.2, 2: 0.3})
    assert gap.mean == pytest.approx(0.2)
    assert gap.half == pytest.approx(4.302653 * 0.1 / 3**0.5)
    assert str(gap) == "+0.20 ± 0.25%"
    assert results.gap_of({0: 0.1}).half is None


def written_run(run, losses, **summary):
    """A run folder with these evaluations, ten steps apart."""
    run.folder.mkdir(parents=True)
    rows = [{"step": 1, "kind": "train", "loss": 3.0, "grad_norm": 1.0, "tokens_per_second": 10.0}]
    rows += [
        {"step": 10 * n, "kind": "eval", "eval_loss": loss} for n, loss in enumerate(losses, 1)
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.folder / "summary.json").write_text(json.dumps({"steps": 20, **summary}))


def test_gaps_pair_the_seeds(tmp_path):
    args = arguments(tmp_path, "--recipes int8 --seeds 4,7")
    args = [a.replace("steps=12", "steps=20") if a.startswith("steps") else a for a in args]
    made = plan.make(args)
    cost = {"tokens_per_second": 5, "peak_memory_bytes": 1}
    for run, losses in zip(made.runs, [(2, 1), (2.02, 1.01), (4, 2), (4.04, 2.0)], strict=True):
        written_run(run, losses, **cost)
    assert [run.name for run in made.runs] == [
        *("bf16-seed4", "int8-seed4", "bf16-seed7", "int8-seed7")
    ]
    found = results.read(made)
    gaps = found.variants[1].gaps
    assert gaps[10].mean == pytest.approx(1) and gaps[10].half == pytest.approx(0, abs=1e-9)
    assert gaps[20].by_seed == pytest.approx({4: 1, 7: 0})
    assert found.verdicts[0].line == (
        "int8: FAIL: eval-loss gap to bf16 +0.50 ± 6.35% (2 seeds, 95% interval); more than 0.3%"
    )
    report = page.render(found, figures.draw(found))
    assert "int8: <b>FAIL</b>: eval-loss gap to bf16 +0.50" in report


def test_what_is_not_trained_to_the_end_does_not_pass(tmp_path):
    made = plan.make(arguments(tmp_path, "--seeds 1 --recipes int8"))
    written_run(made.runs[0], (2, 1), tokens_per_second=5, peak_memory_bytes=1)
    assert results.read(made).verdicts[0].line == "int8: FAIL: not trained to the end: int8-seed0"


# The command line.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--recipes fp8_fll", "fp8_fll: quantization: expected nothing (bf16), one of bf16, fp8_f"),
        (
            "--schedules zigzag",
            "--schedules: expected some of sequential, batch_split, got 'zigzag'",
        ),
        ("--seeds none", "--seeds: expected how many, such as 3, or which, as 0,1,2; got 'none'"),
        ("--threshold 0", "--threshold: expected percent, 0 to 100, got 0"),
        (
            "--threshold much",
            "compare: argument --threshold: invalid float value: 'much'; octablox",
        ),
        ("quantization=int8", "quantization: compare sets it by run; write --recipes, --seeds or"),
        ("--variant=x", "--variant: expected 'NAME key=value ...', got 'x'"),
        ("stps=3", "unknown key 'stps'; did you mean steps"),
        ("--report-only", "compare: runs/compare-demo has no runs yet; leave --report-only out"),
        ("--jobs=2", "compare: unrecognized arguments: --jobs=2; octablox compare --help"),
    ],
)
def test_mistakes(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_variants_of_ones_own(tmp_path):
    line = ["--variant", "warm quantization=fp8_full learning_rate=0.02", "--seeds=1"]
    made = plan.make([*line, *arguments(tmp_path, "--recipes all")])
    names = [variant.name for variant in made.variants]
    assert names == [*RECIPES, "warm"]
    assert made.variants[-1].reference == "bf16"
    assert made.runs[-1].config.optimizer.learning_rate == 0.02
    with pytest.raises(UserError, match="two variants are called int8"):
        plan.make(["--variant", "int8 steps=3", "--recipes=int8"])


def test_schedules_cut_a_batch_alike(tmp_path):
    args = [a for a in arguments(tmp_path, "--recipes int8 --seeds 1") if "split_factor" not in a]
    made = plan.make([*args, "--schedules=sequential,batch_split"])
    names = [(variant.name, variant.reference) for variant in made.variants]
    assert names == [
        *(("bf16-sequential", None), ("bf16-batch_split", None)),
        *(("int8-sequential", "bf16-sequential"), ("int8-batch_split", "bf16-batch_split")),
    ]
    schedules = [run.config.schedule for run in made.runs]
    assert [schedule.use_batch_split_schedule for schedule in schedules] == [False, True] * 2
    assert {schedule.micro_batches for schedule in schedules} == {2}


def test_help_lists_the_options(capsys):
    assert cli.main(["compare", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("--recipes", "--seeds", "--threshold", "(default: 0.3)", "Exit code 0"):
        assert word in out


@pytest.mark.slow
def test_an_interrupted_comparison_resumes(tmp_path):
    line = [*arguments(tmp_path, "--recipes bf16 --seeds 1"), "checkpoint_period=1000"]
    line = [a.replace("steps=12", "steps=80") if a.startswith("steps=") else a for a in line]
    start = [sys.executable, "-m", "octablox", "compare", *line]
    run = tmp_path / "cmp" / "bf16-seed0"
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 120
        while not _logged_steps(run) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130, out
    assert "interrupted; the same command goes on from here" in out
    assert 0 < _logged_steps(run) < 80
    assert cli.main(["compare", *line]) == 0
    assert _logged_steps(run) == 80
    assert f"resuming {run} from step" in (run / "output.txt").read_text()


def _logged_steps(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"train"') if path.exists() else 0
