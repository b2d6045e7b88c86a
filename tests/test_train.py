"""train.py: the schedule, the step, the mesh and the loop."""

import json
import logging
import math
import re
import signal
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import checkpoint
import train
from config import Config, UserError
from corpus import load_corpus
from data import get_batch
from model import abstract_model
from report import flops_per_token

ROOT = Path(train.__file__).parent


def setup(cfg):
    """(corpus, hardware, initial state, step) as train() makes them."""
    corpus = load_corpus(cfg)
    init = train.make_init_state(cfg, corpus.tokenizer.vocab_size)
    hw = train.make_mesh_and_shardings(cfg, init)
    graph, _ = nnx.split(abstract_model(cfg, corpus.tokenizer.vocab_size, hw.dtype))
    return corpus, hw, jax.jit(init, out_shardings=hw.layout)(), train.make_train_step(cfg, graph, hw)


def run_steps(cfg, n):
    """Losses of n steps (log_interval must be 1) and the final state."""
    corpus, hw, state, step = setup(cfg)
    losses = []
    for i in range(n):
        state, metrics = step(state, jax.device_put(get_batch(corpus.train, cfg, i), hw.batch), np.int32(i))
        losses.append(float(metrics["loss"]))
    return losses, state


def records(cfg):
    return [json.loads(line) for line in Path(cfg.out_dir, "metrics.jsonl").read_text().splitlines()]


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


# --- schedule and optimiser ------------------------------------------------------------------------------------------


def test_learning_rate_follows_its_formula(cfg):
    cfg = replace(cfg, warmup_steps=10, max_steps=100, learning_rate=2.0, min_lr=0.5)
    rate = train.learning_rate(cfg)
    for s in range(1, 101):
        cosine = 0.5 + 1.5 * (1 + math.cos(math.pi * (s - 10) / 91)) / 2
        assert rate(s - 1) == pytest.approx(2.0 * s / 10 if s <= 10 else cosine, rel=1e-5)


@pytest.mark.parametrize("warmup, steps", [(0, 1), (0, 20), (5, 3), (100, 20), (20, 20), (1, 1)])
def test_learning_rate_is_positive_and_finite(cfg, warmup, steps):
    """Also in the first step, in the last, and when the run is shorter than the warmup."""
    rate = train.learning_rate(replace(cfg, warmup_steps=warmup, max_steps=steps))
    rates = np.array([float(rate(i)) for i in range(steps)])
    assert (rates > 0).all() and (rates <= cfg.learning_rate).all()


def test_weight_decay_is_on_matrices_only(cfg):
    """With gradients of zero an AdamW step is decay alone: matrices shrink by lr * decay, norm scales stay."""
    cfg = replace(cfg, weight_decay=10.0, warmup_steps=0, max_steps=1000)
    params = {"matrix": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    optimizer = train.make_optimizer(cfg)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -cfg.learning_rate * 10.0, rtol=1e-4)
    assert (updates["scale"] == 0).all()


def test_gradient_is_clipped_to_its_norm(cfg):
    """Adam does not see the length of a gradient, but its moments do: they are those of a vector of length 1."""
    params = {"w": jnp.zeros((3, 3))}
    optimizer = train.make_optimizer(replace(cfg, grad_clip=1.0))
    _, state = optimizer.update({"w": jnp.full((3, 3), 100.0)}, optimizer.init(params), params)
    mu = next(x for name, x in flat(state).items() if ".mu" in name)
    assert np.linalg.norm(mu) == pytest.approx((1 - cfg.beta1) * 1.0, rel=1e-4)


# --- the step --------------------------------------------------------------------------------------------------------


def test_one_batch_can_be_learned_by_heart(one_device, cfg):
    """300 steps on one batch: the loss falls from ln V to next to nothing."""
    cfg = replace(cfg, dropout=0.0, max_steps=300, log_interval=1)
    corpus, hw, state, step = setup(cfg)
    batch = jax.device_put(get_batch(corpus.train, cfg, 0), hw.batch)
    state, metrics = step(state, batch, np.int32(0))
    assert abs(float(metrics["loss"]) - math.log(corpus.tokenizer.vocab_size)) < 0.1
    for i in range(1, 300):
        state, metrics = step(state, batch, np.int32(i))
    assert float(metrics["loss"]) < 0.1


@pytest.mark.parametrize("fsdp, tensor", [(1, 1), (1, 2), (4, 2)])
def test_every_program_is_compiled_once(cfg, fsdp, tensor, caplog):
    """One "Finished XLA compilation" of the step, of the evaluation and of each program that samples, in a run that
    does each several times, on eight devices."""
    jax.clear_caches()
    jax.config.update("jax_log_compiles", True)
    try:
        with caplog.at_level(logging.WARNING):
            assert train.train(replace(cfg, fsdp=fsdp, tensor=tensor, sample_tokens=40)) == 0
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [re.search(r"XLA compilation of (\S+)", r.getMessage()) for r in caplog.records]
    names = [m.group(1) for m in compiled if m]
    for name in "train_step", "eval_step", "prefill", "decode":
        assert sum(name in n for n in names) == 1, (name, [n for n in names if name in n])


@pytest.mark.parametrize("fsdp, tensor", [(1, 1), (4, 2)])
def test_step_takes_over_its_state_and_keeps_its_layout(cfg, fsdp, tensor):
    """The old arrays are gone, and each new one lies where the old one lay."""
    corpus, hw, state, step = setup(replace(cfg, fsdp=fsdp, tensor=tensor, log_interval=1))
    new, _ = step(state, jax.device_put(get_batch(corpus.train, cfg, 0), hw.batch), np.int32(0))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    for old, x, wanted in zip(*map(jax.tree.leaves, (state, new, hw.state))):
        assert old.sharding == x.sharding == wanted.sharding
        assert [s.data.shape for s in x.addressable_shards] == [wanted.sharding.shard_shape(x.shape)] * 8


def test_a_loss_that_is_not_finite_changes_nothing(one_device, cfg):
    """Neither that step nor the good ones after it: the state stays at the last good step."""
    cfg = replace(cfg, log_interval=1)
    corpus, hw, state, step = setup(cfg)
    good = jax.device_put(get_batch(corpus.train, cfg, 0), hw.batch)
    state, _ = step(state, good, np.int32(0))
    broken = jax.tree.map(lambda x: x.copy(), state)
    broken.params["norm"]["scale"] = jnp.full(cfg.n_embd, jnp.inf)
    before = flat(broken)
    for i in 1, 2:
        broken, metrics = step(broken, good, np.int32(i))
        assert not np.isfinite(metrics["loss"])
    after = flat(broken)
    assert all(np.array_equal(before[name], after[name], equal_nan=True) for name in before)
    assert int(broken.step) == 1


def test_loop_fetches_nothing_between_log_lines(one_device, cfg, monkeypatch):
    """The device is read at log lines, evaluations and checkpoints; the steps in between are only dispatched."""
    from jax._src.array import ArrayImpl

    value, fetches, log = ArrayImpl._value, [0], []

    def counted(array):
        fetches[0] += 1
        return value.fget(array)

    def noted(*args):
        log.append(fetches[0])
        return get_batch(*args)

    monkeypatch.setattr(ArrayImpl, "_value", property(counted))
    monkeypatch.setattr(train, "get_batch", noted)
    assert train.train(replace(cfg, log_interval=10, eval_interval=20, checkpoint_interval=20)) == 0
    assert len(log) == 20
    between = np.diff(log)  # fetches from one batch to the next
    assert (between[:9] == 0).all() and (between[10:] == 0).all() and between[9] > 0


def test_dropout_mask_follows_the_step(one_device, cfg):
    """The same batch from the same parameters has another loss at another step, and the same loss at the same step."""
    cfg = replace(cfg, log_interval=1)
    corpus, hw, _, step = setup(cfg)
    batch = jax.device_put(get_batch(corpus.train, cfg, 0), hw.batch)

    def loss(at):
        state = jax.jit(train.make_init_state(cfg, corpus.tokenizer.vocab_size), out_shardings=hw.layout)()
        return float(step(state._replace(step=jnp.int32(at)), batch, np.int32(at))[1]["loss"])

    assert loss(3) == loss(3) != loss(4)


def test_micro_batches_add_up_to_the_batch(one_device, cfg):
    """grad_accum 2 makes the same updates as one big batch, one optimiser step for two micro-batches."""
    cfg = replace(cfg, dropout=0.0, log_interval=1)
    whole, a = run_steps(cfg, 5)
    parts, b = run_steps(replace(cfg, grad_accum=2), 5)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    assert int(b.step) == 5
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params)):
        np.testing.assert_allclose(x, y, atol=1e-4)


def test_padding_of_the_vocabulary_has_no_part_in_training(cfg):
    """Its rows get no gradient: without decay they stay as they are, while those of real tokens move."""
    _, _, start, _ = setup(replace(cfg, weight_decay=0.0))
    before = np.asarray(start.params["wte"])
    V = load_corpus(cfg).tokenizer.vocab_size
    _, state = run_steps(replace(cfg, weight_decay=0.0, log_interval=1), 3)
    moved = (np.asarray(state.params["wte"]) != before).any(axis=1)
    assert len(moved) == 128 and moved[:V].all() and not moved[V:].any()


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs, says",
    [
        (dict(batch_size=12), "12 rows .* 8 groups .* --batch_size 16"),
        (dict(batch_size=20), "--batch_size 16"),
        (dict(batch_size=4, fsdp=4), "4 rows .* data 2 x fsdp 4 = 8 groups"),
        (dict(batch_size=16, grad_accum=4), "--batch_size 32, or --grad_accum 2"),
        (dict(fsdp=3), "8 devices .* --fsdp 3"),
        (dict(tensor=4), "n_head 2 .* --tensor 4"),
        (dict(n_embd=36, fsdp=8), "n_embd 36 .* --fsdp 8"),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(cfg, knobs, says):
    cfg = replace(cfg, **knobs)
    with pytest.raises(UserError, match=says):
        train.make_mesh_and_shardings(cfg, train.make_init_state(cfg, 65))


def test_hardware_is_known_to_one_function():
    """No other line of the program speaks of devices, platforms, processes or shardings."""
    words = r"jax\.sharding|PartitionSpec|NamedSharding|Mesh\b|device_count|devices\(|process_index|device_kind"
    words += r"|platform\b|distributed"
    inside = False
    modules = "config cli download data model checkpoint generate sample report chips hlo train"
    for name in modules.split():
        for line in (ROOT / f"{name}.py").read_text().splitlines():
            if re.match(r"(def|class) ", line):
                inside = line.startswith("def make_mesh_and_shardings")
            assert inside or not re.search(words, line), f"{name}.py: {line}"
        inside = False


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_an_evaluation_that_is_not_finite_is_no_end_by_itself(cfg, capsys):
    """Weights that are numbers may give logits that are not: no text can be drawn then, and the next step says why."""
    wild = dict(learning_rate=1e13, min_lr=0.0, warmup_steps=0, grad_clip=0.0, weight_decay=0.0, eval_interval=1)
    assert train.train(replace(cfg, **wild)) == 1
    out = capsys.readouterr().out
    assert "val_loss nan" in out and "error: loss or gradient not finite at step" in out


def test_evaluation_is_the_mean_over_the_whole_split(cfg):
    """Equal to a plain sum over windows of any length, ragged tail included, whatever the batch."""
    corpus, hw, state, _ = setup(cfg)
    graph, _ = nnx.split(abstract_model(cfg, corpus.tokenizer.vocab_size))
    eval_step = train.make_eval_step(graph)
    val = np.asarray(corpus.val)[: 16 * 5 + 7]
    total, T = 0.0, cfg.block_size
    for start in range(0, len(val) - 1, T):
        window = val[start : start + T + 1].astype(np.int32)[None]
        logits, _ = nnx.merge(graph, state.params)(window[:, :-1])
        shares = jax.nn.log_softmax(logits)[0]
        total -= float(shares[np.arange(len(shares)), window[0, 1:]].sum())
    expected = total / (len(val) - 1)
    assert train.evaluate(eval_step, state.params, val, cfg, hw) == pytest.approx(expected, rel=1e-5)
    halved = replace(cfg, batch_size=8)
    assert train.evaluate(eval_step, state.params, val, halved, hw) == pytest.approx(expected, rel=1e-5)


# --- the loop --------------------------------------------------------------------------------------------------------


def test_a_run_from_start_to_end(one_device, cfg, capsys):
    """Banner, log lines, samples, metrics, curve, checkpoints at and off the interval, and the command to sample."""
    assert train.train(replace(cfg, max_steps=23)) == 0
    out = capsys.readouterr().out
    for says in (
        "1 x cpu as data 1 x fsdp 1 x tensor 1, float32",
        f"{load_corpus(cfg).tokenizer.vocab_size} symbols (char)",
        "16 x 16 = 256 tokens",
        "compiling...",
        f"python sample.py --out_dir {cfg.out_dir}",
    ):
        assert says in out, says
    lines = re.findall(r"^step (\d+) \| loss \d\.\d{4} \| lr \d\.\de-\d\d \| [\d,]+ tok/s \| eta \d+m\d\ds$", out, re.M)
    assert lines == ["5", "10", "15", "20", "23"]
    found = records(cfg)
    assert [r["step"] for r in found if "val_loss" in r] == [0, 10, 20, 23]
    assert [r["step"] for r in found if "loss" in r] == [5, 10, 15, 20, 23]
    assert all(set(r) == {"step", "loss", "lr", "tokens_per_second", "grad_norm"} for r in found if "loss" in r)
    losses = [r["val_loss"] for r in found if "val_loss" in r]
    assert losses[-1] < losses[0] - 0.5
    assert Path(cfg.out_dir, "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in Path(cfg.out_dir, "checkpoints").iterdir()) == ["20", "23"]
    assert [p.name for p in Path(cfg.out_dir, "best").iterdir()] == ["23"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_exactly_max_steps_updates(one_device, cfg, steps):
    cfg = replace(cfg, max_steps=steps)
    assert train.train(cfg) == 0
    label = checkpoint.find(cfg.out_dir)
    assert (label is None) if steps == 0 else label.name == str(steps)
    assert records(cfg)[-1]["step"] == steps and "val_loss" in records(cfg)[-1]


def test_logged_loss_is_the_mean_since_the_last_line(one_device, cfg):
    cfg = replace(cfg, max_steps=10)
    losses, _ = run_steps(replace(cfg, log_interval=1), 10)
    train.train(cfg)
    logged = [r["loss"] for r in records(cfg) if "loss" in r]
    np.testing.assert_allclose(logged, [np.mean(losses[:5]), np.mean(losses[5:])], rtol=1e-5)


def interrupted(cfg, step, monkeypatch):
    """Ctrl-C while `step` is being prepared; the exit code."""

    def batch(tokens, cfg, i, rows):
        if i == step - 1:
            signal.raise_signal(signal.SIGINT)
        assert i < step, "the loop went on after the signal"
        return get_batch(tokens, cfg, i, rows)

    with monkeypatch.context() as patch:
        patch.setattr(train, "get_batch", batch)
        return train.train(cfg)


def test_signal_during_the_last_step_leaves_its_evaluation_to_the_next_run(one_device, cfg, monkeypatch):
    """The run has all its steps then, but is not finished; the same command finishes it."""
    assert interrupted(cfg, cfg.max_steps, monkeypatch) == 130
    assert checkpoint.find(cfg.out_dir).name == "20" and records(cfg)[-1]["step"] == 20 and "loss" in records(cfg)[-1]
    assert train.train(cfg) == 0
    assert [r["step"] for r in records(cfg) if "val_loss" in r] == [0, 10, 20]
    assert [r["step"] for r in records(cfg) if "loss" in r] == [5, 10, 15, 20]


@pytest.mark.parametrize("then", [dict(fsdp=8), dict(fsdp=2, tensor=2), "one device"])
def test_checkpoint_of_one_mesh_is_read_on_another(cfg, then, request):
    """Saved by fsdp 4 x tensor 2; exactly the same arrays on 8 devices laid out otherwise, and on one."""
    saved = replace(cfg, fsdp=4, tensor=2, log_interval=1)
    corpus, hw, state, step = setup(saved)
    state, _ = step(state, jax.device_put(get_batch(corpus.train, cfg, 0), hw.batch), np.int32(0))
    with checkpoint.Checkpoints(cfg.out_dir) as checkpoints:
        checkpoints.save(state, checkpoint.make_meta(saved, corpus))
    before = flat(state)
    if then == "one device":
        request.getfixturevalue("one_device")
    _, other, _, _ = setup(cfg if then == "one device" else replace(cfg, **then))
    with checkpoint.Checkpoints(cfg.out_dir) as checkpoints:
        restored = checkpoints.restore(other.state)
    assert [x.sharding for x in jax.tree.leaves(restored)] == jax.tree.leaves(other.layout)
    after = flat(restored)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_save_is_of_its_moment(one_device, cfg):
    """Saving goes on in the background while later steps reuse the state's memory; what is read back is the state
    that was saved."""
    corpus, hw, state, step = setup(replace(cfg, log_interval=1))
    with checkpoint.Checkpoints(cfg.out_dir) as checkpoints:
        for i in range(6):
            state, _ = step(state, jax.device_put(get_batch(corpus.train, cfg, i), hw.batch), np.int32(i))
            if i == 2:
                before = {name: x.copy() for name, x in flat(state).items()}
                checkpoints.save(state, checkpoint.make_meta(cfg, corpus))
    with checkpoint.Checkpoints(cfg.out_dir) as checkpoints:
        after = flat(checkpoints.restore(hw.state))
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_best_and_latest_do_not_evict_one_another(one_device, cfg):
    """best/ holds the lowest validation loss, however many come after it; checkpoints/ the latest two."""
    corpus, hw, state, _ = setup(cfg)
    folders = lambda: [sorted(int(p.name) for p in Path(cfg.out_dir, f).iterdir()) for f in ("checkpoints", "best")]
    for losses in {1: 2.0, 2: 1.5, 3: 1.7, 4: 1.6}, {5: 1.5, 6: 1.4, 7: 3.0}, {2: 1.3}:
        with checkpoint.Checkpoints(cfg.out_dir) as checkpoints:
            for step, loss in losses.items():
                state = state._replace(step=jnp.int32(step))
                checkpoints.save(state, checkpoint.make_meta(cfg, corpus), loss)
                if step > 2 or 1 in losses:
                    checkpoints.save(state, checkpoint.make_meta(cfg, corpus))
        assert folders() == ([[3, 4], [2]] if 1 in losses else [[6, 7], [6]] if 5 in losses else [[6, 7], [2]])
    assert checkpoint.find(cfg.out_dir).name == "7" and checkpoint.find(cfg.out_dir, "best").name == "2"


def test_log_interval_may_change_on_resume(one_device, cfg, monkeypatch):
    """The first line after a resume is the mean over all steps since the last line, whatever the intervals."""
    losses, _ = run_steps(replace(cfg, log_interval=1), 20)
    assert interrupted(replace(cfg, log_interval=8), 13, monkeypatch) == 130
    train.train(replace(cfg, log_interval=20))
    logged = {r["step"]: r["loss"] for r in records(cfg) if "loss" in r}
    assert logged[8] == pytest.approx(np.mean(losses[:8]), rel=1e-4)
    assert logged[20] == pytest.approx(np.mean(losses[8:]), rel=1e-4)


def test_finished_run_says_so(one_device, cfg, capsys):
    train.train(replace(cfg, max_steps=3))
    capsys.readouterr()
    assert train.train(replace(cfg, max_steps=3)) == 0
    out = capsys.readouterr().out
    assert "finished: 3 of 3 steps" in out and "--max_steps 6" in out and "--fresh" in out


def test_fresh_moves_the_old_run_aside(one_device, cfg):
    cfg = replace(cfg, max_steps=3)
    train.train(cfg)
    before = Path(cfg.out_dir, "metrics.jsonl").read_bytes()
    for n in 1, 2:
        train.train(cfg, fresh=True)
        assert checkpoint.find(f"{cfg.out_dir}.{n}").name == "3"
    assert Path(f"{cfg.out_dir}.1", "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError):
        train.train(replace(cfg, tensor=3), fresh=True)
    assert not Path(f"{cfg.out_dir}.3").exists(), "moved although the run was refused"


def test_another_model_tokenizer_or_corpus_is_refused(one_device, cfg, text_file, tmp_path):
    """Both values are named and nothing is touched."""
    train.train(replace(cfg, max_steps=3))
    files = {p: p.read_bytes() for p in Path(cfg.out_dir).rglob("*") if p.is_file()}
    for knobs, says in (dict(n_layer=3), "n_layer 1, not 3"), (dict(tokenizer="byte"), "tokenizer char, not byte"):
        with pytest.raises(UserError, match=says):
            train.train(replace(cfg, **knobs))
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text() + "!")
    with pytest.raises(UserError, match="sha256"):
        train.train(replace(cfg, dataset=str(other)))
    assert {p: p.read_bytes() for p in Path(cfg.out_dir).rglob("*") if p.is_file()} == files


def test_changed_rate_is_obeyed_and_reported(one_device, cfg, capsys):
    train.train(replace(cfg, max_steps=3))
    capsys.readouterr()
    changed = replace(cfg, max_steps=10, learning_rate=5e-3)
    train.train(changed)
    out = capsys.readouterr().out
    assert "learning_rate 0.01 -> 0.005" in out and "max_steps 3 -> 10" in out and "after step 3 of 10" in out
    assert records(cfg)[-2]["lr"] == pytest.approx(float(train.learning_rate(changed)(9)))


def test_loss_that_is_not_finite_stops_the_run(one_device, cfg, capsys, monkeypatch):
    """Exit 1 with the step named; the last good state is what the checkpoints hold."""
    real = train.token_losses

    def broken(graph, params, batch, rngs=None):  # infinite where a batch starts with the mark that step 8 brings
        return real(graph, params, batch, rngs) + jnp.where(batch[0, 0] == 7777, jnp.inf, 0.0)

    marked = np.full((16, 17), 7777, np.int32)
    batches = lambda tokens, cfg, step, rows: get_batch(tokens, cfg, step, rows) if step != 7 else marked
    monkeypatch.setattr(train, "token_losses", broken)
    monkeypatch.setattr(train, "get_batch", batches)
    assert train.train(replace(cfg, checkpoint_interval=5)) == 1
    assert "not finite at step 8" in capsys.readouterr().out
    assert checkpoint.find(cfg.out_dir).name == "5"
    assert [r["step"] for r in records(cfg)] == [0, 5]


def test_metrics_after_the_checkpoint_are_forgotten(one_device, cfg):
    """A run that was killed after writing more lines than its checkpoint covers never has a step twice."""
    train.train(replace(cfg, max_steps=10))
    path = Path(cfg.out_dir, "metrics.jsonl")
    path.write_text(path.read_text() + '{"step": 15, "loss": 1.0}\n{"step": 20, "val_l')
    train.train(replace(cfg, max_steps=20))
    steps = [(r["step"], "loss" in r) for r in records(cfg)]
    assert len(steps) == len(set(steps)) and steps == sorted(steps, key=lambda s: (s[0], not s[1]))
    assert all(r.get("loss") != 1.0 for r in records(cfg))


def test_flops_of_tiny_by_hand():
    """6 x 10,647,552 + 12 x 6 x 384 x 256 = 71 MFLOP a token."""
    assert flops_per_token(Config(), 10_647_552) == 63_885_312 + 7_077_888
