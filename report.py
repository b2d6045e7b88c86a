"""What a run tells the person who watches it: the banner, the log lines, metrics.jsonl and loss.png.

Nothing here is needed to train; train.py calls it, and the files before it do not know it.
"""

import io
import json
import math
import shlex
import sys
import time

import jax
import jax.numpy as jnp
from tqdm import tqdm

import checkpoint
from config import Config
from corpus import Corpus
from storage import IN_NOTEBOOK, run_path, write_whole

RULE = "-" * 60
NO_ACCELERATOR = """\
****************************************************************************
*  NO TPU OR GPU HERE.  On this CPU the run would take about {hours:,.1f} hours.
*  Colab:   Runtime > Change runtime type > v5e-1 TPU, and run the cells again
*  Kaggle:  Settings > Accelerator > TPU v5e-8, and run the cells again
*  your own machine with a TPU:  pip install "jax[tpu]"
*  or train a model that suits a CPU:  python train.py --preset nano
****************************************************************************"""


def flops_per_token(cfg: Config, n_params: int) -> int:
    """Forward and backward: 6 per parameter, and 12 L C T for attention's scores and sums.  This is PaLM's count
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): it includes the half of the scores that the mask discards."""
    return 6 * n_params + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size


def hours_on_this_cpu(flops: float) -> float:
    """An estimate: these FLOPs at 0.4 of the rate of one large matrix product, measured here and now."""
    product, a, seconds = jax.jit(lambda a: a @ a), jnp.ones((1024, 1024)), []
    for _ in range(4):  # the first one compiles
        start = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return flops / (0.4 * 2 * 1024**3 / min(seconds)) / 3600


def banner(cfg: Config, hw, corpus: Corpus, n_params: int, start: int) -> str:
    """Everything that is asked first about a log."""
    tokens, V = cfg.batch_size * cfg.block_size, corpus.tokenizer.vocab_size
    steps = corpus.train_tokens / tokens
    lines = [
        f"devices   {hw.description}; jax {jax.__version__}",
        f"model     {cfg.n_layer} layers, {cfg.n_embd} wide, {cfg.n_head} heads, context {cfg.block_size}:"
        f" {n_params:,} parameters",
        f"corpus    {corpus.name}: {corpus.train_tokens:,} tokens to train on, {len(corpus.val):,} to validate on;"
        f" {V} symbols ({corpus.tokenizer.kind})",
        f"step      {cfg.batch_size} x {cfg.block_size} = {tokens:,} tokens; an epoch is"
        f" {steps:,.1f} steps, the run {cfg.max_steps / steps:,.1f} epochs",
        f"run       {cfg.out_dir}, {f'going on after step {start:,} of' if start else 'new,'} {cfg.max_steps:,} steps",
        f"loss      should start near ln {V} = {math.log(V):.2f}, where every symbol is as likely as any other"
        if not cfg.init_from
        else f"loss      should start where it stood for the weights in {cfg.init_from}, if the text is as theirs",
    ]
    if corpus.note:
        lines.append(f"NOTE      {corpus.note}")
    flops = flops_per_token(cfg, n_params) * tokens * (cfg.max_steps - start)
    if hw.on_cpu and (hours := hours_on_this_cpu(flops)) > 0.5:
        lines.append(NO_ACCELERATOR.format(hours=hours))
    return "\n".join(lines)


def duration(seconds: float) -> str:
    m, s = divmod(round(seconds), 60)
    return f"{m // 60}h{m % 60:02}m" if m >= 60 else f"{m}m{s:02}s"


class Screen:
    """Log lines on stdout; on a terminal also a progress bar, on stderr.  Keeps the clock that tokens/s come from."""

    def __init__(self, cfg: Config, profile: bool, primary: bool):
        self.cfg, self.profile, self.primary = cfg, profile, primary
        self.begun, self.tracing, self.steps = None, False, 0
        self.opened = time.perf_counter()
        self.bar = None

    def begin(self, start: int, *lines: str) -> None:
        # None: unless there is a terminal.  The log lines have an eta, too.
        hidden = True if not self.primary or IN_NOTEBOOK else None
        self.start = start
        self.bar = tqdm(total=self.cfg.max_steps, initial=start, unit="step", disable=hidden, dynamic_ncols=True)
        self.write("\n".join(lines))
        self.restart_clock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.bar.close()
        if self.tracing:
            self.stop_trace()

    def write(self, text: str) -> None:
        if not self.primary:
            return
        (self.bar or tqdm).write(text)
        sys.stdout.flush()  # tqdm does not, and a log that is a file should be up to date

    def stepped(self, state) -> None:
        """A step was dispatched.  The first one is waited for: it compiled, and no rate shall include that."""
        self.bar.update()
        self.timed += 1
        self.steps += 1
        if self.profile and self.steps in (10, 15):
            jax.block_until_ready(state)
            if self.tracing:
                self.stop_trace()
            else:
                jax.profiler.start_trace(str(run_path(self.cfg.out_dir) / "profile"))
                self.tracing = True
        if self.begun is None:
            jax.block_until_ready(state)
            self.begun = time.perf_counter()
            self.write(f"compiled, and the first step done, in {self.begun - self.opened:.1f} s")
            self.restart_clock()

    def restart_clock(self) -> None:
        """Between two calls only steps are timed, no evaluation or checkpoint."""
        self.mark, self.timed = time.perf_counter(), 0

    def stop_trace(self) -> None:
        jax.profiler.stop_trace()
        self.tracing = False
        self.write(f"trace written.  To see it: pip install xprof && xprof {self.cfg.out_dir}/profile")

    def log(self, step: int, now: dict, n_params: int, peak_flops: float | None) -> dict:
        """Print the line of `step` and return its record.  The device has been waited for just before."""
        seconds, done = time.perf_counter() - self.mark, step - self.start
        rate = self.timed * self.cfg.batch_size * self.cfg.block_size / seconds if self.timed else None  # tokens/s
        parts = [f"step {step}", f"loss {now['loss']:.4f}", f"lr {now['lr']:.1e}"]
        if rate:
            parts.append(f"{rate:,.0f} tok/s")
            if peak_flops:
                parts.append(f"mfu {100 * rate * flops_per_token(self.cfg, n_params) / peak_flops:.1f} %")
        if done > 1:  # the first step of this process was not timed
            left = (time.perf_counter() - self.begun) / (done - 1) * (self.cfg.max_steps - step)
            parts.append("eta " + duration(left))
        self.write(" | ".join(parts))
        self.restart_clock()
        return dict(step=step, loss=now["loss"], lr=now["lr"], tokens_per_second=rate, grad_norm=now["grad_norm"])

    def evaluation(self, step: int, val_loss: float, bits: float, text: str) -> None:
        self.write(f"step {step} | val_loss {val_loss:.4f} | {bits:.4f} bits per byte\n{RULE}\n{text}\n{RULE}")


def finished(cfg: Config, step: int) -> str:
    done = f"{cfg.out_dir} is finished: {step:,} of {cfg.max_steps:,} steps."
    return f"{done}  Go on with --max_steps {2 * step}, or start over with --fresh."


def done(cfg: Config, corpus: Corpus, screen: Screen) -> str:
    """The last lines of a run: how long it took, and the command that samples from it."""
    seconds = time.perf_counter() - screen.begun if screen.begun else 0
    run = f"--preset {cfg.preset}" if cfg.out_dir == f"out/{cfg.preset}" else f"--out_dir {shlex.quote(cfg.out_dir)}"
    prompt = ' --prompt "ROMEO:"' if corpus.name == "shakespeare" else ""
    return (
        f"{cfg.max_steps:,} steps done, {seconds:.0f} s after the first.  The curve is {cfg.out_dir}/loss.png.  Now:\n"
        f"python sample.py {run}{prompt} --max_new_tokens 300 --temperature 0.8"
    )


def read_records(path) -> list[dict]:
    """The lines of a metrics.jsonl, as far as they are whole."""
    records = []
    for line in path.read_bytes().decode(errors="replace").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:  # the last line of a run that was killed while writing it
            pass
    return [r for r in records if isinstance(r, dict) and "step" in r]


def evaluated(cfg: Config, step: int) -> bool:
    """Whether nothing is missing of the evaluation at `step`: neither its record nor, if it was the lowest, its
    checkpoint."""
    records = read_records(run_path(cfg.out_dir) / "metrics.jsonl")
    losses = {r["step"]: r["val_loss"] for r in records if "val_loss" in r and r["step"]}
    saved = [checkpoint.lowest(meta) for _, meta in checkpoint.whole(cfg.out_dir, "best")]
    return step in losses and (losses[step] > min(losses.values()) or saved[0] <= losses[step])


class Metrics:
    """metrics.jsonl and loss.png.  Opened at step n, it drops what an interrupted run wrote after its checkpoint n."""

    def __init__(self, cfg: Config, start: int, primary: bool):
        self.primary = primary
        self.folder = run_path(cfg.out_dir)
        self.path = self.folder / "metrics.jsonl"
        # An evaluation at n itself is made again, for the run may have died between it and its checkpoint.
        again = start % cfg.eval_interval == 0 or start == cfg.max_steps
        before = lambda r: r["step"] < start or (r["step"] == start and not ("val_loss" in r and again))
        self.records = [r for r in read_records(self.path) if before(r)]
        if primary:
            write_whole(self.path, "".join(json.dumps(r) + "\n" for r in self.records).encode())

    def add(self, record: dict) -> None:
        self.records.append(record)
        if not self.primary:
            return
        with self.path.open("a") as f:
            f.write(json.dumps(record) + "\n")

    def plot(self) -> None:
        if not self.primary:
            return
        from matplotlib.figure import Figure  # loaded when first needed; without pyplot it asks for no display

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for key, label, style in ("loss", "training", "-"), ("val_loss", "validation", "o-"):
            if points := [(r["step"], r[key]) for r in self.records if key in r]:
                axes.plot(*zip(*points), style, label=f"{label}, now {points[-1][1]:.3f}")
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=120)
        write_whole(self.folder / "loss.png", png.getvalue())
