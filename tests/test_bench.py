"""`octablox bench gmm | moe | step`: what is measured is right; how fast it is is not tested."""

import json

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from octablox import cli, config
from octablox.bench import gmm, moe, step
from octablox.bench.timing import interleaved

TINY = "model_name=tiny mtp_num_layers=0 base_num_decoder_layers=2 vocab_size=64".split()


@pytest.mark.parametrize("name", ["ragged_dot", "qwix", "dense float32"])
def test_contenders_compute_the_same(name):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((64, 32), (4, 32, 16)))
    if "dense" in name:
        w = jnp.broadcast_to(w[:1], w.shape)
    sizes = jnp.array([10, 0, 50, 4], jnp.int32)
    found = gmm.contenders()
    ours, theirs = (found[n]("bf16", x, w, sizes) for n in ("octablox", name))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_only_what_runs_here_is_a_contender():
    assert list(gmm.contenders())[:3] == ["octablox", "ragged_dot", "qwix"]
    assert "megablox" not in gmm.contenders()  # of TPU


def test_moe_contenders_compute_the_same():
    settings = config.load([*TINY, "num_cpu_devices=8"]).config
    x, gate_up, down, sizes, _ = moe._operands(128, 64, 8, 64)
    found = moe._contenders(settings, "bf16")
    expected = jax.jit(found["ragged_dot"])(x, gate_up, down, sizes)
    got = jax.jit(found["octablox"])(x, gate_up, down, sizes)
    error = np.linalg.norm(np.asarray(got - expected, np.float32)) / np.linalg.norm(
        np.asarray(expected, np.float32)
    )
    assert error < 2**-7  # of bfloat16


def test_a_step_trains():
    settings = config.load([*TINY, "max_target_length=16", "num_cpu_devices=8"]).config
    batch = step.random_batch(settings, 8)
    assert {a.shape for a in batch.values()} == {(8, 16)}
    one = step._Step(settings)
    first = float(one()[1])
    for _ in range(3):
        number, loss = one()
    assert int(number) == 4 and float(loss) < first
    assert one.temporary_bytes > 2**10


def test_rows_are_flat_and_drawn(tmp_path, capsys):
    paths = tmp_path / "rows.json", tmp_path / "rows.png"
    line = ["--recipes=bf16", "--seconds=0.01", f"--json={paths[0]}", f"--plot={paths[1]}"]
    assert cli.main(["bench", "moe", *TINY, "max_target_length=64", *line]) == 0
    rows = json.loads(paths[0].read_text())
    assert [row["direction"] for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        assert row["rows"] == 128 and row["experts"] == 8
        flops = 2 * 128 * 64 * 3 * 64 * (1 if row["direction"] == "forward" else 3)
        assert row["tflops"] == pytest.approx(1e-9 * flops / row["octablox_ms"])
        assert row["of_dense"] == pytest.approx(row["dense_ms"] / row["octablox_ms"])
    assert paths[1].read_bytes()[:4] == b"\x89PNG"
    assert "octablox bench moe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "bench: expected gmm, moe or step, got ''"),
        ("layer", "bench: expected gmm, moe or step, got 'layer'"),
        ("moe --recipes fp9", "--recipes: expected some of bf16, fp8_full"),
        ("step quantization=fp8_full", "quantization: write --recipes instead"),
        ("gmm --shape E9", "bench gmm: argument --shape: invalid choice: 'E9'"),
        ("step --tables", "bench step: unrecognized arguments: --tables"),
    ],
)
def test_mistakes(line, message, capsys):
    assert cli.main(["bench", *line.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_help_names_everything(capsys):
    assert cli.main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("octablox bench gmm [options]", "--static", "--shape", "--recipes", "--plot"):
        assert word in out


def test_every_other_round_goes_backwards():
    calls = []
    interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
