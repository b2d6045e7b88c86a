"""What a run leaves on disk, and how it is found again.  Fourth file to read.

    out/tiny/checkpoints/1000/     the latest two, labelled with the number of completed updates; resuming reads these
    out/tiny/best/750/             the one with the lowest validation loss; sample.py reads this unless told otherwise
        params/  rest/  meta/      the parameters; the rest of the train state; what they belong to, as JSON

Orbax writes in the background, under a temporary name, and renames when all is on disk: a checkpoint is whole or is
not there.  Paths are local or gs://, through etils' epath as in Orbax.
"""

import dataclasses
import json
import logging
import os
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx

from config import PRESETS, Config, UserError
from data import Corpus, make_tokenizer
from model import abstract_model

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every save there, in several lines

ANOTHER_RUN = "use another --out_dir, or --fresh, which moves the old run aside"


class TrainState(NamedTuple):
    """All that changes during training, as one pytree: what the step takes and returns, and what is saved."""

    step: jax.Array  # int32 [], completed updates
    params: Any  # nested dicts of float32 arrays
    opt_state: Any  # optax: AdamW's two moments per parameter, and its own step count
    recent: jax.Array  # float32 [2], sum and number of the losses since the last log line: a resumed run logs them too


def run_path(out_dir: str | epath.Path) -> epath.Path:
    """Absolute, because Orbax refuses relative paths."""
    return epath.Path(out_dir if "://" in str(out_dir) else os.path.abspath(out_dir))


class Checkpoints:
    """The checkpoints of the run in `out_dir`.  Close it, or use `with`: both wait for the save under way."""

    def __init__(self, out_dir: str):
        root = run_path(out_dir)
        lowest = dict(max_to_keep=1, best_fn=lambda metrics: metrics["val_loss"], best_mode="min")
        self.latest = ocp.CheckpointManager(root / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2))
        self.best = ocp.CheckpointManager(root / "best", options=ocp.CheckpointManagerOptions(**lowest))

    def save(self, state: TrainState, meta: dict) -> None:
        """Save as the latest.  Returns once the arrays are copied; the writing goes on in the background."""
        self.latest.save(int(state.step), args=to_args(state, meta))

    def save_best(self, state: TrainState, meta: dict, val_loss: float) -> None:
        """Save as the best, if none before had a validation loss as low."""
        step, best = int(state.step), self.best.best_step()
        if best is None or val_loss < self.best.metrics(best)["val_loss"]:
            if step in self.best.all_steps():  # the same step of a run that was resumed with other knobs
                self.best.delete(step)
            self.best.save(step, args=to_args(state, meta), metrics={"val_loss": val_loss}, force=True)

    def restore(self, like: TrainState) -> TrainState:
        """The latest state.  `like` gives the shape, type and sharding of each array; any mesh will do."""
        read = ocp.args.StandardRestore
        wanted = ocp.args.Composite(params=read(like.params), rest=read(like._replace(params={})))
        found = self.latest.restore(self.latest.latest_step(), args=wanted)
        return found.rest._replace(params=found.params)

    def close(self) -> None:
        self.latest.close()
        self.best.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def to_args(state: TrainState, meta: dict) -> ocp.args.Composite:
    """A checkpoint's three items.  The parameters stand apart so that sampling need not read the moments."""
    write = ocp.args.StandardSave
    rest = write(state._replace(params={}))
    return ocp.args.Composite(params=write(state.params), rest=rest, meta=ocp.args.JsonSave(meta))


def find(out_dir: str | epath.Path, which: str = "latest") -> epath.Path | None:
    """The directory of the latest (or best) complete checkpoint of a run, or None.  Writes nothing."""
    folder = run_path(out_dir) / ("best" if which == "best" else "checkpoints")
    paths = [p for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []
    paths = [p for p in paths if ocp.utils.is_checkpoint_finalized(p)]
    return max(paths, key=lambda p: int(p.name), default=None)


def read_meta(checkpoint: epath.Path) -> dict:
    return json.loads((checkpoint / "meta" / "metadata").read_text())


def make_meta(cfg: Config, corpus: Corpus) -> dict:
    """What the arrays of a checkpoint belong to, as JSON."""
    return dict(
        config=dataclasses.asdict(cfg),
        tokenizer=dict(kind=corpus.tokenizer.kind, symbols=corpus.tokenizer.symbols),
        fingerprint=corpus.fingerprint,
        versions={name: version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint", "numpy")},
    )


def resume_point(cfg: Config, corpus: Corpus) -> tuple[list[str], int]:
    """(the knobs that have changed, in words; completed updates) for the run in cfg.out_dir, or ([], 0).

    UserError if what lies there was made with another architecture, tokenizer or corpus.
    """
    found = find(cfg.out_dir)
    any_found = found or find(cfg.out_dir, "best")
    if not any_found:
        return [], 0
    meta, now, changed = read_meta(any_found), dataclasses.asdict(cfg), []
    for f in dataclasses.fields(cfg):
        if (old := meta["config"].get(f.name, now[f.name])) != now[f.name]:
            if f.metadata["fixed"]:
                raise UserError(f"{cfg.out_dir} was trained with {f.name} {old}, not {now[f.name]}: {ANOTHER_RUN}")
            changed.append(f"changed   {f.name} {old} -> {now[f.name]}")
    if meta["fingerprint"] != corpus.fingerprint:
        old = f"{meta['config']['dataset']} (sha256 {meta['fingerprint'][:12]}...)"
        new = f"{cfg.dataset} (sha256 {corpus.fingerprint[:12]}...)"
        raise UserError(f"{cfg.out_dir} was trained on {old}, not on {new}: {ANOTHER_RUN}")
    return changed, int(found.name) if found else 0


def move_aside(out_dir: str) -> None:
    """Rename out/tiny to out/tiny.1, or the first number that is free."""
    path, n = run_path(out_dir), 1
    while path.with_name(f"{path.name}.{n}").exists():
        n += 1
    if path.exists():
        path.rename(path.with_name(f"{path.name}.{n}"))


def load_model(out_dir: str, which: str):
    """For sampling: (model, config, tokenizer, completed updates), all of them from the checkpoint.

    The model computes in float32, and its arrays are on the default device, whatever they were trained on.
    """
    path = find(out_dir, which) or find(out_dir, "latest")
    if path is None:
        have = sorted(p.parent.name for p in run_path("out").glob("*/checkpoints") if find(p.parent))
        name = os.path.basename(out_dir)
        flag = (
            f"--preset {name}" if out_dir == os.path.join("out", name) and name in PRESETS else f"--out_dir {out_dir}"
        )
        so_far = f" (trained so far: {', '.join(have)})" if have else ""
        raise UserError(f"no checkpoint in {out_dir}; train first: python train.py {flag}{so_far}")
    meta = read_meta(path)
    cfg = Config(**meta["config"])
    tokenizer = make_tokenizer(**meta["tokenizer"])
    graph, like = nnx.split(abstract_model(cfg, tokenizer.vocab_size))
    like = jax.tree.map(
        lambda x: np.empty(x.shape, x.dtype), nnx.to_pure_dict(like)
    )  # numpy: any device may read what any device wrote
    params = ocp.StandardCheckpointer().restore(path / "params", like)
    return nnx.merge(graph, jax.device_put(params)), cfg, tokenizer, int(path.name)
