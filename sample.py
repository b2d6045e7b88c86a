"""Text from a trained model, one token at a time.

    python sample.py --preset tiny --prompt "ROMEO:" --max_new_tokens 300 --temperature 0.8
    python sample.py --preset tiny --interactive

Reads the architecture, the tokenizer and the weights from a checkpoint in out/<preset>; needs no corpus.  Text alone
goes to stdout as it is made, everything else to stderr.

The model would have to read all the text again for every new token, were it not for the cache: the keys and values of
past positions do not change, so they are kept, and a step computes those of one token.  When the cache is full (it
holds block_size tokens, and one more is to be read), the last half of the window is read into a fresh one, and so on.

Two compiled programs do everything, whatever the length of prompt and text: `prefill` reads PREFILL tokens of the
prompt, `decode` makes up to DECODE new ones.
"""

import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import checkpoint
from cli import parse, run
from config import PRESETS, Config, UserError, check_ranges, knob
from data import Corpus, make_tokenizer
from model import GPT, abstract_model
from storage import run_path

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
    which: str = knob("best", "best: lowest validation loss; latest: most steps")
    tensor: int = knob(1, "devices over which heads and MLP width are split", 1)

    def __post_init__(self):
        check_ranges(self)
        if self.which not in ("best", "latest"):
            raise UserError(f"--which {self.which}: choose from best, latest")
        if self.top_p > 1:
            raise UserError(f"--top_p {self.top_p}: a share of the probability, 1 at most")
        if self.prompt is not None and self.prompt_file:
            raise UserError("--prompt and --prompt_file: give one of them")
        if self.prompt == "":
            raise UserError("--prompt is empty: the model needs at least one character to start from")
# fmt: on


def choose(logits: jax.Array, key: jax.Array, temperature, top_k, top_p) -> jax.Array:
    """Draw a token per row of logits [B, V] -> [B].  Temperature first, then top_k, then top_p, as most samplers do."""
    V = logits.shape[-1]

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


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(graph, params, caches, tokens, start):
    """The caches with the keys and values of tokens [B, PREFILL] at positions start, start + 1, ... written in."""
    return nnx.merge(graph, params)(tokens, start, caches)[1]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(graph, params, caches, token, start, n, key, made, temperature, top_k, top_p):
    """n new tokens (n <= DECODE) after `token` [B], which stands at position `start`; `made` is how many came before.

    Returns the caches, tokens int32 [B, DECODE] of which n are valid, and whether no logit was NaN or infinite.
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
    settings = np.float32(how.temperature), np.int32(min(how.top_k or 2**30, 2**30)), np.float32(how.top_p)
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
    prompt = tokenizer.encode("\n") if tokenizer.kind == "byte" or "\n" in tokenizer.symbols else corpus.train[:1]
    graph, _ = nnx.split(abstract_model(cfg, tokenizer.vocab_size))
    how = SampleConfig(max_new_tokens=cfg.sample_tokens, seed=cfg.seed)
    return tokenizer.decode([i for new in generate(nnx.merge(graph, params), cfg, prompt, how, layout) for i in new[0]])


def load_model(out_dir: str, which: str, tensor: int = 1):
    """For sampling: (model, config, tokenizer, completed updates), all from the checkpoint, and the caches' layout.

    The model computes in float32.  Its arrays are on the default device, or cut over the first `tensor` devices,
    whatever they were trained on.
    """
    found = checkpoint.whole(out_dir, which)
    for path, meta in found:
        cfg, tokenizer = Config(**meta["config"]), make_tokenizer(**meta["tokenizer"])
        layout, cache_layout = None, None
        if tensor > 1:
            import train  # not earlier: it imports this module

            init_state = train.make_init_state(cfg, tokenizer.vocab_size)
            alone = replace(cfg, fsdp=1, tensor=tensor, batch_size=tensor, grad_accum=1)
            hw = train.make_mesh_and_shardings(alone, init_state, devices=tensor)
            layout, cache_layout = hw.layout.params, hw.cache
        graph, like = nnx.split(abstract_model(cfg, tokenizer.vocab_size))
        # Into numpy: any device may read what any device wrote.
        like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), nnx.to_pure_dict(like))
        try:
            params = ocp.StandardCheckpointer().restore(path / "params", like)
        except Exception as e:  # damaged; or just replaced, by a run that is training
            print(f"{path} cannot be read ({checkpoint.unreadable(e)})", file=sys.stderr)
            continue
        return nnx.merge(graph, jax.device_put(params, layout)), cfg, tokenizer, int(path.name), cache_layout
    if found:
        raise UserError(f"no checkpoint in {out_dir} can be read")
    have = sorted(p.name for p in run_path("out").glob("*") if checkpoint.find(p))
    name = os.path.basename(out_dir)
    preset = out_dir == os.path.join("out", name) and name in PRESETS
    so_far = f" (trained so far: {', '.join(have)})" if have else ""
    flag = f"--preset {name}" if preset else f"--out_dir {out_dir}"
    raise UserError(f"no checkpoint in {out_dir}; train first: python train.py {flag}{so_far}")


def read_prompt(how: SampleConfig) -> str:
    """From the flag, a file, or a pipe.  (Not from any other standard input, which may never end.)"""
    if how.prompt is not None:
        return typed(how.prompt)
    name, raw = how.prompt_file, b""
    try:
        if name:
            raw = Path(name).read_bytes()
        elif sys.stdin is not None and is_pipe_or_file(sys.stdin):
            name = "standard input"
            print("the prompt is read from standard input, to its end", file=sys.stderr)
            raw = sys.stdin.buffer.read()
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except OSError as e:
        raise UserError(f"--prompt_file {name}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the prompt in {name} is not UTF-8 text") from None
    if how.prompt_file and not text:
        raise UserError(f"--prompt_file {name} is empty: the model needs at least one character to start from")
    return text or "\n"


def is_pipe_or_file(stream) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except OSError:  # a notebook's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def typed(text: str) -> str:
    """Where a line break cannot be typed, \\n is one."""
    return text.rstrip("\r\n").replace("\\n", "\n") or "\n"


def tell(model: GPT, cfg: Config, tokenizer, prompt: str, how: SampleConfig, layout=None) -> None:
    """Print the prompt and its continuations; a single one appears as it is made.  The speed goes to stderr."""
    begun, ids, made = time.perf_counter(), tokenizer.encode(prompt), np.zeros((how.num_samples, 0), np.int32)

    def show(row: int, shown: int, final: bool) -> int:
        """Print what is new in a row of `made`; a character whose bytes are not all there yet waits."""
        text = prompt + tokenizer.decode(made[row])
        text = text if final else text.rstrip("\ufffd")
        print(text[shown:], end="\n" if final else "", flush=True)
        return max(shown, len(text))

    shown, first, at_first = show(0, 0, False), 0, begun
    for new in generate(model, cfg, ids, how, layout):
        made = np.concatenate([made, new], axis=1)
        if not first:
            first, at_first = made.size, time.perf_counter()
        if how.num_samples == 1:
            shown = show(0, shown, False)
    now = time.perf_counter()
    for row in range(how.num_samples):
        if row:
            print("-" * 40)
        show(row, 0 if row else shown, True)
    report = (
        f"{made.size:,} tokens, the first {first} after {at_first - begun:.1f} s"  # which may be spent in compiling
    )
    if made.size > first:
        report += f", then {(made.size - first) / (now - at_first):,.0f} tokens/s"
    print(report, file=sys.stderr)


def main(argv):
    how, on = parse(SampleConfig, argv, __doc__, interactive="type prompts, and get a continuation of each")
    if on["interactive"] and (how.prompt is not None or how.prompt_file):
        raise UserError("--interactive takes its prompts from the keyboard: leave --prompt and --prompt_file out")
    prompt = None if on["interactive"] else read_prompt(how)
    model, cfg, tokenizer, step, layout = load_model(how.out_dir, how.which, how.tensor)
    print(f"{how.out_dir}, step {step}", file=sys.stderr)
    if not on["interactive"]:
        return tell(model, cfg, tokenizer, prompt, how, layout)
    print("a line and Enter; end with Ctrl-D", file=sys.stderr)
    for n, line in enumerate(sys.stdin or ()):
        try:  # another seed each time, so that the same prompt may be asked again
            again = replace(how, seed=(how.seed + n) % 2**32)
            tell(model, cfg, tokenizer, typed(line), again, layout)
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
