"""What a run leaves on disk, and how it is found again.

    out/tiny/checkpoints/1000/     the latest two, labelled with the number of completed updates
    out/tiny/best/750/             the one with the lowest validation loss, which sample.py reads unless told otherwise
        params/  rest/  meta/      the parameters; the rest of the train state; what they belong to, as JSON

Orbax writes in the background, under a temporary name, and renames when all is on disk: whenever the process is killed,
a checkpoint is whole or not there.  A run goes on from the newest that can be read.  What a disk has damaged all the
same is then moved aside, never deleted.  Paths are local or gs://, through etils' epath as in Orbax.
"""

import dataclasses
import json
import logging
import math
import os
import sys
import zlib
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from config import Config, UserError
from corpus import Corpus
from storage import hold, move_aside, remove_whole, run_path
from tokenizer import make_tokenizer

logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax reports every save there, in several lines,
logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # and what it could not read, in pages

ANOTHER_RUN = "use another --out_dir, or --fresh, which moves the old run aside"


class TrainState(NamedTuple):
    """All that changes during training, as one pytree: what the step takes and returns, and what is saved."""

    step: jax.Array  # int32 [], completed updates
    params: Any  # nested dicts of float32 arrays
    opt_state: Any  # optax: AdamW's two moments per parameter, and its own step count
    recent: jax.Array  # float32 [2], sum and number of the losses since the last log line: a resumed run logs them too


class Checkpoints:
    """The checkpoints of the run in `out_dir`, open for writing, by one program at a time.

    Close it, or use `with`: both wait for the save under way.  UserError if another program has it open, OSError, then
    or at a later call, if a checkpoint cannot be written.  A program may be several processes, of which one is the
    `primary`; `gather` gives the list of everyone's value of a number, the primary's first.
    """

    def __init__(self, out_dir: str, fresh: bool = False, primary: bool = True, gather=lambda number: [number]):
        self.root, self.primary, self.gather, refusal = run_path(out_dir), primary, gather, None
        if primary:
            try:
                self.claim(fresh)
            except (UserError, OSError) as e:
                refusal = e
        if gather(refusal is not None)[0]:
            raise refusal or UserError(f"the first process cannot use {self.root}, and says why")
        # Two, since both folders may be written at once.  Processes that wait for each other need a word for each.
        words = {
            name: ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name) for name in ("checkpoints", "best")
        }
        self.writers = {
            name: ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=word)
            for name, word in words.items()
        }

    def claim(self, fresh: bool) -> None:
        """Lock the run's folder, and clear what was being written or deleted when a process was killed."""
        self.held = hold(self.root)
        if fresh and any(self.root.iterdir()):
            move_aside(self.root)
            os.close(self.held)
            self.held = hold(self.root)
        for path in checkpoint_paths(self.root):
            if path.name.endswith(".deleted") or ".orbax-checkpoint-tmp" in path.name:
                path.rmtree()
            elif is_step(path.name) and read_meta(path) is None:
                set_aside(path, "not all of its parts are there")

    def save(self, state: TrainState, meta: dict, val_loss: float | None = None) -> None:
        """Save as the latest; or, with a validation loss, as the best, if none before had one as low.

        Returns once the arrays are copied.  The writing goes on in the background.
        """
        name = "checkpoints" if val_loss is None else "best"
        path, write = self.root / name / str(int(state.step)), ocp.args.StandardSave
        parts = dict(params=write(state.params), rest=write(state._replace(params={})))
        meta = ocp.args.JsonSave(meta | {"val_loss": val_loss})
        with write_errors(self.root):
            self.writers[name].wait_until_finished()
            if path.exists():  # this very state, evaluated a second time after a resume
                return
            if val_loss is not None and any(lowest(old) <= val_loss for _, old in whole(self.root, "best")[:1]):
                return
            self.prune()
            self.writers[name].save(path, args=ocp.args.Composite(meta=meta, **parts))

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest state that can be read, or None if there is no checkpoint.

        `like` gives the shape, type and sharding of each array; any mesh will do.
        """
        read, damaged, paths = ocp.args.StandardRestore, {}, [path for path, _ in whole(self.root)]
        if len(set(self.gather(zlib.crc32(str(paths).encode()) >> 1))) > 1:
            raise UserError(f"{self.root} must be one folder that all processes share")
        parts = dict(params=read(like.params), rest=read(like._replace(params={})))
        for path in paths:
            found = None
            try:
                found = ocp.CompositeCheckpointHandler().restore(path, args=ocp.args.Composite(**parts))
            except Exception as e:  # anything may come of reading damaged files
                damaged[path] = unreadable(e)
            if all(self.gather(found is not None)):  # each process reads its own part, and all must go on from one step
                if self.primary:
                    for bad, why in damaged.items():
                        set_aside(bad, why)
                return found.rest._replace(params=found.params)
            damaged.setdefault(path, "another process cannot read its part")
        if damaged:
            raise UserError(f"no checkpoint in {self.root} can be read: {next(iter(damaged.values()))}")
        return None

    def prune(self) -> None:
        """Delete all but the latest two and the best one, of those that are not being written."""
        for name, which, keep in ("checkpoints", "latest", 2), ("best", "best", 1):
            old = [path for path, _ in whole(self.root, which) if path.parent.name == name][keep:]
            for path in old if self.primary else ():
                remove_whole(path)

    def close(self) -> None:
        with write_errors(self.root), ExitStack() as last:  # all of these, from the bottom up, even if one fails
            if self.primary:
                last.callback(os.close, self.held)
            last.callback(self.prune)
            for writer in self.writers.values():
                last.callback(writer.close)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@contextmanager
def write_errors(root: epath.Path):
    """Orbax and tensorstore have many names for a disk that cannot be written; all become OSError, with a way out."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as e:
        last = find(root)
        have = f"the run goes on from {last} once that is mended" if last else "there is none yet"
        raise OSError(f"a checkpoint could not be written in {root} ({reason(e)}); {have}") from e


def set_aside(path: epath.Path, why: str) -> None:
    """Rename what bears a checkpoint's name and cannot be used as one."""
    moved = move_aside(path, ".damaged")
    print(f"NOTE      {path} is damaged or no checkpoint ({why}), and was moved to {moved.name}", file=sys.stderr)


def reason(e: BaseException) -> str:
    e = e.__cause__ or e  # Orbax puts pages of circumstances before it
    return f"{type(e).__name__}: {e}".splitlines()[0][:160]


def unreadable(e: BaseException) -> str:
    """Why a checkpoint cannot be read.  Orbax abandons coroutines then, whose complaints, at some later moment, would
    bury this one line; so Python's reports of such are off from here on."""
    sys.unraisablehook = lambda _: None
    return reason(e)


# --- finding ---------------------------------------------------------------------------------------------------------


def checkpoint_paths(root: epath.Path) -> list[epath.Path]:
    return [path for name in ("checkpoints", "best") for path in (root / name).glob("*")]


def is_step(name: str) -> bool:
    return name.isascii() and name.isdigit()


def read_meta(path: epath.Path) -> dict | None:
    """What was saved beside the arrays of a checkpoint; None if not all of its parts are there.

    (What is in the arrays shows when they are read.)
    """
    try:
        meta = json.loads((path / "meta" / "metadata").read_text())
        parts = all((path / part).exists() for part in ("params", "rest")) and ocp.utils.is_checkpoint_finalized(path)
        return meta if parts and is_step(path.name) and "val_loss" in meta else None
    except (OSError, ValueError, TypeError):
        return None


def lowest(meta: dict) -> float:
    """A best checkpoint's validation loss; infinite for those in checkpoints/."""
    return math.inf if meta["val_loss"] is None else meta["val_loss"]


def whole(out_dir: str | epath.Path, which: str = "latest") -> list[tuple[epath.Path, dict]]:
    """The whole checkpoints of a run, and what read_meta gives for them, the first choice first.

    latest: those with more steps first.  best: those in best/, the lowest validation loss first; then the others.
    """
    found = [(path, meta) for path in checkpoint_paths(run_path(out_dir)) if (meta := read_meta(path))]
    found.sort(key=lambda pair: -int(pair[0].name))
    if which == "best":
        found.sort(key=lambda pair: lowest(pair[1]))
    return found


def find(out_dir: str | epath.Path, which: str = "latest") -> epath.Path | None:
    """The path of the latest (or best) whole checkpoint of a run, or None."""
    return next((path for path, _ in whole(out_dir, which)), None)


def make_meta(cfg: Config, corpus: Corpus) -> dict:
    """What the arrays of a checkpoint belong to, as JSON."""
    return dict(
        config=dataclasses.asdict(cfg),
        tokenizer=dict(kind=corpus.tokenizer.kind, symbols=corpus.tokenizer.symbols),
        fingerprint=corpus.fingerprint,
        versions={name: version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint", "numpy")},
    )


def resume_point(cfg: Config, fingerprint: str) -> tuple[int, Any, list[str]]:
    """(completed updates, tokenizer, the knobs that have changed, in words) of the run in cfg.out_dir; (0, None, []) if
    there is none.

    UserError if what lies there was made with another architecture, tokenizer or corpus.
    """
    found = whole(cfg.out_dir)
    if not found:
        return 0, None, []
    (path, meta), now, changed = found[0], dataclasses.asdict(cfg), []
    for f in dataclasses.fields(cfg):
        if (old := meta["config"].get(f.name, now[f.name])) != now[f.name]:
            if f.name == "vocab_size" and cfg.tokenizer != "bpe":
                continue
            if f.metadata["fixed"]:
                raise UserError(f"{cfg.out_dir} was trained with {f.name} {old}, not {now[f.name]}: {ANOTHER_RUN}")
            changed.append(f"changed   {f.name} {old} -> {now[f.name]}")
            if f.name == "init_from":
                changed[-1] += ": without effect, this run has weights of its own; --fresh would start from those"
    if meta["fingerprint"] != fingerprint:
        old = f"{meta['config']['dataset']} (sha256 {meta['fingerprint'][:12]}...)"
        new = f"{cfg.dataset} (sha256 {fingerprint[:12]}...)"
        raise UserError(f"{cfg.out_dir} was trained on {old}, not on {new}: {ANOTHER_RUN}")
    return int(path.name), make_tokenizer(**meta["tokenizer"]), changed
