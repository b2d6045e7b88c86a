"""How fast sampling is, as ratios within one run.

    python benchmarks/sampling.py --preset tiny        about a minute on two cores; no checkpoint needed

The weights are random, which costs the same as trained ones.  The tasks take turns, and the best of --rounds counts,
because other programs on the machine can only slow a round down.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np
from flax import nnx

from config import PRESETS, Config
from generate import SampleConfig, generate
from model import GPT

V = 65
PROMPT = np.arange(6)


@jax.jit
def next_token(model, window, n):
    return model(window)[0][0, n - 1].argmax()


def with_cache(model, cfg, how):
    for _ in generate(model, cfg, PROMPT, how):
        pass


def recomputed(model, cfg, how):
    """What sampling would be without a cache: the whole window through the model for every token."""
    text = list(PROMPT)
    for _ in range(how.max_new_tokens):
        window = np.zeros((1, cfg.block_size), np.int32)
        seen = text[-cfg.block_size :]
        window[0, : len(seen)] = seen
        text.append(int(next_token(model, window, len(seen))))


def copied(a, b):
    """A large array, by one thread a core."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(np.copyto, np.array_split(b, cores), np.array_split(a, cores)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--max_new_tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    cfg = Config(**PRESETS[args.preset])
    model = GPT(cfg, V, nnx.Rngs(0))
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    how = SampleConfig(max_new_tokens=args.max_new_tokens)
    memory = np.ones(2**27, np.uint8), np.ones(2**27, np.uint8)
    tasks = {
        "1 sample": (partial(with_cache, model, cfg, how), args.max_new_tokens),
        "16 samples": (partial(with_cache, model, cfg, replace(how, num_samples=16)), 16 * args.max_new_tokens),
        "1 sample, no cache": (partial(recomputed, model, cfg, replace(how, max_new_tokens=30)), 30),
        "copying memory": (partial(copied, *memory), memory[0].nbytes),
    }
    best = dict.fromkeys(tasks, 0.0)
    for n in range(args.rounds + 1):  # the first round compiles
        for name, (task, amount) in tasks.items():
            start = time.perf_counter()
            task()
            if n:
                best[name] = max(best[name], amount / (time.perf_counter() - start))
    one, many, slow, bandwidth = best.values()
    print(f"{args.preset}, {args.max_new_tokens} tokens; jax {jax.__version__} on {jax.devices()[0].device_kind}")
    print(f"1 sample             {one:8,.0f} tokens/s")
    print(f"16 samples           {many:8,.0f} tokens/s  {many / one:.1f} x 1 sample")
    print(f"1 sample, no cache   {slow:8,.0f} tokens/s  with the cache {one / slow:.1f} x as fast")
    print(f"copying memory       {bandwidth / 1e9:8.1f} GB/s")
    limit = bandwidth / size
    print(f"all parameters can be copied {limit:,.0f} times a second; 1 sample reads them at {one / limit:.0%} of that")


if __name__ == "__main__":
    main()
