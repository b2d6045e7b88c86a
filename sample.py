"""Sample from a trained model: the command line around generate.py.

    python sample.py --preset tiny --prompt "ROMEO:" --max_new_tokens 300 --temperature 0.8
    python sample.py --preset tiny --interactive

Reads the architecture, the tokenizer and the weights from a checkpoint in out/<preset>; needs no corpus.  Text alone
goes to stdout as it is made, everything else to stderr.  The model sees block_size tokens at most: when they are full,
it goes on from the last half of them.
"""

import os
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import checkpoint
from cli import parse, run
from config import PRESETS, Config, UserError
from generate import SampleConfig, generate
from model import GPT, abstract_model
from storage import run_path
from tokenizer import make_tokenizer


def read_weights(out_dir: str, which: str):
    """(parameters as numpy arrays, config, tokenizer, completed updates), all from a checkpoint."""
    found = checkpoint.whole(out_dir, which)
    for path, meta in found:
        cfg, tokenizer = Config(**meta["config"]), make_tokenizer(**meta["tokenizer"])
        # Into numpy: any device may read what any device wrote.
        like = nnx.to_pure_dict(nnx.split(abstract_model(cfg, tokenizer.vocab_size))[1])
        like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), like)
        try:
            return ocp.StandardCheckpointer().restore(path / "params", like), cfg, tokenizer, int(path.name)
        except Exception as e:  # damaged; or just replaced, by a run that is training
            print(f"{path} cannot be read ({checkpoint.unreadable(e)})", file=sys.stderr)
    if found:
        raise UserError(f"no checkpoint in {out_dir} can be read")
    have = sorted(p.name for p in run_path("out").glob("*") if checkpoint.find(p))
    name = os.path.basename(out_dir)
    preset = out_dir == os.path.join("out", name) and name in PRESETS
    so_far = f" (trained so far: {', '.join(have)})" if have else ""
    flag = f"--preset {name}" if preset else f"--out_dir {out_dir}"
    raise UserError(f"no checkpoint in {out_dir}; train first: python train.py {flag}{so_far}")


class Loaded(NamedTuple):
    model: GPT  # computes in float32
    cfg: Config  # of the run
    tokenizer: Any
    step: int  # completed updates
    cache_layout: Any  # for generate; None on one device


def load_model(out_dir: str, which: str, tensor: int = 1) -> Loaded:
    """All that sampling needs, from a checkpoint: on the default device, or cut over the first `tensor` devices,
    whatever it was trained on."""
    params, cfg, tokenizer, step = read_weights(out_dir, which)
    layout, cache_layout = None, None
    if tensor > 1:
        import train  # not earlier: it takes a while to load, and one device does without

        init_state = train.make_init_state(cfg, tokenizer.vocab_size)
        alone = replace(cfg, fsdp=1, tensor=tensor, batch_size=tensor, grad_accum=1)
        hw = train.make_mesh_and_shardings(alone, init_state, devices=tensor)
        layout, cache_layout = hw.layout.params, hw.cache
    graph, _ = nnx.split(abstract_model(cfg, tokenizer.vocab_size))
    return Loaded(nnx.merge(graph, jax.device_put(params, layout)), cfg, tokenizer, step, cache_layout)


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
    return text.replace("\\n", "\n")


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
            tell(model, cfg, tokenizer, typed(line.rstrip("\r\n")) or "\n", again, layout)
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
