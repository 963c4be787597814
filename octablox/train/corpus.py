"""Documents: where text comes from, before it is tokens.

A document is one array of token ids: a text's, by its bytes or by a tokenizer, or what `synthetic`
draws. The token that begins each document (BOS) is not in it; `Corpus.bos` says which id it is.
"""

import glob
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from octablox.errors import UserError
from octablox.train.tokenizer import read_tokenizer
from octablox.training_config import DataConfig

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}

# The synthetic language: each token has four successors, of these probabilities.
_SUCCESSORS = np.array([0.5, 0.25, 0.15, 0.1])
_SYNTHETIC_STATES = 1024  # at most; so that every pair is seen often enough to be learnt
_SYNTHETIC_DOCUMENTS = 2048
_SYNTHETIC_LENGTHS = (64, 1024)  # tokens of the shortest and of the longest document


@dataclass(frozen=True)
class Corpus:
    """Non-empty documents, each [tokens] uint8 or int32, in an order that never changes."""

    documents: list[np.ndarray]
    bos: int
    source: str  # in words, for messages


def read_corpus(config: DataConfig, vocab_size: int) -> Corpus:
    """Every document of the data set that `config` names.

    Raises UserError: a path that is missing, cannot be read or holds no text; a line that is no
    JSON; a vocabulary that is too small; a path given to a data set that reads none.
    """
    _check_keys(config)
    if config.dataset_type == "synthetic":
        return _synthetic(config.data_shuffle_seed, vocab_size)
    tokenizer = read_tokenizer(config.tokenizer_path)
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"dataset_type={config.dataset_type} needs vocab_size of at least "
            f"{tokenizer.vocab_size} ({tokenizer.name}), got {vocab_size}: "
            "raise vocab_size or use dataset_type=synthetic"
        )
    if config.dataset_type == "embedded":
        source = sysconfig.get_paths()["stdlib"]
        texts: Iterable[bytes] = map(_read, _library_files(source))
    elif config.dataset_type == "text":
        source = config.dataset_path
        texts = map(_read, _matching_files(source, ""))
    else:
        source = config.dataset_path
        texts = _jsonl_texts(_matching_files(source, ".jsonl"), config.jsonl_text_key)
    documents = [ids for ids in tokenizer.encode(text for text in texts if text) if ids.size]
    if not documents:
        raise UserError(f"expected text in {source}, got none: give a dataset_path that has some")
    return Corpus(documents, tokenizer.bos, source)


def _check_keys(config: DataConfig) -> None:
    """Refuses a key that the chosen data set would ignore, and a path that it lacks."""
    kind = config.dataset_type
    reads_path = kind in ("text", "jsonl")
    if reads_path and not config.dataset_path:
        raise UserError(
            f"dataset_type={kind} needs dataset_path, got none: give a file, a folder or a glob"
        )
    if config.dataset_path and not reads_path:
        raise UserError(
            f"dataset_type={kind} reads no dataset_path, got {config.dataset_path!r}: "
            "write dataset_type=text or dataset_type=jsonl, or leave dataset_path out"
        )
    if config.jsonl_text_key != "text" and kind != "jsonl":
        raise UserError(
            f"dataset_type={kind} reads no jsonl_text_key, got {config.jsonl_text_key!r}: "
            "write dataset_type=jsonl, or leave jsonl_text_key out"
        )


def _library_files(root: str) -> list[str]:
    """The .py files of a standard library at `root`, sorted."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    if not found:
        raise UserError(
            f"expected Python's standard library in {root}, got no .py file there: "
            "use dataset_type=text with a dataset_path of your own"
        )
    return sorted(found)


def _matching_files(path: str, ending: str) -> list[str]:
    """The files that `path` names (a file, a folder, a glob), sorted.

    Of a folder, all below it whose name ends with `ending`, hidden ones left out.
    """
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        found = []
        for folder, folders, files in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            names = [n for n in files if n.endswith(ending) and not n.startswith(".")]
            found += [os.path.join(folder, name) for name in names]
        expected = f"{'*' + ending if ending else 'files'} in the folder {path}"
    elif glob.has_magic(path):
        found = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
        expected = f"files that match {path}"
    else:
        raise UserError(
            f"expected dataset_path to be a file, a folder or a glob, got {path}, "
            "which does not exist: mend the path"
        )
    if not found:
        raise UserError(f"expected {expected}, got none: mend dataset_path")
    return sorted(found)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UserError(
            f"expected a readable file, got {path}: {error.strerror}: "
            "mend its permissions or leave it out of dataset_path"
        ) from error


def _jsonl_texts(paths: list[str], key: str) -> Iterator[bytes]:
    """The text under `key` of each line, as UTF-8; blank lines are skipped."""
    for path in paths:
        # Only b"\n" ends a line: splitlines would also cut at form feeds.
        for number, line in enumerate(_read(path).split(b"\n"), start=1):
            if line.strip():
                yield _jsonl_text(line, key, f"{path}:{number}")


def _jsonl_text(line: bytes, key: str, place: str) -> bytes:
    try:
        row = json.loads(line)
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(
            f"{place}: expected a line of JSON, got {line[:40]!r} ({error}): mend the line"
        ) from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected a JSON object, got {line[:40]!r}: mend the line")
    if key not in row:
        keys = ", ".join(row) or "none"
        raise UserError(f"{place}: expected the key {key}, got {keys}: set jsonl_text_key")
    if not isinstance(row[key], str):
        raise UserError(
            f"{place}: expected a string under {key}, got {type(row[key]).__name__}: "
            "set jsonl_text_key or mend the line"
        )
    # A lone surrogate is legal in JSON and not in UTF-8; its three bytes do no harm here.
    return row[key].encode("utf-8", "surrogatepass")


def _synthetic(seed: int, vocab_size: int) -> Corpus:
    """Documents of a random first-order Markov chain.

    Its conditional entropy, about 1.2 nats a token, is far below that of its single tokens, so a
    model that learns shows it in the loss. The states spread over the whole vocabulary.
    """
    if vocab_size < 3:
        raise UserError(
            f"dataset_type=synthetic needs vocab_size of at least 3, got {vocab_size}: raise it"
        )
    # RandomState, not default_rng: numpy promises its stream never changes.
    random = np.random.RandomState(seed % 2**32)
    states = min(vocab_size - 1, _SYNTHETIC_STATES)
    ids = (np.arange(states) * (vocab_size - 1) // states).astype(np.int32)
    successors = random.randint(states, size=(states, len(_SUCCESSORS)))
    shortest, longest = _SYNTHETIC_LENGTHS
    walks = np.empty((longest, _SYNTHETIC_DOCUMENTS), np.int64)  # all documents step together
    walks[0] = random.randint(states, size=_SYNTHETIC_DOCUMENTS)
    for t in range(1, longest):
        choice = random.choice(len(_SUCCESSORS), size=_SYNTHETIC_DOCUMENTS, p=_SUCCESSORS)
        walks[t] = successors[walks[t - 1], choice]
    lengths = random.randint(shortest, longest + 1, size=_SYNTHETIC_DOCUMENTS)
    documents = [ids[walks[:length, d]] for d, length in enumerate(lengths)]
    return Corpus(documents, bos=vocab_size - 1, source="synthetic")
