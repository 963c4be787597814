"""`octablox bench gmm`: grouped matmuls on this machine, octablox beside others.

The others are lax.ragged_dot, qwix.ragged_dot, tokamax (where it is installed), JAX's megablox (on
TPU), and a dense matmul. For each shape, split of the rows, recipe and direction: median
milliseconds of each (all timed in turn), how many times slower the others are, and the temporary
memory of each. Forward + backward is the product and both gradients. The dense matmul multiplies
as many numbers as the rows there are: [M, K] @ [K, N], in bfloat16 and float32, the faster of the
two. GB/s counts every operand and result once, in bfloat16.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import qwix
from jax import lax
from jax import numpy as jnp
from qwix._src.core import ragged_dot_qt
from rich.console import Console
from rich.table import Table

from octablox.bench.report import write
from octablox.bench.timing import interleaved
from octablox.fp8 import RECIPES
from octablox.gmm import gmm
from octablox.options import Parser

# name: (experts, M, K, N)
SHAPES = {
    "E8": (8, 4096, 512, 512),
    "E8 wide": (8, 4096, 1024, 1024),
    "E16": (16, 4096, 512, 512),
    "E64": (64, 4096, 256, 256),
}
SPLITS = ("even", "skewed", "half empty")
RECIPE_NAMES = ("bf16", "fp8_full")
DIRECTIONS = ("forward", "forward+backward")
TARGET_RIVALS, TARGET_DENSE = 8.0, 1.5


def group_sizes(split: str, experts: int, rows: int) -> np.ndarray:
    """int32 [E] that sum to `rows`: equal, as 1/rank, or equal with every other group empty."""
    weight = {
        "even": np.ones(experts),
        "skewed": np.random.default_rng(0).permutation(1 / np.arange(1, experts + 1)),
        "half empty": np.arange(experts) % 2,
    }[split]
    ends = np.round(np.cumsum(weight / weight.sum()) * rows).astype(np.int32)
    return np.diff(ends, prepend=0).astype(np.int32)


def octablox_gmm(recipe, x, w, sizes):
    """Ours."""
    return gmm(x, w, sizes, recipe=RECIPES[recipe])


def lax_ragged_dot(recipe, x, w, sizes):
    """It knows no FP8 training: bfloat16 under either recipe."""
    return lax.ragged_dot(x, w, sizes)


def qwix_ragged_dot(recipe, x, w, sizes):
    """Under fp8_full qwix's quantized training form, with the recipe's types."""
    if recipe == "bf16":
        return qwix.ragged_dot(x, w, sizes)
    config = ragged_dot_qt.RaggedDotQtConfig(
        lhs_qtype=jnp.float8_e4m3fn,
        rhs_qtype=jnp.float8_e4m3fn,
        dlhs_grad_qtype=jnp.float8_e5m2,
        drhs_grad_qtype=jnp.float8_e5m2,
    )
    return ragged_dot_qt.ragged_dot_qt(x, w, sizes, config)


def tokamax_ragged_dot(recipe, x, w, sizes):
    """Its own choice of a kernel, in bfloat16 under either recipe."""
    import tokamax

    return tokamax.ragged_dot(x, w, sizes)


def megablox(recipe, x, w, sizes):
    """JAX's kernel for TPU, in bfloat16 under either recipe."""
    from jax.experimental.pallas.ops.tpu.megablox import ops

    return ops.gmm(x, w, sizes, preferred_element_type=x.dtype)


def dense(dtype, recipe, x, w, sizes):
    """One matrix for all rows."""
    return x.astype(dtype) @ w[0].astype(dtype)


def contenders() -> dict[str, Callable]:
    """Those that run on this machine. Dense is timed in both types, and the faster counts."""
    found = {"octablox": octablox_gmm, "ragged_dot": lax_ragged_dot, "qwix": qwix_ragged_dot}
    if importlib.util.find_spec("tokamax"):
        found["tokamax"] = tokamax_ragged_dot
    if jax.default_backend() == "tpu":
        found["megablox"] = megablox
    found["dense bfloat16"] = functools.partial(dense, jnp.bfloat16)
    return found | {"dense float32": functools.partial(dense, jnp.float32)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. Times in milliseconds, memory (temporary) in MiB.

    None: that contender does not run here. `tflops` and `gb_per_second` are octablox's.
    """

    shape: str
    experts: int
    m: int
    k: int
    n: int
    split: str
    recipe: str
    direction: str
    octablox_ms: float
    ragged_dot_ms: float
    qwix_ms: float
    dense_ms: float
    ragged_dot_ratio: float
    qwix_ratio: float
    dense_ratio: float  # of octablox to dense
    octablox_mib: float
    ragged_dot_mib: float
    qwix_mib: float
    dense_mib: float
    tokamax_ms: float | None
    megablox_ms: float | None
    tflops: float
    gb_per_second: float


def compiled(contender, recipe, direction, x, w, dout):
    """The contender as a compiled function of x, w, group sizes and dout."""

    def forward(x, w, sizes, dout):
        return contender(recipe, x, w, sizes)

    def both(x, w, sizes, dout):
        out, vjp = jax.vjp(lambda x, w: contender(recipe, x, w, sizes), x, w)
        return out, *vjp(dout.astype(out.dtype))

    sizes = jax.ShapeDtypeStruct(w.shape[:1], jnp.int32)
    function = forward if direction == "forward" else both
    return jax.jit(function).lower(x, w, sizes, dout).compile()


def measure(name, recipe, direction, seconds):
    """A row for each split of the rows, from the same compiled functions."""
    experts, m, k, n = SHAPES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (m, k), (experts, k, n), (m, n)
    x, w, dout = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    functions = {
        contender: compiled(
            function, recipe, direction, x, w[:1] if "dense" in contender else w, dout
        )
        for contender, function in contenders().items()
    }
    mib = {c: f.memory_analysis().temp_size_in_bytes / 2**20 for c, f in functions.items()}
    for split in SPLITS:
        sizes = jnp.asarray(group_sizes(split, experts, m))
        runs = {
            c: functools.partial(
                f, x, w[:1] if "dense" in c else w, sizes[:1] if "dense" in c else sizes, dout
            )
            for c, f in functions.items()
        }
        ms = {c: 1e3 * t for c, t in interleaved(runs, rounds=9, seconds=seconds).items()}
        ours, fastest = ms["octablox"], min(("dense bfloat16", "dense float32"), key=ms.get)
        yield Row(
            name,
            experts,
            m,
            k,
            n,
            split,
            recipe,
            direction,
            *(ms[c] for c in ("octablox", "ragged_dot", "qwix", fastest)),
            ms["ragged_dot"] / ours,
            ms["qwix"] / ours,
            ours / ms[fastest],
            *(mib[c] for c in ("octablox", "ragged_dot", "qwix", fastest)),
            ms.get("tokamax"),
            ms.get("megablox"),
            1e-9 * products_of(direction) * 2 * m * k * n / ours,
            1e-6 * products_of(direction) * 2 * (m * k + experts * k * n + m * n) / ours,
        )


def products_of(direction: str) -> int:
    """How many products of the same size: each reads two of x, w and out, and writes the third."""
    return 1 if direction == "forward" else 3


def geometric_mean(values):
    """Of positive numbers."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def table_of(rows):
    """The rows for people."""
    table = Table("shape", "split", "recipe", "direction")
    rivals = [name for name in _SOMEWHERE if any(_of(row, name) for row in rows)]
    timed = ("octablox", "ragged_dot", "qwix", *rivals, "dense")
    for column in timed:
        table.add_column(f"{column}\nms", justify="right")
    for column in ("ragged_dot /\noctablox", "qwix /\noctablox", "octablox /\ndense"):
        table.add_column(column, justify="right")
    for column in ("TFLOP/s", "GB/s"):
        table.add_column(column, justify="right")
    table.add_column("temporary MiB:\noctablox, ragged_dot, qwix, dense", justify="right")
    for r in rows:
        mib = r.octablox_mib, r.ragged_dot_mib, r.qwix_mib, r.dense_mib
        table.add_row(
            f"{r.shape}: M={r.m} K={r.k} N={r.n}",
            r.split,
            r.recipe,
            r.direction,
            *("–" if (ms := _of(r, name)) is None else f"{ms:.1f}" for name in timed),
            *(f"{x:.1f}x" for x in (r.ragged_dot_ratio, r.qwix_ratio)),
            f"{r.dense_ratio:.2f}x",
            f"{r.tflops:.3f}",
            f"{r.gb_per_second:.1f}",
            ", ".join(f"{x:.0f}" for x in mib),
        )
    return table


# Contenders that do not run on every machine.
_SOMEWHERE = ("tokamax", "megablox")


def _of(row, name):
    """A contender's milliseconds, or None."""
    return getattr(row, f"{name}_ms")


def _bars(row):
    """TFLOP/s of every contender, for the picture."""
    names = ("octablox", "ragged_dot", "qwix", *_SOMEWHERE, "dense")
    work = row.tflops * row.octablox_ms
    speeds = {name: work / ms for name in names if (ms := _of(row, name)) is not None}
    return f"{row.shape} {row.split}\n{row.recipe} {row.direction}", speeds


def summary(rows):
    """Lines with the geometric means beside what they should be."""
    for rival in ("ragged_dot", "qwix"):
        mean = geometric_mean(getattr(row, f"{rival}_ratio") for row in rows)
        yield f"{rival} / octablox: geometric mean {mean:.1f}x (target: {TARGET_RIVALS:g}x or more)"
        for recipe in RECIPE_NAMES:
            ours = [getattr(row, f"{rival}_ratio") for row in rows if row.recipe == recipe]
            yield f"  {recipe}: {geometric_mean(ours):.1f}x"
    for shape, recipe, direction in itertools.product(SHAPES, RECIPE_NAMES, DIRECTIONS):
        ratios = [
            row.dense_ratio
            for row in rows
            if (row.shape, row.recipe, row.direction) == (shape, recipe, direction)
        ]
        if ratios and SHAPES[shape][0] == 8:
            yield (
                f"octablox / dense, {shape}, {recipe} {direction}: geometric mean "
                f"{geometric_mean(ratios):.2f}x (target: {TARGET_DENSE}x or less)"
            )


def parser() -> Parser:
    """Of the options."""
    made = Parser("bench gmm")
    made.add_argument("--shape", choices=list(SHAPES), action="append", help="only this shape")
    made.add_argument(
        "--seconds", type=float, default=3.0, help="to spend on a row (default: %(default)g)"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    made.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rows there")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table and writes the rows. UserError."""
    args = parser().parse_args(argv)
    console, rows, start = Console(width=180), [], time.perf_counter()
    for name in args.shape or SHAPES:
        for recipe in RECIPE_NAMES:
            for direction in DIRECTIONS:
                rows += measure(name, recipe, direction, args.seconds)
                console.print(f"{time.perf_counter() - start:4.0f} s  {name} {recipe} {direction}")
    console.print(table_of(rows))
    for line in summary(rows):
        console.print(line)
    flat = [dataclasses.asdict(row) for row in rows]
    write(flat, args.json, args.plot, [_bars(row) for row in rows], "octablox bench gmm")
    return 0
