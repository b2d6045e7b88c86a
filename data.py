"""From a text to the batch of step n.  Third file to read, after config.py and model.py.

A corpus is one long line of token ids, the first 90 % for training and the rest for validation.  A batch is B windows
of T + 1 tokens: the first T are what the model reads, the last T what it should have guessed.  Which windows make up
batch n depends on (seed, n) alone, so a run that resumes at step n needs no saved iterator, and any number of
devices or hosts sees the same batches.  (A changed batch_size or block_size changes what batch n is.)
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from config import Config, UserError
from download import shakespeare

# --- tokens ----------------------------------------------------------------------------------------------------------


class CharTokenizer:
    """One id per character of the corpus, in the order of their code points."""

    kind = "char"

    def __init__(self, symbols: str):
        self.symbols, self.vocab_size = symbols, len(symbols)

    def encode(self, text: str) -> np.ndarray:
        """[N] ids.  UserError names the characters that are not in the vocabulary."""
        if unknown := sorted(set(text) - set(self.symbols)):
            raise UserError(f"characters the model never saw: {' '.join(map(repr, unknown[:20]))}")
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)  # one number a character, without a Python loop
        known = np.frombuffer(self.symbols.encode("utf-32-le"), np.uint32)
        return np.searchsorted(known, points).astype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def decode(self, ids) -> str:
        return "".join(self.symbols[i] for i in ids)


class ByteTokenizer:
    """The 256 bytes of UTF-8: any language, no unknown character, longer sequences outside ASCII."""

    kind, symbols, vocab_size = "byte", "", 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)

    def decode(self, ids) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")


def make_tokenizer(kind: str, symbols: str):
    """The tokenizer that (kind, symbols) stand for; a checkpoint stores these two and no more."""
    if kind not in ("char", "byte"):
        raise UserError(f"--tokenizer {kind}: choose from char, byte")
    return CharTokenizer(symbols) if kind == "char" else ByteTokenizer()


# --- corpora ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    train: np.ndarray  # [N] token ids
    val: np.ndarray  # [M] token ids
    tokenizer: CharTokenizer | ByteTokenizer
    name: str  # as given on the command line
    fingerprint: str  # sha256 of the text
    note: str  # what the reader of a log must know about this text, or ""


def load_corpus(cfg: Config) -> Corpus:
    """Find or fetch the corpus of `cfg`, check it, tokenise it and split it.  UserError where any of this fails."""
    if cfg.dataset == "fineweb" or cfg.tokenizer == "gpt2":
        raise UserError(
            "fineweb and gpt2 are not here yet: train on a text of yours, --dataset my.txt --tokenizer byte"
        )
    path, note = shakespeare(Path(cfg.data_dir)) if cfg.dataset == "shakespeare" else (Path(cfg.dataset), "")
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise UserError(f"--dataset {path}: {e.strerror}; give shakespeare or the path of a text file") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        byte = f"byte {raw[e.start]:#04x} at offset {e.start:,}"
        raise UserError(f"{path} is not UTF-8: {byte}; save it as UTF-8 first") from None
    tokenizer = make_tokenizer(cfg.tokenizer, "".join(sorted(set(text))))
    tokens = tokenizer.encode(text)
    n = len(tokens) * 9 // 10
    if min(n, len(tokens) - n) < cfg.block_size + 1:
        raise UserError(
            f"{path} has {len(tokens):,} tokens; --block_size {cfg.block_size} needs {10 * cfg.block_size + 1:,}, so"
            f" that the last tenth, kept for validation, holds one window of block_size + 1"
        )
    return Corpus(tokens[:n], tokens[n:], tokenizer, cfg.dataset, hashlib.sha256(raw).hexdigest(), note)


# --- batches ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_windows: int, slack: int) -> tuple[int, np.ndarray]:
    """One pass over the corpus: where its first window starts, and the order of the windows."""
    rng = np.random.default_rng((seed, epoch))
    return int(rng.integers(slack + 1)), rng.permutation(n_windows)


def get_batch(tokens: np.ndarray, cfg: Config, step: int, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
    """The batch of `step`: int32 [B, T + 1], or the given rows of it.  Inputs are [:, :-1], targets [:, 1:].

    Every pass over the corpus visits its windows once each, in an order of its own; each pass cuts the corpus at
    another offset, so that a token is not always seen with the same past.
    """
    T, B = cfg.block_size, cfg.batch_size
    n_windows, slack = divmod(len(tokens) - 1, T)
    if n_windows > 1:  # give one window up, so that the offset of a pass can be anything in 0 .. T - 1
        n_windows, slack = n_windows - 1, T - 1
    epochs, k = np.divmod(np.arange(step * B, (step + 1) * B)[rows], n_windows)
    starts = np.empty_like(k)
    for epoch in np.unique(epochs):  # nearly always one
        offset, order = epoch_order(cfg.seed, int(epoch), n_windows, slack)
        starts[epochs == epoch] = offset + T * order[k[epochs == epoch]]
    return np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[starts].astype(np.int32)


def eval_batches(
    tokens: np.ndarray, cfg: Config, rows: slice | np.ndarray = slice(None)
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Fixed windows that predict every token but the first exactly once: (int32 [B, T + 1], weights [B, T]).

    B is what a micro-batch holds, which is known to fit in memory.  The last window is ragged and the last batch may
    lack rows; both are filled up with token 0 at weight 0.
    """
    T, B = cfg.block_size, cfg.batch_size // cfg.grad_accum
    n = min(len(tokens) - 1, cfg.eval_tokens)
    n_batches = -(-n // (B * T))
    padded = np.zeros(n_batches * B * T + 1, np.int32)
    padded[: n + 1] = tokens[: n + 1]
    weights = (np.arange(n_batches * B * T) < n).astype(np.float32).reshape(n_batches, B, T)
    for i in range(n_batches):
        start = np.arange(i * B, (i + 1) * B)[rows, None] * T
        yield padded[start + np.arange(T + 1)], weights[i][rows]
