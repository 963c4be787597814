"""Documents to rows: the held-out split, the token stream, and the windows cut from it.

Shapes: L tokens of a stream, n documents, S tokens of a row.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

Row = dict[str, np.ndarray]

_PAIRS_AT_ONCE = 1 << 22  # bounds the memory of counting
_TABLE = 1 << 26  # pairs that are counted in a table of all; more are sorted


def derived_seed(seed: int, purpose: str) -> int:
    """A seed in [0, 2**32) for one purpose; the same on every machine and version."""
    digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def shuffled(count: int, seed: int, purpose: str) -> list[int]:
    """The indices 0..count-1 in an order that only `seed` and `purpose` decide."""
    return sorted(range(count), key=lambda index: (derived_seed(seed, f"{purpose}:{index}"), index))


def hold_out(
    documents: list[np.ndarray], fraction: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(training, evaluation) documents: `fraction` of them, at least one on each side.

    Of a single document, the tail is held out.
    """
    if len(documents) == 1:
        (whole,) = documents
        tail = max(1, round(len(whole) * fraction))
        return [whole[:-tail]], [whole[-tail:]]
    count = min(max(1, round(len(documents) * fraction)), len(documents) - 1)
    order = shuffled(len(documents), seed, "held out")
    held = set(order[:count])
    train = [document for i, document in enumerate(documents) if i not in held]
    return train, [documents[i] for i in sorted(held)]


@dataclass(frozen=True)
class Stream:
    """The documents of a split, one after the other, each begun by BOS.

    tokens: [L] uint16 (int32 for a vocabulary that needs it).
    starts: [n] int64, where each document's BOS lies; ascending, starts[0] == 0.
    """

    tokens: np.ndarray
    starts: np.ndarray


def concatenate(documents: list[np.ndarray], bos: int) -> Stream:
    """The stream of `documents` in their order."""
    lengths = np.array([len(document) + 1 for document in documents], np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    largest = max([bos, *(int(document.max()) for document in documents if document.size)])
    tokens = np.empty(ends[-1], np.uint16 if largest < 2**16 else np.int32)
    for document, start, end in zip(documents, starts, ends, strict=True):
        tokens[start] = bos
        tokens[start + 1 : end] = document
    return Stream(tokens, starts)


class Windows:
    """The rows of a stream, by number: S tokens each, without overlap, nothing left out.

    A random-access source for grain. Row w holds tokens [wS, wS+S); its last target is the first
    token of row w+1, if that is of the same document. Only the last row is padded; a row past the
    end is padding alone.
    """

    def __init__(self, stream: Stream, length: int):
        self._stream = stream
        self._length = length

    def __len__(self) -> int:
        # The stream's last token has no target: a row for it alone would weigh nothing.
        return -(-(len(self._stream.tokens) - 1) // self._length)

    def __repr__(self) -> str:  # grain names its sources by this
        return f"Windows({len(self)} rows of {self._length} tokens)"

    def __getitem__(self, index: int) -> Row:
        """tokens, targets, segment_ids, positions [S] int32; weights [S] float32, 0 or 1."""
        tokens, starts = self._stream.tokens, self._stream.starts
        begin = index * self._length
        at = np.arange(begin, min(begin + self._length, len(tokens)))  # [<=S] in the stream
        row: Row = {
            name: np.zeros(self._length, np.int32)
            for name in ("tokens", "targets", "segment_ids", "positions")
        }
        row["weights"] = np.zeros(self._length, np.float32)
        if not at.size:
            return row
        document = np.searchsorted(starts, at, side="right")  # 1, 2, ...: of the whole stream
        # A document that began in an earlier row counts from 0 again here.
        origin = np.maximum(starts[document - 1], begin)
        used = slice(0, at.size)
        row["tokens"][used] = tokens[at]
        row["segment_ids"][used] = document - document[0] + 1
        row["positions"][used] = at - origin
        following = np.searchsorted(starts, at + 1, side="right")
        has_target = (following == document) & (at + 1 < len(tokens))
        row["targets"][used][has_target] = tokens[at[has_target] + 1]
        row["weights"][used] = has_target
        return row


def bigram_nats(stream: Stream) -> float:
    """H(next | previous) in nats a token, over every pair that has loss weight in the windows.

    It is the loss of the best model that sees one token back, with the counts known.
    """
    tokens, starts = stream.tokens, stream.starts
    # Ids may lie far apart (synthetic data in a large vocabulary): count by rank among those used.
    used = np.flatnonzero(np.bincount(tokens))
    rank = np.zeros(int(used[-1]) + 1, np.int64)
    rank[used] = np.arange(used.size)
    within = np.ones(len(tokens) - 1, bool)  # pair i is (tokens[i], tokens[i + 1])
    within[starts[1:] - 1] = False
    if used.size**2 > _TABLE:
        return _sorted_bigram_nats(rank[tokens], within)
    counts = np.zeros(used.size**2, np.int64)
    for begin in range(0, within.size, _PAIRS_AT_ONCE):
        chunk = rank[tokens[begin : begin + _PAIRS_AT_ONCE + 1]]
        pairs = chunk[:-1] * used.size + chunk[1:]
        counts += np.bincount(pairs[within[begin : begin + pairs.size]], minlength=counts.size)
    table = counts.reshape(used.size, used.size)  # [previous, next]
    return float((_plogp(table.sum(1)) - _plogp(table)) / table.sum())


def _sorted_bigram_nats(ranks: np.ndarray, within: np.ndarray) -> float:
    """The same of a large vocabulary, most of whose pairs never come."""
    previous = ranks[:-1][within]
    _, of_pairs = np.unique(previous * (ranks.max() + 1) + ranks[1:][within], return_counts=True)
    return float((_plogp(np.bincount(previous)) - _plogp(of_pairs)) / previous.size)


def _plogp(counts: np.ndarray) -> float:
    """Sum of c ln c over the counts above zero."""
    present = counts[counts > 0].astype(np.float64)
    return float(np.sum(present * np.log(present)))
