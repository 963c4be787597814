"""The model is that of `transformers`: logits and gradients of converted random checkpoints.

What `transformers` computes lies in tests/data, written by `hf_reference.py`; `make test-reference`
computes it anew and compares.
"""

import functools
import os
import pathlib
import subprocess

import hf_checkpoints
import jax
import numpy as np
import pytest
import tiny_model
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from octablox import cli
from octablox.config import load
from octablox.hf import layout
from octablox.mesh import batch_partition, map_specs
from octablox.model import transformer
from octablox.train.pretrained import load_params
from octablox.train.step import settings_of

DATA = pathlib.Path(__file__).parent / "data"
CASES = {
    "grouped": hf_checkpoints.GROUPED,
    "ungrouped": hf_checkpoints.UNGROUPED,
    "softmax": hf_checkpoints.SOFTMAX,
}
# Four and eight times the original context of 16.
SEQUENCES, LENGTH = 2, 64
TOKENS = np.random.default_rng(1).integers(0, 48, (SEQUENCES, LENGTH))


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Its name, its config, its checkpoint converted, and what `transformers` computes."""
    folder = converted(tmp_path_factory.mktemp(request.param), CASES[request.param])
    config = load([f"load_parameters_path={folder}", "dtype=float32"]).config
    return request.param, config, folder, load_file(DATA / f"hf_{request.param}.safetensors")


def converted(folder, sizes):
    """A folder with the parameters of a random checkpoint of these sizes."""
    hf_checkpoints.write(folder / "hf", sizes, hf_checkpoints.random_tensors(sizes))
    line = f"convert --from hf {folder / 'hf'} --to octablox {folder / 'converted'}"
    assert cli.main(line.split()) == 0
    return folder / "converted"


def batch():
    weights = np.ones((SEQUENCES, LENGTH), np.float32)
    weights[:, -1] = 0
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), weights.shape)
    return {
        "tokens": TOKENS.astype(np.int32),
        "targets": np.roll(TOKENS, -1, axis=1).astype(np.int32),
        "segment_ids": np.ones_like(positions),
        "positions": positions,
        "weights": weights,
    }


def on_mesh(config, mesh, fn, out):
    specs = transformer.parameter_specs(config.model, config.moe)
    partitions = map_specs(lambda spec: spec.partition_spec, specs)
    inputs = partitions, batch_partition()
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=inputs, out_specs=out, check_vma=True))


def logits(config, mesh, params, rows):
    settings = settings_of(config)
    probes = transformer.new_probes(config.model)
    fn = functools.partial(transformer.logits, settings=settings)
    compute = on_mesh(config, mesh, lambda p, b: fn(p, probes, b), batch_partition())
    rows = jax.device_put(rows, NamedSharding(mesh, batch_partition()))
    return np.asarray(compute(params, rows))


def parameters(config, mesh, folder):
    specs = transformer.parameter_specs(config.model, config.moe)
    return load_params(specs, mesh, np.dtype(np.float32), folder)


def test_logits(case):
    _, config, folder, expected = case
    mesh = tiny_model.mesh()
    found = logits(config, mesh, parameters(config, mesh, folder), batch())
    assert config.model.original_max_position_embeddings == 16
    assert np.std(expected["logits"]) > 0.5
    assert np.max(np.abs(found - expected["logits"])) < 1e-4


def test_gradients(case):
    _, config, folder, expected = case
    mesh = tiny_model.mesh()
    params = parameters(config, mesh, folder)
    losses, grads, _ = tiny_model.gradients(config, mesh, params, batch(), **tiny_model.QUICK)
    assert losses["loss"] == pytest.approx(float(expected["loss"][0]), abs=1e-5)
    compared = 0
    for entry in layout.entries(config.model, config.moe):
        if entry.ours.endswith(".bias"):
            continue  # moved by load, not by a gradient
        wanted = expected[f"grad.{entry.theirs}"]
        found = entry.view(_of_layer(grads, entry.ours))
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < 1e-4, f"{entry.theirs}: {error}"
        compared += 1
    assert compared == sum(name.startswith("grad.") for name in expected)


def test_multi_token_prediction(tmp_path):
    """Its mean surprise, and that the model before it is not changed by it."""
    sizes = hf_checkpoints.WITH_MTP
    folder = converted(tmp_path, sizes)
    expected = load_file(DATA / "hf_mtp.safetensors")
    config = load([f"load_parameters_path={folder}", "dtype=float32"]).config
    mesh = tiny_model.mesh()
    settings, probes = settings_of(config), transformer.new_probes(config.model)
    total = {"total_weight": jnp.float32(batch()["weights"].sum())}
    compute = on_mesh(
        config, mesh, lambda p, b: transformer.loss(p, probes, b | total, settings)[1], P()
    )
    rows = jax.device_put(batch(), NamedSharding(mesh, batch_partition()))
    losses = compute(parameters(config, mesh, folder), rows)
    assert losses["loss"] == pytest.approx(float(expected["loss"][0]), abs=1e-5)
    scores = expected["mtp_logits"][:, :-1].astype(np.float64)
    log_p = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    surprise = -np.take_along_axis(log_p, TOKENS[:, 2:, None], axis=-1).sum()
    assert losses["mtp_loss"] == pytest.approx(surprise / batch()["weights"].sum(), abs=1e-5)


def _of_layer(tree, name):
    words = name.split(".")
    number = int(words.pop(1)) if words[0].endswith("layers") else None
    for word in words:
        tree = tree[word]
    return np.asarray(tree if number is None else tree[number])


def test_the_biases_and_the_groups_matter(case):
    """Without them the logits are others: the comparison above would fail."""
    name, config, folder, expected = case
    if name == "softmax":
        moe = config.moe.model_copy(update={"norm_topk_prob": True})
        config = config.model_copy(update={"moe": moe})
    mesh = tiny_model.mesh()
    params = parameters(config, mesh, folder)
    router = params["moe_layers"]["router"]
    router["bias"] *= 0
    assert np.max(np.abs(logits(config, mesh, params, batch()) - expected["logits"])) > 1e-2
    if name == "grouped":
        moe = config.moe.model_copy(update={"n_routing_groups": 1, "topk_routing_group": 1})
        config = config.model_copy(update={"moe": moe})
        params = parameters(config, mesh, folder)
        assert np.max(np.abs(logits(config, mesh, params, batch()) - expected["logits"])) > 1e-2


@pytest.mark.reference
@pytest.mark.parametrize("name", [*CASES, "mtp"])
def test_the_data_is_what_transformers_computes(name, tmp_path):
    folder = tmp_path / "hf"
    sizes = CASES.get(name, hf_checkpoints.WITH_MTP)
    hf_checkpoints.write(folder, sizes, hf_checkpoints.random_tensors(sizes))
    save_file({"tokens": TOKENS}, folder / "tokens.safetensors")
    program = pathlib.Path(__file__).parent / "hf_reference.py"
    output = tmp_path / "output.safetensors"
    subprocess.run([os.environ["REFERENCE_PYTHON"], program, folder, output], check=True)
    expected, found = load_file(DATA / f"hf_{name}.safetensors"), load_file(output)
    assert found.keys() >= expected.keys()
    for key, values in expected.items():
        error = np.linalg.norm(found[key] - values) / np.linalg.norm(values)
        assert error < 1e-5, f"{key}: {error}"
