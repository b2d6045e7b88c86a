"""export.py and --init_from: the weights out of a run, as Hugging Face has them, and into another one.

That transformers computes the same with them is checked by .ci/huggingface.py, where transformers is.
"""

import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from flax import nnx

import export
import train
from config import Config, UserError
from corpus import load_corpus
from export import ExportConfig
from sample import load_model
from tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, gpt2_bpe, train_bpe


@pytest.fixture(scope="module")
def source(text_file, tmp_path_factory):
    """A run of 60 steps that has learned something, its configuration, and what export.py makes of it."""
    root = tmp_path_factory.mktemp("source")
    small = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=16, dropout=0.0, sample_tokens=0)
    knobs = dict(max_steps=60, eval_interval=60, learning_rate=1e-2, warmup_steps=5, log_interval=20)
    where = dict(dataset=str(text_file), data_dir=str(text_file.parent), out_dir=str(root / "run"))
    cfg = Config(**small, **knobs, **where)
    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: first)
        assert train.train(cfg) == 0
    export.export(ExportConfig(out_dir=cfg.out_dir, out=str(root / "exported")))
    return cfg


def exported(cfg) -> Path:
    return Path(cfg.out_dir).with_name("exported")


def val_losses(cfg):
    lines = map(json.loads, Path(cfg.out_dir, "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["val_loss"] for r in lines if "val_loss" in r}


# --- out -------------------------------------------------------------------------------------------------------------


def test_exported_files_hold_the_model(source):
    """Every parameter once, transposed where PyTorch wants it so, without the padding; sizes as config.json says."""
    from safetensors.numpy import load_file

    model, cfg, tokenizer, *_ = load_model(source.out_dir, "best")
    tensors = load_file(exported(source) / "model.safetensors")
    V, C, F, D = tokenizer.vocab_size, cfg.n_embd, cfg.n_hidden, cfg.n_embd // cfg.n_head
    params = nnx.to_pure_dict(nnx.split(model)[1])
    assert sum(x.size for x in tensors.values()) == train.count_parameters(params, V)
    assert tensors["model.embed_tokens.weight"].shape == (V, C)
    block = "model.layers.1"
    assert tensors[f"{block}.self_attn.q_norm.weight"].shape == (D,)
    down = model.h[1].mlp.down_proj.kernel[...]
    assert down.shape == (F, C) and (tensors[f"{block}.mlp.down_proj.weight"] == down.T).all()
    config = json.loads((exported(source) / "config.json").read_text())
    sizes = dict(
        vocab_size=V, hidden_size=C, intermediate_size=F, num_hidden_layers=2, num_attention_heads=2, head_dim=D
    )
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=16, rope_theta=10_000.0, rms_norm_eps=1e-6)
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config.items() >= sizes.items()


def test_weights_come_back_as_they_were(source):
    """From the exported folder and from the run itself."""
    for folder in exported(source), source.out_dir:
        cfg = replace(source, init_from=str(folder))
        params, tokenizer = export.read_weights(cfg), export.source_tokenizer(cfg)
        model, *_ = load_model(source.out_dir, "best")
        ours = nnx.to_pure_dict(nnx.split(model)[1])
        V = tokenizer.vocab_size
        for tree in params, ours:
            tree["wte"] = tree["wte"][:V]  # not the padding, which nothing depends on
        assert jax.tree.structure(params) == jax.tree.structure(ours)
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), params, ours)))
        assert tokenizer.symbols == load_corpus(source).tokenizer.symbols


def test_tokenizer_json_of_every_kind(gpt2_files):
    """Hugging Face's library reads it, makes the same ids, and gives the text back."""
    import tokenizers

    text = "ROMEO:\n  What light -- it's 3 o'clock,\n\n\nnaïve 日本語 🙂\t\r\n end "
    gpt2 = BPETokenizer("gpt2", gpt2_bpe(json.loads(gpt2_files["encoder.json"]), gpt2_files["vocab.bpe"].decode()))
    bpe = BPETokenizer("bpe", train_bpe([text * 5], 300))
    for ours in CharTokenizer("".join(sorted(set(text)))), ByteTokenizer(), bpe, gpt2:
        theirs = tokenizers.Tokenizer.from_str(export.hf_tokenizer(ours))
        assert theirs.encode(text).ids == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text).tolist()) == text
        assert theirs.get_vocab_size() == ours.vocab_size


def test_nothing_is_written_over(source, tmp_path):
    """A folder that is there is refused, and left as it is; one that could not be finished is not there."""
    (tmp_path / "there").mkdir()
    how = ExportConfig(out_dir=source.out_dir, out=str(tmp_path / "there"))
    with pytest.raises(UserError, match="there is there already"):
        export.export(how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "to_hf", lambda *_: {"x": "not an array"})
        with pytest.raises(Exception, match="str"):
            export.export(replace(how, out=str(tmp_path / "new")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            export.export(replace(how, out=str(tmp_path / "new")))
    assert [p.name for p in tmp_path.iterdir()] == ["there"] and not any((tmp_path / "there").iterdir())
    export.export(replace(how, out=str(tmp_path / "new")))
    names = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json training.json"
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == names.split()


# --- in --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{}, dict(fsdp=4, tensor=2)])
def test_a_run_starts_from_the_weights(source, tmp_path, mesh):
    """On the same text its first validation loss is the source's best one, from a run and from what was exported."""
    for i, folder in enumerate((source.out_dir, exported(source))):
        cfg = replace(source, init_from=str(folder), out_dir=str(tmp_path / str(i)), max_steps=2, **mesh)
        assert train.train(cfg) == 0
        assert val_losses(cfg)[0] == pytest.approx(min(val_losses(source).values()), rel=1e-6)


def test_fine_tuning_beats_starting_anew(one_device, source, tmp_path, text_file):
    """Another text in the same characters: after as many steps, what was learned from the first one is worth a lot."""
    words, rng = "the east is my sun and night is light to what breaks lord of thee".split(), random.Random(1)
    lines = [f"NURSE:\n{' '.join(rng.choices(words, k=6))}.\n\n" for _ in range(400)]
    text = tmp_path / "other.txt"
    text.write_text("".join(lines))
    fewer = set(text_file.read_text()) - set(text.read_text())
    assert fewer, "or the vocabularies would be the same by themselves"
    losses = {}
    for name, more in ("anew", {}), ("tuned", dict(init_from=source.out_dir)):
        cfg = replace(source, dataset=str(text), out_dir=str(tmp_path / name), max_steps=20, eval_interval=20, **more)
        assert train.train(cfg) == 0
        losses[name] = val_losses(cfg)
    assert losses["tuned"][0] < losses["anew"][0] - 1 and losses["tuned"][20] < losses["anew"][20] - 0.2


def test_a_resumed_run_needs_its_source_no_more(one_device, source, tmp_path, capsys):
    """The optimiser starts afresh, and then it is a run like any other, with a tokenizer of its own."""
    copy = shutil.copytree(source.out_dir, tmp_path / "source")
    cfg = replace(source, init_from=str(copy), out_dir=str(tmp_path / "run"), max_steps=10)
    assert train.train(cfg) == 0
    shutil.rmtree(copy)
    assert train.train(replace(cfg, max_steps=20)) == 0
    assert "going on after step 10 of 20" in capsys.readouterr().out
    with pytest.raises(UserError, match="--init_from .*source holds no weights"):
        train.train(replace(cfg, out_dir=str(tmp_path / "new")))
    train.train(replace(cfg, init_from="elsewhere", max_steps=21))
    assert "init_from" in (out := capsys.readouterr().out) and "without effect" in out


def test_weights_of_another_shape_are_refused(source, tmp_path):
    cfg = replace(source, init_from=source.out_dir, out_dir=str(tmp_path / "run"))
    for change, says in (
        (dict(n_embd=64), "has n_embd 32, not 64: add --n_embd 32"),
        (dict(n_layer=1), "has n_layer 2, not 1: add --n_layer 2"),
        (dict(tokenizer="byte"), "has tokenizer char, not byte: add --tokenizer char"),
    ):
        with pytest.raises(UserError, match=says):
            train.train(replace(cfg, **change))
    text = tmp_path / "text.txt"
    text.write_text(Path(source.dataset).read_text() + "#")
    with pytest.raises(UserError, match="text.txt has characters the model never saw: '#'"):
        train.train(replace(cfg, dataset=str(text)))
    assert not (tmp_path / "run").exists()


def rewrite(name, old, new):
    """Damage: in the file `name` of a folder, replace what is old."""
    return lambda d: (d / name).write_text((d / name).read_text().replace(old, new, 1))


DAMAGE = {
    "cut weights": lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:5000]),
    "no weights": lambda d: (d / "model.safetensors").unlink(),
    "cut meta": lambda d: (d / "training.json").write_text((d / "training.json").read_text()[:100]),
    "later meta": rewrite("training.json", '"preset"', '"prefix"'),
    "another shape": rewrite("training.json", '"symbols": "', '"symbols": "\\u0001'),
    "a file": lambda d: (shutil.rmtree(d), d.write_text("nonsense")),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damaged_exports_are_refused(source, tmp_path, fault):
    """In one line that names the folder, before there is a run."""
    copy = shutil.copytree(exported(source), tmp_path / "copy")
    DAMAGE[fault](copy)
    with pytest.raises(UserError, match=f"--init_from {copy}") as e:
        train.train(replace(source, init_from=str(copy), out_dir=str(tmp_path / "run")))
    assert "\n" not in str(e.value) and not (tmp_path / "run").exists()


def test_missing_safetensors_is_named(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(UserError, match="pip install safetensors"):
        train.train(replace(source, init_from=str(exported(source)), out_dir=str(tmp_path / "run")))
    with pytest.raises(UserError, match="pip install safetensors"):
        export.export(ExportConfig(out_dir=source.out_dir, out=str(tmp_path / "out")))
    with pytest.raises(UserError, match="--which worst: choose from best, latest"):
        ExportConfig(which="worst")


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_a_run_keeps_its_tokenizer(one_device, source, tmp_path, kind):
    """In the checkpoint, so that it samples without the corpus, and goes on without the file where it was learned."""
    text = shutil.copy(source.dataset, tmp_path / "text.txt")
    more = dict(
        tokenizer=kind, vocab_size=300, dataset=str(text), data_dir=str(tmp_path), out_dir=str(tmp_path / "run")
    )
    cfg = replace(source, **more, max_steps=10, sample_tokens=4)
    assert train.train(cfg) == 0
    shutil.rmtree(tmp_path / "tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("corpus.train_bpe", lambda *_: pytest.fail("learned again"))
        assert train.train(replace(cfg, max_steps=12)) == 0
    text.unlink()
    _, _, tokenizer, step, _ = load_model(cfg.out_dir, "latest")
    assert step == 12 and tokenizer.decode(tokenizer.encode("ROMEO: naïve 🙂")) == "ROMEO: naïve 🙂"
