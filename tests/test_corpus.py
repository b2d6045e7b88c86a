"""tokenizer.py and corpus.py: any text comes back as it was, and is tokenised once, in little memory."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corpus
import tokenizer
from config import Config, UserError
from corpus import count_predicted, load_corpus
from storage import locked
from tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, gpt2_bpe, pieces, train_bpe

# --- tokenizers ------------------------------------------------------------------------------------------------------

SAMPLE = "ROMEO:\nWhat light through yonder window breaks? It's the east, and I'm 3 -- naïve 日本語 🙂\n\n" * 3


@pytest.fixture(scope="module")
def tokenizers(gpt2_files):
    """One of each kind but char, whose symbols a text brings along."""
    bpe = BPETokenizer("bpe", train_bpe([SAMPLE], 320))
    gpt2 = BPETokenizer("gpt2", gpt2_bpe(json.loads(gpt2_files["encoder.json"]), gpt2_files["vocab.bpe"].decode()))
    return [ByteTokenizer(), bpe, gpt2]


LENGTHS = {}  # of the tokenizers above: for 50,257 symbols they take a while


@settings(deadline=None, max_examples=150)
@given(st.text() | st.text("ab '\n\t3\x1c\x85!é", max_size=30))
def test_any_text_comes_back(tokenizers, text):
    """Ids are in the vocabulary, decode to the text, and stand for as many bytes as it has."""
    for one in [CharTokenizer("".join(sorted(set(text)))), *tokenizers]:
        lengths = LENGTHS.setdefault(one, one.token_bytes())
        ids = one.encode(text)
        assert one.decode(ids) == text
        assert (ids < one.vocab_size).all() and ids.ndim == 1
        assert lengths[ids].sum() == len(text.encode()) and len(lengths) == one.vocab_size


WORDS = st.text("ab'3\x1cé!", min_size=1, max_size=5)
GAPS = st.sampled_from([" ", "\n", "  \n", " \t", "\n\n\n", " \x85 "])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(WORDS, GAPS), min_size=1, max_size=30), st.integers(9, 20))
def test_pieces_have_the_ids_of_the_whole(tokenizers, words, size):
    """Cut where words end, a text is encoded as in one go, which the library does."""
    text = "".join(word + "b" + gap for word, gap in words)
    parts = list(pieces(text, size))
    assert "".join(parts) == text and all(0 < len(part) <= 2 * size for part in parts)
    assert all(a[-1].strip() and b[0] in " \n" for a, b in zip(parts, parts[1:]))
    assert len(parts) > 1 or len(text) <= 2 * size
    for one in tokenizers[1:]:
        assert [i for part in parts for i in one.model.encode(part).ids] == one.model.encode(text).ids


def test_text_without_spaces_is_cut_anywhere():
    parts = list(pieces("日" * 1000, 64))
    assert "".join(parts) == "日" * 1000 and max(map(len, parts)) == 128


def test_bpe_learns_what_repeats(tokenizers):
    """As many ids as asked for, the bytes among them; a word of the corpus is one, and twice trained is the same."""
    bpe = tokenizers[1]
    assert bpe.vocab_size == 320 and len(bpe.encode(" window")) == 1 and len(bpe.encode(" qzxw")) == 5
    assert len(bpe.encode(SAMPLE)) < len(SAMPLE.encode()) / 3
    assert train_bpe([SAMPLE], 320) == bpe.symbols
    assert BPETokenizer("bpe", train_bpe(["ab"], 5000)).vocab_size == 257  # there is nothing more to learn


def test_end_of_text_in_a_text_is_text(tokenizers):
    """The symbol between FineWeb's documents is never read out of a text, and stands for none."""
    gpt2 = tokenizers[2]
    assert 50_256 not in gpt2.encode("<|endoftext|>") and gpt2.decode([50_256]) == "<|endoftext|>"
    assert gpt2.vocab_size == 50_257 and gpt2.token_bytes()[50_256] == 0


def test_unknown_characters_are_named():
    with pytest.raises(UserError, match="'#' 'é'"):
        CharTokenizer("abc").encode("abé#")
    with pytest.raises(UserError, match="'b'"):  # between the known ones
        CharTokenizer("ac").encode("abc")


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="--tokenizer bpe .* pip install tokenizers"):
        train_bpe(["text"], 300)


# --- texts -----------------------------------------------------------------------------------------------------------


def small(**knobs) -> Config:
    return Config(**{**dict(block_size=8, batch_size=4), **knobs})


def ids(corpus):
    return np.concatenate([*map(np.asarray, corpus.train), np.asarray(corpus.val)])


def corpus_of(tmp_path, content: bytes, **knobs):
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return load_corpus(small(dataset=str(path), data_dir=str(tmp_path), **knobs))


KINDS = "char", "byte", "bpe"
UNICODE = ("naïve Ω 日本語 🙂, it's " * 9 + "\n").encode() * 30


def test_first_nine_tenths_train_the_rest_validates(tmp_path):
    corpus = corpus_of(tmp_path, b"abcdefghij" * 100)
    assert (corpus.train_tokens, len(corpus.val), corpus.tokenizer.vocab_size) == (900, 100, 10)
    text = corpus.tokenizer.decode(ids(corpus))
    assert text == "abcdefghij" * 100
    assert corpus.fingerprint == hashlib.sha256(text.encode()).hexdigest()


def test_text_is_utf8_whatever_the_locale(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("naïve Ω 🙂\n" * 50, encoding="utf-8")
    cfg = f"Config(dataset={str(path)!r}, data_dir={str(tmp_path)!r}, block_size=8)"
    code = f"import corpus; from config import Config; print(ascii(corpus.load_corpus({cfg}).tokenizer.symbols))"
    env = {"PATH": "/usr/bin", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = Path(tokenizer.__file__).parent
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
        load_corpus(small(dataset=str(tmp_path / "none.txt"), data_dir=str(tmp_path)))
    with pytest.raises(UserError, match="not a file"):
        load_corpus(small(dataset=str(tmp_path), data_dir=str(tmp_path)))


def test_the_shortest_text_that_is_accepted(tmp_path):
    corpus = corpus_of(tmp_path, b"xyz" * 27)
    assert (corpus.train_tokens, len(corpus.val)) == (72, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_make_no_difference(tmp_path, monkeypatch, kind):
    """Read a few bytes at a time, in the middle of characters and words, a text has the same ids as in one go."""
    whole = corpus_of(tmp_path / "a", UNICODE, tokenizer=kind, vocab_size=300)
    monkeypatch.setattr(corpus, "CHUNK", 101)
    monkeypatch.setattr(tokenizer, "PIECE", 40)
    chunked = corpus_of(tmp_path / "b", UNICODE, tokenizer=kind, vocab_size=300)
    assert (ids(chunked) == ids(whole)).all()
    assert whole.tokenizer.decode(ids(whole)).encode() == UNICODE
    with pytest.raises(UserError, match="byte 0xe9 at offset 5,000"):
        corpus_of(tmp_path / "c", b"x" * 5000 + b"\xe9t\xe9 " + b"x" * 500, tokenizer=kind)
    with pytest.raises(UserError, match="byte 0xe6 at offset 5,000"):  # the file ends within a character
        corpus_of(tmp_path / "d", b"x" * 5000 + "日".encode()[:2], tokenizer=kind)
    assert not any((tmp_path / "c" / "tokens").glob("*.bin*"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_tokenised_once(tmp_path, monkeypatch, kind):
    """The second time nothing of it is read but to see that it has not changed; if it has, it is another text."""
    first = corpus_of(tmp_path, UNICODE, tokenizer=kind, vocab_size=300)
    real = corpus.read_text
    monkeypatch.setattr(corpus, "read_text", lambda *_: pytest.fail("read again"))
    again = corpus_of(tmp_path, UNICODE, tokenizer=kind, vocab_size=300)
    assert (ids(again) == ids(first)).all() and again.fingerprint == first.fingerprint
    assert again.tokenizer.symbols == first.tokenizer.symbols
    monkeypatch.setattr(corpus, "read_text", real)
    changed = UNICODE.replace("Ω".encode(), "Æ".encode(), 1)
    other = corpus_of(tmp_path, changed, tokenizer=kind, vocab_size=300)
    assert other.tokenizer.decode(ids(other)).encode() == changed and other.fingerprint != first.fingerprint
    if kind == "bpe":
        other = corpus_of(tmp_path, UNICODE, tokenizer=kind, vocab_size=280)
        assert other.tokenizer.vocab_size == 280 and other.tokenizer.decode(ids(other)).encode() == UNICODE


def test_another_version_tokenises_anew(tmp_path, monkeypatch):
    """What a later version of this code writes, it does not take from an earlier one."""
    corpus_of(tmp_path, UNICODE)
    read, real = [], corpus.read_text
    monkeypatch.setattr(corpus, "read_text", lambda *args: read.append(1) or real(*args))
    corpus_of(tmp_path, UNICODE)
    assert read == []
    monkeypatch.setattr(corpus, "VERSION", 0)
    corpus_of(tmp_path, UNICODE)
    assert read == [1, 1]  # for its symbols, and for its tokens


@pytest.mark.parametrize("damage", [lambda f: f.truncate(1000), lambda f: f.truncate(4), lambda f: f.write(bytes(9))])
def test_a_damaged_token_file_is_made_again(tmp_path, damage):
    """Too short, as after a machine that lost its power; or with another count of tokens."""
    whole = ids(corpus_of(tmp_path, UNICODE))
    (path,) = (tmp_path / "tokens").glob("*.bin")
    with open(path, "r+b") as f:
        damage(f)
    (path.parent / f"{path.name}.123").write_text("of a process that was killed")
    assert (ids(corpus_of(tmp_path, UNICODE)) == whole).all()
    assert [p.name for p in path.parent.glob("*.bin*")] == [path.name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_changes_while_it_is_read_is_not_kept(tmp_path, monkeypatch, kind):
    """Between its hash and its tokens: else these would be taken for its own for ever."""
    found = corpus.find_corpus

    def find(cfg):
        result = found(cfg)
        result.path.write_bytes(UNICODE[::-1].replace(b"\n", b".")[:5000] if kind == "byte" else b"other " * 5000)
        return result

    monkeypatch.setattr(corpus, "find_corpus", find)
    with pytest.raises(UserError, match="changed while it was read|not UTF-8"):
        corpus_of(tmp_path, UNICODE, tokenizer=kind, vocab_size=300)
    monkeypatch.setattr(corpus, "find_corpus", found)
    right = corpus_of(tmp_path, UNICODE, tokenizer=kind, vocab_size=300)
    assert right.tokenizer.decode(ids(right)).encode() == UNICODE


@pytest.mark.parametrize("locks", [True, False])
def test_two_processes_want_the_same_text(tmp_path, locks):
    """One makes its tokens and the other waits; or, where there are no locks, both do: both have all of them."""
    path = tmp_path / "text.txt"
    path.write_bytes(UNICODE * 300)
    code = f"""if True:
        import sys, numpy as np, storage, corpus
        from config import Config
        if not {locks}:
            storage.wait_for = lambda *_: False
        c = corpus.load_corpus(Config(dataset=sys.argv[1], data_dir=sys.argv[2], block_size=8))
        text = c.tokenizer.decode(np.concatenate([np.asarray(c.train[0]), np.asarray(c.val)]))
        print(text == open(sys.argv[1], encoding="utf-8").read())"""
    command = [sys.executable, "-c", code, path, tmp_path / "data"]
    start = dict(cwd=Path(tokenizer.__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, **start) for _ in range(3)]
    answers = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in answers] == ["True\n"] * 3, answers
    assert len([*(tmp_path / "data" / "tokens").glob("*.bin*")]) == 1


def test_bpe_learns_from_short_pieces(tmp_path, monkeypatch):
    """All of a text without spaces, which would be one word: twice the length takes it four times as long."""
    given = []
    monkeypatch.setattr(corpus, "train_bpe", lambda texts, n: given.extend(texts) or train_bpe(["ACGT"], n))
    corpus_of(tmp_path, b"ACGT" * 10_000, tokenizer="bpe", vocab_size=300)
    assert "".join(given) == "ACGT" * 10_000 and max(map(len, given)) <= 2 * corpus.SHORT


def test_interrupted_tokenising_leaves_nothing(tmp_path, monkeypatch):
    """Ctrl-C in the middle: the next start begins again, and gets all of it."""
    monkeypatch.setattr(corpus, "CHUNK", 1000)
    encode, calls = ByteTokenizer.encode, []

    def interrupted(self, text):
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        corpus_of(tmp_path, UNICODE, tokenizer="byte")
    assert [p.name for p in (tmp_path / "tokens").iterdir()] == [".lock"]
    assert len(ids(corpus_of(tmp_path, UNICODE, tokenizer="byte"))) == len(UNICODE)


def test_vocabulary_of_another_text(tmp_path):
    """Characters that the weights to start from have never seen are refused, with the file and them."""
    path = tmp_path / "text.txt"
    path.write_text("abcé" * 100)
    with pytest.raises(UserError, match=r"text.txt has characters the model never saw: 'é'; .* byte or bpe"):
        load_corpus(small(dataset=str(path), data_dir=str(tmp_path)), CharTokenizer("abc"))
    corpus = load_corpus(small(dataset=str(path), data_dir=str(tmp_path)), CharTokenizer("abcdé"))
    assert corpus.tokenizer.symbols == "abcdé" and (ids(corpus)[:4] == [0, 1, 2, 4]).all()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much memory was ever used")
@pytest.mark.parametrize("kind, large", [("char", 120), ("bpe", 24)])
def test_memory_does_not_grow_with_the_text(tmp_path, kind, large):
    """A large text takes hardly more than one of 8 MB to tokenise and to draw batches from."""
    code = r"""if True:
        import re, sys
        from config import Config
        from corpus import load_corpus
        from data import get_batch
        corpus = load_corpus(Config(dataset=sys.argv[1], data_dir=sys.argv[2], tokenizer=sys.argv[3], block_size=128))
        for step in range(50):
            get_batch(corpus.train, Config(block_size=128), step)
        print(corpus.train_tokens, re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read()).group(1))"""
    peaks = []
    for millions in 8, large:
        path = tmp_path / f"{millions}.txt"
        path.write_bytes(b"To be, or not to be, that is a line of text of 50 b\n"[:50] * (millions * 20_000))
        command = [sys.executable, "-c", code, path, tmp_path, kind]
        done = subprocess.run(command, cwd=Path(tokenizer.__file__).parent, capture_output=True, text=True, check=True)
        tokens, peak = map(int, done.stdout.split())
        assert tokens == millions * 900_000 if kind == "char" else tokens > millions * 20_000
        peaks.append(peak / 1000)
    order = 2 * 4 * (large - 8) / 128  # MB: 4 bytes for 128 tokens, and as much again while it is made
    assert peaks[1] - peaks[0] < 20 + order, peaks


def test_bits_per_byte_count_the_bytes_of_what_is_predicted(tmp_path):
    """All but the first token of the validation split, whatever a token is; or as many as eval_tokens."""
    for kind in KINDS:
        text = corpus_of(tmp_path, UNICODE, tokenizer=kind, vocab_size=300)
        predicted = np.asarray(text.val)[1:]
        if kind == "bpe":
            lengths = [len(text.tokenizer.model.id_to_token(i)) for i in predicted]
        else:
            lengths = [len(text.tokenizer.symbols[i].encode()) if kind == "char" else 1 for i in predicted]
        assert count_predicted(text, small()) == (len(predicted), sum(lengths))
        assert count_predicted(text, small(eval_tokens=7)) == (7, sum(lengths[:7]))


def test_a_folder_is_worked_on_by_one_at_a_time(tmp_path, capsys):
    """The second waits, and says so, until the first comes out, also by an exception."""
    order = []

    def second():
        with locked(tmp_path):
            order.append("second")

    with pytest.raises(ValueError), locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
        raise ValueError
    thread.join(10)
    assert order == ["first", "second"] and "waiting for" in capsys.readouterr().err


def test_data_on_a_bucket_is_refused():
    with pytest.raises(UserError, match="--data_dir gs://b: must be on a disk"):
        load_corpus(small(data_dir="gs://b"))
