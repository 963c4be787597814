"""The data: reading, splitting, packing, the bigram entropy, resuming, sharding."""

import json
import math
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from octablox.errors import UserError
from octablox.train.corpus import read_corpus
from octablox.train.data import make_data
from octablox.train.packing import Windows, bigram_nats, concatenate, hold_out
from octablox.training_config import DataConfig

BOS = 9  # of the hand-made examples
INT_KEYS = ("tokens", "targets", "segment_ids", "positions")


def windows_of(documents, length):
    return Windows(concatenate([np.array(d, np.uint8) for d in documents], BOS), length)


def rows_of(windows):
    return [{k: v.tolist() for k, v in windows[i].items()} for i in range(len(windows))]


@pytest.fixture
def corpus_file(tmp_path):
    """40 short documents of random letters: no two rows of 8 tokens are equal."""
    path = tmp_path / "corpus.jsonl"
    rng = np.random.RandomState(0)
    texts = ["".join(rng.choice(list("abcdefghij"), rng.randint(20, 60))) for _ in range(40)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def jsonl_data(path, **changes):
    wanted = {"batch_size": 4, "sequence_length": 16, "vocab_size": 257, "eval_steps": 2}
    config = DataConfig(dataset_type="jsonl", dataset_path=str(path), eval_fraction=0.2)
    return make_data(config, **(wanted | changes))


# Packing, by hand. The stream is 9 1 2 3 | 9 4 | 9 5 6 7 8.


def test_packing_of_three_documents_by_hand():
    rows = rows_of(windows_of([[1, 2, 3], [4], [5, 6, 7, 8]], 6))
    assert rows == [
        {
            "tokens": [9, 1, 2, 3, 9, 4],
            "targets": [1, 2, 3, 0, 4, 0],
            "segment_ids": [1, 1, 1, 1, 2, 2],
            "positions": [0, 1, 2, 3, 0, 1],
            "weights": [1, 1, 1, 0, 1, 0],
        },
        {
            "tokens": [9, 5, 6, 7, 8, 0],
            "targets": [5, 6, 7, 8, 0, 0],
            "segment_ids": [1, 1, 1, 1, 1, 0],
            "positions": [0, 1, 2, 3, 4, 0],
            "weights": [1, 1, 1, 1, 0, 0],
        },
    ]


def test_a_document_goes_on_in_the_next_row():
    """It is segment 1 there, at position 0; the target across the cut is not lost."""
    rows = rows_of(windows_of([[1], [2, 3, 4, 5], [6]], 4))
    assert rows[0]["tokens"] == [9, 1, 9, 2]
    assert rows[0]["targets"] == [1, 0, 2, 3]
    assert rows[0]["weights"] == [1, 0, 1, 1]
    assert rows[1]["tokens"] == [3, 4, 5, 9]
    assert rows[1]["targets"] == [4, 5, 0, 6]
    assert rows[1]["segment_ids"] == [1, 1, 1, 2]
    assert rows[1]["positions"] == [0, 1, 2, 0]
    assert rows[1]["weights"] == [1, 1, 0, 1]
    assert len(rows) == 2  # the 6 that remains has no target, and was one


def test_dtypes_are_the_contracts():
    row = windows_of([[1, 2, 3]], 2)[0]
    assert [row[k].dtype for k in INT_KEYS] == [np.int32] * 4
    assert row["weights"].dtype == np.float32
    assert all(v.shape == (2,) for v in row.values())


def test_every_token_and_every_target_comes_once():
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 9, rng.integers(1, 30)).tolist() for _ in range(50)]
    rows = rows_of(windows_of(documents, 7))
    stream = [t for d in documents for t in [BOS, *d]]
    tokens = [t for r in rows for t, s in zip(r["tokens"], r["segment_ids"], strict=True) if s]
    assert tokens in (stream, stream[:-1])
    pairs = Counter(
        (t, u)
        for r in rows
        for t, u, w in zip(r["tokens"], r["targets"], r["weights"], strict=True)
        if w
    )
    assert pairs == Counter(p for d in documents for p in zip([BOS, *d], d, strict=False))


def test_weights_are_not_segment_ids():
    """A row of five documents: the fault weighs the fifth five times."""
    row = windows_of([[1, 2], [3, 4], [5, 6], [7, 8], [1, 2]], 15)[0]
    assert row["segment_ids"].max() == 5
    assert set(row["weights"].tolist()) == {0.0, 1.0}
    assert row["weights"].sum() == 10


def test_a_row_past_the_end_is_padding():
    windows = windows_of([[1, 2, 3]], 3)
    assert len(windows) == 1
    assert all(not windows[5][k].any() for k in (*INT_KEYS, "weights"))


# The split.


def test_split_is_deterministic_and_by_document():
    documents = [np.array([i], np.uint8) for i in range(100)]
    train, held = hold_out(documents, 0.05, seed=3)
    assert (len(train), len(held)) == (95, 5)
    assert sorted(int(d[0]) for d in train + held) == list(range(100))
    again = hold_out(documents, 0.05, seed=3)[1]
    other = hold_out(documents, 0.05, seed=4)[1]
    assert [int(d[0]) for d in again] == [int(d[0]) for d in held]
    assert [int(d[0]) for d in other] != [int(d[0]) for d in held]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_side_gets_a_document(fraction):
    train, held = hold_out([np.array([1]), np.array([2])], fraction, seed=0)
    assert (len(train), len(held)) == (1, 1)


def test_of_one_document_the_tail_is_held_out():
    train, held = hold_out([np.arange(20)], 0.2, seed=0)
    assert [d.tolist() for d in train] == [list(range(16))]
    assert [d.tolist() for d in held] == [[16, 17, 18, 19]]


def documents_in(batches):
    """The texts (as far as a row holds them) of all segments."""
    found = set()
    for batch in batches:
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for segment in range(1, segments.max() + 1):
                found.add(bytes(tokens[(segments == segment) & (tokens < 256)].astype(np.uint8)))
    return found


def test_evaluation_text_is_never_trained_on(corpus_file):
    data = jsonl_data(corpus_file, sequence_length=512, eval_steps=1)
    train = documents_in(next(data.train) for _ in range(3))
    held = documents_in(data.eval_batches())
    assert len(held) == 8  # all of 40 * 0.2 lie in one row of 512
    assert not held & train
    texts = {json.loads(line)["text"].encode() for line in corpus_file.read_text().splitlines()}
    assert held < texts


# The bigram entropy.


def naive_bigram(pairs):
    previous = Counter(a for a, _ in pairs.elements())
    total = sum(pairs.values())
    return sum(c / total * math.log(previous[a] / c) for (a, _), c in pairs.items())


def test_bigram_of_a_known_chain():
    """After 1 come 2 and 3 equally often: ln 2 there, nothing elsewhere."""
    stream = concatenate([np.array([1, 2], np.uint8), np.array([1, 3], np.uint8)], BOS)
    assert bigram_nats(stream) == pytest.approx(math.log(2) / 2, abs=1e-12)


def test_bigram_counts_what_training_weighs(corpus_file, monkeypatch):
    monkeypatch.setattr("octablox.train.packing._PAIRS_AT_ONCE", 37)  # more than one chunk
    data = jsonl_data(corpus_file, batch_size=1)
    pairs = Counter()
    rows = -(-(data.train_tokens - 1) // 16)
    for _ in range(rows):  # one epoch
        batch = next(data.train)
        mask = batch["weights"][0] == 1
        pairs.update(
            zip(batch["tokens"][0][mask].tolist(), batch["targets"][0][mask].tolist(), strict=True)
        )
    assert data.bigram_nats == pytest.approx(naive_bigram(pairs), rel=1e-12)
    assert 2 < data.bigram_nats < math.log(10)


def test_bigram_of_a_large_vocabulary_needs_no_table_of_it():
    stream = concatenate([np.array([0, 100_000, 0, 100_001], np.int32)], bos=129_279)
    assert stream.tokens.dtype == np.int32
    # Pairs: BOS 0, 0 a, a 0, 0 b.
    assert bigram_nats(stream) == pytest.approx(math.log(2) / 2, abs=1e-12)


# Order, resuming, sharding.


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_equal(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def test_an_epoch_has_every_row_once_and_the_next_is_shuffled_anew(corpus_file):
    data = jsonl_data(corpus_file, batch_size=1)
    count = -(-(data.train_tokens - 1) // 16)
    first, second = (
        [batch["tokens"].tobytes() for batch in take(data.train, count)] for _ in range(2)
    )
    assert sorted(first) == sorted(second)
    assert len(set(first)) == count
    assert first != second


def test_same_seed_same_batches_other_seed_others(corpus_file):
    config = DataConfig(dataset_type="jsonl", dataset_path=str(corpus_file))
    sizes = {"batch_size": 4, "sequence_length": 16, "vocab_size": 257, "eval_steps": 1}
    one, same = (take(make_data(config, **sizes).train, 30) for _ in range(2))
    assert_equal(same, one)
    other = config.model_copy(update={"data_shuffle_seed": 1})
    assert (next(make_data(other, **sizes).train)["tokens"] != one[0]["tokens"]).any()


def test_resumes_in_the_middle_of_an_epoch_and_of_a_later_one(corpus_file):
    data = jsonl_data(corpus_file)
    whole = take(data.train, 60)  # an epoch is some 21 batches
    for done in (5, 33):
        first = jsonl_data(corpus_file)
        take(first.train, done)
        state = json.loads(json.dumps(first.train.get_state()))  # as a checkpoint keeps it
        second = jsonl_data(corpus_file)
        second.train.set_state(state)
        assert_equal(take(second.train, 10), whole[done : done + 10])


def test_two_processes_make_up_the_batch_of_one(corpus_file):
    whole = jsonl_data(corpus_file)
    parts = [jsonl_data(corpus_file, process_index=p, process_count=2) for p in (0, 1)]

    def joined(batches):
        return [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(*batches, strict=True)]

    assert_equal(joined([take(p.train, 30) for p in parts]), take(whole.train, 30))
    assert_equal(joined([list(p.eval_batches()) for p in parts]), list(whole.eval_batches()))
    assert next(parts[0].train)["tokens"].shape == (2, 16)


def test_two_processes_shards_are_disjoint_within_an_epoch(corpus_file):
    parts = [
        jsonl_data(corpus_file, batch_size=2, process_index=p, process_count=2) for p in (0, 1)
    ]
    steps = -(-(parts[0].train_tokens - 1) // 16) // 2
    seen = [{b["tokens"].tobytes() for b in take(p.train, steps)} for p in parts]
    assert len(seen[0]) == len(seen[1]) == steps
    assert not seen[0] & seen[1]


def test_evaluation_is_the_same_each_time_and_spans_the_split(corpus_file):
    data = jsonl_data(corpus_file, batch_size=2, sequence_length=8, eval_steps=3)
    first = list(data.eval_batches())
    assert len(first) == 3
    assert_equal(list(data.eval_batches()), first)
    assert data.eval_tokens > 3 * 2 * 8 * 2  # so the six rows must be spread, not the first six
    contiguous = jsonl_data(corpus_file, batch_size=2, sequence_length=8, eval_steps=1000)
    every = [row.tobytes() for b in contiguous.eval_batches() for row in b["tokens"]]
    at = [every.index(row.tobytes()) for b in first for row in b["tokens"]]
    count = -(-(data.eval_tokens - 1) // 8)
    assert at == [i * count // 6 for i in range(6)]


def test_a_short_evaluation_split_is_padded_with_weights_0(corpus_file):
    data = jsonl_data(corpus_file, batch_size=4, sequence_length=512, eval_steps=2)
    batches = list(data.eval_batches())
    assert [b["tokens"].shape for b in batches] == [(4, 512)] * 2
    # The split's 8 documents lie in the first row; each token of theirs but BOS is a target.
    assert [b["weights"].sum(axis=1).tolist() for b in batches] == [
        [data.eval_tokens - 8, 0, 0, 0],
        [0, 0, 0, 0],
    ]


# The data sets.


def test_embedded_is_the_standard_library():
    corpus = read_corpus(DataConfig(), 257)
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {document.tobytes() for document in corpus.documents}
    assert (root / "json" / "decoder.py").read_bytes() in texts
    assert (root / "this.py").read_bytes() in texts
    tests = [p for p in (root / "test").glob("test_*.py") if p.stat().st_size]
    assert not any(path.read_bytes() in texts for path in tests[:50])
    assert len(corpus.documents) > 300
    assert corpus.bos == 256


def test_embedded_leaves_out_tests_and_installed_packages(tmp_path, monkeypatch):
    left_out = ["site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"]
    for folder in ["json", *left_out, "lib2to3/tests"]:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.py").write_text(folder)
    (tmp_path / "b.py").write_text("b")
    (tmp_path / "c.txt").write_text("c")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    documents = read_corpus(DataConfig(), 257).documents
    assert [d.tobytes() for d in documents] == [b"b", b"json"]
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    fails({}, f"expected Python's standard library in {tmp_path / 'none'}, got no .py file there")


def test_text_from_a_file_a_folder_and_a_glob(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"one\xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "c.md").write_bytes(b"three")
    (tmp_path / ".hidden").write_bytes(b"no")

    def read(path):
        corpus = read_corpus(DataConfig(dataset_type="text", dataset_path=str(path)), 257)
        return [d.tobytes() for d in corpus.documents]

    assert read(tmp_path / "c.md") == [b"three"]
    assert read(tmp_path) == [b"one\xff", b"two", b"three"]
    assert read(tmp_path / "*.txt") == [b"one\xff"]
    assert read(tmp_path / "**" / "*.txt") == [b"one\xff", b"two"]


def test_jsonl_takes_the_key_and_skips_blank_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "h\\u00e9"}\n\n{"body": "a\\fb", "text": 3}\n', encoding="utf-8")
    config = DataConfig(dataset_type="jsonl", dataset_path=str(tmp_path), jsonl_text_key="body")
    documents = read_corpus(config, 257).documents
    assert [d.tobytes() for d in documents] == ["hé".encode(), b"a\fb"]


@pytest.mark.parametrize("vocab_size", [3, 50, 2048, 129_280])
def test_synthetic_is_a_chain_that_can_be_learnt(vocab_size):
    config = DataConfig(dataset_type="synthetic")
    sizes = {"batch_size": 2, "sequence_length": 32, "eval_steps": 1}
    data = make_data(config, vocab_size=vocab_size, **sizes)
    batch = next(data.train)
    assert batch["tokens"].min() >= 0
    assert batch["tokens"].max() < vocab_size
    entropy = -sum(p * math.log(p) for p in (0.5, 0.25, 0.15, 0.1))
    assert data.bigram_nats < entropy + 0.02  # + that of the first token, which is uniform
    if vocab_size >= 2048:  # with fewer states, a state's successors coincide
        assert data.bigram_nats > entropy - 0.02
        assert batch["tokens"].max() > vocab_size / 2  # spread over the vocabulary
    assert_equal([next(make_data(config, vocab_size=vocab_size, **sizes).train)], [batch])


# Errors.


def fails(config, text, *, vocab_size=257, sequence_length=16, **more):
    with pytest.raises(UserError) as caught:
        make_data(
            DataConfig(**config),
            **({"batch_size": 2, "eval_steps": 1} | more),
            vocab_size=vocab_size,
            sequence_length=sequence_length,
        )
    message = str(caught.value)
    assert text in message
    assert "\n" not in message


def test_bad_paths(tmp_path):
    text = {"dataset_type": "text"}
    fails(text, "dataset_type=text needs dataset_path, got none: give a file")
    missing = str(tmp_path / "no.txt")
    fails(text | {"dataset_path": missing}, f"got {missing}, which does not exist")
    pattern = str(tmp_path / "*.txt")
    fails(text | {"dataset_path": pattern}, f"expected files that match {pattern}, got none")
    fails(text | {"dataset_path": str(tmp_path)}, f"files in the folder {tmp_path}, got none")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    fails(
        text | {"dataset_path": str(tmp_path)},
        f"expected a readable file, got {tmp_path / 'dangling'}: No such file or directory",
    )
    jsonl = {"dataset_type": "jsonl", "dataset_path": str(tmp_path)}
    fails(jsonl, f"expected *.jsonl in the folder {tmp_path}, got none")


def test_keys_that_would_be_ignored():
    fails({"dataset_path": "x.txt"}, "dataset_type=embedded reads no dataset_path, got 'x.txt'")
    fails({"jsonl_text_key": "body"}, "reads no jsonl_text_key, got 'body': write dataset_type=")


def test_empty_and_short_text(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"")
    config = {"dataset_type": "text", "dataset_path": str(path)}
    fails(config, f"expected text in {path}, got none")
    path.write_bytes(b"x")
    fails(config, "at least 17 training tokens for one row of max_target_length=16, got 1 from")
    path.write_bytes(b"x" * 16)  # 15 are for training, and BOS
    fails(config, f"got 16 from {path}: give more text or lower max_target_length")
    path.write_bytes(b"x" * 17)
    make_data(DataConfig(**config), batch_size=2, sequence_length=16, vocab_size=257, eval_steps=1)


@pytest.mark.parametrize(
    "line, text",
    [
        ('{"text": "cut', 'x.jsonl:3: expected a line of JSON, got b\'{"text": "cut\''),
        ("[1]", "x.jsonl:3: expected a JSON object, got b'[1]': mend the line"),
        ('{"body": 1, "id": 2}', "x.jsonl:3: expected the key text, got body, id: set jsonl"),
        ('{"text": 7}', "x.jsonl:3: expected a string under text, got int"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, text):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    fails({"dataset_type": "jsonl", "dataset_path": str(path)}, text)


def test_vocabulary_too_small():
    fails({}, "dataset_type=embedded needs vocab_size of at least 257", vocab_size=256)
    fails({"dataset_type": "synthetic"}, "at least 3, got 2", vocab_size=2)


def test_a_batch_that_the_processes_do_not_divide():
    fails({}, "that 3 processes divide, got 2 rows", process_count=3)
