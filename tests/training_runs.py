"""Small training runs, started as a user starts them, for the tests of the training loop."""

import json
import os
import shlex
import signal
from pathlib import Path

import jax
import numpy as np

from octablox import cli, config
from octablox.checks import resolve_mesh_shape
from octablox.mesh import make_mesh
from octablox.train import loop
from octablox.train.checkpoint import Checkpoints, Restored
from octablox.train.step import Trainer

# One MoE layer on 8 devices. The schedule's length is fixed, so that runs of other lengths are the
# same compiled program; the compilation cache is that of the tests.
SMALL = """
model_name=tiny base_num_decoder_layers=1 first_num_dense_layers=0 mtp_num_layers=0 vocab_size=64
max_target_length=16 dataset_type=synthetic learning_rate=0.01 learning_rate_schedule_steps=40
eval_steps=1 log_period=1 enable_tensorboard=false jax_cache_dir=
"""


def arguments(folder: Path, line: str, base: str = SMALL) -> list[str]:
    """`octablox train`'s arguments; the keys in `line` replace those of `base`."""
    keys = dict(word.split("=", 1) for word in shlex.split(f"{base} {line}"))
    keys = {"base_output_directory": str(folder), "run_name": "run", **keys}
    return ["train", *(f"{key}={value}" for key, value in keys.items())]


def train(folder: Path, line: str, base: str = SMALL) -> int:
    """Runs in this process; returns the exit code."""
    return cli.main(arguments(folder, line, base))


def rows(folder: Path, kind: str) -> list[dict]:
    """The rows of the run's metrics.jsonl of one kind."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def losses(folder: Path) -> dict[int, float]:
    """Step -> training loss; no step twice."""
    found = [(row["step"], row["loss"]) for row in rows(folder, "train")]
    assert len(dict(found)) == len(found), f"a step twice: {found}"
    return dict(found)


def checkpoint_steps(folder: Path) -> list[int]:
    names = [path.name for path in (folder / "run" / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())


def saved(folder: Path) -> Restored:
    """The newest checkpoint of the run, with its arrays on the host."""
    settings = config.read(folder / "run" / "config.yml")
    trainer = Trainer(settings, make_mesh(resolve_mesh_shape(settings, jax.device_count())))
    with Checkpoints(folder / "run" / "checkpoints", period=1, keep=99) as checkpoints:
        found = checkpoints.restore(trainer.abstract_state())
    return found._replace(state=jax.tree.map(np.asarray, found.state))


def assert_same_state(a: Restored, b: Restored) -> None:
    """Parameters, optimizer and data iterator are equal to the bit."""
    assert a.step == b.step
    assert a.data_state == b.data_state
    assert jax.tree.structure(a.state) == jax.tree.structure(b.state)
    pairs = zip(jax.tree.leaves_with_path(a.state), jax.tree.leaves(b.state), strict=True)
    for (path, x), y in pairs:
        assert x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)


def at_step(monkeypatch, step: int, do) -> None:
    """Calls `do(run)` when that step has run, before anything of it is logged or saved."""
    take = loop._Run._take

    def take_and_do(self, number, metrics):
        take(self, number, metrics)
        if number == step:
            do(self)

    monkeypatch.setattr(loop._Run, "_take", take_and_do)


def press_ctrl_c(run: object = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)
