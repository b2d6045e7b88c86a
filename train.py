"""Train a GPT.  Fifth and last file to read: it puts the others together.

    python train.py --preset tiny               on a TPU: minutes.  --help lists every knob
    python train.py --preset nano               on a CPU: three minutes

The same command run again continues where the run in out/<preset> stopped.  What a run leaves there: checkpoints/ and
best/ (see checkpoint.py), metrics.jsonl (a line per log interval and per evaluation) and loss.png.

Five JAX ideas carry this file: sharding as data, trace once, pure functions, pytrees, and donation.  A "layout" here is
what JAX calls a sharding.
"""

import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from glob import glob
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import checkpoint
import export
import report
from checkpoint import Checkpoints, TrainState
from chips import chip_of
from cli import deadline, noted_signals, parse, run
from config import Config, UserError
from corpus import count_predicted, find_corpus, load_corpus
from data import eval_batches, get_batch
from generate import sample_text
from model import GPT, abstract_model


class Hardware(NamedTuple):
    """All that the rest of the program knows of the machine it runs on."""

    state: TrainState  # of ShapeDtypeStruct: shape, type and layout of every array of the train state
    layout: TrainState  # the layouts alone
    batch: Any  # the layout of a batch [B, T + 1]
    cache: Any  # the layout of the keys or values [B, H, S, D] that sampling keeps
    rows: Callable[[int], np.ndarray]  # of a batch of B rows, the numbers of those that this process makes
    place: Callable[[np.ndarray], jax.Array]  # its rows of a batch -> the batch
    dtype: str  # what matrix products are computed in
    peak_flops: float | None  # of all devices together; None where unknown
    on_cpu: bool
    description: str
    several: bool  # processes
    primary: bool  # the one process that prints
    gather: Callable[[int], list[int]]  # a number of each process -> those of all, the primary's first
    preempted: Callable[[int], bool]  # of a step: whether all processes end after it, for one of them was told to


def make_mesh_and_shardings(cfg: Config, init_state: Callable[[], TrainState], devices=None) -> Hardware:
    """Where every array lives.  The one function that knows the hardware.

    devices: None for all there are, a number for the first so many, or a list, of a TPU that is not there (plan.py).

    JAX's idea of a parallel program: the code describes the computation on whole arrays, as if on one huge device.
    Beside it stands, as data, how each array is cut over a mesh of devices, and from the two the compiler derives
    what every device computes and what they send each other.  So this function has no counterpart in the model.

    The mesh has three axes.  `data`: each group of devices has all parameters and its own rows of the batch.  `fsdp`:
    the same, but the parameters too are cut over the group, and gathered when needed.  `tensor`: the heads and the
    MLP's hidden channels are cut, so that one matrix product is shared (Megatron: Shoeybi et al. 2019).
    """
    from jax.experimental import mesh_utils, multihost_utils
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def join_other_processes() -> None:
        """One process a host is how JAX runs on several; they find each other here, and then it is as if on one."""
        names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
        if any(name in os.environ for name in names):
            address, *numbers = (os.environ.get(name, "") for name in names)
            total, process = (int(n) if n.isdigit() else -1 for n in numbers)
            if not address or not 0 <= process < total:
                have = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
                raise UserError(f"{have}: needed are host:port, a number n, and one of 0 to n - 1")
            with deadline(300, f"not all {total} processes came to {address} within {{}} s: is one missing?"):
                jax.distributed.initialize(address, total, process, initialization_timeout=3600)
        # A Cloud TPU's host, whose metadata name the others, or a task of Slurm.  Colab and Kaggle lend single hosts.
        elif not {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & os.environ.keys() and (
            int(os.environ.get("SLURM_NTASKS", 1)) > 1 or glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*")
        ):
            try:
                with deadline(300, "the processes of this job did not all meet within {} s: is one missing?"):
                    jax.distributed.initialize(initialization_timeout=3600)
            except (ValueError, OSError) as e:
                print(f"NOTE      no word of other hosts ({e}): this one goes on alone", file=sys.stderr)

    def find_devices() -> list:
        if jax.config.jax_num_cpu_devices < 0 and jax.__version_info__ >= (0, 12):  # 0.10.2 was seen to hang so
            # On a CPU each core is a device.  Data parallelism then meets once a step; threads that share one device's
            # small operations meet in each of them, which took a third of nano's time on two cores.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            try:
                jax.config.update("jax_num_cpu_devices", max(n for n in range(1, cores + 1) if rows % n == 0))
            except RuntimeError:
                pass  # JAX has already started, in a notebook say: then with what it has
        join_other_processes()
        try:
            return jax.devices()
        except RuntimeError as e:  # most often a TPU that another process, or an old notebook, still holds
            line, held = str(e).splitlines()[0], "end that process, or the notebook that holds it, first"
            raise UserError(f"{line}: {held if 'in use' in line else 'is jax[tpu] installed, for this jax?'}") from None

    rows = cfg.batch_size // cfg.grad_accum
    if devices is None or isinstance(devices, int):
        devices = find_devices()[:devices]
    if len(devices) < cfg.tensor:
        raise UserError(f"--tensor {cfg.tensor} needs as many devices; JAX has {len(devices)}")
    n, kind, platform = len(devices), devices[0].device_kind, devices[0].platform
    data = n // (cfg.fsdp * cfg.tensor)
    if data * cfg.fsdp * cfg.tensor != n:
        raise UserError(f"{n} devices cannot form groups of --fsdp {cfg.fsdp} x --tensor {cfg.tensor}")
    if rows % (groups := data * cfg.fsdp):
        fewer = [a for a in range(cfg.grad_accum - 1, 0, -1) if cfg.batch_size % (a * groups) == 0]
        nearest = f"--batch_size {max(1, round(rows / groups)) * groups * cfg.grad_accum}"
        nearest += f", or --grad_accum {fewer[0]}" if fewer else ""
        raise UserError(
            f"batch_size {cfg.batch_size} / grad_accum {cfg.grad_accum} = {rows} rows do not divide over data {data}"
            f" x fsdp {cfg.fsdp} = {groups} groups of devices; the nearest that do: {nearest}"
        )
    for name, axis in ("n_head", "tensor"), ("n_hidden", "tensor"), ("n_embd", "fsdp"):
        size, parts = getattr(cfg, name), getattr(cfg, axis)
        if size % parts:
            raise UserError(f"{name} {size} is not divisible by --{axis} {parts}")

    # Auto axes: the compiler chooses the layouts in between.  Named explicitly because JAX's default has changed.
    shape, names, auto = (data, cfg.fsdp, cfg.tensor), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        mesh = jax.make_mesh(shape, names, axis_types=auto, devices=devices)
    elif data % slices:
        raise UserError(f"{slices} slices need as many groups of fsdp x tensor, or a multiple; there are {data}")
    else:  # only `data` goes from slice to slice, over the slow network between them
        inside, across = (data // slices, cfg.fsdp, cfg.tensor), (slices, 1, 1)
        split = dict(allow_split_physical_axes=True)
        mesh = Mesh(mesh_utils.create_hybrid_device_mesh(inside, across, devices, **split), names, axis_types=auto)

    def lay_out(path, x):
        """P(a, b): dimension 0 is cut over mesh axis a, dimension 1 over b; None or nothing: not cut, a copy on each.

        Matrices that read the residual stream are [C, out], those that write to it [in, C]: C is cut over fsdp, the
        other side over tensor.  The embedding [V, C] is cut over both by V: cut by C, it would give rows that are cut
        by C, and so would be every activation after them.  AdamW's moments have their parameter's path and layout."""
        name = jax.tree_util.keystr(path)
        if any(f"'{m}_proj'" in name for m in ("q", "k", "v", "gate", "up")):
            spec = P("fsdp", "tensor")
        elif any(f"'{m}_proj'" in name for m in ("o", "down")):
            spec = P("tensor", "fsdp")
        elif "'wte'" in name:
            spec = P(("tensor", "fsdp")) if len(x) % (cfg.tensor * cfg.fsdp) == 0 else P(None, "fsdp")
        else:
            assert x.ndim < 2, f"no layout for {name}"
            spec = P()  # norm scales and counters: a copy everywhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    # eval_shape traces and keeps only the shapes; a pytree is a nest of dicts and tuples with arrays as its leaves.
    state = jax.tree_util.tree_map_with_path(lay_out, jax.eval_shape(init_state))
    # bfloat16 pays on TPUs and on GPUs from Ampere (8.0) on; a T4 or V100 has fast float16 only, a CPU neither.
    before_ampere = str(getattr(devices[0], "compute_capability", "")).startswith(("5.", "6.", "7."))
    best = "float32" if platform == "cpu" or before_ampere else "bfloat16"
    dtype = best if cfg.dtype == "auto" else cfg.dtype
    chip = chip_of(kind)
    batch = NamedSharding(mesh, P(("data", "fsdp")))

    several = jax.process_count() > 1

    def rows_here(B):
        """Those that any of this process's devices has.  Not always neighbours: a mesh orders devices its own way."""
        here = batch.addressable_devices_indices_map((B,)).values()
        return np.unique(np.concatenate([np.arange(B)[index] for index in here]))

    return Hardware(
        state=state,
        layout=jax.tree.map(lambda x: x.sharding, state),
        batch=batch,
        cache=NamedSharding(mesh, P(None, "tensor")),
        rows=rows_here,
        place=partial(jax.make_array_from_process_local_data, batch),
        dtype=dtype,
        peak_flops=chip.flops * n if chip and dtype == "bfloat16" else None,
        on_cpu=platform == "cpu",
        description=f"{n} x {kind} as data {data} x fsdp {cfg.fsdp} x tensor {cfg.tensor}, {dtype}",
        several=several,
        primary=jax.process_index() == 0,
        gather=(lambda n: multihost_utils.process_allgather(np.int32(n)).tolist()) if several else lambda n: [n],
        preempted=multihost_utils.reached_preemption_sync_point,
    )


# --- the step --------------------------------------------------------------------------------------------------------


def learning_rate(cfg: Config) -> Callable:
    """Updates done so far -> rate of the next one.  With s = 1 .. max_steps the number of that update:

    peak * s / warmup                                     while s <= warmup
    min + (peak - min) * (1 + cos(pi p)) / 2              then, with p = (s - warmup) / (max_steps + 1 - warmup)

    so that neither the first nor the last update is wasted on a rate of zero.
    """
    warmup = min(cfg.warmup_steps, cfg.max_steps)
    schedule = optax.warmup_cosine_decay_schedule(0.0, cfg.learning_rate, warmup, cfg.max_steps + 1, cfg.min_lr)
    return lambda done: schedule(done + 1)


def make_optimizer(cfg: Config) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) behind a clip of the gradient's norm."""
    matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # decay pulls only these to zero
    clip = optax.clip_by_global_norm(cfg.grad_clip) if cfg.grad_clip else optax.identity()
    betas = dict(b1=cfg.beta1, b2=cfg.beta2)
    return optax.chain(clip, optax.adamw(learning_rate(cfg), **betas, weight_decay=cfg.weight_decay, mask=matrices))


def random_keys(cfg: Config) -> jax.Array:
    """Two keys from the seed, for the initial weights and for dropout.  (Keys are split, or folded with a number, as
    dropout's is with the step.)"""
    return jax.random.split(jax.random.key(cfg.seed))


def make_init_state(cfg: Config, vocab_size: int) -> Callable[[], TrainState]:
    """A function that makes the state of step 0.  Compiled with hw.layout, each device makes only its own part."""

    def init_state():
        _, params = nnx.split(GPT(cfg, vocab_size, nnx.Rngs(params=random_keys(cfg)[0])))
        # Dicts, because each step takes the state apart: C++ does it for these, Python for nnx.State.
        params = nnx.to_pure_dict(params)
        return TrainState(
            step=jnp.int32(0), params=params, opt_state=make_optimizer(cfg).init(params), recent=jnp.zeros(2)
        )

    return init_state


def count_parameters(params, vocab_size: int) -> int:
    """Without the padding of the vocabulary."""
    V, C = params["wte"].shape
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params)) - (V - vocab_size) * C


def token_losses(graph, params, batch, rngs=None) -> jax.Array:
    """Cross entropy  -log softmax(logits)[target]  of every position, in nats.  batch [B, T + 1] -> [B, T]."""
    logits, _ = nnx.merge(graph, params)(batch[:, :-1], rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])


def make_train_step(cfg: Config, graph, hw: Hardware) -> Callable:
    """(state, batch [B, T + 1], step) -> (the next state, metrics): one compiled, pure function.

    Metrics: loss, the mean of the steps since the last log line; lr; grad_norm, before the clip.

    Trace once: `jax.jit` runs the Python below a single time, with placeholders that have a shape but no values, and
    compiles what it saw.  Pure: the result depends on the arguments alone (cfg and graph are constants of the program)
    and nothing outside is changed, hence the state goes in and comes out.  Pytree: `jax.grad` and optax walk over all
    the leaves of a nest of tuples and dicts.  Donation:
    the old state's memory is given to the new one, so that there are never two of them.
    """
    optimizer, rate = make_optimizer(cfg), learning_rate(cfg)

    def loss_and_grads(params, batch, key):
        loss = lambda p: token_losses(graph, p, batch, nnx.Rngs(dropout=key)).mean()
        return jax.value_and_grad(loss)(params)

    def train_step(state: TrainState, batch: jax.Array, step: jax.Array):
        key = jax.random.fold_in(random_keys(cfg)[1], step)
        if cfg.grad_accum == 1:
            loss, grads = loss_and_grads(state.params, batch, key)
        else:  # the mean over equal micro-batches is the mean over the batch
            A = cfg.grad_accum
            micro = batch.reshape(-1, A, batch.shape[-1]).swapaxes(0, 1)  # [A, B/A, T + 1]; every device keeps its rows

            def add(total, i):
                new = loss_and_grads(state.params, micro[i], jax.random.fold_in(key, i))
                return jax.tree.map(jnp.add, total, new), None

            zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), state.params))
            loss, grads = jax.tree.map(lambda x: x / A, jax.lax.scan(add, zero, jnp.arange(A))[0])
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        # The sum and the number of the losses since the last log line.
        recent = jnp.where(step % cfg.log_interval == 0, 0, state.recent) + jnp.stack([loss, 1])
        new = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, recent)
        # Skip the update if the loss is not finite, or if one before it was skipped: then state.step lags behind step.
        # So the state is good at every moment; the loop sees it lag, and stops.
        grad_norm = optax.tree.norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (state.step == step)
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)
        return new, dict(loss=recent[0] / recent[1], lr=rate(step), grad_norm=grad_norm)

    where = dict(in_shardings=(hw.layout, hw.batch, None), out_shardings=(hw.layout, None))
    return jax.jit(train_step, donate_argnums=0, **where)


def make_eval_step(graph) -> Callable:
    """(params, batch [B, T + 1], weights [B, T]) -> the weighted sum of the losses."""

    def eval_step(params, batch, weights):
        return (token_losses(graph, params, batch) * weights).sum()

    return jax.jit(eval_step)


def evaluate(eval_step, params, tokens, cfg: Config, hw: Hardware, caught=()) -> float | None:
    """Mean loss over the whole split, in fixed windows: the same number for the same parameters, always.

    None as soon as there is anything in `caught`.
    """
    sums, rows = [], hw.rows(cfg.batch_size // cfg.grad_accum)
    for batch, weights in eval_batches(tokens, cfg, rows):
        if len(sums) > 1:
            jax.block_until_ready(sums[-2])  # the device has one to work on, and a signal need not wait for all of them
        if caught:
            return None
        sums.append(eval_step(params, hw.place(batch), hw.place(weights)))
    count = min(len(tokens) - 1, cfg.eval_tokens)
    return float(np.sum(jax.device_get(sums), dtype=np.float64) / count)


# --- the loop --------------------------------------------------------------------------------------------------------


def train(cfg: Config, fresh: bool = False, profile: bool = False) -> int:
    """Train until max_steps or a signal.  Returns the exit code: 0, 1 if diverged, or 128 + the signal's number."""
    found = find_corpus(cfg)
    tokenizer = None if fresh else checkpoint.resume_point(cfg, found.fingerprint)[1]
    if from_weights := bool(cfg.init_from and tokenizer is None):
        tokenizer = export.source_tokenizer(cfg)
    corpus = load_corpus(cfg, tokenizer, found)
    vocab_size = corpus.tokenizer.vocab_size
    init_state = make_init_state(cfg, vocab_size)
    hw = make_mesh_and_shardings(cfg, init_state)
    weights = export.read_weights(cfg) if from_weights else None
    graph, _ = nnx.split(abstract_model(cfg, vocab_size, hw.dtype))
    train_step, eval_step = make_train_step(cfg, graph, hw), make_eval_step(graph)
    n_params = count_parameters(hw.state.params, vocab_size)
    meta = checkpoint.make_meta(cfg, corpus)

    with (
        noted_signals(hw.several) as caught,
        Checkpoints(cfg.out_dir, fresh, hw.primary, hw.gather) as checkpoints,
        report.Screen(cfg, profile, hw.primary) as screen,
    ):
        start, _, changed = checkpoint.resume_point(cfg, corpus.fingerprint)
        if start > cfg.max_steps or (start == cfg.max_steps and report.evaluated(cfg, start)):
            screen.write(report.finished(cfg, start))
            return 0
        state = checkpoints.restore(hw.state)
        start = int(state.step) if state else 0
        screen.begin(start, report.banner(cfg, hw, corpus, n_params, start), *changed, "compiling...")
        if state is None:  # compiled with its layout, it never exists whole on any one device
            state = jax.jit(init_state, out_shardings=hw.layout)()
            if weights is not None:
                lay_down = lambda x, like: jax.make_array_from_callback(x.shape, like.sharding, lambda at: x[at])
                state = state._replace(params=jax.tree.map(lay_down, weights, hw.state.params))
        predicted, text_bytes = count_predicted(corpus, cfg)
        metrics, device_metrics, rows = report.Metrics(cfg, start, hw.primary), {}, hw.rows(cfg.batch_size)
        for step in range(start, cfg.max_steps + 1):  # `step` updates are done
            final, stop = step == cfg.max_steps, bool(caught) or hw.preempted(step)
            log = step > start and (step % cfg.log_interval == 0 or final)
            evaluate_now = not stop and (step % cfg.eval_interval == 0 or final)
            save = step > start and (step % cfg.checkpoint_interval == 0 or final or stop)
            # The one place where Python waits for the device.  Between two of these it runs ahead.
            if (log or evaluate_now or save) and (good := int(state.step)) != step:
                screen.write(
                    f"error: loss or gradient not finite at step {good + 1}.  What is saved is from before it; the same"
                    " command comes here again.  Try a lower --learning_rate; to go further back, move the newest"
                    f" folder out of {cfg.out_dir}/checkpoints"
                )
                return 1
            if log:
                values = {name: float(x) for name, x in jax.device_get(device_metrics).items()}
                metrics.add(screen.log(step, values, n_params, hw.peak_flops))
            if evaluate_now:
                val_loss = evaluate(eval_step, state.params, corpus.val, cfg, hw, caught)
                if val_loss is None:  # a signal came; the evaluation is made when the run goes on
                    stop, save = True, step > start
                else:
                    bits = val_loss * predicted / (text_bytes * math.log(2))
                    metrics.add(dict(step=step, val_loss=val_loss, bits_per_byte=bits))
                    metrics.plot()
                    sane = math.isfinite(val_loss)
                    text = sample_text(state.params, cfg, corpus, hw.cache) if sane else ""
                    screen.evaluation(step, val_loss, bits, text)
                    if step and sane:
                        checkpoints.save(state, meta, val_loss)
            if save:
                checkpoints.save(state, meta)
            if final or stop:
                break
            if evaluate_now or save:
                screen.restart_clock()
            try:
                batch = hw.place(get_batch(corpus.train, cfg, step, rows))
            except (UserError, OSError):  # a shard that cannot be fetched, a token file that was deleted
                if step > start and not hw.several:
                    checkpoints.save(state, meta)
                raise
            # Returns at once: the device works on, and Python prepares the next batch.
            state, device_metrics = train_step(state, batch, np.int32(step))
            screen.stepped(state)
    if stop:
        number = caught[0] if caught else signal.SIGTERM
        same = "the same command" + " without --fresh" * fresh
        screen.write(f"stopped by {signal.Signals(number).name} after step {step:,}; {same} goes on from there")
        return 128 + number
    screen.write(report.done(cfg, corpus, screen))
    return 0


def main(argv):
    fresh, profile = "move the run in out_dir aside and start over", "write a trace of steps 10 to 15 of this process"
    cfg, switches = parse(Config, argv, __doc__, fresh=fresh, profile=profile)
    return train(cfg, **switches)


if __name__ == "__main__":
    run(main)
