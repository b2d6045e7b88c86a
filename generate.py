"""Text from a model, one token at a time.  Fourth file to read; sample.py and train.py use it.

The model would have to read all the text again for every new token, were it not for the cache: the keys and values of
past positions do not change, so they are kept, and a step computes those of one token.  When the cache is full (it
holds block_size tokens, and one more is to be read), the last half of the window is read into a fresh one, and so on.

Two compiled programs do everything, whatever the length of prompt and text: `prefill` reads PREFILL tokens of the
prompt, `decode` makes up to DECODE new ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from config import Config, UserError, check_ranges, knob
from corpus import Corpus
from model import GPT, abstract_model

PREFILL, DECODE = 64, 16


# fmt: off
@dataclass(frozen=True)
class SampleConfig:
    """One call of sample.py."""
    preset: str = knob("tiny", "read the run in out/<preset>")
    out_dir: str = knob("", "read the run in this directory instead")
    prompt: str = knob(None, "the text to continue, \\n being a line break; or what is piped in, or a line break")
    prompt_file: str = knob("", "read the text to continue from this file")
    max_new_tokens: int = knob(300, "tokens to add", 0)
    temperature: float = knob(0.8, "below 1 safer, above 1 wilder; 0 always takes the likeliest token", 0, 1e6)
    top_k: int = knob(0, "choose among the k likeliest tokens; 0 means all", 0)
    top_p: float = knob(1.0, "choose among the likeliest tokens that together hold this share", 0)
    num_samples: int = knob(1, "how many continuations", 1)
    seed: int = knob(1337, "same seed, same text", 0, 2**32)
    which: str = knob("best", "lowest validation loss, or most steps", choices="best latest")
    tensor: int = knob(1, "devices over which heads and MLP width are split", 1)

    def __post_init__(self):
        check_ranges(self)
        if self.top_p > 1:
            raise UserError(f"--top_p {self.top_p}: a share of the probability, 1 at most")
        if self.prompt is not None and self.prompt_file:
            raise UserError("--prompt and --prompt_file: give one of them")
        if self.prompt == "":
            raise UserError("--prompt is empty: the model needs at least one character to start from")
# fmt: on


def choose(logits: jax.Array, key: jax.Array, temperature, top_k, top_p) -> jax.Array:
    """Draw a token per row of logits [B, V] -> [B].  Temperature first, then top_k, then top_p, as most samplers do.

    temperature 0: the likeliest.  top_k 0: all."""
    V = logits.shape[-1]
    top_k = jnp.where(top_k == 0, V, top_k)

    def restrict(scaled):
        ranked = -jnp.sort(-scaled)  # [B, V], likeliest first
        share = jax.nn.softmax(jnp.where(jnp.arange(V) < top_k, ranked, -jnp.inf))
        before = jnp.cumsum(share, axis=-1) - share  # what the likelier ones hold; below top_p means: still needed
        kept = (before < jnp.maximum(top_p, 1e-6)) & (share > 0)
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(scaled >= least, scaled, -jnp.inf)

    scaled = logits / jnp.maximum(temperature, 1e-6)
    # Sorting a large vocabulary can take longer than the model, so it is not done for nothing.
    scaled = jax.lax.cond((top_k < V) | (top_p < 1), restrict, lambda scaled: scaled, scaled)
    return jnp.where(temperature == 0, jnp.argmax(logits, axis=-1), jax.random.categorical(key, scaled))


# jax.jit, for the first time here: the first call with given shapes runs the Python once, on placeholders that have a
# shape and no values (it traces), and compiles what it saw; later calls run that.  static: the graph is no array, but
# part of the program.  donate: the old caches' memory is used for the new ones.
@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(graph, params, caches, tokens, start):
    """The caches with the keys and values of tokens [B, PREFILL] at positions start, start + 1, ... written in."""
    return nnx.merge(graph, params)(tokens, start, caches)[1]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(graph, params, caches, token, start, n, key, made, temperature, top_k, top_p):
    """n new tokens (n <= DECODE) after `token` [B], which stands at position `start`; `made` is how many came before.

    Returns the caches, tokens int32 [B, DECODE] of which n are valid, and whether no logit was NaN or +inf (those of
    the padding are -inf).
    """
    model = nnx.merge(graph, params)

    def step(i, carry):
        caches, token, out, finite = carry
        logits, caches = model(token[:, None], start + i, caches)  # [B, 1, V]
        logits = logits[:, 0]
        token = choose(logits, jax.random.fold_in(key, made + i), temperature, top_k, top_p)
        return caches, token, out.at[:, i].set(token), finite & (logits < jnp.inf).all()

    out = jnp.zeros((token.shape[0], DECODE), jnp.int32)
    caches, _, out, finite = jax.lax.fori_loop(0, n, step, (caches, token, out, True))
    return caches, out, finite


def empty_caches(cfg: Config, B: int, layout=None) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values [B, H, S, D] of every block, S being block_size rounded up to whole chunks of PREFILL."""
    shape = B, cfg.n_head, -(-cfg.block_size // PREFILL) * PREFILL, cfg.n_embd // cfg.n_head
    zeros = partial(jnp.zeros, shape, device=layout)
    return [(zeros(), zeros()) for _ in range(cfg.n_layer)]


def generate(model: GPT, cfg: Config, prompt: np.ndarray, how: SampleConfig, layout=None) -> Iterator[np.ndarray]:
    """Continue prompt int [P], num_samples times; yields new tokens [num_samples, n], n <= DECODE, as they are made.

    layout: of the caches, if the model is on several devices (see Hardware in train.py).
    """
    graph, params = nnx.split(model)
    key = jax.random.key(how.seed)
    T, B = cfg.block_size, how.num_samples
    settings = np.float32(how.temperature), np.int32(min(how.top_k, 2**30)), np.float32(how.top_p)
    text = np.tile(np.asarray(prompt, np.int32), (B, 1))  # [B, N]
    caches, position, n_made = None, T, 0
    while n_made < how.max_new_tokens:
        if position == T:  # at the start, and whenever the cache is full
            window = text if text.shape[1] <= T else text[:, -(T // 2) :]
            position = window.shape[1] - 1  # of the last token, which decode reads itself
            caches = empty_caches(cfg, B, layout)
            for i in range(0, position, PREFILL):
                # A last chunk of fewer tokens is filled up.  The filling's keys are overwritten before any query may
                # see them: a query sees no position after its own, and writes its own first.
                chunk = window[:, i : i + PREFILL]
                chunk = np.pad(chunk, ((0, 0), (0, PREFILL - chunk.shape[1])))
                caches = prefill(graph, params, caches, chunk, np.int32(i))
        n = min(DECODE, T - position, how.max_new_tokens - n_made)
        here = np.int32(position), np.int32(n), key, np.int32(n_made)
        caches, out, finite = decode(graph, params, caches, text[:, -1], *here, *settings)
        if not finite:
            raise UserError("the model's logits are not finite: this checkpoint's weights are damaged")
        new = np.asarray(out)[:, :n]
        text = np.concatenate([text, new], axis=1)[:, -(T + 1) :]  # no more is ever read again
        position, n_made = position + n, n_made + n
        yield new


def sample_text(params, cfg: Config, corpus: Corpus, layout) -> str:
    """What train.py shows at an evaluation: a line break, or else the corpus's first token, continued in float32."""
    tokenizer = corpus.tokenizer
    breaks = tokenizer.kind != "char" or "\n" in tokenizer.symbols
    prompt = tokenizer.encode("\n") if breaks else np.asarray(corpus.train[0])[:1]
    graph, _ = nnx.split(abstract_model(cfg, tokenizer.vocab_size))
    how = SampleConfig(max_new_tokens=cfg.sample_tokens, seed=cfg.seed)
    return tokenizer.decode([i for new in generate(nnx.merge(graph, params), cfg, prompt, how, layout) for i in new[0]])
