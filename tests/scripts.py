"""The scripts of this repository as a user runs them, in processes of their own, and ways to make them fail."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

import checkpoint

ROOT = Path(checkpoint.__file__).parent
DATA_DIR = tempfile.mkdtemp(prefix="datasets-")
atexit.register(shutil.rmtree, DATA_DIR, ignore_errors=True)
SMALL = "--n_layer 1 --n_head 2 --n_embd 32 --block_size 16 --batch_size 16 --sample_tokens 0 --log_interval 10".split()
SMALL += ["--data_dir", DATA_DIR]

# Runs a script with parts of it slowed down or interrupted, as the environment says; else it is the script itself.
DRIVER = """
import os, runpy, shutil, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have inherited a deaf ear
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import data
batch, evaluation = data.get_batch, data.eval_batches

def slowly(f, seconds=float(os.environ.get("SLOW_FILES", 0))):
    def slow(*args, **kwargs):
        time.sleep(seconds)
        result = f(*args, **kwargs)
        time.sleep(seconds)
        return result
    return slow

if "SLOW_FILES" in os.environ:  # what Orbax calls at the end of a save, and to delete an old checkpoint
    os.rename, os.replace, os.rmdir = slowly(os.rename), slowly(os.replace), slowly(os.rmdir)

if "DEADLINE" in os.environ:
    import cli
    deadline = cli.deadline
    cli.deadline = lambda seconds, message: deadline(float(os.environ["DEADLINE"]), message)

def get_batch(tokens, cfg, step, *rest):
    if step == 0 and "SHOW_ROWS" in os.environ:
        print("rows", *rest[0], file=sys.stderr)
    if str(step) == os.environ.get("CTRL_C_AT"):
        signal.raise_signal(signal.SIGINT)
    if str(step) == os.environ.get("STUCK_AT"):  # in C++ for ever, as in a long compilation
        import jax
        for_ever = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2, lambda x: x / 2, x)).lower(1.0).compile()
        print("stuck", flush=True)
        for_ever(1.0).block_until_ready()
    return batch(tokens, cfg, step, *rest)

def eval_batches(*args):
    for i, one in enumerate(evaluation(*args)):
        if "SLOW_EVALUATION" in os.environ:
            print("evaluating", i, flush=True)
            time.sleep(float(os.environ["SLOW_EVALUATION"]))
        yield one
    if "SLOW_EVALUATION" in os.environ:
        print("evaluated", flush=True)

data.get_batch, data.eval_batches = get_batch, eval_batches
runpy.run_path(sys.argv[0], run_name="__main__")
"""


STARTED = []


def script(name, *flags, before=(), **env):
    """Start `python name.py flags`, on one device unless JAX_NUM_CPU_DEVICES says otherwise."""
    command = [*before, sys.executable, "-c", DRIVER, ROOT / f"{name}.py", *flags]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", **{k: str(v) for k, v in env.items()}}
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    STARTED.append(subprocess.Popen(list(map(str, command)), env=environment, **pipes))
    return STARTED[-1]


def end_all():
    """What a test that failed has left running."""
    while STARTED:
        if (process := STARTED.pop()).poll() is None:
            process.kill()
            process.communicate()


def finish(process):
    """(exit code, stdout, stderr)"""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def train(*flags, **env):
    return finish(script("train", *flags, **env))


def read_until(process, text):
    """Lines of stdout up to the one that holds `text`."""
    lines = []
    while text not in "".join(lines[-1:]):
        line = process.stdout.readline()
        assert line, ("the process ended", lines, process.stderr.read())
        lines.append(line)
    return lines


def wait_for(condition, process):
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def arrays(path):
    """Every array of a checkpoint by its name, read without the code under test."""
    found = {}
    for part in "params", "rest":
        with warnings.catch_warnings(action="ignore"):  # Orbax asks where the arrays shall be, and we do not care
            tree = ocp.PyTreeCheckpointer().restore(path / part)
        found |= {part + jax.tree_util.keystr(k): np.asarray(x) for k, x in jax.tree_util.tree_leaves_with_path(tree)}
    return found


def metrics(run):
    """What metrics.jsonl says, without the one thing that differs between equal runs."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def assert_same_run(a, b):
    """Equal to the last bit: what is in the latest and the best checkpoint, and every line of the metrics."""
    assert metrics(a) == metrics(b)
    for which in "latest", "best":
        one, other = checkpoint.find(a, which), checkpoint.find(b, which)
        assert one.name == other.name
        x, y = arrays(one), arrays(other)
        assert x.keys() == y.keys() and len(x) > 20
        for name in x:
            assert np.array_equal(x[name], y[name]), name
