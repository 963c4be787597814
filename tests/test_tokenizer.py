"""A tokenizer.json instead of bytes."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from octablox.errors import UserError
from octablox.train import packing
from octablox.train.corpus import read_corpus
from octablox.train.data import make_data
from octablox.train.packing import bigram_nats, concatenate
from octablox.train.tokenizer import BYTE_BOS, BYTE_VOCAB, read_tokenizer
from octablox.training_config import DataConfig

TEXT = "the quick brown fox jumps over the lazy dog; the dog sleeps.\n" * 20 + "naïve – ☃\n"


def byte_pairs():
    """As DeepSeek's: byte-level BPE, a little vocabulary, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<begin>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    byte_pairs().save(str(tmp_path / "tokenizer.json"))
    beside = {"bos_token": {"content": "<begin>"}, "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def data_config(folder):
    return DataConfig(
        dataset_type="text",
        dataset_path=str(folder / "text.txt"),
        tokenizer_path=str(folder),
    )


def test_bytes_by_default():
    tokenizer = read_tokenizer("")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (BYTE_BOS, None, BYTE_VOCAB)
    (ids,) = tokenizer.encode([TEXT.encode()])
    assert ids.dtype == np.uint8
    assert tokenizer.decode(ids.tolist()) == TEXT
    assert tokenizer.decode([104, 105, BYTE_BOS, 0xE2]) == "hi\ufffd"


def test_text_comes_back_and_is_shorter(folder):
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = read_tokenizer(str(path))
        (ids,) = tokenizer.encode([TEXT.encode()])
        assert tokenizer.decode(ids.tolist()) == TEXT
        assert len(ids) < len(TEXT) / 2
        assert ids.max() < tokenizer.vocab_size
        assert (tokenizer.bos, tokenizer.eos) == (0, 1)


def test_the_token_that_every_text_begins_with_is_bos(folder):
    tokenizer = byte_pairs()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    found = read_tokenizer(str(folder))
    assert found.bos == 1
    assert 1 not in found.encode([b"the dog"])[0]


def test_errors(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="token that begins a document, got none: name it as bos"):
        read_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"expected a tokenizer.json, got .*: "):
        read_tokenizer(str(folder))
    with pytest.raises(UserError, match=r"nowhere\.json: No such file"):
        read_tokenizer(str(folder / "nowhere.json"))


def test_documents_are_tokenized(folder):
    corpus = read_corpus(data_config(folder), vocab_size=300)
    (ids,) = corpus.documents
    assert corpus.bos == 0
    assert read_tokenizer(str(folder)).decode(ids.tolist()) == TEXT
    sizes = {"batch_size": 2, "sequence_length": 16, "eval_steps": 1}
    data = make_data(data_config(folder), vocab_size=300, **sizes)
    assert next(data.train)["tokens"].max() < 300
    with pytest.raises(UserError, match=r"vocab_size of at least \d+ \(the \d+ tokens of .*"):
        make_data(data_config(folder), vocab_size=257, **sizes)


def test_ids_above_bos_are_held(folder):
    stream = concatenate([np.array([70_000, 3], np.int32)], bos=0)
    assert stream.tokens.tolist() == [0, 70_000, 3]


def test_bigrams_of_many_tokens_are_those_of_a_table(monkeypatch):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50, size).astype(np.int32) ** 2 for size in (1, 700, 900)]
    stream = concatenate(documents, bos=3000)
    expected = bigram_nats(stream)
    monkeypatch.setattr(packing, "_TABLE", 0)
    assert bigram_nats(stream) == pytest.approx(expected, rel=1e-12)
    assert expected > 1
