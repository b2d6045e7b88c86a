"""Every knob of a training run, on one screen.  First file to read: all others take their numbers from here.

`python train.py --help` prints this table.  A flag is a field: `--learning_rate 3e-3` sets `learning_rate`.
"""

import math
from dataclasses import dataclass, field, fields


class UserError(Exception):
    """Something the reader of the message can put right: one line, exit code 2, no traceback (see cli.run)."""


def knob(default, meaning: str, at_least=None, below=None, fixed=False, choices=""):
    """A dataclass field that knows its meaning and its range.  A fixed one cannot change when a run is resumed."""
    return field(default=default, metadata=dict(meaning=meaning, range=(at_least, below), choices=choices, fixed=fixed))


# fmt: off
@dataclass(frozen=True)
class Config:
    """One training run.  The defaults are the preset `tiny`: minutes on one free TPU."""
    preset: str = knob("tiny", "the line of PRESETS to start from")
    # data
    dataset: str = knob("shakespeare", "shakespeare, fineweb, or the path of any UTF-8 text file")
    tokenizer: str = knob("char", "bpe is learned from the corpus", fixed=True, choices="char byte bpe gpt2")
    vocab_size: int = knob(1024, "symbols that bpe learns, the 256 bytes among them", 256, 2**20, fixed=True)
    data_dir: str = knob("datasets", "where downloads and tokenised texts are kept")
    # model
    n_layer: int = knob(6, "transformer blocks", 1, fixed=True)
    n_head: int = knob(6, "attention heads; must divide n_embd", 1, fixed=True)
    n_embd: int = knob(384, "channels of the residual stream", 2, fixed=True)
    block_size: int = knob(256, "context: how many tokens back the model can look", 2, fixed=True)
    rope_theta: float = knob(10_000.0, "base of the rotary embedding's wavelengths", 1.0, fixed=True)
    dropout: float = knob(0.2, "share of activations zeroed in training; 0 for runs of a few epochs", 0, 1)
    dtype: str = knob("auto", "of the matrix products; auto: bfloat16 where fast", choices="auto float32 bfloat16")
    # optimiser: AdamW with linear warmup, then a cosine down to min_lr
    batch_size: int = knob(64, "sequences per optimiser step, over all devices", 1)
    grad_accum: int = knob(1, "micro-batches a step is cut into when memory is short; must divide batch_size", 1)
    remat: int = knob(0, "1: compute a block's activations again when its gradient needs them; saves memory", 0, 2)
    max_steps: int = knob(5000, "optimiser steps", 0)
    learning_rate: float = knob(1e-3, "peak, reached after warmup", 0)
    min_lr: float = knob(1e-4, "where the cosine ends; a tenth of the peak is usual, 0 for short runs", 0)
    warmup_steps: int = knob(100, "steps of linear rise to the peak", 0)
    beta1: float = knob(0.9, "AdamW: decay of the gradient's mean", 0, 1)
    beta2: float = knob(0.99, "AdamW: decay of its square; 0.95 for large batches", 0, 1)
    weight_decay: float = knob(0.1, "AdamW: on matrices only, never on norm scales", 0)
    grad_clip: float = knob(1.0, "largest global norm of the gradient; 0 never clips", 0)
    # devices: data parallelism takes what these two leave
    fsdp: int = knob(1, "devices over which parameters and optimiser state are split", 1)
    tensor: int = knob(1, "devices over which heads and MLP width are split", 1)
    # the run
    out_dir: str = knob("", "where the run lives; empty means out/<preset>")
    init_from: str = knob("", "start from the weights and tokenizer of this run's or export.py's folder")
    seed: int = knob(1337, "of initial weights, batches and dropout", 0, 2**32)
    log_interval: int = knob(10, "steps between log lines", 1)
    eval_interval: int = knob(250, "steps between evaluations, each with a sample of text", 1)
    eval_tokens: int = knob(10_000_000, "evaluate on the whole validation split, or on this many of its tokens", 1)
    sample_tokens: int = knob(200, "tokens of text shown at each evaluation", 0)
    checkpoint_interval: int = knob(250, "steps between checkpoints", 1)

    def __post_init__(self):
        check_ranges(self)
        for whole, part in ("n_embd", "n_head"), ("batch_size", "grad_accum"):
            a, b = getattr(self, whole), getattr(self, part)
            if a % b:
                raise UserError(f"{whole} {a} is not divisible by {part} {b}; {whole} {a - a % b + b} would be")
        if self.min_lr > self.learning_rate:
            raise UserError(f"min_lr {self.min_lr} is above learning_rate {self.learning_rate}: the cosine would rise")
        if self.n_embd // self.n_head % 2:
            raise UserError(f"n_embd {self.n_embd} / n_head {self.n_head}: rotary embedding needs an even head width")

    @property
    def n_hidden(self) -> int:
        """Width of the MLP: 8/3 n_embd, so that SwiGLU's three matrices cost what the classic two of 4 n_embd do."""
        multiple = 128 if self.n_embd >= 768 else 64
        return multiple * max(1, round(8 * self.n_embd / 3 / multiple))


FINEWEB = dict(dataset="fineweb", tokenizer="gpt2", batch_size=512, grad_accum=16, dropout=0.0, beta2=0.95)
PRESETS = {  # what differs from the defaults above
    "nano": dict(n_layer=6, n_head=2, n_embd=64, block_size=128, dropout=0.0, batch_size=8, max_steps=4_000,
                 learning_rate=6e-3, min_lr=0.0, log_interval=100, eval_interval=1_000, checkpoint_interval=1_000),
    "tiny": dict(),
    "small": FINEWEB | dict(n_layer=12, n_head=6, n_embd=768, block_size=1024, warmup_steps=250,
                            checkpoint_interval=500),
    "scaled": FINEWEB | dict(n_layer=24, n_head=16, n_embd=2048, block_size=2048, warmup_steps=500, max_steps=25_000,
                             learning_rate=4e-4, min_lr=4e-5, remat=1, fsdp=16, checkpoint_interval=500),
}
# fmt: on


def check_ranges(cfg) -> None:
    """Every number inside the range that its knob states, or UserError."""
    for f in fields(cfg):
        value, (low, high), choices = getattr(cfg, f.name), f.metadata["range"], f.metadata["choices"].split()
        if choices and value not in choices:
            raise UserError(f"--{f.name} {value}: choose from {', '.join(choices)}")
        if low is not None and not (math.isfinite(value) and low <= value < (high or math.inf)):
            raise UserError(f"--{f.name} {value}: must be {low} or more" + f" and less than {high}" * bool(high))
