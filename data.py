"""The batch of step n.  Third file to read.

A corpus is a long line of token ids (corpus.py makes it from a text).  A batch is B windows of T + 1 tokens: the first
T are what the model reads, the last T what it should have guessed.  Which windows make up batch n depends on (seed, n)
alone, so a run that resumes at step n needs no saved iterator, and any number of devices or hosts sees the same
batches.  (A changed batch_size or block_size changes what batch n is.)

The ids are in files, of which a batch reads its windows and no more: a corpus may be larger than the memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from config import Config


@dataclass(frozen=True)
class Tokens:
    """Ids in a file.  np.asarray gives them as an array that is read from the disk where it is looked at.

    Opened anew for each batch, in 0.1 ms: what was looked at would stay in memory as long as the array does.
    """

    path: Path
    dtype: type
    start: int  # the first id
    stop: int  # the one after the last
    header: int = 0  # bytes before the ids

    def __len__(self) -> int:
        return self.stop - self.start

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        offset = self.header + self.start * np.dtype(self.dtype).itemsize
        return np.memmap(self.path, self.dtype, "r", offset, (len(self),))


def cut(tokens, T: int) -> tuple[int, int]:
    """Into how many windows of T + 1 tokens a pass cuts `tokens`, and the largest offset that the first may have.

    Neighbours share one token: the last target of one is the first input of the next."""
    n_windows, slack = divmod(len(tokens) - 1, T)
    # Give one window up, so that the offset of a pass can be anything in 0 .. T - 1.
    return (n_windows - 1, T - 1) if n_windows > 1 else (n_windows, slack)


@lru_cache(maxsize=2)
def cut_all(lengths: tuple[int, ...], T: int) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The cuts of parts of these lengths, and how many windows there are up to the end of each."""
    cuts = [cut(range(length), T) for length in lengths]
    return cuts, np.cumsum([n for n, _ in cuts])


@lru_cache(maxsize=1)
def window_order(seed: int, epoch: int, part: int, n_windows: int, slack: int) -> tuple[int, np.ndarray]:
    """One pass over a part of the corpus: where its first window starts, and the order of its windows.

    All that grows in memory with a corpus: 4 bytes a window, and twice that while they are shuffled."""
    rng = np.random.default_rng((seed, epoch, part))
    return int(rng.integers(slack + 1)), rng.permutation(np.arange(n_windows, dtype=np.uint32))


def get_batch(parts: Sequence, cfg: Config, step: int, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
    """The batch of `step`: int32 [B, T + 1], or the given rows of it.  Inputs are [:, :-1], targets [:, 1:].

    An epoch takes the parts of a corpus, which are token arrays, one after the other; of a part it visits all windows
    once each, in an order of its own.  Each pass cuts a part at another offset, so that a token is not always seen with
    the same past.
    """
    T, B = cfg.block_size, cfg.batch_size
    cuts, ends = cut_all(tuple(map(len, parts)), T)
    epochs, k = np.divmod(np.arange(step * B, (step + 1) * B)[rows], ends[-1])
    inside = np.searchsorted(ends, k, side="right")
    batch = np.empty((len(k), T + 1), np.int32)
    for epoch, i in {*zip(epochs.tolist(), inside.tolist())}:  # nearly always one pair
        mine, (n_windows, slack) = (epochs == epoch) & (inside == i), cuts[i]
        offset, order = window_order(cfg.seed, epoch, i, n_windows, slack)
        starts = offset + T * order[k[mine] - (ends[i] - n_windows)].astype(np.int64)
        batch[mine] = np.lib.stride_tricks.sliding_window_view(np.asarray(parts[i]), T + 1)[starts]
    return batch


def eval_batches(
    tokens, cfg: Config, rows: slice | np.ndarray = slice(None)
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Fixed windows that predict every token but the first exactly once: (int32 [B, T + 1], weights [B, T]).

    B is what a micro-batch holds, which is known to fit in memory.  The last window is ragged and the last batch may
    lack rows; both are filled up with token 0 at weight 0.
    """
    T, B = cfg.block_size, cfg.batch_size // cfg.grad_accum
    n = min(len(tokens) - 1, cfg.eval_tokens)
    n_batches = -(-n // (B * T))
    padded = np.zeros(n_batches * B * T + 1, np.int32)
    padded[: n + 1] = np.asarray(tokens)[: n + 1]
    weights = (np.arange(n_batches * B * T) < n).astype(np.float32).reshape(n_batches, B, T)
    for i in range(n_batches):
        start = np.arange(i * B, (i + 1) * B)[rows, None] * T
        yield padded[start + np.arange(T + 1)], weights[i][rows]
