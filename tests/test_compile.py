"""`octablox compile`: what it is told, what it prints, how it fails; and real compilations."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import hlo_modules as hm
import pytest
from rich.console import Console

from octablox import cli, config
from octablox.aot import command, compiler, hlo
from octablox.aot.chips import GIB, parse_topology
from octablox.aot.overlap import read_schedule
from octablox.aot.report import Cost, Memory, Report, print_report, sum_collectives
from octablox.errors import UserError

TOPOLOGY = parse_topology("tpu7x:2x2x1")
# One kind of layer, so that it compiles in seconds, run twice.
SMALL = (
    "model_name=tiny base_num_decoder_layers=2 first_num_dense_layers=0 mtp_num_layers=0 "
    "num_experts=4 n_routing_groups=1 topk_routing_group=1 quantization=fp8_full "
    "use_batch_split_schedule=true per_device_batch_size=2 ici_expert_parallelism=2 "
    "compile_topology=tpu7x:2x2x1"
).split()


def test_help_is_quick_and_imports_no_jax():
    program = (
        "import sys; from octablox.cli import main; code = main(['compile', '--help'])\n"
        "assert not {'jax', 'numpy', 'pydantic'} & set(sys.modules), 'something heavy'\n"
        "sys.exit(code)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 1
    for word in (*cli.COMPILE_FLAGS, "compile_topology", "pip install 'octablox[tpu]'"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "expected compile_topology=, such as compile_topology=tpu7x:4x4x8, got none"),
        (["--json"], "--json: expected FILE after it, got nothing"),
        (["--xla", "fast"], "--xla: expected OPTION=VALUE, got 'fast'"),
        (["--link-gbps=-1"], "--link-gbps: expected a number above 0, got '-1'"),
        (["--clock-ghz", "quick"], "--clock-ghz: expected a number above 0, got 'quick'"),
        (["--jsn", "x"], "expected key=value, got '--jsn'"),
        (
            ["compile_topology=tpu7x:2x2x1", "num_cpu_devices=8"],
            "num_cpu_devices=8 has no meaning with compile_topology=tpu7x:2x2x1, which says how "
            "many devices there are; leave it out",
        ),
        (
            ["compile_topology=tpu7x:2x2x1", "ici_expert_parallelism=3"],
            "expert 3 x data 1 = 3 does not divide 8 devices; choose sizes that do, or another "
            "compile_topology than tpu7x:2x2x1",
        ),
        (
            ["compile_topology=v5e:3x3"],
            "compile_topology: 'v5e:3x3' is no v5e topology; near ones are v5e:2x4, v5e:4x4, "
            "v5e:2x2",
        ),
    ],
)
def test_what_cannot_be_compiled_is_one_line_and_exit_2(args, line, capsys):
    assert cli.main(["compile", "model_name=tiny", *args]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].replace("data 1 x expert 3", "expert 3 x data 1") == (
        f"error: {line}"
    )
    assert captured.out == ""


def test_train_refuses_a_topology(capsys):
    assert cli.main(["train", "model_name=tiny", "compile_topology=tpu7x:2x2x1"]) == 2
    assert capsys.readouterr().err == (
        "error: compile_topology=tpu7x:2x2x1 is for octablox compile and show; "
        "leave it out to train\n"
    )


def test_show_shows_a_topology(capsys):
    """Its devices, and its chip's kernels; without libtpu."""
    keys = "model_name=deepseek2-16b", "compile_topology=tpu7x:2x2x2", "quantization=fp8_full"
    assert cli.main(["show", "--json", *keys, "ici_expert_parallelism=4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mesh"] == {"data": 1, "fsdp": 4, "expert": 4, "context": 1}
    assert {gemm["backend"] for gemm in report["gemms"]} == {"pallas_tpu"}


def test_a_missing_libtpu_is_one_line(monkeypatch):
    from jax.experimental import topologies

    def refuses(**settings):
        raise RuntimeError("Unable to initialize backend 'tpu'\nand a trace")

    monkeypatch.setattr(topologies, "get_topology_desc", refuses)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    settings = config.load(SMALL).config
    with pytest.raises(UserError) as error:
        compiler.compile_report(settings)
    assert str(error.value) == (
        "octablox compile needs libtpu, which is not installed; pip install 'octablox[tpu]' "
        "(no TPU is needed)"
    )


def test_flags():
    flags = [("--xla", "a=1"), ("--xla", "--b=x=y"), ("--json", "r.json"), ("--link-gbps", "90")]
    options, path = command.read_flags([*flags, ("--timeline", "t.txt")])
    timeline = pathlib.Path("t.txt")
    expected = compiler.Options(xla={"a": "1", "b": "x=y"}, ring_gbps=90.0, timeline=timeline)
    assert options == expected
    assert path == pathlib.Path("r.json")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("the total memory required (260.00G) exceeds available HBM (94.74G).", 260 * GIB),
        ("Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm.", 17.5 * GIB),
        ("(512.00M) exceeds available HBM (15.75G)", GIB / 2),
        ("INTERNAL: Mosaic failed to compile TPU kernel", None),
    ],
)
def test_memory_that_xla_says_is_needed(text, needed):
    assert compiler._needed_bytes(text) == needed


class _Lowered:
    def __init__(self, text):
        self._text = text

    def compile(self, **settings):
        raise RuntimeError(self._text)


def test_too_much_memory_names_the_shortfall_and_what_to_change():
    lowered = _Lowered("(100.74G) exceeds available HBM (94.74G)")
    with pytest.raises(compiler.DoesNotFit) as error:
        compiler._compile(lowered, TOPOLOGY, {}, 2 * GIB)
    assert str(error.value) == (
        "does not fit: a step needs 100.74 GiB on each device (2.00 GiB of it parameters and "
        "optimizer), tpu7x has 94.74 GiB: 6.00 GiB too little; lower per_device_batch_size or "
        "max_target_length, write remat_policy=full, or choose a larger compile_topology"
    )
    with pytest.raises(compiler.DoesNotFit, match="choose a larger compile_topology or a larger"):
        compiler._compile(lowered, TOPOLOGY, {}, 90 * GIB)


def test_another_failure_of_xlas_is_one_line_and_its_text_is_kept():
    text = "INTERNAL: Mosaic failed\nand pages of it"
    with pytest.raises(UserError, match="XLA cannot compile this step for tpu7x:2x2x1") as error:
        compiler._compile(_Lowered(text), TOPOLOGY, {}, 0)
    assert "\n" not in str(error.value)
    path = pathlib.Path(str(error.value).split("all of it is in ")[1].rstrip(")"))
    assert path.read_text() == text
    path.unlink()


def make_report(**changes):
    """A report on a schedule written by hand."""
    body = "\n".join([hm.start("g", "gathers"), hm.update("g"), hm.product("p"), hm.done("g")])
    gathers = hm.collective("gathers", "all-gather", hm.groups("fsdp"), f"{hm.FORWARD}/all_gather")
    entry = "\n".join([hm.PARAMETER, hm.while_line(), "  ROOT %r = bf16[512,512]{1,0} bitcast(%a)"])
    module = hlo.parse(hm.module(entry, gathers, hm.loop(body)))
    schedule = read_schedule(module, TOPOLOGY.chip, hm.MESH)
    values = {
        "model": "tiny",
        "recipe": "fp8_full",
        "topology": TOPOLOGY,
        "mesh": hm.MESH,
        "tokens": 4096,
        "memory": Memory(2 * GIB, 3 * GIB, 2 * GIB, 2 * GIB, 5 * GIB, GIB, 0, 94 * GIB),
        "model_flops": schedule.flops["bf16"],
        "schedule": schedule,
        "traffic": sum_collectives(schedule.collectives),
        "cost": Cost(1.0, 2.0, 3.0, 4),
    }
    return Report(**(values | changes))


def test_the_report_adds_up():
    report = make_report()
    assert report.memory.peak == 9 * GIB
    assert report.memory.fits
    assert not dataclasses.replace(report.memory, available=8 * GIB).fits
    (row,) = report.traffic
    assert (row.count, row.overlapped, row.exposed_seconds) == (5, 1.0, 0.0)
    compute = sum(report.schedule.compute.values())
    assert report.schedule.seconds == pytest.approx(compute)
    assert report.roofline["network"] == row.seconds
    assert report.roofline_seconds == max(report.roofline.values())
    # All FLOPs are the model's here, at the bf16 peak.
    assert report.mfu(report.roofline["flops"]) == pytest.approx(1.0)


def test_the_report_as_json_and_as_tables(capsys):
    report = make_report()
    found = json.loads(json.dumps(report.to_json()))
    assert found["fits"] is True
    assert found["memory_bytes"]["peak"] == 9 * GIB
    assert found["network_bytes"] == {"fsdp all-gather": report.traffic[0].bytes}
    assert found["collectives"][0]["phase"] == "forward"
    assert found["modelled_seconds"]["step"] == report.schedule.seconds
    assert found["assumptions"] == report.assumptions()
    print_report(report, Console(width=160))
    out = capsys.readouterr().out
    assert "tpu7x:2x2x1: 8 devices, 2 to a chip; data 1 × fsdp 4 × expert 2" in out
    assert "9.000" in out
    for line in report.assumptions():
        assert line.split(";")[0][:60] in out


def test_what_does_not_fit_is_written_too(monkeypatch, tmp_path, capsys):
    def refuses(*args):
        raise compiler.DoesNotFit("does not fit: too large", 3.0, 2.0)

    monkeypatch.setattr(command, "compile_report", refuses)
    path = tmp_path / "report.json"
    assert cli.main(["compile", *SMALL, "--json", str(path)]) == 2
    assert capsys.readouterr().err == "error: does not fit: too large\n"
    assert json.loads(path.read_text()) == {
        "fits": False,
        "needed_bytes": 3.0,
        "available_bytes": 2.0,
    }


# Compilations, which need libtpu.


def compile_program(folder, *args):
    command_line = [sys.executable, "-m", "octablox", "compile", *args]
    env = os.environ | {"XLA_FLAGS": ""}
    return subprocess.run(
        command_line, capture_output=True, text=True, timeout=300, cwd=folder, env=env
    )


@pytest.mark.aot
def test_a_small_step_fits_and_overlaps(tmp_path):
    paths = tmp_path / "report.json", tmp_path / "step.hlo"
    timeline = tmp_path / "timeline.txt"
    flags = ["--json", str(paths[0]), "--save-hlo", str(paths[1]), "--timeline", str(timeline)]
    done = compile_program(tmp_path, *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    text = timeline.read_text()
    assert "dot_general" in text and "all-gather over expert" in text
    # Nothing but what is being done, a line each, on stderr.
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["tracing", "XLA", "reading"]
    assert "step" in done.stdout
    report = json.loads(paths[0].read_text())
    assert report["fits"] and report["devices"] == 8 and report["devices_per_chip"] == 2
    assert report["mesh"] == {"data": 1, "fsdp": 4, "expert": 2, "context": 1}
    memory = report["memory_bytes"]
    assert 0 < memory["state"] < memory["arguments"] < memory["peak"] < memory["available"]
    rows = report["collectives"]
    assert all(row["bytes"] > 0 for row in rows)
    found = {(row["phase"], row["axes"], row["kind"]) for row in rows}
    assert ("forward", "expert", "all-gather") in found
    assert ("backward", "expert", "all-gather") in found
    assert sum(row["overlapped_bytes"] for row in rows) > 0.3 * sum(row["bytes"] for row in rows)
    # Three products of two layers' two GMMs for each micro-batch, and some that run again.
    settings = config.load(SMALL).config
    rows_of_one = settings.run.max_target_length * settings.moe.num_experts_per_tok
    once = 2 * 2 * rows_of_one * 2 * (128 * 128 + 128 * 128)  # K and N of tiny padded to 128
    assert report["expert_flops"].keys() == {"fp8"}
    assert 3 * once <= report["expert_flops"]["fp8"] <= 4 * once
    assert hlo.parse(paths[1].read_text()).entry


@pytest.mark.aot_few
def test_long_sequences_and_an_all_to_all(tmp_path):
    """What only a TPU runs.

    The attention kernel on a piece of a sequence, ragged transfers, sums as a grouped matmul.
    """
    path = tmp_path / "report.json"
    keys = "ici_expert_parallelism=4 ici_context_parallelism=2 max_target_length=256"
    keys += " use_ring_of_experts=false ragged_buffer_factor=1.25"
    keys += " fp8_dispatch=true fp8_dispatch_grad=true"
    hlo_path = tmp_path / "step.hlo"
    flags = ["--json", str(path), "--save-hlo", str(hlo_path)]
    small = [key for key in SMALL if "expert_parallelism" not in key]
    done = compile_program(tmp_path, *small, *keys.split(), *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["mesh"] == {"data": 1, "fsdp": 1, "expert": 4, "context": 2}
    assert report["expert_flops"].keys() == {"fp8"}
    found = {(row["phase"], row["axes"], row["kind"]) for row in report["collectives"]}
    for phase in ("forward", "backward"):
        assert (phase, "expert", "ragged-all-to-all") in found
    assert ("forward", "context", "all-gather") in found  # of latents
    text = hlo_path.read_text()
    for kernel in ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv", "combine/octablox_tgmm"):
        assert kernel in text, kernel
    for dtype in ("f8e4m3fn", "f8e5m2"):  # tokens, and their gradients
        assert re.search(rf"= {dtype}\S* ragged-all-to-all", text)
    # Kernels that are alike, forward and again, are so to the letter: XLA compiles them once.
    called_from: dict[str, set[str]] = {}
    for line in text.splitlines():
        if "octablox_gmm" in line and " custom-call(" in line:
            of = [re.search(f'"{key}":"([^"]*)"', line) for key in ("body", "debug_locations")]
            body, lines = (found.group(1) for found in of if found)
            called_from.setdefault(body, set()).add(lines)
    assert called_from and all(len(found) == 1 for found in called_from.values())
    # Steps of the schedule are computations of their own.
    assert re.search(r' conditional\(.*op_name="[^"]*/cond"', text)


@pytest.mark.aot
def test_without_latency_hiding_nothing_overlaps():
    settings = config.load(SMALL).config
    options = compiler.Options(xla={"xla_tpu_enable_latency_hiding_scheduler": "false"})
    report = compiler.compile_report(settings, options)
    assert report.traffic
    assert sum(one.overlapped_bytes for one in report.traffic) == 0
    # XLA parts a collective permute's start from its end without that scheduler, too.
    others = [one for one in report.traffic if one.kind != "collective-permute"]
    assert sum(one.seconds for one in others) > 0.99 * report.roofline["network"]
    for one in others:
        assert one.exposed_seconds == pytest.approx(one.seconds), one


@pytest.mark.aot
def test_a_step_that_does_not_fit_is_refused(tmp_path):
    # 34 GiB of embedding and head and their moments on each of four devices of 16 GB.
    keys = [arg for arg in SMALL if not arg.startswith(("compile_", "quantization"))]
    args = ["vocab_size=200000000", "compile_topology=v5e:2x2"]
    done = compile_program(tmp_path, *keys, *args)
    assert done.returncode == 2, done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: does not fit: a step needs ")
    assert "v5e has 15.75 GiB" in last and "GiB too little" in last


@pytest.mark.aot
def test_an_option_that_xla_does_not_know(tmp_path):
    done = compile_program(tmp_path, *SMALL, "--xla", "xla_tpu_go_faster=true")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: --xla: expected an option of XLA's, got 'xla_tpu_go_faster'"
    )
