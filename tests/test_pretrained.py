"""A run that starts from a converted checkpoint, or from another run."""

import json
import shutil

import hf_checkpoints
import numpy as np
import pytest
import tiny_model
from hf_checkpoints import BLOCKS, GROUPED, WITH_MTP
from tokenizers import Tokenizer, models, pre_tokenizers
from training_runs import losses, saved, train

from octablox import cli
from octablox.config import load
from octablox.train.pretrained import open_parameters
from octablox.train.step import Trainer
from octablox.weights import folder as weights

KEYS = """
dataset_type=synthetic max_target_length=16 eval_steps=1 log_period=1 enable_tensorboard=false
jax_cache_dir= learning_rate=0.001 warmup_steps_fraction=0 learning_rate_schedule_steps=40
"""


def converted(folder, sizes, tensors, more=""):
    hf_checkpoints.write(folder / "hf", sizes, tensors)
    line = f"convert --from hf {folder / 'hf'} --to octablox {folder / 'converted'} {more}"
    assert cli.main(line.split()) == 0
    return folder / "converted"


@pytest.mark.parametrize("sizes", [WITH_MTP, BLOCKS], ids=["float32", "fp8"])
def test_every_shard_is_what_was_converted(tmp_path, sizes):
    make = hf_checkpoints.fp8_tensors if sizes is BLOCKS else hf_checkpoints.random_tensors
    folder = converted(tmp_path, sizes, make(sizes))
    config = load([f"load_parameters_path={folder}"]).config
    state = Trainer(config, tiny_model.mesh(fsdp=4, expert=2)).init()
    assert int(state.step) == 0
    parameters = open_parameters(folder)
    for name, values in tiny_model.names_and_values(state.params):
        whole = tuple(slice(0, size) for size in values.shape)
        expected = weights.read(parameters, name, whole, np.dtype(np.float32))
        np.testing.assert_array_equal(values, expected, err_msg=name)
    bias = state.params["moe_layers"]["router"]["bias"]
    assert bias.dtype == np.float32
    assert len(np.unique(bias)) > 1


def test_fine_tuning_is_one_command_and_resumes_and_is_started_from(tmp_path, capsys):
    sizes = GROUPED | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    folder = converted(tmp_path, sizes, hf_checkpoints.random_tensors(sizes))
    assert train(tmp_path, f"load_parameters_path={folder} steps=2 {KEYS}", base="") == 0
    assert f"starting {tmp_path / 'run'} from the parameters in {folder}" in capsys.readouterr().out
    first = read_parameters(folder)
    # Two steps of Adam move each parameter by about the learning rates' sum.
    for name, values in tiny_model.names_and_values(saved(tmp_path).state.params):
        moved = np.abs(values - first[name]).max()
        assert 0 < moved < 3e-3, f"{name}: {moved}"
    settings = load([f"config={tmp_path / 'run' / 'config.yml'}"]).config
    assert (settings.model_name, settings.model.base_emb_dim) == ("custom", 32)

    # The parameters are in the run's checkpoint now.
    shutil.rmtree(folder)
    assert train(tmp_path, "steps=3", base="") == 0
    assert "resuming with steps=3 (was 2)" in capsys.readouterr().out
    assert list(losses(tmp_path)) == [1, 2, 3]

    line = f"load_parameters_path={tmp_path / 'run'} steps=1 {KEYS}"
    assert train(tmp_path / "second", line, base="") == 0
    before, after = saved(tmp_path).state.params, saved(tmp_path / "second").state.params
    for (name, x), (_, y) in zip(
        tiny_model.names_and_values(before), tiny_model.names_and_values(after), strict=True
    ):
        assert 0 < np.abs(x - y).max() < 1.5e-3, name


def read_parameters(folder):
    """Name -> all of a parameter, float32."""
    trainer = Trainer(load([f"load_parameters_path={folder}"]).config, tiny_model.mesh())
    return dict(tiny_model.names_and_values(trainer.init().params))


def test_the_tokenizer_comes_along(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "hf").mkdir()
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    folder = converted(tmp_path, GROUPED, hf_checkpoints.random_tensors(GROUPED))
    assert load([f"load_parameters_path={folder}"]).config.data.tokenizer_path == str(
        folder / "hf" / "tokenizer.json"
    )
    bytes_again = load([f"load_parameters_path={folder}", "tokenizer_path="]).config
    assert bytes_again.data.tokenizer_path == ""


def test_a_checkpoint_that_is_not_converted(tmp_path, capsys):
    folder = hf_checkpoints.write(tmp_path / "hf", GROUPED, {})
    assert train(tmp_path, f"load_parameters_path={folder}", base="") == 2
    assert capsys.readouterr().err == (
        f"error: load_parameters_path: {folder} is a Hugging Face checkpoint; convert it first: "
        f"octablox convert --from hf {folder} --to octablox NEW_FOLDER\n"
    )


@pytest.mark.parametrize(
    "key, said",
    [
        ("mtp_num_layers=1", "has no parameter mtp."),
        ("base_mlp_dim=48", "has dense_layers.mlp.down [40, 32] for a layer, expected [48, 32]"),
    ],
)
def test_other_sizes_are_refused(tmp_path, capsys, key, said):
    folder = converted(tmp_path, GROUPED, hf_checkpoints.random_tensors(GROUPED))
    assert train(tmp_path, f"load_parameters_path={folder} steps=1 {key} {KEYS}", base="") == 2
    assert said in capsys.readouterr().err
