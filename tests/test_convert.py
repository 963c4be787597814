"""Checkpoints of DeepSeek-V3's family in and out: nothing lost, nothing mistaken."""

import json
import pathlib
import shutil
import subprocess
import tempfile

import hf_checkpoints
import ml_dtypes
import numpy as np
import pytest
from hf_checkpoints import BLOCKS, FP8, GROUPED, SOFTMAX, UNGROUPED, WITH_MTP, bits
from safetensors import deserialize

from benchmarks.convert import measure
from octablox import cli, config, fp8, fp8_blocks
from octablox.hf import architecture, checkpoint, convert
from octablox.train.pretrained import open_parameters
from octablox.weights import folder as weights
from octablox.weights.tensor_files import TensorFile

CAST = 1.5 * fp8.CAST_ERROR["float8_e4m3fn"]  # the budget of one cast
CASES = "grouped", "ungrouped", "softmax", "mtp"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"F32": np.float32, "BF16": BFLOAT16, "F8_E4M3": hf_checkpoints.E4M3}


def octablox(line):
    """Runs a command; returns the exit code."""
    return cli.main(line.split())


def to_octablox(source, target, more=""):
    return octablox(f"convert --from hf {source} --to octablox {target} {more}")


def to_hf(source, target, more=""):
    return octablox(f"convert --from octablox {source} --to hf {target} {more}")


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in deserialize(file.read_bytes()):
            values = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]])
            found[name] = values.reshape(tensor["shape"])
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    differing = [name for name in expected if bits(found[name]) != bits(expected[name])]
    assert differing == []


def parameter(folder, path, dtype=np.float32):
    """All of a parameter of the train state."""
    settings = config.read(folder / "config.yml")
    layers = {
        "dense_layers": settings.model.first_num_dense_layers,
        "moe_layers": settings.model.base_num_decoder_layers
        - settings.model.first_num_dense_layers,
        "mtp": 1,
    }
    parameters = open_parameters(folder)
    shape = weights.shape(parameters, path)
    stack = [slice(0, layers[path.split(".")[0]])] if "layers." in path else []
    index = (*stack, *(slice(None) for _ in shape))
    return weights.read(parameters, path, index, np.dtype(dtype))


def shard_of(name):
    """Weights in files of their own, far from their scales."""
    return 7 if name.endswith("scale_inv") else sum(name.encode()) % 3


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("sizes", [GROUPED, UNGROUPED, SOFTMAX, WITH_MTP], ids=CASES)
def test_there_and_back_to_the_bit(tmp_path, sizes, dtype):
    tensors = hf_checkpoints.random_tensors(sizes, dtype=dtype)
    hf_checkpoints.write(tmp_path / "hf", sizes, tensors, shard_of)
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 0
    assert to_hf(tmp_path / "ours", tmp_path / "back") == 0
    assert_same(tensors_of(tmp_path / "back"), tensors)
    found = architecture.read(tmp_path / "back" / "config.json")
    assert found == architecture.parse(sizes)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors.values())


def test_where_each_weight_goes(tmp_path):
    tensors = hf_checkpoints.random_tensors(WITH_MTP)
    hf_checkpoints.write(tmp_path / "hf", WITH_MTP, tensors)
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 0
    gate_up = parameter(tmp_path / "ours", "moe_layers.experts.gate_up")
    assert gate_up.shape == (2, 8, 32, 2, 16)
    layer = "model.layers.2.mlp"
    np.testing.assert_array_equal(
        gate_up[1, 3, :, 0], tensors[f"{layer}.experts.3.gate_proj.weight"].T
    )
    np.testing.assert_array_equal(
        gate_up[1, 3, :, 1], tensors[f"{layer}.experts.3.up_proj.weight"].T
    )
    for path, name in {
        "embedding": "model.embed_tokens.weight",
        "dense_layers.mlp.norm": "model.layers.0.post_attention_layernorm.weight",
        "mtp.layers.router.bias": "model.layers.3.mlp.gate.e_score_correction_bias",
        "mtp.hidden_norm": "model.layers.3.hnorm.weight",
    }.items():
        found = parameter(tmp_path / "ours", path)
        np.testing.assert_array_equal(found.reshape(tensors[name].shape), tensors[name])
    for path, name in {
        "head": "lm_head.weight",
        "mtp.projection": "model.layers.3.eh_proj.weight",
        "mtp.layers.attention.kv_a": "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
    }.items():
        found = parameter(tmp_path / "ours", path)
        np.testing.assert_array_equal(found.reshape(tensors[name].T.shape), tensors[name].T)


@pytest.mark.parametrize("power_of_two", [False, True], ids=["float", "ue8m0"])
def test_fp8_blocks(tmp_path, power_of_two):
    scale_fmt = {"scale_fmt": "ue8m0"} if power_of_two else {}
    sizes = BLOCKS | {"quantization_config": FP8 | scale_fmt}
    tensors = hf_checkpoints.fp8_tensors(sizes, power_of_two=power_of_two)
    hf_checkpoints.write(tmp_path / "hf", sizes, tensors, shard_of)
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert tensors[kv_a].shape == (576, 160)
    assert tensors[f"{kv_a}_scale_inv"].shape == (5, 2)

    # As they are: the same bits come back, scales too.
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 0
    assert to_hf(tmp_path / "ours", tmp_path / "back") == 0
    assert_same(tensors_of(tmp_path / "back"), tensors)
    built = architecture.read(tmp_path / "back" / "config.json")
    assert (built.fp8, built.power_of_two) == (True, power_of_two)

    # Dequantized, when they are read or when they are converted.
    assert to_octablox(tmp_path / "hf", tmp_path / "floats", "--dtype float32") == 0
    assert to_octablox(tmp_path / "hf", tmp_path / "bfloat16", "--dtype bfloat16") == 0
    for path, name in {
        "dense_layers.attention.q_a": "model.layers.0.self_attn.q_a_proj.weight",
        "dense_layers.attention.kv_a": kv_a,
        "dense_layers.mlp.down": "model.layers.0.mlp.down_proj.weight",
        "mtp.layers.shared.down": "model.layers.2.mlp.shared_experts.down_proj.weight",
    }.items():
        values, scales = tensors[name], tensors[f"{name}_scale_inv"]
        expected = hf_checkpoints.from_blocks(values, scales).T.astype(np.float32)
        for kind in ("ours", "floats"):
            np.testing.assert_array_equal(parameter(tmp_path / kind, path)[0], expected)
        found = parameter(tmp_path / "bfloat16", path, BFLOAT16)[0]
        np.testing.assert_array_equal(found, expected.astype(BFLOAT16))
    gate_up = parameter(tmp_path / "ours", "moe_layers.experts.gate_up")
    np.testing.assert_array_equal(
        gate_up, parameter(tmp_path / "floats", "moe_layers.experts.gate_up")
    )
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    expected = hf_checkpoints.from_blocks(tensors[name], tensors[f"{name}_scale_inv"])
    np.testing.assert_array_equal(gate_up[0, 2, :, 1], expected.T.astype(np.float32))


def test_parts_of_fp8_blocks(tmp_path):
    """A shard of a parameter is that part of the whole, wherever it is cut."""
    hf_checkpoints.write(tmp_path / "hf", BLOCKS, hf_checkpoints.fp8_tensors(BLOCKS))
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 0
    parameters = open_parameters(tmp_path / "ours")
    path = "moe_layers.experts.gate_up"
    whole = parameter(tmp_path / "ours", path)
    for index in (
        (slice(0, 1), slice(2, 4), slice(80, 160), slice(0, 2), slice(0, 96)),
        (slice(0, 1), slice(0, 1), slice(0, 160), slice(1, 2), slice(5, 6)),
    ):
        found = weights.read(parameters, path, index, np.dtype(np.float32))
        np.testing.assert_array_equal(found, whole[index])


@pytest.mark.parametrize("dtype", ["keep", "float32", "fp8"])
def test_chunks_change_nothing(tmp_path, dtype, monkeypatch):
    """A tensor that comes in many pieces, along both dims, is the tensor that comes as one."""
    hf_checkpoints.write(tmp_path / "hf", BLOCKS, hf_checkpoints.fp8_tensors(BLOCKS))
    released = []
    for chunk in (convert.CHUNK, 4096):
        monkeypatch.setattr(convert, "CHUNK", chunk)
        monkeypatch.setattr(checkpoint, "CHUNK", chunk)
        monkeypatch.setattr(TensorFile, "release", lambda self, c=chunk: released.append(c))
        folder = tmp_path / str(chunk)
        assert to_octablox(tmp_path / "hf", folder / "ours", f"--dtype {dtype}") == 0
        assert to_hf(folder / "ours", folder / "back", f"--dtype {dtype}") == 0
    assert released.count(4096) > 10 * released.count(64 << 20)
    for part in ("ours/weights", "back"):
        whole, pieces = (tensors_of(tmp_path / str(c) / part) for c in (64 << 20, 4096))
        assert_same(pieces, whole)


@pytest.mark.parametrize("power_of_two", [False, True], ids=["float", "ue8m0"])
def test_export_of_fp8_is_the_official_layout(tmp_path, power_of_two):
    sizes = {key: value for key, value in BLOCKS.items() if key != "quantization_config"}
    tensors = hf_checkpoints.random_tensors(sizes)
    zeros = "model.layers.1.mlp.experts.1.down_proj.weight"
    tensors[zeros][:128] = 0
    hf_checkpoints.write(tmp_path / "hf", sizes, tensors)
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 0
    kind = "fp8_ue8m0" if power_of_two else "fp8"
    assert to_hf(tmp_path / "ours", tmp_path / "fp8", f"--dtype {kind}") == 0
    # Imported in blocks and exported as they are, what they are is known from the scales.
    assert to_octablox(tmp_path / "hf", tmp_path / "blocks", f"--dtype {kind}") == 0
    assert to_hf(tmp_path / "blocks", tmp_path / "kept") == 0
    built = architecture.read(tmp_path / "kept" / "config.json")
    assert (built.fp8, built.power_of_two) == (True, power_of_two)
    found = tensors_of(tmp_path / "fp8")
    expected = {}
    for name, values in tensors.items():
        if name.endswith("bias"):
            expected[name] = values
        elif any(word in name for word in hf_checkpoints._FLOATS):
            expected[name] = values.astype(BFLOAT16)
        else:
            blocks = hf_checkpoints.in_blocks(values, power_of_two)
            expected[name], expected[f"{name}_scale_inv"] = blocks
    assert found.keys() == expected.keys()
    assert found[f"{zeros}_scale_inv"][0, 0] == 1
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        if name.endswith("scale_inv"):
            np.testing.assert_allclose(found[name], values, rtol=1e-6)
        elif values.dtype != hf_checkpoints.E4M3:
            np.testing.assert_array_equal(found[name], values)
        else:
            # float32 divides here, float64 there: a value on the edge may round the other way.
            differ = found[name].view(np.uint8) != values.view(np.uint8)
            assert differ.mean() < 1e-3, name
            restored = hf_checkpoints.from_blocks(found[name], found[f"{name}_scale_inv"])
            error = np.linalg.norm(restored - tensors[name]) / np.linalg.norm(tensors[name])
            assert error < CAST, name
    assert architecture.read(tmp_path / "fp8" / "config.json").power_of_two == power_of_two


def test_fp8_becomes_powers_of_two_only_when_it_must(tmp_path):
    """Blocks whose scales are powers of two already stay as they are; others are cast anew."""
    for name, power_of_two in (("float", False), ("ue8m0", True)):
        tensors = hf_checkpoints.fp8_tensors(BLOCKS, power_of_two=power_of_two)
        hf_checkpoints.write(tmp_path / name / "hf", BLOCKS, tensors)
        assert to_octablox(tmp_path / name / "hf", tmp_path / name / "ours") == 0
        assert to_hf(tmp_path / name / "ours", tmp_path / name / "b", "--dtype fp8_ue8m0") == 0
        found = tensors_of(tmp_path / name / "b")
        if power_of_two:
            assert_same(found, tensors)
            continue
        for scale in (key for key in found if key.endswith("scale_inv")):
            assert (np.frexp(found[scale])[0] == 0.5).all(), scale
            weight = scale.removesuffix("_scale_inv")
            before = hf_checkpoints.from_blocks(tensors[weight], tensors[scale])
            after = hf_checkpoints.from_blocks(found[weight], found[scale])
            error = np.linalg.norm(after - before) / np.linalg.norm(before)
            assert 0 < error < CAST, weight


def test_the_wrong_readings_of_scales_would_be_seen():
    """Divided instead of multiplied, or blocks of even size instead of 128: other numbers."""
    rng = np.random.default_rng(0)
    values, scales = hf_checkpoints.in_blocks(rng.normal(size=(576, 160)))
    right = hf_checkpoints.from_blocks(values, scales).astype(np.float32)
    np.testing.assert_array_equal(fp8_blocks.dequantize(values, scales), right)
    of_grid = scales.repeat(-(-576 // 5), 0)[:576].repeat(160 // 2, 1)
    divided = values.astype(np.float32) / scales.repeat(128, 0)[:576].repeat(128, 1)[:, :160]
    for wrong in (values.astype(np.float32) * of_grid, divided):
        assert np.linalg.norm(wrong - right) > 0.01 * np.linalg.norm(right)


def test_quantizing_zeros_denormals_and_the_largest():
    weight = np.zeros((129, 130), np.float32)
    weight[128, 0], weight[0, 129], weight[128, 129] = 1e-42, 3e38, -1e-30
    for power_of_two in (False, True):
        values, scales = fp8_blocks.quantize(weight, power_of_two)
        assert np.isfinite(scales).all()
        assert (scales > 0).all()
        assert scales[0, 0] == 1
        restored = hf_checkpoints.from_blocks(values, scales)
        assert restored[0, 129] == pytest.approx(3e38, rel=0.07)
        assert restored[128, 129] == pytest.approx(-1e-30, rel=0.07)
        assert restored[128, 0] == 0


def wrong(tmp_path, capsys, sizes, tensors, shard=None):
    """The error of converting this, and that nothing was written."""
    hf_checkpoints.write(tmp_path / "hf", sizes, tensors, shard)
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 2
    assert not (tmp_path / "ours").exists()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_all_that_is_wrong_is_named_at_once(tmp_path, capsys):
    tensors = hf_checkpoints.fp8_tensors(BLOCKS)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    del tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"]
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    tensors["model.layers.9.mlp.gate.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.norm.weight"] = np.zeros(161, np.float32)
    down = "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors[down] = np.ones((3, 3), np.float32)
    tensors["lm_head.weight"] = np.zeros((48, 160), np.int32)
    expert = "model.layers.1.mlp.experts.1.up_proj.weight"
    tensors[expert] = np.zeros((96, 160), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    error = wrong(tmp_path, capsys, BLOCKS, tensors)
    for part in (
        "2 missing: model.layers.0.mlp.up_proj.weight_scale_inv, "
        "model.layers.1.self_attn.o_proj.weight;",
        f"2 misshapen: {down} expected [2, 3], got [3, 3], model.norm.weight expected [160], "
        "got [161];",
        "1 of an unsupported dtype: lm_head.weight I32;",
        f"1 of another dtype than their neighbours: {expert} F32, "
        "model.layers.1.mlp.experts.0.gate_proj.weight F8_E4M3",
    ):
        assert part in error
    unexpected = error.split("2 unexpected: ")[1].split(";")[0].split(", ")
    assert set(unexpected) == {"model.layers.9.mlp.gate.weight", f"{expert}_scale_inv"}


def test_what_is_there_twice_must_be_equal(tmp_path, capsys):
    tensors = hf_checkpoints.random_tensors(WITH_MTP)
    name = "model.layers.3.shared_head.head.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][-1, -1] += 1
    error = wrong(tmp_path, capsys, WITH_MTP, tensors)
    assert f"1 unequal: {name} and lm_head.weight, which octablox shares" in error


def test_fp8_without_a_word_in_the_config(tmp_path, capsys):
    sizes = {key: value for key, value in BLOCKS.items() if key != "quantization_config"}
    error = wrong(tmp_path, capsys, sizes, hf_checkpoints.fp8_tensors(BLOCKS))
    assert "q_a_proj.weight F8_E4M3" in error


def test_files_that_are_missing_or_cut_short(tmp_path, capsys):
    hf_checkpoints.write(tmp_path / "hf", GROUPED, hf_checkpoints.random_tensors(GROUPED), shard_of)
    whole = tmp_path / "hf" / "model-00001.safetensors"
    whole.write_bytes(whole.read_bytes()[:-1])
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 2
    assert "it is cut short; copy it anew" in capsys.readouterr().err
    whole.unlink()
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 2
    assert (
        "lacks 1 files that model.safetensors.index.json names: model-00001.safetensors; fetch them"
    ) in capsys.readouterr().err
    shutil.rmtree(tmp_path / "hf")
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 2
    assert "expected a checkpoint's config.json" in capsys.readouterr().err


def test_a_conversion_that_was_cut_short_goes_on(tmp_path, capsys, monkeypatch):
    tensors = hf_checkpoints.random_tensors(WITH_MTP)
    hf_checkpoints.write(tmp_path / "hf", WITH_MTP, tensors)
    copy, copied = convert.copy, []

    def copy_some(source, target, *rest):
        copied.append(target.values.shape)
        if len(copied) == 50:
            raise KeyboardInterrupt
        return copy(source, target, *rest)

    monkeypatch.setattr(convert, "copy", copy_some)
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 130
    files = {path.name for path in (tmp_path / "ours" / "weights").iterdir()}
    assert 0 < len(files) < 5
    assert not any(name.startswith(".") for name in files)

    # Half of it is no checkpoint, and no place for another one.
    assert octablox(f"train load_parameters_path={tmp_path / 'ours'}") == 2
    assert to_octablox(tmp_path / "hf", tmp_path / "ours", "--dtype bfloat16") == 2
    assert "holds an unfinished conversion of other files, or with other" in capsys.readouterr().err

    monkeypatch.undo()
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 0
    assert f"{len(files)} of 5 files were whole already" in capsys.readouterr().out
    assert to_hf(tmp_path / "ours", tmp_path / "back") == 0
    assert_same(tensors_of(tmp_path / "back"), tensors)
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 2
    assert "expected a new or empty folder, got" in capsys.readouterr().err


def test_a_full_disk(tmp_path, capsys):
    hf_checkpoints.write(tmp_path / "hf", WITH_MTP, hf_checkpoints.random_tensors(WITH_MTP))
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", small])
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        assert to_octablox(tmp_path / "hf", small / "ours") == 2
        assert f"disk full: {small / 'ours'} needs" in capsys.readouterr().err
        whole = list((small / "ours" / "weights").iterdir())
        assert whole
        assert not any(path.name.startswith(".") for path in whole)
        subprocess.run(["mount", "-o", "remount,size=10m", small], check=True)
        assert to_octablox(tmp_path / "hf", small / "ours") == 0
        assert f"{len(whole)} of 5 files were whole already" in capsys.readouterr().out
    finally:
        subprocess.run(["umount", small], check=True)


def test_keys_that_octablox_does_not_know_are_told(tmp_path, capsys):
    sizes = GROUPED | {"index_topk": 2048}
    hf_checkpoints.write(tmp_path / "hf", sizes, hf_checkpoints.random_tensors(sizes))
    assert to_octablox(tmp_path / "hf", tmp_path / "ours") == 0
    assert "keys of config.json that octablox does not know: index_topk" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, said",
    [
        ("", "expected --from; write octablox convert --from hf DIR --to octablox DIR, or --from"),
        ("--from hf a --to hf b", "expected --from and --to of hf and octablox, got hf and hf"),
        ("--from hf", "--from: expected hf or octablox and a folder after it"),
        ("a b", "expected octablox convert --from hf DIR"),
        ("--from hf a --to octablox b --dtype fp16", "--dtype: expected one of keep, bfloat16"),
    ],
)
def test_what_was_meant_is_said(line, said, capsys):
    assert octablox(f"convert {line}") == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_ten_gigabytes_in_three():
    """There and back to the bit (which `measure` compares), each in bounded memory."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(10, pathlib.Path(folder))
    assert len(found) == 2
    for row in found:
        assert row["gigabytes"] > 9.9
        assert row["peak_gigabytes"] < 3
