"""How much memory and time converting a checkpoint takes, there and back.

    python -m benchmarks.convert [--gb 10] [--json FILE] [--folder DIR]

A checkpoint of DeepSeek-V3's width in bfloat16 is made (a dense layer, one with as many experts as
the size asks for, embedding and head), converted by `octablox convert` in a process of its own,
converted back, compared, and deleted. Peak memory is the resident set's, pages of mapped files
included.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from octablox.hf import architecture, layout
from octablox.hf.architecture import Architecture
from octablox.model.config import ModelConfig
from octablox.moe.config import MoeConfig
from octablox.weights.tensor_files import NewTensorFile, Tensor, TensorFile

WIDTH, EXPERT = 7168, 2048
MODEL = ModelConfig(
    vocab_size=129280,
    base_emb_dim=WIDTH,
    base_mlp_dim=18432,
    base_num_decoder_layers=2,
    first_num_dense_layers=1,
    base_num_query_heads=16,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
# Runs a command and says what it took, at the end of its output.
CHILD = """
import json, resource, sys, time
from octablox import cli
began = time.perf_counter()
code = cli.main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": time.perf_counter() - began, "peak_bytes": peak}))
sys.exit(code)
"""


def make(folder: Path, gigabytes: float) -> int:
    """Writes the checkpoint into two files; returns its bytes."""
    rest = layout.entries(MODEL, MoeConfig(num_experts=1))
    one_expert = 3 * WIDTH * EXPERT * 2
    fixed = sum(2 * int(np.prod(entry.shape)) for entry in rest) - one_expert
    experts = max(int((gigabytes * 1e9 - fixed) / one_expert), 2)
    moe = MoeConfig(num_experts=experts, base_moe_mlp_dim=EXPERT)
    entries = layout.entries(MODEL, moe)
    folder.mkdir(parents=True)
    config = architecture.to_json(Architecture(MODEL, moe), "bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).integers(0, 2**16, 10**7 + 7, np.uint16)
    total, half = 0, len(entries) // 2
    for n, part in enumerate((entries[:half], entries[half:])):
        tensors = {entry.theirs: Tensor("BF16", entry.shape) for entry in part}
        with NewTensorFile(folder / f"model-{n}.safetensors", tensors) as file:
            for entry in part:
                array = file.array(entry.theirs)
                flat = array.reshape(-1).view(np.uint16)
                for first in range(0, flat.size, noise.size):
                    chunk = flat[first : first + noise.size]
                    chunk[...] = noise[: chunk.size]
                    file.release()
                total += array.nbytes
    return total


def convert(line: str) -> dict[str, float]:
    """`octablox convert` in a process of its own: seconds and peak bytes."""
    command = [sys.executable, "-c", CHILD, "convert", *line.split()]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def same(a: Path, b: Path) -> bool:
    """Whether two checkpoints have the same tensors, to the bit."""

    def tensors(folder):
        files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
        return {name: file for file in files for name in file.tensors}

    left, right = tensors(a), tensors(b)
    if left.keys() != right.keys():
        return False
    for name in left:
        x, y = (of[name].array(name).reshape(-1).view(np.uint16) for of in (left, right))
        if not np.array_equal(x, y):
            return False
        left[name].release()
        right[name].release()
    return True


def measure(gigabytes: float, folder: Path) -> list[dict[str, object]]:
    """A row for each direction; the folder is empty again at the end."""
    try:
        hf, ours, back = (folder / name for name in ("hf", "ours", "back"))
        nbytes = make(hf, gigabytes)
        rows = []
        for direction, line in (
            ("hf to octablox", f"--from hf {hf} --to octablox {ours}"),
            ("octablox to hf", f"--from octablox {ours} --to hf {back}"),
        ):
            took = convert(line)
            rows.append(
                {
                    "direction": direction,
                    "gigabytes": nbytes / 1e9,
                    "peak_gigabytes": took["peak_bytes"] / 1e9,
                    "seconds": took["seconds"],
                    "gigabytes_per_second": nbytes / 1e9 / took["seconds"],
                }
            )
        if not same(hf, back):
            raise SystemExit("what came back is not what was converted")
        return rows
    finally:
        for name in ("hf", "ours", "back"):
            shutil.rmtree(folder / name, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=10.0, help="of the checkpoint")
    parser.add_argument("--folder", type=Path, help="with room for three times that")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(args.gb, Path(folder))
    table = Table(title="octablox convert")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(v if isinstance(v, str) else f"{v:.2f}" for v in row.values()))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
