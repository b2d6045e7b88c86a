"""Shared by all tests: eight fake devices, a small corpus, a small model.

python -m pytest            everything, without a network, in ten minutes on two cores
python -m pytest -m long    120 times kill -9: another ten
"""

import atexit
import json
import os
import random
import shutil
import signal
import tempfile

# Ctrl-C is part of what is tested, and a program in the background may have inherited that it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before jax is imported.  Subprocesses of the tests inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Many tests compile the same programs.  Each is compiled once a session, into a cache that the session starts empty and
# that its worker processes share.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache = tempfile.mkdtemp(prefix="jax-cache-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, cache, ignore_errors=True)

import jax  # noqa: E402
import pytest  # noqa: E402
import scripts  # noqa: E402

from config import Config  # noqa: E402

assert jax.device_count() == 8


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 20,000 characters of made-up dialogue: learnable, the same on every machine."""
    rng = random.Random(0)
    words = "what light through yonder window breaks it is the east and I am sun to thee my lord of night".split()
    lines = []
    while sum(map(len, lines)) < 20_000:
        lines.append(rng.choice(["ROMEO", "JULIET", "NURSE"]) + ":\n" + " ".join(rng.choices(words, k=8)) + ".\n\n")
    path = tmp_path_factory.mktemp("corpus") / "play.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def cfg(text_file, tmp_path):
    """A configuration that compiles in a second or two and runs on the eight devices."""
    small = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=16, dropout=0.1)
    run = dict(max_steps=20, warmup_steps=5, log_interval=5, eval_interval=10, checkpoint_interval=10, sample_tokens=8)
    rates = dict(learning_rate=1e-2, min_lr=1e-3)
    return Config(
        dataset=str(text_file), data_dir=str(text_file.parent), out_dir=str(tmp_path / "run"), **small, **run, **rates
    )


@pytest.fixture(scope="session")
def gpt2_files():
    """Files of the form and the size of GPT-2's vocabulary, which merge nothing but `th` and ` th`."""
    letters = {chr(b) if 33 <= b < 127 or 161 <= b < 173 or b >= 174 else None for b in range(256)} - {None}
    letters |= {chr(256 + n) for n in range(256 - len(letters))}
    symbols = [*sorted(letters), "th", "\u0120th"]
    symbols += [f"never{i}" for i in range(50_256 - len(symbols))] + ["<|endoftext|>"]
    encoder = json.dumps({symbol: i for i, symbol in enumerate(symbols)})
    return {"encoder.json": encoder.encode(), "vocab.bpe": "#version: 0.2\nt h\n\u0120 th\n".encode()}


@pytest.fixture
def one_device(monkeypatch):
    """train.py finds a single device, as on a laptop or a free Colab TPU; compiling for one is quicker, too."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: first)


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    scripts.end_all()
