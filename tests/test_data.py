"""data.py: which windows are in which batch, of one part or several, in memory or in files; and what is evaluated."""

from dataclasses import replace

import numpy as np
import pytest

import data
from config import Config
from data import Tokens, eval_batches, get_batch


def small(**knobs) -> Config:
    return Config(**{**dict(block_size=8, batch_size=4), **knobs})


def test_targets_are_inputs_shifted_by_one():
    """Row by row, a batch is a run of consecutive tokens of the corpus."""
    batch = get_batch([np.arange(1000)], small(), step=3)
    assert batch.shape == (4, 9) and batch.dtype == np.int32
    assert (np.diff(batch, axis=1) == 1).all()


def test_batch_depends_on_seed_and_step_alone():
    tokens, cfg = np.arange(1000), small()
    data.window_order.cache_clear()
    late = get_batch([tokens], cfg, 70)  # in another order of calls, as after a resume
    assert (get_batch([tokens], cfg, 7) != get_batch([tokens], cfg, 8)).any()
    assert (get_batch([tokens], cfg, 70) == late).all()
    assert (get_batch([tokens], replace(cfg, seed=1), 70) != late).any()


def test_rows_of_a_host_are_rows_of_the_global_batch():
    tokens, cfg = np.arange(1000), small()
    halves = [get_batch([tokens], cfg, 5, rows) for rows in (slice(0, 2), slice(2, 4))]
    assert (np.concatenate(halves) == get_batch([tokens], cfg, 5)).all()


def test_an_epoch_visits_every_window_once():
    """80 steps of 4 windows over 641 tokens are four passes: each pass predicts no token twice."""
    tokens, cfg = np.arange(8 * 81 + 1), small()  # 81 windows, of which a pass uses 80 at an offset of its own
    for epoch in range(4):
        seen = np.concatenate([get_batch([tokens], cfg, s)[:, 1:].ravel() for s in range(epoch * 20, epoch * 20 + 20)])
        assert len(np.unique(seen)) == len(seen) == 640
    offsets = {get_batch([tokens], cfg, 20 * epoch)[0, 0] % 8 for epoch in range(20)}
    assert len(offsets) > 3, "every pass cuts the corpus at the same places"


@pytest.mark.parametrize("extra", [0, 1, 5, 7, 8, 9])
def test_shortest_corpora(extra):
    """block_size + 1 tokens are exactly one window, which starts at 0; every start of longer ones is inside."""
    tokens = np.arange(9 + extra)
    starts = np.concatenate([get_batch([tokens], small(), step)[:, 0] for step in range(50)])
    assert starts.min() == 0 and starts.max() <= extra
    assert set(starts) == {0} if extra == 0 else len(set(starts)) > 1


@pytest.mark.parametrize("length", [9, 32, 33, 34, 40, 41, 100])
def test_evaluation_predicts_every_token_once(length):
    """All tokens but the first are a target once, whatever is left over at the end; fillings weigh nothing."""
    targets = [b[:, 1:][w > 0] for b, w in eval_batches(np.arange(length), small())]
    assert (np.sort(np.concatenate(targets)) == np.arange(1, length)).all()
    shapes = {(b.shape, w.shape) for b, w in eval_batches(np.arange(length), small())}
    assert shapes == {((4, 9), (4, 8))}  # one shape, so one compilation
    capped = [w.sum() for _, w in eval_batches(np.arange(length), small(eval_tokens=8))]
    assert sum(capped) == 8


# --- several parts ---------------------------------------------------------------------------------------------------

PARTS = [np.arange(0, 100), np.arange(1000, 1164), np.arange(2000, 2033)]  # of 11, 19 and 3 windows a pass


def test_an_epoch_visits_the_parts_in_order():
    """All windows of the first, then those of the second, then the third's, and again: no window spans two, and every
    window comes once an epoch."""
    windows = np.concatenate([get_batch(PARTS, small(batch_size=3), step) for step in range(22)])
    assert (np.diff(windows, axis=1) == 1).all()
    part = windows[:, 0] // 1000
    assert part.tolist() == 2 * ([0] * 11 + [1] * 19 + [2] * 3)
    for epoch in windows[:33], windows[33:]:
        targets = epoch[:, 1:].ravel()
        assert len(np.unique(targets)) == len(targets) == 33 * 8
    assert (windows[:33] != windows[33:]).any()


def test_rows_of_a_host_with_several_parts():
    """A batch that has windows of two parts, cut by rows: each host reads its own."""
    whole = [get_batch(PARTS, small(batch_size=8), step) for step in range(5)]
    for step, batch in enumerate(whole):
        rows = np.array([1, 2, 5]), np.array([0, 3, 4, 6, 7])
        for mine in rows:
            assert (get_batch(PARTS, small(batch_size=8), step, mine) == batch[mine]).all()
    assert any(len(set(batch[:, 0] // 1000)) == 2 for batch in whole)


def test_order_is_what_numpy_says():
    """Written down here, so that a run that is resumed with a later version of the code goes on as it began."""
    rng = np.random.default_rng((1337, 1, 2))  # seed, epoch, part
    offset, order = rng.integers(8), rng.permutation(3)
    starts = np.concatenate([get_batch(PARTS, small(batch_size=3), step)[:, 0] for step in (20, 21)])
    assert starts[3:].tolist() == [2000 + offset + 8 * k for k in order]
    tokens, cfg = np.arange(8 * 81 + 1), small(seed=7)
    rng = np.random.default_rng((7, 0))
    offset, order = rng.integers(8), rng.permutation(80)
    starts = get_batch([tokens], cfg, 3)[:, 0]
    assert starts.tolist() == [offset + 8 * k for k in order[12:16]]


@pytest.mark.parametrize("dtype", [np.uint8, "<u2", np.uint32])
def test_tokens_in_a_file_are_those_of_an_array(tmp_path, dtype):
    """From the header on, from the first to the last; nothing else of the file is seen."""
    ids = np.random.default_rng(0).integers(0, 256, 1000).astype(dtype)
    path = tmp_path / "ids"
    path.write_bytes(b"header" + ids.tobytes())
    tokens = Tokens(path, dtype, 100, 900, 6)
    assert len(tokens) == 800 and (np.asarray(tokens) == ids[100:900]).all()
    for step in 0, 30:
        assert (get_batch([tokens], small(), step) == get_batch([ids[100:900]], small(), step)).all()
    ours, same = (list(eval_batches(t, small())) for t in (tokens, ids[100:900]))
    assert all((a == b).all() and (v == w).all() for (a, v), (b, w) in zip(ours, same, strict=True))
