"""The batches of a run: training without end, and a fixed held-out set.

A batch is a dict of numpy arrays, B rows of S tokens:
  tokens, targets, segment_ids, positions  [B, S] int32
  weights                                  [B, S] float32, 0 or 1
segment_ids count 1, 2, ... per document within a row, 0 is padding. A weight is 1 exactly where
targets is the next token of the same document, whatever the segment id is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octablox.errors import UserError
from octablox.train.corpus import read_corpus
from octablox.train.packing import (
    Windows,
    bigram_nats,
    concatenate,
    derived_seed,
    hold_out,
    shuffled,
)
from octablox.training_config import DataConfig

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Data:
    """What a run reads.

    train: a grain DatasetIterator over batches of this process's rows; it never ends, each epoch
        is shuffled anew, and get_state() / set_state() resume it exactly.
    bigram_nats: H(next token | this token) of the training split, in nats a token.
    train_tokens, eval_tokens: lengths of the two splits, each document's BOS included.
    documents: how many there are in both splits.
    """

    train: Any
    bigram_nats: float
    train_tokens: int
    eval_tokens: int
    documents: int
    _eval_windows: Windows = field(repr=False)
    _eval_rows: np.ndarray = field(repr=False)  # [eval_steps, rows of this process]: windows

    def eval_batches(self) -> Iterator[Batch]:
        """The same `eval_steps` batches at every call, spread over the whole held-out split.

        Where the split is shorter than that, rows of padding (weights 0) make up the rest, so a
        mean must be over tokens of all batches, not over the batches' means.
        """
        for rows in self._eval_rows:
            windows = [self._eval_windows[int(row)] for row in rows]
            yield {name: np.stack([w[name] for w in windows]) for name in windows[0]}


def make_data(
    config: DataConfig,
    *,
    batch_size: int,
    sequence_length: int,
    vocab_size: int,
    eval_steps: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Data:
    """Reads, splits and packs the data set; `batch_size` counts the rows of all processes.

    Process p of P gets rows [p B/P, (p+1) B/P) of every global batch, so the batches are the same
    for any P.

    Raises UserError: see read_corpus; a training split shorter than one row; a batch that P does
    not divide.
    """
    if batch_size % process_count:
        raise UserError(
            f"expected a batch that {process_count} processes divide, got {batch_size} rows: "
            "change per_device_batch_size"
        )
    corpus = read_corpus(config, vocab_size)
    seed = config.data_shuffle_seed
    train_documents, eval_documents = hold_out(corpus.documents, config.eval_fraction, seed)
    order = shuffled(len(train_documents), seed, "documents")
    train = concatenate([train_documents[i] for i in order], corpus.bos)
    held_out = concatenate(eval_documents, corpus.bos)
    if len(train.tokens) <= sequence_length:
        raise UserError(
            f"expected at least {sequence_length + 1} training tokens for one row of "
            f"max_target_length={sequence_length}, got {len(train.tokens)} from {corpus.source}: "
            "give more text or lower max_target_length"
        )
    eval_windows = Windows(held_out, sequence_length)
    rows = _eval_rows(len(eval_windows), eval_steps, batch_size)
    mine = slice(
        process_index * batch_size // process_count,
        (process_index + 1) * batch_size // process_count,
    )
    return Data(
        train=_train_iterator(
            Windows(train, sequence_length),
            derived_seed(seed, "rows"),
            batch_size // process_count,
            process_index,
            process_count,
        ),
        bigram_nats=bigram_nats(train),
        train_tokens=len(train.tokens),
        eval_tokens=len(held_out.tokens),
        documents=len(corpus.documents),
        _eval_windows=eval_windows,
        _eval_rows=rows[:, mine],
    )


def _eval_rows(available: int, eval_steps: int, batch_size: int) -> np.ndarray:
    """[eval_steps, batch_size] numbers of windows; those past `available` are padding."""
    wanted = eval_steps * batch_size
    rows = np.arange(wanted)
    if available > wanted:  # evenly spaced, so that a short evaluation still sees every document
        rows = rows * available // wanted
    return rows.reshape(eval_steps, batch_size)


def _train_iterator(
    windows: Windows, seed: int, rows: int, process_index: int, process_count: int
) -> Any:
    """A grain DatasetIterator of batches of `rows` rows."""
    import grain  # two seconds, and it imports jax

    # The slice takes every P-th group of `rows` rows: together the P groups are the global batch.
    dataset = grain.MapDataset.source(windows).shuffle(seed).repeat()
    # Without drop_remainder grain takes the endless length through a float, which overflows.
    dataset = dataset.batch(rows, drop_remainder=True)
    dataset = dataset[process_index::process_count]
    # The tokens are in memory: a thread would only compete for the interpreter's lock.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.to_iter_dataset(options))
