"""Checkpoints come back to the bit, on any mesh, after any crash, or say why they cannot."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from octablox.errors import UserError
from octablox.train import checkpoint, checkpoint_files
from octablox.train.checkpoint import Checkpoints

WHOLE_RANGE = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float16", "uint8"]
PLAIN = ["float32", "int8", "int32", "uint32", "bool"]


class AdamState(NamedTuple):
    count: jax.Array
    mu: dict


def mesh_of(fsdp, expert):
    return jax.make_mesh((fsdp, expert), ("fsdp", "expert"), axis_types=(AxisType.Explicit,) * 2)


def every_bit_pattern(dtype):
    """[256, 256]: all values of a 16-bit dtype, or of an 8-bit one 256 times, NaNs included."""
    dtype = jnp.dtype(dtype)
    bits = np.arange(65536).astype(f"uint{8 * dtype.itemsize}")
    return bits.view(dtype).reshape(256, 256)


def host_state(seed=0):
    rng = np.random.default_rng(seed)
    params = {f"w_{dtype}": every_bit_pattern(dtype) for dtype in WHOLE_RANGE}
    params |= {f"w_{dtype}": (100 * rng.standard_normal((16, 8))).astype(dtype) for dtype in PLAIN}
    moments = {"w": rng.standard_normal((8, 16)).astype("float32")}
    return {
        "params": params,
        "opt_state": (AdamState(np.int32(seed), moments), None, ()),
        "router_bias": rng.standard_normal(16).astype("float32"),
        "step": np.int32(seed),
    }


def put(tree, mesh):
    """`tree` on `mesh`: matrices over both axes, the rest replicated."""

    def one(x):
        spec = P("fsdp", "expert") if np.ndim(x) == 2 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


def opened(tmp_path, keep=2, **more):
    return Checkpoints(tmp_path / "checkpoints", period=5, keep=keep, **more)


def small(value=0.0, mesh=None):
    tree = {"params": {"embed": np.full((8, 4), value, np.float32)}, "step": np.int32(value)}
    return put(tree, mesh or mesh_of(4, 2))


@pytest.mark.parametrize("fsdp, expert", [(4, 2), (2, 4), (1, 1), (8, 1)])
def test_round_trip_onto_another_mesh(tmp_path, fsdp, expert):
    host = host_state(3)
    data_state = {"worker": [1, 2], "name": "ü", "nested": {"at": None}}
    with opened(tmp_path) as checkpoints:
        checkpoints.save(3, put(host, mesh_of(4, 2)), data_state)
    target = abstract(put(host, mesh_of(fsdp, expert)))
    with opened(tmp_path) as checkpoints:
        step, state, found = checkpoints.restore(target)
    assert (step, found) == (3, data_state)
    assert_same_bits(state, host)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    assert shardings == jax.tree.map(lambda x: x.sharding, target)


def test_leaves_without_sharding_stay_uncommitted(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, {"step": jnp.int32(7), "w": small(2.0)["params"]["embed"]}, {})
        for scalar in (jax.ShapeDtypeStruct((), jnp.int32), jnp.int32(0)):
            target = {"step": scalar, "w": small()["params"]["embed"]}
            _, state, _ = checkpoints.restore(target)
            # A scalar committed to one device would not go with `w`, which is on eight.
            total = jax.jit(lambda s: s["w"] + s["step"])(state)
            assert_same_bits(total, np.full((8, 4), 9, np.float32))


def test_state_under_set_mesh_may_be_donated_at_once(tmp_path):
    mesh = mesh_of(4, 2)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with jax.set_mesh(mesh), opened(tmp_path, keep=1) as checkpoints:
        x = put(np.zeros((1024, 2048), np.float32), mesh)
        for step in range(4):
            checkpoints.save(step, {"x": x}, b"")
            for _ in range(5):
                x = add(x)
            jax.block_until_ready(x)
            _, state, _ = checkpoints.restore({"x": x})
            assert_same_bits(state["x"], np.full((1024, 2048), 5 * step, np.float32))


def test_restored_state_may_be_donated(tmp_path):
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, small(1), b"")
        state = checkpoints.restore(abstract(small())).state
        assert_same_bits(add(state), jax.tree.map(np.asarray, small(2)))


@pytest.mark.parametrize("data_state", [b"", bytes(range(256)), {}, {"a": [1, 2.5, "x", None]}])
def test_data_state(tmp_path, data_state):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, small(), data_state)
        assert checkpoints.restore(abstract(small())).data_state == data_state


def test_data_state_is_copied(tmp_path):
    data_state = {"at": [1]}
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, small(), data_state)
        data_state["at"].append(2)
        assert checkpoints.restore(abstract(small())).data_state == {"at": [1]}


def test_retention_and_latest_step(tmp_path):
    with opened(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        assert [step for step in range(1, 12) if checkpoints.due(step)] == [5, 10]
        for step in (9, 10, 100):
            checkpoints.save(step, small(step), {"at": step}, blocking=True)
            assert checkpoints.latest_step() == step
        assert checkpoints.steps() == [10, 100]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "100"]


def test_some_checkpoints_stay_for_good(tmp_path):
    with opened(tmp_path, keep=1, keep_every=4) as checkpoints:
        for step in range(2, 12, 2):
            checkpoints.save(step, small(step), {"at": step}, blocking=True)
        assert checkpoints.steps() == [4, 8, 10]
        assert checkpoints.restore(abstract(small())).step == 10


def test_saving_a_step_twice_changes_nothing(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(5, small(1.0), {"at": 1})
        checkpoints.save(5, small(2.0), {"at": 2}, blocking=True)
        step, state, data_state = checkpoints.restore(abstract(small()))
    assert (step, data_state) == (5, {"at": 1})
    assert_same_bits(state["params"]["embed"], np.full((8, 4), 1, np.float32))


def test_no_checkpoint(tmp_path):
    with opened(tmp_path) as checkpoints, pytest.raises(UserError, match="expected a checkpoint"):
        checkpoints.restore(abstract(small()))


OTHER_MODELS = {
    "shape": (
        lambda s: s["params"].update(embed=jnp.zeros((16, 4))),
        "params.embed expected float32[16,4], found float32[8,4]; give",
    ),
    "dtype": (
        lambda s: s["params"].update(embed=jnp.zeros((8, 4), jnp.bfloat16)),
        "params.embed expected bfloat16[8,4], found float32[8,4]; give",
    ),
    "missing": (
        lambda s: s["params"].update(head=jnp.zeros(3)),
        "params.head expected float32[3], found nothing; give",
    ),
    "extra": (lambda s: s.pop("step"), "step expected nothing, found int32[]; give"),
    "many": (
        lambda s: s["params"].update({f"w{i}": jnp.zeros(3) for i in range(5)}),
        "params.w0 expected float32[3], found nothing; "
        "params.w1 expected float32[3], found nothing; "
        "params.w2 expected float32[3], found nothing; and 2 more; give",
    ),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_another_model(tmp_path, case):
    change, expected = OTHER_MODELS[case]
    notes = []
    with opened(tmp_path, note=notes.append) as checkpoints:
        checkpoints.save(4, small(), {})
        target = small()
        change(target)
        with pytest.raises(UserError) as caught:
            checkpoints.restore(target)
        assert checkpoints.latest_step() == 4
    assert str(caught.value) == (
        f"the checkpoint of step 4 in {tmp_path / 'checkpoints'} is of another model: {expected} "
        "another run_name, or the model flags that this run was started with"
    )
    assert notes == []  # not damaged, so no older one is tried


def biggest_file(folder):
    files = (p for p in (folder / "state").rglob("*") if p.is_file())
    return max(files, key=lambda p: p.stat().st_size)


def truncate(folder):
    path = biggest_file(folder)
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(folder):
    path = biggest_file(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def empty(folder):
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut_checksums(folder):
    os.truncate(folder / "checksums.json", 10)


def empty_metadata(folder):
    os.truncate(folder / "_CHECKPOINT_METADATA", 0)


DAMAGES = {
    "truncated": (truncate, "has other contents than were written"),
    "bit flipped": (flip_a_bit, "has other contents than were written"),
    "file missing": (lambda folder: biggest_file(folder).unlink(), "is missing"),
    "meta missing": (lambda folder: shutil.rmtree(folder / "meta"), "is missing"),
    "empty": (empty, ""),
    "checksums cut": (cut_checksums, ""),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_falls_back_from_a_damaged_checkpoint(tmp_path, case):
    damage, reason = DAMAGES[case]
    notes = []
    folder = tmp_path / "checkpoints"
    with opened(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, small(step), {"at": step})
    damage(folder / "3")
    with opened(tmp_path, keep=3, note=notes.append) as checkpoints:
        step, state, data_state = checkpoints.restore(abstract(small()))
        assert (step, data_state) == (2, {"at": 2})
        assert_same_bits(state, jax.tree.map(np.asarray, small(2)))
        assert checkpoints.latest_step() == 2
        assert len(notes) == 1
        assert notes[0].startswith(f"the checkpoint {folder / '3'} is damaged (")
        assert notes[0].endswith("); going back to step 2")
        assert reason in notes[0] and "\n" not in notes[0]
        # The run comes to step 3 again: the damaged one makes way, and is not lost.
        checkpoints.save(3, small(33), {"at": 33}, blocking=True)
        assert checkpoints.restore(abstract(small())).data_state == {"at": 33}
    assert sorted(os.listdir(folder)) == ["1", "2", "3", "3.damaged"]


def test_all_damaged(tmp_path):
    notes = []
    with opened(tmp_path, note=notes.append) as checkpoints:
        checkpoints.save(1, small(), {}, blocking=True)
        truncate(tmp_path / "checkpoints" / "1")
        with pytest.raises(UserError, match=r"expected a readable checkpoint in .*, got none"):
            checkpoints.restore(abstract(small()))
    assert notes[0].endswith("; there is no older one")


def test_every_file_has_a_checksum(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, small(), {})
    folder = tmp_path / "checkpoints" / "1"
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    sums = json.loads((folder / "checksums.json").read_text())
    assert set(sums) == {name for name in files if name.startswith(("state/", "meta/"))}


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("seen", ["before", "in the middle"])
def test_disk_full(tiny_disk, monkeypatch, seen, blocking):
    if seen == "in the middle":  # something else fills the disk while this save is under way
        monkeypatch.setattr(Checkpoints, "_require_space", lambda self, needed: None)
    rng = np.random.default_rng(0)
    mesh = mesh_of(4, 2)

    def state(megabytes):
        return put({"w": rng.standard_normal((256, 1024 * megabytes), np.float32)}, mesh)

    good = state(1)
    with opened(tiny_disk) as checkpoints:
        checkpoints.save(1, good, {"at": 1}, blocking=True)
        with pytest.raises(UserError) as caught:
            checkpoints.save(2, state(8), {"at": 2}, blocking)
            checkpoints.wait()
        text = str(caught.value)
        assert text.startswith("disk full: the checkpoint of step 2 needs about 8 MiB in ")
        assert "are free; the checkpoint of step 1 is still good; free some space" in text
        assert os.listdir(tiny_disk / "checkpoints") == ["1"]
        # The same object goes on: what fits is saved, what was saved is there.
        step, found, _ = checkpoints.restore(abstract(good))
        assert step == 1
        assert_same_bits(found, good)
        checkpoints.save(2, good, {"at": 2}, blocking=True)
        assert checkpoints.steps() == [1, 2]


def test_disk_full_in_the_background(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as checkpoints:
        with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
            patch.setattr(checkpoint_files, "checksums", full)
            checkpoints.save(1, small(), {})
            checkpoints.save(2, small(), {})
        assert str(caught.value).startswith("disk full: the checkpoint of step 1 needs about 132 B")
        assert "; nothing was saved before; free some space" in str(caught.value)
        assert os.listdir(tmp_path / "checkpoints") == []
        checkpoints.save(1, small(1), {"at": 1}, blocking=True)
        assert checkpoints.restore(abstract(small())).data_state == {"at": 1}


def test_another_error_outweighs_a_failed_save(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_files, "checksums", full)
    with pytest.raises(ZeroDivisionError), opened(tmp_path) as checkpoints:
        checkpoints.save(1, small(), {})
        raise ZeroDivisionError


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        Checkpoints(tmp_path / "file" / "checkpoints", period=1, keep=1)
    assert str(caught.value) == (
        f"expected a folder that can be written for checkpoints, got {tmp_path}/file/checkpoints: "
        "Not a directory; give another base_output_directory"
    )


def test_folder_that_becomes_read_only(tiny_disk):
    with opened(tiny_disk) as checkpoints:
        checkpoints.save(1, small(), {}, blocking=True)
        subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
        with pytest.raises(UserError) as caught:
            checkpoints.save(2, small(), {}, blocking=True)
    assert str(caught.value).startswith("cannot write the checkpoint of step 2 in ")
    assert "Read-only file system; the checkpoint of step 1 is still good" in str(caught.value)
    with pytest.raises(UserError, match=r"expected a folder that can be written .*Read-only"):
        opened(tiny_disk)


SAVER = """
    import sys, numpy as np, jax
    from octablox.train.checkpoint import Checkpoints
    checkpoints = Checkpoints(sys.argv[1], period=1, keep=2)
    first = (checkpoints.latest_step() or 0) + 1
    for step in range(first, first + 100000):
        w = jax.device_put(np.full((256, 2048), step, np.float32))
        state = {"w": w, "step": jax.numpy.int32(step)}
        checkpoints.save(step, state, {"at": step})
        print(step, flush=True)
"""


def kill_while_saving(folder, seconds):
    """The last step that had started to save when the run was killed."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SAVER), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    first = process.stdout.readline()
    time.sleep(seconds)
    process.kill()
    rest, errors = process.communicate()
    assert (errors, first != "") == ("", True)
    return int((first + rest).split()[-1])


def test_killed_at_any_moment(tmp_path):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    folder = tmp_path / "checkpoints"
    target = {"w": jax.ShapeDtypeStruct((256, 2048), jnp.float32)}
    target["step"] = jax.ShapeDtypeStruct((), jnp.int32)
    leftovers = 0
    for _ in range(3):
        started = kill_while_saving(folder, rng.uniform(0.02, 0.6))
        leftovers += len([name for name in os.listdir(folder) if not name.isdecimal()])
        notes = []
        with Checkpoints(folder, period=1, keep=2, note=notes.append) as checkpoints:
            if started > 1:  # each save first waits for the one before it
                assert checkpoints.latest_step() in (started - 1, started), f"seed {seed}"
            if checkpoints.latest_step() is not None:
                step, state, data_state = checkpoints.restore(target)
                assert data_state == {"at": step}
                assert_same_bits(state["w"], np.full((256, 2048), step, np.float32))
                assert state["step"] == step
        assert notes == []
    print(f"{leftovers} unfinished folders were left")


def test_only_late_writers_are_ignored(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    checkpoint._ignore_late_writers()
    errors = [RuntimeError("Event loop is closed"), RuntimeError("other"), ValueError("other")]
    for error in errors:
        sys.unraisablehook(SimpleNamespace(exc_value=error))
    assert [caught.exc_value for caught in seen] == errors[1:]


SILENT = """
    import errno, sys, jax
    from octablox.errors import UserError
    from octablox.train import checkpoint_files
    from octablox.train.checkpoint import Checkpoints

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    state = {"x": jax.numpy.ones(3)}
    with Checkpoints(sys.argv[1], period=1, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, {})
        checkpoints.restore(state)
        checkpoint_files.checksums = full
        try:
            checkpoints.save(3, state, {}, blocking=True)
        except UserError as error:
            print(str(error)[:9])
"""


def test_silent_on_the_terminal(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SILENT), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "disk full\n", "")
