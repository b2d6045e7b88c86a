"""A text, or FineWeb's shards, as files of token ids.  Read when another file sends you here.

A text is tokenised once, into `tokens/` under data_dir.  The file's name is made of what the text and the tokenizer
hash to, so a text that has changed is another one.  The first 90 % of the ids are for training, the rest for
validation.  FineWeb comes as ids, in shards that are fetched when a batch needs them; one of them is for validation.
"""

import codecs
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

import download
from config import Config, UserError
from data import Tokens, cut
from storage import bytes_bar, locked, write_whole
from tokenizer import (
    PIECE,
    PLACE,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    UnknownCharacters,
    code_points,
    gpt2_bpe,
    make_tokenizer,
    narrowest,
    pieces,
    train_bpe,
)

CHUNK = 1 << 20  # bytes of a text that are in memory at a time
BPE_SAMPLE = 1 << 27  # bytes of a text from which byte-pair encoding learns: it would learn little from more
SHORT = 1 << 12  # characters that it is given at a time: a word without an end takes it as long as its square
VERSION = 1  # of the token files: another number, and texts are tokenised anew
HEADER = 8  # bytes: how many ids follow, as int64


@dataclass(frozen=True)
class Shard(Tokens):
    """The same, fetched when it is opened."""

    number: int = 0
    last: int = 0  # the last one of the run

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        download.fineweb_shard(self.path.parent, self.number, self.last)
        return super().__array__(dtype, copy)


class Found(NamedTuple):
    path: Path  # of the text, or the folder of FineWeb's shards
    fingerprint: str  # sha256 of the text
    note: str  # what the reader of a log must know about this text, or ""


@dataclass(frozen=True)
class Corpus:
    train: Sequence[Tokens]  # one after the other; no window spans two
    val: Tokens
    tokenizer: CharTokenizer | ByteTokenizer | BPETokenizer
    name: str  # as given on the command line
    fingerprint: str
    note: str

    @property
    def train_tokens(self) -> int:
        return sum(map(len, self.train))


def find_corpus(cfg: Config) -> Found:
    """Where the corpus of `cfg` is; a named one is fetched if need be.  UserError if there is none."""
    if "://" in cfg.data_dir:
        raise UserError(f"--data_dir {cfg.data_dir}: must be on a disk of this machine, from where it can be mapped")
    if cfg.out_dir and Path(cfg.data_dir).resolve().is_relative_to(Path(cfg.out_dir).resolve()):
        raise UserError(f"--data_dir {cfg.data_dir} is in --out_dir {cfg.out_dir}, which --fresh moves aside")
    if cfg.dataset == "fineweb":
        return Found(Path(cfg.data_dir) / "fineweb", "fineweb10B-gpt2", "")
    path, note = download.shakespeare(Path(cfg.data_dir)) if cfg.dataset == "shakespeare" else (Path(cfg.dataset), "")
    if path.exists() and not path.is_file():
        raise UserError(f"--dataset {path}: not a file; give shakespeare, fineweb or the path of a text file")
    try:
        with open(path, "rb") as f:
            return Found(path, hashlib.file_digest(f, "sha256").hexdigest(), note)
    except OSError as e:
        have = "give shakespeare, fineweb or the path of a text file"
        raise UserError(f"--dataset {path}: {e.strerror}; {have}") from None


def load_corpus(cfg: Config, tokenizer=None, found: Found | None = None) -> Corpus:
    """Find or fetch the corpus of `cfg`, check it, tokenise it and split it.  UserError where any of this fails.

    tokenizer: that of the run or the model to go on from; None for one of the kind that `cfg` names.
    found: what find_corpus gave for `cfg`, to spare reading the text once more.
    """
    found = found or find_corpus(cfg)
    path, fingerprint, note = found
    if cfg.dataset == "fineweb":
        tokenizer, train, val, note = load_fineweb(cfg, path, tokenizer)
        return Corpus(train, val, tokenizer, cfg.dataset, fingerprint, note)
    folder = Path(cfg.data_dir) / "tokens"
    with locked(folder) as alone:
        name = f"{fingerprint[:16]}-v{VERSION}"
        tokenizer = tokenizer or learn(cfg, found, folder / name)
        symbols = hashlib.sha256(tokenizer.symbols.encode(errors="surrogatepass")).hexdigest()
        tokens = folder / f"{name}-{tokenizer.kind}-{symbols[:8]}.bin"
        dtype = narrowest(tokenizer.vocab_size)
        if count_ids(tokens, dtype) is None:
            for left in folder.glob(f"{tokens.name}.*") if alone else ():  # by a process that was killed
                left.unlink()
            tokenise(found, tokenizer, tokens)
    count = count_ids(tokens, dtype)
    n = count * 9 // 10
    if min(n, count - n) < cfg.block_size + 1:
        raise UserError(
            f"{path} has {count:,} tokens; --block_size {cfg.block_size} needs {10 * cfg.block_size + 1:,}, so"
            f" that the last tenth, kept for validation, holds one window of block_size + 1"
        )
    train, val = Tokens(tokens, dtype, 0, n, HEADER), Tokens(tokens, dtype, n, count, HEADER)
    return Corpus([train], val, tokenizer, cfg.dataset, fingerprint, note)


def load_fineweb(cfg: Config, folder: Path, tokenizer):
    """(tokenizer, shards to train on, shard to validate on, note)"""
    if cfg.tokenizer != "gpt2":
        raise UserError(f"--tokenizer {cfg.tokenizer}: fineweb comes as tokens of gpt2")
    tokenizer = tokenizer or gpt2(cfg)
    shard = lambda i, last: Shard(
        download.shard_path(folder, i), "<u2", 0, download.SHARD_TOKENS, download.SHARD_HEADER, i, last
    )
    windows, _ = cut(shard(1, 1), cfg.block_size)
    if windows < 1:
        raise UserError(f"--block_size {cfg.block_size}: a shard of fineweb has {download.SHARD_TOKENS:,} tokens")
    last = min(max(1, -(-cfg.max_steps * cfg.batch_size // windows)), download.FINEWEB_SHARDS)
    note = download.check_disk(folder, range(last + 1))
    return tokenizer, [shard(i, last) for i in range(1, download.FINEWEB_SHARDS + 1)], shard(0, 0), note


def learn(cfg: Config, found: Found, cache: Path):
    """The tokenizer of the kind that `cfg` names for this text.  What was learned from it is kept beside its tokens."""
    if cfg.tokenizer == "byte":
        return ByteTokenizer()
    if cfg.tokenizer == "gpt2":
        return gpt2(cfg)
    size = f"-{cfg.vocab_size}" if cfg.tokenizer == "bpe" else ""
    known = cache.with_name(f"{cache.name}-{cfg.tokenizer}{size}.json")
    if not known.exists():
        if cfg.tokenizer == "bpe":
            every = -(-found.path.stat().st_size // BPE_SAMPLE) or 1  # of these chunks one
            sample = islice(read_text(found, "learning bpe"), 0, None, every)
            symbols = train_bpe((piece for text in sample for piece in pieces(text, SHORT)), cfg.vocab_size)
        else:
            seen = np.zeros(0x110000, bool)
            for text in read_text(found, "reading"):
                seen[code_points(text)] = True
            symbols = "".join(map(chr, np.flatnonzero(seen)))
        write_whole(known, json.dumps(symbols).encode())
    return make_tokenizer(cfg.tokenizer, json.loads(known.read_text()))


def gpt2(cfg: Config) -> BPETokenizer:
    vocabulary, merges = download.gpt2_vocabulary(Path(cfg.data_dir) / "gpt2")
    return BPETokenizer("gpt2", gpt2_bpe(json.loads(vocabulary.read_text("utf-8")), merges.read_text("utf-8")))


def read_text(found: Found, doing: str) -> Iterator[str]:
    """A text in chunks, each but the last ending where a word does, if there is such a place near: see PLACE.

    UserError where it is not UTF-8, or, at its end, if it is not the text that was found."""
    path, decoder, text, sha256 = found.path, codecs.getincrementaldecoder("utf-8")(), "", hashlib.sha256()
    with open(path, "rb") as f, bytes_bar(f"{doing} {path.name}", path.stat().st_size) as bar:
        while block := f.read(CHUNK):
            sha256.update(block)
            text += decode(decoder, block, f.tell(), path)
            ends = [found.start() for found in PLACE.finditer(text, max(0, len(text) - PIECE))]
            end = ends[-1] if ends else len(text)
            yield text[:end]
            text = text[end:]
            bar.update(len(block))
        yield text + decode(decoder, b"", f.tell(), path)
    if sha256.hexdigest() != found.fingerprint:
        raise UserError(f"{path} has changed while it was read; start again")


def decode(decoder, block: bytes, end: int, path: Path) -> str:
    """The text of a block of bytes that ends at `end`; of none, the end of the file."""
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as e:
        byte = f"byte {e.object[e.start]:#04x} at offset {end - len(e.object) + e.start:,}"
        raise UserError(f"{path} is not UTF-8: {byte}; save it as UTF-8 first") from None


def tokenise(found: Found, tokenizer, to: Path) -> None:
    """The ids of a text into the file `to`, whole or not at all."""
    part = to.with_name(f"{to.name}.{os.getpid()}")  # of this process alone, for where there are no locks
    try:
        with open(part, "wb") as f:
            f.write(bytes(HEADER))
            count = 0
            for text in read_text(found, "tokenising"):
                ids = tokenizer.encode(text)
                ids.tofile(f)
                count += len(ids)
            f.seek(0)
            f.write(count.to_bytes(HEADER, "little"))
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, to)
    except UnknownCharacters as e:  # only where the vocabulary is not this text's own
        raise UserError(f"{found.path} has {e}; models of --tokenizer byte or bpe know them all") from None
    finally:
        part.unlink(missing_ok=True)


def count_ids(path: Path, dtype: type) -> int | None:
    """How many ids there are in a file; None if it is not whole, or not there."""
    if not path.exists():
        return None
    with open(path, "rb") as f:
        count = int.from_bytes(f.read(HEADER), "little")
    return count if path.stat().st_size == HEADER + count * np.dtype(dtype).itemsize else None


def count_predicted(corpus: Corpus, cfg: Config) -> tuple[int, int]:
    """(tokens, bytes of text that they stand for) of what an evaluation predicts.  A loss per token depends on how
    much text a token is; bits per byte, loss * tokens / (bytes ln 2), compare whatever the tokenizer."""
    n = min(len(corpus.val) - 1, cfg.eval_tokens)
    times = np.bincount(np.asarray(corpus.val)[1 : n + 1], minlength=corpus.tokenizer.vocab_size)
    return n, int(times @ corpus.tokenizer.token_bytes())
