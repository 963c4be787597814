"""Text to token ids and back: bytes, or a `tokenizer.json`.

Bytes need no file: ids 0..255, and 256 begins a document (BOS).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from octablox.errors import UserError

BYTE_BOS = 256  # the first id that no byte has
BYTE_VOCAB = 257
FILE = "tokenizer.json"


@runtime_checkable
class Tokenizer(Protocol):
    """What is asked of either kind.

    Attributes:
      bos: the id that begins a document.
      eos: the id that ends one, or None where there is none.
      vocab_size: one more than the largest id.
      name: in words, for messages.
    """

    bos: int
    eos: int | None
    vocab_size: int
    name: str

    def encode(self, texts: Iterable[bytes]) -> list[np.ndarray]:
        """The ids of each text, integers [tokens], without BOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no text becomes U+FFFD."""
        ...


class ByteTokenizer:
    """See `Tokenizer`: every byte is a token."""

    bos: int = BYTE_BOS
    eos: int | None = None
    vocab_size: int = BYTE_VOCAB
    name: str = "256 bytes and one token that begins a document"

    def encode(self, texts: Iterable[bytes]) -> list[np.ndarray]:
        """See `Tokenizer`: uint8."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(i for i in ids if i < BYTE_BOS).decode(errors="replace")


class JsonTokenizer:
    """See `Tokenizer`: a tokenizer.json, or the folder that has one.

    Raises:
      UserError: it cannot be read, the package `tokenizers` is missing, or nothing says which
        token begins a document.
    """

    def __init__(self, path: Path):
        path = path / FILE if path.is_dir() else path
        self._tokenizer = _read(path)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.name = f"the {self.vocab_size} tokens of {path}"
        beside = _beside(path)
        self.eos = self._id(beside.get("eos_token"))
        # What it begins every text with, else what the file beside it says.
        first = self._tokenizer.encode("").ids[:1]
        bos = first[0] if first else self._id(beside.get("bos_token"))
        if bos is None:
            raise UserError(
                f"expected a token that begins a document, got none: name it as bos_token in "
                f"{path.with_name('tokenizer_config.json')}"
            )
        self.bos = bos

    def encode(self, texts: Iterable[bytes]) -> list[np.ndarray]:
        """See `Tokenizer`: int32."""
        strings = [text.decode(errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`; without the special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _id(self, token: Any) -> int | None:
        """Of a token as tokenizer_config.json has it: its text, or an object with it."""
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._tokenizer.token_to_id(text)


def read_tokenizer(path: str) -> Tokenizer:
    """The tokenizer at `path`, that of bytes if it is empty; UserError as `JsonTokenizer`."""
    return JsonTokenizer(Path(path)) if path else ByteTokenizer()


def _read(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Rust
    except ImportError as error:
        raise UserError(
            "tokenizer_path needs the package tokenizers; pip install 'octablox[hf]'"
        ) from error
    try:
        return Rust.from_str(path.read_text())
    except OSError as error:
        raise UserError(
            f"tokenizer_path: expected a tokenizer.json, got {path}: {error.strerror}"
        ) from error
    except Exception as error:  # the package raises nothing more special
        raise UserError(
            f"tokenizer_path: expected a tokenizer.json, got {path}: {' '.join(str(error).split())}"
        ) from error


def _beside(path: Path) -> dict[str, Any]:
    """tokenizer_config.json in the same folder; {} if there is none."""
    config = path.with_name("tokenizer_config.json")
    try:
        return json.loads(config.read_text()) if config.is_file() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {config}: {error}; mend or remove it") from error
