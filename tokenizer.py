"""Text to token ids and back.  Read when another file sends you here.

    char   one id per character of the corpus
    byte   one id per byte of the text as UTF-8, 256 in all
    bpe    byte-pair encoding: the bytes, and the pieces of words that the corpus repeats most, --vocab_size in all
    gpt2   the byte-pair encoding of GPT-2, 50,257 ids; FineWeb's shards are written in it

Decoding gives back what was encoded, whatever Unicode it is.  Two strings say all about a tokenizer, its kind and its
symbols: checkpoints store these, and so need no corpus.
"""

import re
from collections.abc import Iterator

import numpy as np

from config import UserError

PIECE = 1 << 18  # characters that byte-pair encoding works on at a time; several threads have one each


class UnknownCharacters(UserError):
    pass


def narrowest(vocab_size: int) -> type:
    """The smallest type that holds every id: what is on disk, and goes through memory, is mostly ids."""
    return np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32


class CharTokenizer:
    """One id per character of the corpus, in the order of their code points.  `symbols` is all of them."""

    kind = "char"

    def __init__(self, symbols: str):
        self.symbols, self.vocab_size = symbols, len(symbols)
        points = code_points(symbols)
        self.ids = np.full(points.max(initial=0) + 1, -1)  # [largest code point + 1], -1 where there is no such symbol
        self.ids[points] = np.arange(len(symbols))

    def encode(self, text: str) -> np.ndarray:
        """[N] ids.  UserError names the characters that are not in the vocabulary."""
        points = code_points(text)  # one number a character, without a Python loop
        ids = self.ids[np.minimum(points, len(self.ids) - 1)]
        if (points >= len(self.ids)).any() or (ids < 0).any():
            unknown = sorted(set(text) - set(self.symbols))
            raise UnknownCharacters(f"characters the model never saw: {' '.join(map(repr, unknown[:20]))}")
        return ids.astype(narrowest(self.vocab_size))

    def decode(self, ids) -> str:
        return "".join(self.symbols[i] for i in ids)

    def token_bytes(self) -> np.ndarray:
        """[V] how many bytes of text each id stands for."""
        return np.array([len(c.encode()) for c in self.symbols])


class ByteTokenizer:
    """The 256 bytes of UTF-8: any language, no unknown character, longer sequences outside ASCII."""

    kind, symbols, vocab_size = "byte", "", 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)

    def decode(self, ids) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        return np.ones(256, np.int64)


class BPETokenizer:
    """Byte-pair encoding (Sennrich et al. 2015, arXiv:1508.07909) over bytes, with the rules by which GPT-2 cuts a text
    into words first (Radford et al. 2019): a word and the space before it are one, digits and punctuation apart.

    `symbols` is a tokenizer.json of Hugging Face's `tokenizers`, which does the work.
    """

    def __init__(self, kind: str, symbols: str):
        self.kind, self.symbols = kind, symbols
        self.model = huggingface().Tokenizer.from_str(symbols)
        self.vocab_size = self.model.get_vocab_size()
        self.model.encode_special_tokens = True  # <|endoftext|> in a text is 13 characters of it like any others

    def encode(self, text: str) -> np.ndarray:
        found = self.model.encode_batch_fast(list(pieces(text.encode(errors="replace").decode(), PIECE)))
        return np.array([i for piece in found for i in piece.ids], narrowest(self.vocab_size))

    def decode(self, ids) -> str:
        return self.model.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        vocabulary = {i: text for text, i in self.model.get_vocab(with_added_tokens=False).items()}
        special = self.model.get_added_tokens_decoder()  # these stand for no text
        return np.array([0 if i in special else len(vocabulary[i]) for i in range(self.vocab_size)])  # a byte a letter


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


# Cut before a space or line break that follows something else, a text has the same ids as whole: a word ends there,
# for GPT-2's rules, whatever comes before and after.
PLACE = re.compile(r"(?<=\S)(?=[ \n])")


def pieces(text: str, size: int) -> Iterator[str]:
    """The text in pieces of about `size` characters, cut at PLACEs; anywhere only where there is none within `size`."""
    start = 0
    while len(text) - start > size:
        found = PLACE.search(text, start + size, start + 2 * size)
        end = found.start() if found else min(start + 2 * size, len(text))
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def huggingface():
    """The library, loaded when it is needed."""
    try:
        import tokenizers
    except ImportError:
        why = "--tokenizer bpe and gpt2, and export.py, need a package that is not here"
        raise UserError(f"{why}: pip install tokenizers") from None
    return tokenizers


def byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]):
    """A tokenizer of Hugging Face's over bytes, each written as one printable letter, as GPT-2's files have it."""
    hf = huggingface()
    model = hf.Tokenizer(hf.models.BPE(vocabulary, merges))
    model.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = hf.decoders.ByteLevel()
    return model


def train_bpe(texts: Iterator[str], vocab_size: int) -> str:
    """`symbols` of a byte-pair encoding with vocab_size ids, or fewer where the texts repeat nothing more."""
    hf = huggingface()
    model, alphabet = byte_level({}, []), hf.pre_tokenizers.ByteLevel.alphabet()
    options = dict(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(texts, hf.trainers.BpeTrainer(**options))
    return model.to_str()


def gpt2_bpe(vocabulary: dict[str, int], merges: str) -> str:
    """`symbols` of GPT-2's encoding, from what is in its files encoder.json and vocab.bpe."""
    model = byte_level(vocabulary, [tuple(line.split()) for line in merges.split("\n")[1:] if line])
    model.add_special_tokens(["<|endoftext|>"])
    return model.to_str()


def make_tokenizer(kind: str, symbols: str):
    """The tokenizer that these two strings stand for."""
    if kind == "char":
        return CharTokenizer(symbols)
    return ByteTokenizer() if kind == "byte" else BPETokenizer(kind, symbols)
