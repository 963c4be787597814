"""Tile choice of the TPU kernels, by a small model of VMEM, the matrix unit and HBM.

The model counts cycles of one call: for every step the greater of what the matrix unit and what
HBM need. Its constants are read from compiled schedules; it ranks tiles, it does not predict time.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from octablox.errors import UserError
from octablox.kernels.chips import CHIPS, MIB

BLOCK = 32  # rows that a DMA moves at least
LANES = 128

# Cycles that a straight piece of matrix code takes beyond its multiplications, and what a
# pipelined step adds to it: semaphores, DMA descriptors, the block shared with the next group.
FILL_AND_DRAIN = 300
STEP = {"gmm": 370, "tgmm": 520}
# The matrix unit takes a new weight no more often than every so many rows.
PUSH = 128
# Longer pieces of code gain little, and are compiled, kept and fetched: limits of one, and of all.
PIECE_CYCLES = 20_000
# Rows of two products that are multiplied before they are combined: fewer are to be combined when
# the matrix unit is done.
CHUNK = 256
CODE_CYCLES = 128_000

Product = Literal["gmm", "dlhs", "tgmm"]
PRODUCTS: tuple[Product, ...] = get_args(Product)


@dataclasses.dataclass(frozen=True)
class GmmTiles:
    """A step of the gmm kernel.

    Attributes:
      rows: rows of a tile; a multiple of 32.
      columns: columns of a tile; divides N, a multiple of 128.
      contracted: K, all of it.
      buckets: row counts for which there is code, ascending, the last is `rows`.
      chunk: rows that are multiplied and scaled at a time, at least; None: all.
    """

    rows: int
    columns: int
    contracted: int
    buckets: tuple[int, ...]
    chunk: int | None = None

    def __str__(self) -> str:
        """Rows × K × columns."""
        return f"{self.rows} × {self.contracted} × {self.columns}"


@dataclasses.dataclass(frozen=True)
class TgmmTiles:
    """A step of the tgmm kernel.

    Attributes:
      rows, buckets: as those of `GmmTiles`.
      k, n: size of the output tile; they divide K and N.
      chunk_k: part of `k` that is multiplied at a time; None: all.
    """

    rows: int
    k: int
    n: int
    buckets: tuple[int, ...]
    chunk_k: int | None = None

    def __str__(self) -> str:
        """Rows × k × n."""
        return f"{self.rows} × {self.k} × {self.n}"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most rows (M), and elements along K and N, that a user wants in a tile."""

    rows: int
    k: int
    n: int


@dataclasses.dataclass(frozen=True)
class Gmm:
    """What the choice depends on; `columns` of one output, `parts` matrices side by side.

    `lhs`, `rhs` and `out` are names of dtypes. `streams` counts the results, and the arrays of
    their size that the epilogue reads.
    """

    chip: str
    rows: int
    k: int
    columns: int
    experts: int
    lhs: str
    rhs: str
    out: str
    parts: int = 1
    streams: int = 1
    k_block: int | None = None
    product: Product = "gmm"


@dataclasses.dataclass(frozen=True)
class Tgmm:
    """What the choice depends on; as `Gmm`."""

    chip: str
    rows: int
    k: int
    n: int
    experts: int
    lhs: str
    rhs: str
    out: str


Override = GmmTiles | TgmmTiles | Limits
_overrides: contextvars.ContextVar[dict[str, Override] | None]
_overrides = contextvars.ContextVar("tile_overrides", default=None)
_record: contextvars.ContextVar[list[GmmTiles | TgmmTiles] | None]
_record = contextvars.ContextVar("tile_record", default=None)


@contextlib.contextmanager
def override(**tiles: Override) -> Iterator[None]:
    """Fixes or limits tiles, by product (`gmm`, `dlhs`, `tgmm`), for what is traced inside."""
    token = _overrides.set({**(_overrides.get() or {}), **tiles})
    try:
        yield
    finally:
        _overrides.reset(token)


@contextlib.contextmanager
def record() -> Iterator[list[GmmTiles | TgmmTiles]]:
    """A list of the tiles that are chosen inside."""
    chosen: list[GmmTiles | TgmmTiles] = []
    token = _record.set(chosen)
    try:
        yield chosen
    finally:
        _record.reset(token)


def choose(call: Gmm | Tgmm) -> GmmTiles | TgmmTiles:
    """The tiles to use: the override of the product, or the first of `ranked`.

    Raises:
      ValueError: nothing fits into VMEM.
      UserError: what the user asked for does not.
    """
    product = call.product if isinstance(call, Gmm) else "tgmm"
    fixed = (_overrides.get() or {}).get(product)
    if isinstance(fixed, Limits):
        fixed = limited(call, fixed)
    tiles = fixed or ranked(call)[0]
    chosen = _record.get()
    if chosen is not None:
        chosen.append(tiles)
    return tiles


def parse_limits(key: str, text: str) -> Limits:
    """Limits from M,K,N, as the value of a key.

    Raises:
      UserError: they are no such limits.
    """
    words = text.split(",")
    sizes = [int(word) for word in words if word.strip().isdecimal()]
    if len(sizes) != len(words) or len(sizes) != 3:
        raise UserError(f"{key}: expected three numbers M,K,N, as 512,7168,2048, got {text!r}")
    least = (BLOCK, LANES, LANES)
    for dim, size, multiple in zip("MKN", sizes, least, strict=True):
        if size == 0 or size % multiple:
            raise UserError(f"{key}: expected {dim} to be a multiple of {multiple}, got {size}")
    return Limits(*sizes)


def limited(call: Gmm | Tgmm, limits: Limits) -> GmmTiles | TgmmTiles:
    """The largest tiles within limits.

    Raises:
      UserError: no tile is, or it does not fit into VMEM.
    """
    chip = CHIPS[call.chip]
    tiles: GmmTiles | TgmmTiles
    if isinstance(call, Gmm):
        key = f"{call.product}_tiles"
        if limits.k < call.k:
            raise UserError(
                f"{key}: expected K of at least {call.k}, all of which a step multiplies, "
                f"got {limits.k}"
            )
        columns = max(divisors(call.columns, limits.n))
        rows = min(limits.rows, _up(call.rows, BLOCK))
        tiles = _gmm_tiles(call, rows, columns)
        used = gmm_vmem(call, tiles)
    else:
        key, k, n = "tgmm_tiles", max(divisors(call.k, limits.k)), max(divisors(call.n, limits.n))
        tiles = _tgmm_tiles(min(limits.rows, _up(call.rows, BLOCK)), k, n)
        used = tgmm_vmem(call, tiles)
    if used > chip.vmem:
        raise UserError(
            f"{key}: a tile of {tiles} needs {used >> 20} MiB of VMEM, {chip.name} gives "
            f"{chip.vmem >> 20}; write smaller ones"
        )
    return tiles


@functools.cache
def ranked(call: Gmm | Tgmm) -> Sequence[GmmTiles | TgmmTiles]:
    """All tiles that fit into VMEM, the one of the fewest modelled cycles first.

    Raises:
      ValueError: nothing fits.
    """
    vmem = CHIPS[call.chip].vmem
    fitting: list[tuple[float, GmmTiles | TgmmTiles]]
    if isinstance(call, Gmm):
        gmms = (t for t in _gmm_candidates(call) if gmm_vmem(call, t) <= vmem)
        fitting = [(gmm_cycles(call, t), t) for t in gmms]
    else:
        tgmms = (t for t in _tgmm_candidates(call) if tgmm_vmem(call, t) <= vmem)
        fitting = [(tgmm_cycles(call, t), t) for t in tgmms]
    if not fitting:
        raise ValueError(f"no tile fits into {vmem >> 20} MiB of VMEM for {call}")
    return [tiles for _, tiles in sorted(fitting, key=lambda pair: pair[0])]


def gmm_vmem(call: Gmm, tiles: GmmTiles) -> int:
    """Bytes of VMEM: two buffers of each window, and the scratch."""
    lhs, rhs, out = (_bytes(t) for t in (call.lhs, call.rhs, call.out))
    windows = tiles.rows * call.k * lhs + call.parts * call.k * tiles.columns * rhs
    windows += call.streams * tiles.rows * tiles.columns * out
    scratch = BLOCK * (2 * call.streams * tiles.columns + call.columns) * out
    if call.k_block:
        blocks = call.k // call.k_block
        windows += (tiles.rows * _up(blocks, LANES) + call.parts * blocks * tiles.columns) * 4
        scratch += (
            (call.parts + 2) * tiles.rows * tiles.columns * 4
        )  # totals, and values to be added
    if call.parts * call.streams > 1:  # products that wait for their epilogue
        scratch += min(tiles.rows, 2 * CHUNK) * tiles.columns * 4
    scratch += 2 * (tiles.rows + LANES) * LANES * 4
    scratch += call.experts * call.parts * call.columns * 4 + call.rows * 8
    return 2 * windows + scratch + MIB


def tgmm_vmem(call: Tgmm, tiles: TgmmTiles) -> int:
    """Bytes of VMEM: two buffers of each window, the lower half of a sum, the scratch."""
    lhs, rhs, out = (_bytes(t) for t in (call.lhs, call.rhs, call.out))
    windows = tiles.rows * (tiles.k * lhs + tiles.n * rhs) + tiles.k * tiles.n * out
    scratch = tiles.k * tiles.n * (4 - out) + (tiles.k + LANES) * LANES * 4
    return 2 * windows + scratch + call.experts * call.n * 4 + 2 * MIB


def gmm_cycles(call: Gmm, tiles: GmmTiles) -> float:
    """Modelled cycles of one call on groups of random sizes about their mean."""
    chip = CHIPS[call.chip]
    columns = call.parts * tiles.columns
    matrix = _gmm_row_cycles(call, tiles.columns)
    weight = call.k * columns * _bytes(call.rhs)
    row = call.k * _bytes(call.lhs) + call.streams * tiles.columns * _bytes(call.out)
    total = 0.0
    for rows, steps in _group_samples(call, tiles):
        compute = sum(max(b, PUSH) * matrix + FILL_AND_DRAIN + STEP["gmm"] for b in steps)
        total += max(compute, (weight + row * rows) / chip.hbm)
    return total / len(SPREAD) * call.experts * (call.columns // tiles.columns)


def _gmm_row_cycles(call: Gmm, columns: int) -> float:
    """Cycles of the matrix unit for one row of a step."""
    chip = CHIPS[call.chip]
    block = call.k_block or call.k
    contracted = call.k // block * _up(block, chip.side)
    rate = chip.macs[chip.kind(call.lhs, call.rhs)]
    return contracted * _up(call.parts * columns, chip.side) / rate


def tgmm_cycles(call: Tgmm, tiles: TgmmTiles) -> float:
    """Modelled cycles of one call on groups of random sizes about their mean."""
    chip = CHIPS[call.chip]
    rate = chip.macs[chip.kind(call.lhs, call.rhs)]
    matrix = _up(tiles.k, chip.side) * _up(tiles.n, chip.side) / rate
    # To add a tile to the window takes about nine operations a register, four a cycle.
    again = tiles.k * tiles.n / 1024 * 9 / 4
    row = tiles.k * _bytes(call.lhs) + tiles.n * _bytes(call.rhs)
    total = 0.0
    for rows, steps in _group_samples(call, tiles):
        compute = sum(_up(b, chip.side) * matrix + FILL_AND_DRAIN + STEP["tgmm"] for b in steps)
        compute += again * (len(steps) - 1)
        moved = tiles.k * tiles.n * _bytes(call.out) + row * rows
        total += max(compute, moved / chip.hbm)
    return total / len(SPREAD) * call.experts * (call.k // tiles.k) * (call.n // tiles.n)


# Group sizes to reckon with, in standard deviations from the mean.
SPREAD = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0)


def _group_samples(call, tiles) -> Iterator[tuple[float, list[int]]]:
    """Rows that a group reads and the buckets of its steps, for each of `SPREAD`."""
    mean = call.rows / call.experts
    for deviations in SPREAD:
        rows = max(1.0, mean + deviations * math.sqrt(mean)) + BLOCK / 2  # the head
        whole, rest = divmod(math.ceil(rows), tiles.rows)
        steps = [tiles.rows] * whole
        if rest:
            steps.append(next(b for b in tiles.buckets if b >= rest))
        yield rows, steps


def _gmm_candidates(call: Gmm) -> Iterator[GmmTiles]:
    for columns in divisors(call.columns, 7168 if call.parts == 1 else 2048):
        cycles = _gmm_row_cycles(call, columns)
        least = min(256, _up(call.rows, 64))  # fewer rows wait for the weights to be pushed
        for rows in range(least, min(1280, _up(call.rows, 64)) + 1, 64):
            if rows == least or rows * cycles <= PIECE_CYCLES:
                yield _gmm_tiles(call, rows, columns)


def _gmm_tiles(call: Gmm, rows: int, columns: int) -> GmmTiles:
    code = buckets(rows, CODE_CYCLES / _gmm_row_cycles(call, columns))
    chunk = CHUNK if call.parts * call.streams > 1 else None
    return GmmTiles(rows, columns, call.k, code, chunk)


def _tgmm_candidates(call: Tgmm) -> Iterator[TgmmTiles]:
    chip = CHIPS[call.chip]
    rate = chip.macs[chip.kind(call.lhs, call.rhs)]
    for k in divisors(call.k, 3584):
        for n in divisors(call.n, 2048):
            for rows in range(256, min(1280, _up(call.rows, 256)) + 1, 64):
                if rows == 256 or rows * k * n / rate <= PIECE_CYCLES:
                    yield _tgmm_tiles(rows, k, n)


def _tgmm_tiles(rows: int, k: int, n: int) -> TgmmTiles:
    chunk = max(divisors(k, 1024))
    return TgmmTiles(rows, k, n, coarse(rows), chunk if chunk < k else None)


def buckets(rows: int, code_rows: float) -> tuple[int, ...]:
    """Row counts worth code of their own, in sum not above `code_rows` if that is possible.

    Fine just below the tile, where a group's size is: a tile is chosen a little larger than the
    mean group, so that most groups are one step, and 32 rows more than such a step needs are 6%.
    Each count is also another branch in every step.
    """
    for unit in (BLOCK, 2 * BLOCK, 4 * BLOCK):
        finest = max(BLOCK, rows - 4 * BLOCK)
        chosen = {*range(4 * unit, finest, 4 * unit), *range(finest, rows, unit), rows}
        if sum(chosen) <= code_rows:
            return tuple(sorted(chosen))
    return (rows,) if rows < 256 else (_up(rows // 2, BLOCK), rows)


def coarse(rows: int) -> tuple[int, ...]:
    """Row counts in steps of the matrix unit's 256, below which a contraction is padded."""
    return tuple(sorted({*range(256, rows, 256), rows}))


def last_buckets(buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Those for which the last step of a group of several has code in tgmm: every other one."""
    return buckets[::-2][::-1]


def divisors(size: int, top: int) -> list[int]:
    """Multiples of 128 up to `top` that divide `size`."""
    return [d for d in range(LANES, min(size, top) + 1, LANES) if size % d == 0]


def _bytes(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2}.get(dtype, 1)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
