"""Decoding with a cache is the model, to `transformers`' logits; and what is printed."""

import functools
import pathlib

import hf_checkpoints
import numpy as np
import pytest
from hf_checkpoints import BLOCKS, GROUPED, UNGROUPED
from jax import numpy as jnp
from safetensors.numpy import load_file

from octablox import cli, fp8
from octablox.config import load
from octablox.generate import Generator, Options, blockwise_experts, sample
from octablox.hf import layout
from octablox.train.pretrained import open_parameters

DATA = pathlib.Path(__file__).parent / "data"
TOKENS = np.random.default_rng(1).integers(0, 48, (2, 64))


def converted(folder, sizes, tensors, more=""):
    hf_checkpoints.write(folder / "hf", sizes, tensors)
    line = f"convert --from hf {folder / 'hf'} --to octablox {folder / 'converted'} {more}"
    assert cli.main(line.split()) == 0
    return folder / "converted"


def generator(folder, *keys):
    config = load([f"load_parameters_path={folder}", "dtype=float32", *keys]).config
    return Generator(config, folder)


def logits_of(made, row, prompt):
    """After each token from the prompt's last on: float32 [S - prompt, V]."""
    found = []

    def next_token(logits, step):
        found.append(logits)
        return int(row[prompt + step])

    count = len(row) - prompt
    assert list(made.tokens(row[:prompt].tolist(), count, next_token)) == row[prompt:].tolist()
    return np.array(found)


@pytest.mark.parametrize("name, sizes", [("grouped", GROUPED), ("ungrouped", UNGROUPED)])
def test_every_token_sees_what_the_whole_sequence_shows(tmp_path, name, sizes):
    folder = converted(tmp_path, sizes, hf_checkpoints.random_tensors(sizes))
    expected = load_file(DATA / f"hf_{name}.safetensors")["logits"]
    made = generator(folder)
    for row, prompt in ((0, 10), (1, 1)):
        found = logits_of(made, TOKENS[row], prompt)
        assert np.max(np.abs(found - expected[row, prompt - 1 : -1])) < 1e-4


def test_experts_in_fp8_blocks_are_multiplied_as_they_are(tmp_path):
    tensors = hf_checkpoints.fp8_tensors(BLOCKS)
    folder = converted(tmp_path, BLOCKS, tensors)
    operands = blockwise_experts(open_parameters(folder), 1, np.float32)
    restored = {}
    for name, operand in operands.items():
        assert operand.q.qvalue.dtype == hf_checkpoints.E4M3
        # Blocks' scales spread over the tiles that the recipe gives such a weight.
        like = jnp.zeros(operand.shape)
        parts = 2 if name == "gate_up" else 1
        usual = fp8.quantize_weight(like, fp8.RECIPES["fp8_blockwise"].weight, parts=parts)
        assert operand.q.qvalue.shape[1:] == usual.qvalue.shape
        assert operand.q.scale.shape[1:] == usual.scale.shape
        layer = fp8.QArray(operand.q.qvalue[0], operand.q.scale[0], None, operand.q.qtype)
        _, k, n = operand.shape
        restored[name] = np.asarray(fp8.dequantize(layer))[:, :k, :n]
    for e in range(4):
        for name, found in (
            ("gate", restored["gate_up"][e][:, :96]),
            ("up", restored["gate_up"][e][:, 96:]),
            ("down", restored["down"][e]),
        ):
            weight = f"model.layers.1.mlp.experts.{e}.{name}_proj.weight"
            expected = hf_checkpoints.from_blocks(tensors[weight], tensors[f"{weight}_scale_inv"])
            np.testing.assert_array_equal(found, expected.T.astype(np.float32))

    # As exact weights under a recipe that rounds activations alone.
    (tmp_path / "act.yml").write_text(
        "act: {dtype: float8_e4m3fn, tile: [1, 128], power_of_two: true}"
    )
    row = TOKENS[0][:6]
    floats = logits_of(generator(folder, f"quantization={tmp_path / 'act.yml'}"), row, 1)
    blocks = logits_of(generator(folder, "quantization=fp8_blockwise"), row, 1)
    np.testing.assert_allclose(blocks, floats, atol=1e-5 * np.abs(floats).max())


def test_sampling():
    logits = np.log(np.array([0.1, 0.5, 0.1, 0.3], np.float32))
    count = 400

    def shares(**options):
        choose = functools.partial(sample, options=Options(**options))
        drawn = [choose(logits, step) for step in range(count)]
        assert drawn == [choose(logits, step) for step in range(count)]
        return np.bincount(drawn, minlength=4) / count

    assert shares(temperature=0.0).tolist() == [0, 1, 0, 0]
    error = 3 * np.sqrt(0.25 / count)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=1.0), np.exp(logits), atol=error)
    nucleus = shares(temperature=1.0, top_p=0.7)
    np.testing.assert_allclose(nucleus, [0, 0.625, 0, 0.375], atol=error)
    sharp = np.array([0.01, 0.25, 0.01, 0.09]) / 0.36
    np.testing.assert_allclose(shares(temperature=0.5, top_p=1.0), sharp, atol=error)
    assert shares(temperature=1.0, top_p=0.5).tolist() == [0, 1, 0, 0]


RUN = """
model_name=tiny base_num_decoder_layers=1 first_num_dense_layers=1 mtp_num_layers=0 vocab_size=257
max_target_length=16 dataset_type=text learning_rate=0.02 steps=30 eval_steps=1 eval_interval=-1
checkpoint_period=30 per_device_batch_size=1 jax_cache_dir= run_name=run
enable_tensorboard=false
"""


def test_a_run_speaks_as_it_was_taught(tmp_path, capsys):
    """Trained on eight letters; and what it was converted to has the same parameters."""
    (tmp_path / "text.txt").write_text("abcdefgh" * 500)
    keys = [f"dataset_path={tmp_path / 'text.txt'}", f"base_output_directory={tmp_path}"]
    assert cli.main(["train", *RUN.split(), *keys]) == 0
    run = tmp_path / "run"
    capsys.readouterr()
    command = ["generate", "--from", str(run), "--prompt", "abcd", "--tokens=12"]
    assert cli.main([*command, "--temperature=0"]) == 0
    out, err = capsys.readouterr()
    assert out == "abcdefghabcdefgh\n"
    assert err.startswith("12 tokens in ")

    for line in (
        f"convert --from octablox {run} --to hf {tmp_path / 'hf'}",
        f"convert --from hf {tmp_path / 'hf'} --to octablox {tmp_path / 'again'}",
    ):
        assert cli.main(line.split()) == 0
    trained, again = open_parameters(run), open_parameters(tmp_path / "again")
    settings = load([f"load_parameters_path={tmp_path / 'again'}"]).config
    for entry in layout.entries(settings.model, settings.moe):
        np.testing.assert_array_equal(
            np.asarray(trained.array(entry.ours)), again.array(entry.ours), err_msg=entry.ours
        )


@pytest.mark.parametrize(
    "line, said",
    [
        ("", "expected --from DIR, what octablox convert wrote or a run's folder"),
        ("--from . --tokens few", "--tokens: expected a whole number, got 'few'"),
        ("--from . --top-p 2", "--top-p: expected above 0 and at most 1, got 2.0"),
        ("--from . --seed", "--seed: expected N after it, got nothing"),
        ("--form .", "expected --from, --prompt, --tokens, --temperature, --top-p, --seed or key"),
        ("--from nowhere", "load_parameters_path: expected a folder that octablox convert has"),
    ],
)
def test_what_was_meant_is_said(line, said, capsys):
    assert cli.main(["generate", *line.split()]) == 2
    assert said in capsys.readouterr().err
