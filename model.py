"""The GPT: pure maths on arrays.  Second file to read.

A decoder-only transformer with the anatomy of today's open models (Llama, Gemma 3, Qwen3): tokens in, for every
position a guess at the next token out.  There is no optimiser in this file, no data, no device and no mesh: a
module holds arrays and says what to do with them, and the same lines run on one CPU and on a TPU pod.

    letter  meaning                              in config.py
    B       sequences in a batch                 batch_size
    T       positions in a sequence              block_size at most
    S       positions that a query may look at   T, or the length of the key/value cache
    C       channels of the residual stream      n_embd
    H       attention heads                      n_head
    D       channels of one head                 C / H
    F       hidden channels of the MLP           about 8/3 C, see Config.n_hidden
    V       vocabulary, padded                   the tokenizer's, rounded up

Parameters are float32.  `dtype` is what the matrix products are computed in; softmax, the norms' statistics, the
logits and the loss are float32 always.

Flax NNX in one paragraph, for PyTorch readers: nnx.Module is nn.Module and nnx.Param is nn.Parameter.  What differs
is the step: JAX differentiates and compiles pure functions, whose result depends on their arguments alone and which
change nothing.  So train.py takes the model apart (`nnx.split`: structure and arrays) and puts it together again
(`nnx.merge`) inside the function that is compiled.  Nor do arrays change: what "writes" to one returns another.
`param[...]` is a Param's array, and `nnx.data([...])` what nn.ModuleList is.  There is no global random state either: a
key is a value, which gives the same numbers each time; `rngs.params()` derives a new one.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from config import Config

VOCAB_MULTIPLE = 128  # matrix units are as wide, and any sensible number of devices divides it
INIT_STD = 0.02  # as in GPT-2
EMBED_STD = 0.01  # its rows are also the output head: at 0.02 the first guesses are confident enough to cost 0.1 nats


def residual_std(cfg: Config) -> float:
    """For the 2 n_layer matrices that write into the residual stream: their sum starts with the variance of one."""
    return INIT_STD / (2 * cfg.n_layer) ** 0.5


def widen(x: jax.Array) -> jax.Array:
    """bfloat16 to float32, for sums and angles: its 8 bits round 257 to 256.  float32 and float64 stay as they are."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class RMSNorm(nnx.Module):
    """y = scale * x / sqrt(mean(x^2) + eps), over the last axis.  Zhang & Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, size: int):
        self.scale = nnx.Param(jnp.ones(size))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = widen(x)
        y = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return (self.scale[...] * y).astype(x.dtype)


class Linear(nnx.Module):
    """y = x W without a bias.  W is [in, out], normal(0, std)."""

    def __init__(self, n_in: int, n_out: int, std: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (n_in, n_out)))

    def __call__(self, x: jax.Array) -> jax.Array:
        # One product over all B*T rows: given [B, T, in], XLA's CPU compiler takes twice as long for the gradient of W.
        rows = x.reshape(-1, x.shape[-1])  # [B*T, in]
        return (rows @ self.kernel[...].astype(x.dtype)).reshape(*x.shape[:-1], -1)


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding.  Su et al. 2021, arXiv:2104.09864.  x [B, T, H, D], positions [T].

    Channels i and i + D/2 are a point in the plane, turned by the angle  position * theta^(-2i/D).  The dot product of
    a query and a key then depends on how far apart they stand and not on where.
    """
    D = x.shape[-1]
    angle = positions[:, None, None] * theta ** (-jnp.arange(0, D, 2) / D)  # [T, 1, D/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(widen(x), 2, axis=-1)  # [B, T, H, D/2] each
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q, k, v, positions):
    """softmax(q k^T / sqrt(D)) v: a position gathers from those up to itself.  Vaswani et al. 2017, arXiv:1706.03762.

    Queries q [B, H, T, D], which stand at positions [T]; keys and values k, v [B, H, S, D], at 0 .. S-1.
    """
    may_see = positions[:, None] >= jnp.arange(k.shape[2])  # [T, S]
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=widen(q).dtype) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(may_see, scores, -jnp.inf)).astype(q.dtype)  # [B, H, T, S]
    return jnp.einsum("bhts,bhsd->bhtd", weights, v)


def attend_to_written(q, k, v, positions):
    """The same, reading only the quarters of a cache that have anything in them: sampling waits for what is read.

    A compiled program has fixed shapes, so the length read is one of four, and lax.switch chooses while it runs."""

    def first(n):
        return lambda q, k, v: attend(q, k[:, :, :n], v[:, :, :n], positions)

    S = k.shape[2]
    return jax.lax.switch(positions[-1] * 4 // S, [first(-(-S * i // 4)) for i in (1, 2, 3, 4)], q, k, v)


class Attention(nnx.Module):
    """`attend` in each of H heads, between projections.

    Queries and keys are normalised first (QK-norm: Henry et al. 2020, arXiv:2010.04245), which bounds the scores and
    so allows the high learning rates of the presets.
    """

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        C, D = cfg.n_embd, cfg.n_embd // cfg.n_head
        self.n_head, self.rope_theta = cfg.n_head, cfg.rope_theta
        self.q_proj = Linear(C, C, INIT_STD, rngs)
        self.k_proj = Linear(C, C, INIT_STD, rngs)
        self.v_proj = Linear(C, C, INIT_STD, rngs)
        self.o_proj = Linear(C, C, residual_std(cfg), rngs)
        self.q_norm = RMSNorm(D)
        self.k_norm = RMSNorm(D)

    def __call__(self, x, positions, cache=None):
        """x [B, T, C] -> [B, T, C], and the cache of keys and values with those of `positions` written into it."""
        B, T, C = x.shape

        q, k, v = (proj(x).reshape(B, T, self.n_head, -1) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = rope(self.q_norm(q), positions, self.rope_theta)
        k = rope(self.k_norm(k), positions, self.rope_theta)
        # Not earlier: on a CPU, norm and rope on the transposed arrays cost a third of nano's speed.
        q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))  # [B, H, T, D]
        if cache is None:
            # Each head's T x T weights are computed again for the gradient: a TPU does that sooner than it reads them.
            y = jax.checkpoint(attend)(q, k, v, positions)
        else:
            k, v = (jax.lax.dynamic_update_slice(old, new, (0, 0, positions[0], 0)) for old, new in zip(cache, (k, v)))
            y = attend_to_written(q, k, v, positions)
        return self.o_proj(y.swapaxes(1, 2).reshape(B, T, C)), (k, v)


class MLP(nnx.Module):
    """(silu(x W_gate) * x W_up) W_down, silu(z) = z sigmoid(z).  SwiGLU: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        C, F = cfg.n_embd, cfg.n_hidden
        self.gate_proj = Linear(C, F, INIT_STD, rngs)
        self.up_proj = Linear(C, F, INIT_STD, rngs)
        self.down_proj = Linear(F, C, residual_std(cfg), rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))  # [B, T, F] inside


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the stream x runs through, each part adds its correction."""

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(cfg.n_embd)
        self.attn = Attention(cfg, rngs)
        self.mlp_norm = RMSNorm(cfg.n_embd)
        self.mlp = MLP(cfg, rngs)
        self.drop = nnx.Dropout(cfg.dropout)

    def __call__(self, x, positions, cache=None, rngs=None):
        y, cache = self.attn(self.attn_norm(x), positions, cache)
        x = x + self.drop(y, deterministic=rngs is None, rngs=rngs)
        y = self.mlp(self.mlp_norm(x))
        return x + self.drop(y, deterministic=rngs is None, rngs=rngs), cache


class GPT(nnx.Module):
    """Token ids [B, T] -> logits [B, T, V]: for each position, how likely each token is to come next."""

    def __init__(self, cfg: Config, vocab_size: int, rngs: nnx.Rngs, dtype: str = "float32"):
        self.dtype, self.vocab_size = jnp.dtype(dtype), vocab_size
        V = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.wte = nnx.Param(EMBED_STD * jax.random.normal(rngs.params(), (V, cfg.n_embd)))
        self.h = nnx.data([Block(cfg, rngs) for _ in range(cfg.n_layer)])
        self.norm = RMSNorm(cfg.n_embd)
        self.drop = nnx.Dropout(cfg.dropout)
        self.remat = cfg.remat

    def __call__(self, tokens: jax.Array, start=0, caches=None, rngs: nnx.Rngs | None = None):
        """Logits [B, T, V] in float32, and the key/value caches, one pair [B, H, S, D] per block.

        The padding's logits are -inf, so that it adds nothing to a loss, gets no gradient, and is never drawn.
        start: position of tokens[:, 0].  With caches, the tokens see what stands there before `start` as well.
        rngs: Rngs(dropout=key) to train; None, as in evaluation and sampling, drops nothing.
        """
        B, T = tokens.shape
        positions = start + jnp.arange(T)
        x = self.wte[...][tokens].astype(self.dtype)  # [B, T, C]
        x = self.drop(x, deterministic=rngs is None, rngs=rngs)
        # Rematerialisation: of a block only its input is kept; the backward pass computes the rest of it a second time.
        apply = nnx.remat(Block.__call__) if self.remat and rngs is not None else Block.__call__
        new_caches = []
        for block, cache in zip(self.h, caches or [None] * len(self.h)):
            x, cache = apply(block, x, positions, cache, rngs)
            new_caches.append(cache)
        # The embedding is also the output head (tied: Press & Wolf 2016, arXiv:1608.05859): one array, used twice.
        rows, wte = self.norm(x).reshape(B * T, -1), self.wte[...].astype(self.dtype)
        logits = jnp.dot(rows, wte.T, preferred_element_type=widen(rows).dtype)  # [B*T, V]
        logits = jnp.where(jnp.arange(len(wte)) < self.vocab_size, logits, -jnp.inf)
        return logits.reshape(B, T, -1), new_caches


def abstract_model(cfg: Config, vocab_size: int, dtype: str = "float32") -> GPT:
    """The model with shapes in place of arrays: costs no memory, and `nnx.merge` puts real arrays in their places."""
    return nnx.eval_shape(lambda: GPT(cfg, vocab_size, nnx.Rngs(0), dtype))
