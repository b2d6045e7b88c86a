"""Text from a trained model, one token at a time.  Fifth file to read.

    python sample.py --preset tiny --prompt "ROMEO:" --max_new_tokens 300 --temperature 0.8

Reads the architecture, the tokenizer and the weights from a checkpoint in out/<preset>; needs no corpus.  Text alone
goes to stdout as it is made, everything else to stderr.

The model would have to read all the text again for every new token, were it not for the cache: the keys and values of
past positions do not change, so they are kept, and a step computes those of one token.  When the cache is full (the
text has reached block_size tokens), the last half of the window is read into a fresh cache and generation goes on.

Two compiled programs do everything, whatever the length of prompt and text: `prefill` reads PREFILL tokens of the
prompt, `decode` makes up to DECODE new ones.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoint import load_model
from config import Config, UserError, check_ranges, knob, parse, run
from model import GPT

PREFILL, DECODE = 64, 16


# fmt: off
@dataclass(frozen=True)
class SampleConfig:
    """One call of sample.py."""
    preset: str = knob("tiny", "read the run in out/<preset>")
    out_dir: str = knob("", "read the run in this directory instead")
    prompt: str = knob("\n", "the text to continue")
    max_new_tokens: int = knob(300, "tokens to add", 0)
    temperature: float = knob(0.8, "below 1 bolder, above 1 wilder; 0 always takes the likeliest token", 0)
    top_k: int = knob(0, "choose among the k likeliest tokens; 0 means all", 0)
    top_p: float = knob(1.0, "choose among the likeliest tokens that together hold this share", 0)
    num_samples: int = knob(1, "how many continuations", 1)
    seed: int = knob(1337, "same seed, same text", 0)
    which: str = knob("best", "best: lowest validation loss; latest: most steps")

    def __post_init__(self):
        check_ranges(self)
        if self.which not in ("best", "latest"):
            raise UserError(f"--which {self.which}: choose from best, latest")
        if not self.prompt:
            raise UserError("--prompt is empty: the model needs at least one character to start from")
# fmt: on


def choose(logits: jax.Array, key: jax.Array, temperature, top_k, top_p) -> jax.Array:
    """Draw a token per row of logits [B, V] -> [B].  Temperature first, then top_k, then top_p, as most samplers do."""
    scaled = logits / jnp.maximum(temperature, 1e-6)
    ranked = -jnp.sort(-scaled)  # [B, V], likeliest first
    share = jax.nn.softmax(jnp.where(jnp.arange(logits.shape[-1]) < top_k, ranked, -jnp.inf))
    before = jnp.cumsum(share, axis=-1) - share  # what the likelier ones hold; below top_p means: still needed
    kept = (before < jnp.maximum(top_p, 1e-6)) & (share > 0)
    least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    drawn = jax.random.categorical(key, jnp.where(scaled >= least, scaled, -jnp.inf))
    return jnp.where(temperature == 0, jnp.argmax(logits, axis=-1), drawn)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(graph, params, caches, tokens, start):
    """The caches with the keys and values of tokens [B, PREFILL] at positions start, start + 1, ... written in."""
    return nnx.merge(graph, params)(tokens, start, caches)[1]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(graph, params, caches, token, start, n, key, made, temperature, top_k, top_p):
    """n new tokens (n <= DECODE) after `token` [B], which stands at position `start`; `made` is how many came before.

    Returns the caches, tokens int32 [B, DECODE] of which n are valid, and whether every logit was finite.
    """
    model = nnx.merge(graph, params)

    def step(i, carry):
        caches, token, out, finite = carry
        logits, caches = model(token[:, None], start + i, caches)  # [B, 1, V]
        logits = logits[:, 0]
        token = choose(logits, jax.random.fold_in(key, made + i), temperature, top_k, top_p)
        return caches, token, out.at[:, i].set(token), finite & jnp.isfinite(logits).all()

    out = jnp.zeros((token.shape[0], DECODE), jnp.int32)
    caches, _, out, finite = jax.lax.fori_loop(0, n, step, (caches, token, out, True))
    return caches, out, finite


def empty_caches(cfg: Config, B: int, dtype) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values [B, H, S, D] of every block, S being block_size rounded up to whole chunks of PREFILL."""
    shape = B, cfg.n_head, -(-cfg.block_size // PREFILL) * PREFILL, cfg.n_embd // cfg.n_head
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(cfg.n_layer)]


def generate(model: GPT, cfg: Config, prompt: np.ndarray, how: SampleConfig) -> Iterator[np.ndarray]:
    """Continue prompt int [P], num_samples times; yields new tokens [num_samples, n], n <= DECODE, as they are made."""
    graph, params = nnx.split(model)
    key = jax.random.key(how.seed)
    T, B = cfg.block_size, how.num_samples
    settings = np.float32(how.temperature), np.int32(how.top_k or 2**30), np.float32(how.top_p)
    text = np.tile(np.asarray(prompt, np.int32), (B, 1))  # [B, N], grows
    caches, position, n_made = None, T, 0
    while n_made < how.max_new_tokens:
        if position == T:  # at the start, and whenever the cache is full
            window = text if text.shape[1] <= T else text[:, -(T // 2) :]
            position = window.shape[1] - 1  # of the last token, which decode reads itself
            caches = empty_caches(cfg, B, model.dtype)
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
        text = np.concatenate([text, new], axis=1)
        position, n_made = position + n, n_made + n
        yield new


def main(argv):
    how, _ = parse(SampleConfig, argv, __doc__)
    model, cfg, tokenizer, step = load_model(how.out_dir, how.which)
    prompt = tokenizer.encode(how.prompt)
    print(f"{how.out_dir}, step {step}", file=sys.stderr)
    start, made, shown = time.perf_counter(), np.zeros((how.num_samples, 0), np.int32), 0

    def show(row: int, shown: int, final: bool) -> int:
        """Print what is new in a row of `made`; a character whose bytes are not all there yet waits."""
        text = how.prompt + tokenizer.decode(made[row])
        text = text if final else text.rstrip("\ufffd")
        print(text[shown:], end="\n" if final else "", flush=True)
        return len(text)

    for new in generate(model, cfg, prompt, how):
        made = np.concatenate([made, new], axis=1)
        if how.num_samples == 1:
            shown = show(0, shown, False)
    seconds = time.perf_counter() - start
    for row in range(how.num_samples):
        if row:
            print("-" * 40)
        show(row, shown, True)
    rate = made.size / seconds
    print(f"{made.size:,} tokens in {seconds:.1f} s: {rate:,.0f} tokens/s, compiling included", file=sys.stderr)


if __name__ == "__main__":
    run(main)
