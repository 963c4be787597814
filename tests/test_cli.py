"""The program as a user meets it: help, errors, exit codes."""

import json
import os
import subprocess
import sys
import time

import pytest

import octablox
from octablox import cli
from octablox.errors import UserError


def run(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octablox", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **kwargs)


def test_help_is_quick_and_imports_no_jax():
    program = (
        "import sys; from octablox.cli import main; code = main(['--help'])\n"
        "assert not {'jax', 'numpy', 'pydantic'} & set(sys.modules), 'something heavy'\n"
        "sys.exit(code)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 1
    assert done.stdout.startswith("octablox VERB [key=value ...]")
    for verb in cli.VERBS:
        assert f"\n  {verb} " in done.stdout


def test_importing_the_package_is_instant():
    program = "import sys, octablox; assert 'jax' not in sys.modules; print(octablox.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, octablox.__version__)


def test_every_public_name_is_there():
    program = (
        "import octablox, octablox.gmm, types\n"
        "names = [n for n in dir(octablox) if not n.startswith('_')]\n"
        "for name in names: getattr(octablox, name)\n"
        "assert not isinstance(octablox.gmm, types.ModuleType), 'the module hides the function'\n"
        "from octablox import gmm; assert callable(gmm)\n"
        "print(len(names))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'octablox' has no attribute 'gmmm'"):
        _ = octablox.gmmm


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"octablox {octablox.__version__}\n"


@pytest.mark.parametrize("verb", ["train", "show"])
def test_the_help_of_a_verb_lists_every_key(verb, capsys):
    from octablox import config

    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  steps=100 " in out
    assert "tiny" in out
    for key in config.KEYS:
        assert f"\n  {key}=" in out


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["trian"],
            f"error: expected a verb ({', '.join(cli.VERBS)}), got 'trian'; did you mean train?",
        ),
        (["train", "stepz=3"], "error: unknown key 'stepz'; did you mean steps or eval_steps?"),
        (["show", "steps"], "error: expected key=value, got 'steps'; write steps=VALUE"),
    ],
)
def test_a_users_error_is_one_line_and_exit_2(args, line, capsys):
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert captured.err == line + "\n"
    assert captured.out == ""


def test_the_programs_own_error_keeps_its_traceback(monkeypatch):
    def broken(args):
        raise ZeroDivisionError("a fault")

    monkeypatch.setitem(cli.VERBS, "train", cli.Verb(broken, ""))
    with pytest.raises(ZeroDivisionError, match="a fault"):
        cli.main(["train"])


def test_an_error_while_training_is_a_users_error_too(monkeypatch, capsys):
    def refuses(args):
        raise UserError("no room; free some")

    monkeypatch.setitem(cli.VERBS, "train", cli.Verb(refuses, ""))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "error: no room; free some\n"


def test_ctrl_c_before_a_run_has_begun_is_quiet(monkeypatch, capsys):
    def stopped(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "train", cli.Verb(stopped, ""))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "octablox", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_show_says_what_a_run_would_be():
    env = os.environ | {"XLA_FLAGS": ""}
    line = ["model_name=tiny", "num_cpu_devices=8", "ici_expert_parallelism=2"]
    done = run("show", *line, "quantization=fp8_full", "--json", env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mesh"] == {"data": 1, "fsdp": 4, "expert": 2, "context": 1}
    assert report["config"]["num_experts"] == {"value": 8, "source": "preset tiny"}
    gemms = {(row["gemm"], row["product"]): row for row in report["gemms"]}
    gate_up = gemms["gate_up", "out"]
    # 1 row of 64 tokens a device, gathered over 2 expert shards, 2 copies of each.
    assert {key: gate_up[key] for key in "EMKN"} == {"E": 4, "M": 256, "K": 64, "N": 128}
    down = gemms["down", "drhs"]
    assert {key: down[key] for key in "EMKN"} == {"E": 4, "M": 256, "K": 64, "N": 64}
    assert "float8_e5m2" in gemms["down", "dlhs"]["lhs"]
    assert gate_up["backend"] == "xla"
    parts = report["parameters"]
    # Two MoE layers and the MTP layer, each with 8 experts of gate, up and down.
    assert parts["routed experts"] == 3 * 8 * 3 * 64 * 64
    assert parts["shared experts"] == 3 * 3 * 64 * 64
    assert parts["embedding"] == parts["output head"] == 320 * 64
    named = sum(n for part, n in parts.items() if part not in ("total", "active_per_token"))
    assert parts["total"] == named
    assert parts["total"] - parts["active_per_token"] == parts["routed experts"] * 6 // 8
    assert "other" not in parts
    forward = report["flops"]["forward_per_token"]
    assert forward["routed experts"] == 2 * 3 * 2 * 3 * 64 * 64
    assert report["flops"]["per_step"] == 3 * 512 * sum(forward.values())


def test_the_published_sizes_come_out_in_the_parameter_counts():
    env = os.environ | {"XLA_FLAGS": ""}
    line = ["model_name=deepseek3-671b", "num_cpu_devices=256"]
    counts = {}
    for mtp in (0, 1):
        done = run("show", *line, f"mtp_num_layers={mtp}", "--json", env=env)
        assert done.returncode == 0, done.stderr
        counts[mtp] = json.loads(done.stdout)["parameters"]
    routed_layer = 256 * 3 * 7168 * 2048
    assert counts[0]["routed experts"] == 58 * routed_layer
    assert counts[1]["routed experts"] == 59 * routed_layer
    # DeepSeek-V3 report: 671B parameters, of which a token activates 37B.
    assert round(counts[0]["total"] / 1e9) == 671
    assert int(counts[0]["active_per_token"] / 1e9) == 37
