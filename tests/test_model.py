"""model.py against formulas, numpy and finite differences."""

import math
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from config import PRESETS, Config
from model import GPT

V = 65


@pytest.fixture
def cfg(cfg):
    """Two blocks, so that the second one's input is not the embedding."""
    return replace(cfg, n_layer=2)


def numpy_forward(params: dict, tokens: np.ndarray, cfg: Config) -> np.ndarray:
    """The same architecture written a second time: float64, one sequence and one head at a time, no library."""
    D = cfg.n_embd // cfg.n_head

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turn(x):  # rope as complex numbers: channel i is the real part, i + D/2 the imaginary part
        z = x[:, : D // 2] + 1j * x[:, D // 2 :]
        z = z * np.exp(1j * np.outer(np.arange(len(x)), cfg.rope_theta ** (-2 * np.arange(D // 2) / D)))
        return np.concatenate([z.real, z.imag], axis=1)

    out = []
    for row in tokens:
        x = params["wte"][row]
        for block in params["h"]:
            a = block["attn"]
            y = norm(x, block["attn_norm"]["scale"])
            q, k, v = (y @ a[f"{name}_proj"]["kernel"] for name in "qkv")
            heads = []
            for h in range(cfg.n_head):
                cut = slice(h * D, (h + 1) * D)
                qh, kh = turn(norm(q[:, cut], a["q_norm"]["scale"])), turn(norm(k[:, cut], a["k_norm"]["scale"]))
                head = np.zeros((len(row), D))
                for t in range(len(row)):  # the mask, spelled out: position t sees 0 .. t
                    score = kh[: t + 1] @ qh[t] / math.sqrt(D)
                    weight = np.exp(score - score.max())
                    head[t] = weight / weight.sum() @ v[: t + 1, cut]
                heads.append(head)
            x = x + np.concatenate(heads, axis=1) @ a["o_proj"]["kernel"]
            m, y = block["mlp"], norm(x, block["mlp_norm"]["scale"])
            gate = y @ m["gate_proj"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ m["up_proj"]["kernel"])) @ m["down_proj"]["kernel"]
        out.append(norm(x, params["norm"]["scale"]) @ params["wte"][:V].T)
    return np.stack(out)


def to_numpy(model) -> dict:
    """The parameters as nested dicts and lists of float64 arrays."""
    pure = nnx.to_pure_dict(nnx.state(model))
    pure = jax.tree.map(lambda x: np.asarray(x, np.float64), pure)
    return {**pure, "h": [pure["h"][i] for i in range(len(pure["h"]))]}


@nnx.jit
def call(model, *args):
    return model(*args)


def roughen(model):
    """Random norm scales and larger matrices, so that no factor is one and no term is small by accident."""
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    leaves = [x * 10 if x.ndim > 1 else x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def test_logits_equal_numpy(cfg):
    """Embedding, RMSNorm, RoPE, QK-norm, masked attention, SwiGLU and the tied head agree with a second writing."""
    model = roughen(GPT(cfg, V, nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, V, (3, cfg.block_size))
    expected = numpy_forward(to_numpy(model), tokens, cfg)
    assert expected.std() > 0.5  # logits large enough to tell models apart
    logits, _ = call(model, tokens)
    np.testing.assert_allclose(logits[:, :, :V], expected, rtol=1e-5, atol=1e-5)
    assert logits.shape[-1] == 128 and (logits[:, :, V:] == -jnp.inf).all()


def test_no_position_sees_a_later_one(cfg):
    """The logits at t have a gradient with respect to the embedding at s if s <= t, and exactly none if s > t."""
    graph, params = nnx.split(roughen(GPT(cfg, V, nnx.Rngs(0))))
    T = cfg.block_size
    tokens = jnp.arange(T)[None]  # another token at each position, so row s of wte is the embedding at position s

    def output(params, t):  # logits of the tokens that are not in the input: as a head, they use other rows of wte
        return (nnx.merge(graph, params)(tokens)[0][0, t, T:] ** 2).sum()

    grad = jax.jit(jax.grad(output))
    for t in range(T):
        size = np.abs(grad(params, t)["wte"][...]).sum(axis=1)[:T]
        assert (size[: t + 1] > 0).all(), "an earlier token has no influence"
        assert (size[t + 1 :] == 0).all(), "a later token has influence"


def test_parameter_count_by_formula():
    """V C + L (4 C^2 + 3 C F + 2 C + 2 D) + C; the preset tiny has 10.6 million within 2 %.  V is 128 instead of 65."""
    for preset in PRESETS:
        cfg = Config(**PRESETS[preset])
        params = nnx.eval_shape(lambda c=cfg: nnx.state(GPT(c, V, nnx.Rngs(0))))
        C, F, D = cfg.n_embd, cfg.n_hidden, cfg.n_embd // cfg.n_head
        count = sum(x.size for x in jax.tree.leaves(params))
        assert count == 128 * C + cfg.n_layer * (4 * C * C + 3 * C * F + 2 * C + 2 * D) + C
        if preset == "tiny":
            assert F == 1024 and abs(count / 10.6e6 - 1) < 0.02


@contextmanager
def float64():
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def test_gradients_equal_finite_differences(cfg):
    """In float64, (loss(p + h d) - loss(p - h d)) / 2h equals grad . d for a random direction d of each parameter."""
    with float64():
        cfg = replace(cfg, n_embd=8, block_size=8)
        model = roughen(GPT(cfg, V, nnx.Rngs(0), "float64"))
        graph, params = nnx.split(model)
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        tokens = np.random.default_rng(0).integers(0, V, (2, 9))

        @jax.jit
        def loss(params):
            logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

        grads = jax.grad(loss)(params)
        assert loss(params).dtype == jnp.float64
        leaves, tree = jax.tree.flatten(params)
        for i, (x, g) in enumerate(zip(leaves, jax.tree.leaves(grads))):
            d = np.random.default_rng(i).normal(size=x.shape)
            at = lambda h, i=i, x=x, d=d: loss(jax.tree.unflatten(tree, leaves[:i] + [x + h * d] + leaves[i + 1 :]))
            np.testing.assert_allclose((at(3e-6) - at(-3e-6)) / 6e-6, (g * d).sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_untrained_loss_is_near_ln_v(seed):
    """Before training every symbol is about as likely as any other: within 0.1 of ln 65, on the preset tiny."""
    cfg = Config()
    tokens = np.random.default_rng(seed).integers(0, V, (2, cfg.block_size + 1))
    logits, _ = call(GPT(cfg, V, nnx.Rngs(seed)), tokens[:, :-1])
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()
    assert abs(loss - math.log(V)) < 0.1


def test_bfloat16_keeps_logits_and_norms_in_float32(cfg):
    """Products are computed in bfloat16; logits come out in float32, close to the float32 model's but not equal."""
    tokens = np.random.default_rng(0).integers(0, V, (2, cfg.block_size))
    both = (call(roughen(GPT(cfg, V, nnx.Rngs(0), dtype)), tokens)[0] for dtype in ("float32", "bfloat16"))
    exact, half = (logits[:, :, :V] for logits in both)
    assert half.dtype == jnp.float32
    assert not (half == half.astype(jnp.bfloat16)).all(), "the logits were rounded to bfloat16"
    assert 0 < jnp.abs(exact - half).mean() < 0.05 * exact.std()


@pytest.mark.parametrize("stops, unwritten", [((5, 6, 16), 0.0), ((4, 8, 12, 16), jnp.nan)])
def test_cached_logits_equal_whole_sequence_logits(cfg, stops, unwritten):
    """Reading a text in pieces, with the keys and values of the earlier ones cached, changes nothing; and of a cache
    only the quarters are read that something was written in."""
    model = roughen(GPT(cfg, V, nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, V, (2, 16))
    whole, _ = call(model, tokens)
    caches = [(jnp.full((2, 2, 16, 16), unwritten), jnp.full((2, 2, 16, 16), unwritten))] * 2
    pieces = []
    for start, stop in zip((0, *stops), stops):
        logits, caches = call(model, tokens[:, start:stop], start, caches)
        pieces.append(logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=1e-5)


def test_dropout_needs_a_key_and_follows_it(cfg):
    """Without rngs nothing is dropped; the same key drops the same, another key something else."""
    model = GPT(replace(cfg, dropout=0.5), V, nnx.Rngs(0))
    tokens = np.zeros((1, cfg.block_size), int)
    run = lambda key: model(tokens, rngs=nnx.Rngs(dropout=jax.random.key(key)))[0]
    assert (model(tokens)[0] == model(tokens)[0]).all()
    assert (run(1) == run(1)).all()
    assert (run(1) != run(2)).any() and (run(1) != model(tokens)[0]).any()
