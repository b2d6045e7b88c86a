"""sample.py: the cache against whole-sequence passes, the distributions, and the command line."""

import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sample
import train
from cli import parse
from config import Config, UserError
from generate import PREFILL, SampleConfig, choose, decode, empty_caches, generate, prefill
from model import GPT
from sample import load_model
from tokenizer import make_tokenizer

V = 20


@pytest.fixture
def cfg(cfg):
    return replace(cfg, n_layer=2)


@pytest.fixture(scope="module")
def model_of():
    """cfg -> a model that has opinions: larger weights than at the start of training."""

    def make(cfg):
        graph, params = nnx.split(GPT(cfg, V, nnx.Rngs(3)))
        return nnx.merge(graph, jax.tree.map(lambda x: x * 20 if x.ndim > 1 else x, params))

    return make


def text_of(model, cfg, prompt, **how):
    return np.concatenate([*generate(model, cfg, np.asarray(prompt), SampleConfig(**how))], axis=1)


def greedy(model, cfg, prompt, n) -> list[int]:
    """Likeliest tokens by whole-sequence passes, without a cache but with the same window: all the text, until it has
    block_size tokens and one more is to come; then its last half."""
    T = cfg.block_size
    forward = jax.jit(lambda model, tokens: model(tokens)[0])
    window, made = list(prompt if len(prompt) <= T else prompt[-(T // 2) :]), []
    for _ in range(n):
        padded = np.zeros((1, T), int)
        padded[0, : len(window)] = window
        made.append(int(forward(model, padded)[0, len(window) - 1].argmax()))
        window.append(made[-1])
        if len(window) > T:
            window = window[-(T // 2) :]
    return made


@pytest.mark.parametrize(
    "T, length, n", [(16, n, 30) for n in (1, 5, 15, 16, 17, 40)] + [(100, n, 150) for n in (70, 100, 250)]
)
def test_greedy_text_equals_whole_sequence_passes(cfg, model_of, T, length, n):
    """Prompts shorter than, equal to and longer than the context, and longer than a chunk; texts that outgrow it."""
    cfg = replace(cfg, block_size=T)
    model = model_of(cfg)
    prompt = np.random.default_rng(length).integers(0, V, length)
    expected = greedy(model, cfg, prompt, n)
    assert len(set(expected)) > 2
    assert text_of(model, cfg, prompt, max_new_tokens=n, temperature=0.0)[0].tolist() == expected


def test_prefill_in_chunks_equals_one_pass(cfg, model_of):
    """A prompt longer than a chunk is read chunk by chunk; the caches then hold what a single pass computes."""
    cfg = replace(cfg, block_size=160)
    model, prompt = model_of(cfg), np.random.default_rng(0).integers(0, V, 150)
    _, whole = model(prompt[None, :-1])
    graph, params = nnx.split(model)
    caches = empty_caches(cfg, 1)
    for i in range(0, 149, PREFILL):
        chunk = np.zeros((1, PREFILL), np.int32)
        chunk[0, : len(prompt[i : i + PREFILL])] = prompt[i : i + PREFILL]
        caches = prefill(graph, params, caches, chunk, np.int32(i))
    for cached, exact in zip(jax.tree.leaves(caches), jax.tree.leaves(whole)):
        np.testing.assert_allclose(cached[:, :, :149], exact, atol=1e-4)


def test_two_programs_whatever_the_lengths(cfg, model_of):
    """One compilation of prefill and one of decode serve short and long prompts and texts."""
    model = model_of(replace(cfg, block_size=48))
    sizes = []
    for length, n in (2, 3), (30, 50), (200, 120):
        text_of(model, replace(cfg, block_size=48), np.arange(length) % V, max_new_tokens=n)
        sizes.append((prefill._cache_size(), decode._cache_size()))
    assert sizes[0] == sizes[1] == sizes[2]


def test_seeds_and_rows(cfg, model_of):
    """Same seed, same text, however many tokens are asked for; another seed, another text; rows of a batch differ."""
    model, prompt = model_of(cfg), [1, 2, 3]
    a = text_of(model, cfg, prompt, max_new_tokens=40, temperature=2.0)
    assert a.shape == (1, 40)
    assert (a == text_of(model, cfg, prompt, max_new_tokens=40, temperature=2.0)).all()
    assert (a[:, :7] == text_of(model, cfg, prompt, max_new_tokens=7, temperature=2.0)).all()
    assert (a != text_of(model, cfg, prompt, max_new_tokens=40, temperature=2.0, seed=1)).any()
    rows = text_of(model, cfg, prompt, max_new_tokens=40, temperature=2.0, num_samples=3)
    assert len({tuple(row) for row in rows}) == 3
    graph, params = nnx.split(model)
    indifferent = nnx.merge(graph, jax.tree.map(jnp.zeros_like, params))  # every token as likely as any other
    drawn = text_of(indifferent, cfg, prompt, max_new_tokens=40, temperature=1.0)
    assert len(set(drawn[0].tolist())) > 8, "a random key was used for more than one token"


@pytest.mark.parametrize(
    "how", [dict(), dict(temperature=100.0), dict(top_k=100), dict(top_p=0.999), dict(temperature=0)]
)
def test_padding_of_the_vocabulary_is_never_drawn(cfg, how):
    """Not in 1,600 tokens of a model to which all 128 rows of its embedding, 108 of them padding, look alike."""
    graph, params = nnx.split(GPT(cfg, V, nnx.Rngs(0)))
    indifferent = nnx.merge(graph, jax.tree.map(jnp.zeros_like, params))
    assert text_of(indifferent, cfg, [1], max_new_tokens=100, num_samples=16, **how).max() < V
    wte = params["wte"][...].at[V:].multiply(1000)  # and not if its logits would be the largest
    params["wte"] = nnx.Param(wte)
    assert text_of(nnx.merge(graph, params), cfg, [1], max_new_tokens=20, **how).max() < V


def frequencies(temperature=1.0, top_k=2**30, top_p=1.0, n=40_000):
    """How often each token of P is chosen in n draws."""
    logits = jnp.tile(jnp.log(P), (n, 1))
    drawn = choose(logits, jax.random.key(0), temperature, top_k, top_p)
    return np.bincount(drawn, minlength=len(P))


P = np.array([0.02, 0.4, 0.1, 0.3, 0.18])


@pytest.mark.parametrize(
    "how, expected",
    [
        (dict(), P),
        (dict(temperature=0.5), P**2),
        (dict(temperature=2.0), P**0.5),
        (dict(top_k=2), [0, 0.4, 0, 0.3, 0]),
        (dict(top_k=99), P),
        (dict(top_p=0.75), [0, 0.4, 0, 0.3, 0.18]),  # 0.4 + 0.3 is not yet 0.75, so the third is needed
        (dict(top_p=0.65), [0, 0.4, 0, 0.3, 0]),
        (dict(top_p=1e-9), [0, 1, 0, 0, 0]),
        (dict(top_k=3, top_p=0.7), [0, 0.4, 0, 0.3, 0]),  # of 0.88 left by top_k, 0.4 / 0.88 is less than 0.7
        (dict(temperature=0.5, top_p=0.75), [0, 0.16, 0, 0.09, 0]),  # 0.25 of 0.303; before the temperature, 0.7
        (dict(temperature=2.0, top_k=2), [0, 0.4**0.5, 0, 0.3**0.5, 0]),
        (dict(top_k=1), [0, 1, 0, 0, 0]),
        (dict(temperature=0.0), [0, 1, 0, 0, 0]),
        (dict(temperature=0.0, top_k=3), [0, 1, 0, 0, 0]),
    ],
)
def test_draws_have_the_right_distribution(how, expected):
    """Chi-square of 40,000 draws against the closed form; 25 is passed by chance once in 20,000 (4 degrees)."""
    expected = np.array(expected, float) / np.sum(expected)
    seen = frequencies(**how)
    assert (seen[expected == 0] == 0).all()
    some = expected > 0
    assert ((seen - 40_000 * expected)[some] ** 2 / (40_000 * expected[some])).sum() < 25


def test_weights_that_are_not_finite_are_an_error(cfg, model_of):
    graph, params = nnx.split(model_of(cfg))
    broken = nnx.merge(graph, jax.tree.map(lambda x: x * jnp.nan, params))
    with pytest.raises(UserError, match="not finite"):
        text_of(broken, cfg, [1], max_new_tokens=5)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """The out_dir of a run of a few steps."""
    small = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=16, max_steps=4, sample_tokens=0)
    cfg = Config(dataset=str(text_file), out_dir=str(tmp_path_factory.mktemp("trained") / "run"), **small)
    assert train.train(cfg) == 0
    return cfg


def test_stdout_is_the_prompt_the_text_and_a_newline(trained, capsys):
    """Nothing but text on stdout, and the rest on stderr; the text is what generate() makes."""
    sample.main(["--out_dir", trained.out_dir, "--prompt", "ROMEO:", "--max_new_tokens", "25", "--temperature", "0"])
    out, err = capsys.readouterr()
    model, cfg, tokenizer, *_ = load_model(trained.out_dir, "best")
    assert out == "ROMEO:" + tokenizer.decode(greedy(model, cfg, tokenizer.encode("ROMEO:"), 25)) + "\n"
    assert "step 4" in err and "tokens/s" in err


def test_samples_are_set_apart(trained, capsys):
    sample.main(["--out_dir", trained.out_dir, "--prompt", "R", "--max_new_tokens", "5", "--num_samples", "3"])
    out = capsys.readouterr().out
    assert re.fullmatch(r"(?s)R.{5}\n-+\nR.{5}\n-+\nR.{5}\n", out)


@pytest.mark.parametrize(
    "pieces, prints",
    [
        (["é", "🙂x"], ["R", "é", "🙂x"]),  # whole characters
        ([b"\xc3", b"\xa9\xf0\x9f", b"\x99", b"\x82!"], ["R", "é", "🙂!"]),  # cut in two and in four
        ([b"a\xf0\x9f", b"b"], ["R", "a", "\ufffdb"]),  # begun, and never completed
        ([b"a\xe2\x82"], ["R", "a", "\ufffd"]),  # not complete at the end of the text
    ],
)
def test_a_character_is_printed_when_all_its_bytes_are_there(pieces, prints, monkeypatch):
    """Byte by byte, as the model makes them, with the tokenizer `byte`."""
    made = [np.array([[*(x.encode() if isinstance(x, str) else x)]]) for x in pieces]
    printed = []
    monkeypatch.setattr(sample, "generate", lambda *_: iter(made))
    monkeypatch.setattr("builtins.print", lambda text, **where: printed.append(text) if "file" not in where else None)
    sample.tell(None, None, make_tokenizer("byte", None), "R", SampleConfig())
    assert [text for text in printed if text] == prints


def test_tensor_parallel_sampling(trained, capsys, tmp_path):
    """What fsdp 2 x tensor 2 has trained gives the same text on one device and on two that share the heads."""
    cut = replace(trained, out_dir=str(tmp_path / "cut"), fsdp=2, tensor=2)
    assert train.train(cut) == 0
    ask = ["--out_dir", cut.out_dir, "--prompt", "ROMEO:", "--max_new_tokens", "40", "--temperature", "0"]
    texts = []
    for devices in "1", "2":
        capsys.readouterr()
        sample.main([*ask, "--tensor", devices])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) == 47
    model, *_, layout = load_model(cut.out_dir, "best", 2)
    kernel, (keys, _) = model.h[0].attn.q_proj.kernel[...], empty_caches(cut, 3, layout)[0]
    for whole, axis in (kernel, 1), (keys, 1):
        pieces = [piece.data.shape for piece in whole.addressable_shards]
        assert len(pieces) == 2 and all(piece[axis] * 2 == whole.shape[axis] for piece in pieces)
    with pytest.raises(UserError, match="n_head 2 is not divisible by --tensor 4"):
        sample.main([*ask, "--tensor", "4"])


def test_corpus_is_not_needed(trained, capsys):
    """Architecture, tokenizer and weights are read from the checkpoint; the corpus may be gone."""
    Path(trained.dataset).rename(Path(trained.dataset).with_suffix(".gone"))
    try:
        sample.main(["--out_dir", trained.out_dir, "--prompt", "R", "--max_new_tokens", "3"])
    finally:
        Path(trained.dataset).with_suffix(".gone").rename(trained.dataset)
    assert len(capsys.readouterr().out) == 5


def test_prompt_from_a_file(trained, capsys, tmp_path):
    (tmp_path / "prompt").write_text("ROMEO:\nIt is")
    sample.main(["--out_dir", trained.out_dir, "--prompt_file", str(tmp_path / "prompt"), "--max_new_tokens", "4"])
    assert re.fullmatch(r"(?s)ROMEO:\nIt is.{4}\n", capsys.readouterr().out)


def typed(monkeypatch, text):
    """Standard input is a pipe that holds `text`."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    monkeypatch.setattr(sys, "stdin", os.fdopen(reader, encoding="utf-8"))


def test_prompt_from_a_pipe(trained, capsys, monkeypatch):
    """Only if no flag gives one; without either it is a line break."""
    ask = ["--out_dir", trained.out_dir, "--max_new_tokens", "4"]
    for piped, flags, begins in (
        ("ROMEO:\n", [], "ROMEO:\n"),
        ("ROMEO:\r\n", [], "ROMEO:\n"),
        ("ROMEO:\n", ["--prompt", r"it\nis"], "it\nis"),
        ("", ["--prompt", "it\n"], "it\n"),
        ("", [], "\n"),
    ):
        typed(monkeypatch, piped)
        sample.main([*ask, *flags])
        assert re.fullmatch(rf"(?s){begins}.{{4}}\n", capsys.readouterr().out)


def test_interactive(trained, capsys, monkeypatch):
    """One continuation a line with the model loaded once; the same line gets another one; a bad line is no end."""
    loads = []
    monkeypatch.setattr(sample, "load_model", lambda *args: loads.append(1) or load_model(*args))
    typed(monkeypatch, "ROMEO:\n#\nROMEO:\nI\\nam\r\n")
    sample.main(["--out_dir", trained.out_dir, "--max_new_tokens", "20", "--interactive"])
    out, err = capsys.readouterr()
    assert re.fullmatch(r"(?s)ROMEO:.{20}\nROMEO:.{20}\nI\nam.{20}\n", out) and out[:27] != out[27:54]
    assert "never saw: '#'" in err and len(loads) == 1


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--prompt", "A", "--prompt_file", "B"], "give one of them"),
        (["--prompt", "A", "--interactive"], "leave --prompt and --prompt_file out"),
        (["--prompt_file", "/none"], "--prompt_file /none: No such file"),
        (["--prompt_file", os.path.dirname(__file__)], "Is a directory"),
        (["--prompt_file", os.devnull], "/dev/null is empty"),
        (["--prompt_file", sys.executable], "is not UTF-8 text"),
        (["--temperature", "1e40"], "--temperature 1e+40: must be 0 or more and less"),
        (["--tensor", "9"], "--tensor 9 needs as many devices; JAX has 8"),
        (["--prompt", "ROMÉO#"], "never saw: '#' 'É'"),
        (["--prompt", ""], "--prompt is empty"),
        (["--temperature", "-1"], "--temperature -1.0: must be 0 or more"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
        (["--top_k", "-2"], "--top_k -2: must be 0 or more"),
        (["--num_samples", "0"], "--num_samples 0: must be 1 or more"),
        (["--top_p", "90"], "--top_p 90.0: a share"),
        (["--seed", "99999999999"], "--seed 99999999999: must be 0 or more and less than 4294967296"),
        (["--which", "worst"], "--which worst: choose from best, latest"),
        (["--temprature", "1"], "unknown flag --temprature; did you mean --temperature?"),
    ],
)
def test_bad_flags_are_refused(trained, flags, says):
    with pytest.raises(UserError) as e:
        sample.main(["--out_dir", trained.out_dir, *flags])
    assert says in str(e.value)


def test_without_a_checkpoint_it_says_what_to_do(trained, tmp_path, monkeypatch):
    shutil.copytree(trained.out_dir, tmp_path / "out" / "nano")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"train first: python train.py --preset tiny \(trained so far: nano\)"):
        sample.main(["--preset", "tiny"])
    with pytest.raises(UserError, match="choose from nano, tiny"):
        sample.main(["--preset", "huge"])
    assert parse(SampleConfig, [], "")[0].out_dir.endswith("tiny")
