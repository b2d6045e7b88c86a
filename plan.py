"""Compile a preset for a TPU that you do not have: does it fit, what limits it, what does it cost?

    pip install "jax[tpu]"                                  # on Linux; no TPU needed
    python plan.py --preset tiny --tpu v5e-8
    python plan.py --preset scaled --tpu v5e-16 --fsdp 16 --json

The very step that train.py runs goes through the TPU's own compiler.  Sizes, FLOPs and collectives are what it made of
it; times and prices are computed from them and from chips.py, and are predictions.
"""

import json
import os
import re
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

import train
from chips import CHIPS, PRICES
from cli import MORE_MEMORY, parse, run
from config import Config, UserError, knob
from generate import PREFILL
from hlo import read_program
from model import abstract_model
from report import duration, flops_per_token

# As Google names them: by chips for v5e and v6e, by cores (two a chip) for the others.  The torus, in chips.
TORUS = {
    "v2": {8: "2x2"},
    "v3": {8: "2x2"},
    "v4": {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4"},
    "v5p": {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4"},
    "v5e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
}
TORUS["v6e"] = TORUS["v5e"]
NAMES = ", ".join(f"{generation}-{size}" for generation in TORUS for size in TORUS[generation])
# XLA may turn a product with gathered weights into a loop that computes while it sends, and counts the FLOPs of a loop
# once.  So it shall not here.  (In train.py it may, which needs more memory, and hides some of the sending.)
COUNTABLE = dict(xla_jf_spmd_threshold_for_windowed_einsum_mib="1000000")


class DoesNotFit(UserError):
    pass


@dataclass(frozen=True)
class PlanConfig(Config):
    tpu: str = knob("v5e-8", f"to compile for: {NAMES}")


def find_topology(tpu: str) -> list:
    """The devices of a TPU that is not there.  They can be compiled for, and can hold no array."""
    generation, _, size = tpu.partition("-")
    torus = TORUS.get(generation, {}).get(int(size) if size.isdigit() else None)
    if torus is None:
        raise UserError(f"--tpu {tpu}: choose from {NAMES}")
    options = {}
    if generation == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as on the real ones
    if generation in ("v5e", "v6e") and int(size) <= 8:  # one host; larger ones have hosts of four chips
        options["chips_per_host_bounds"] = *map(int, torus.split("x")), 1
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{torus}", **options).devices
    except Exception as e:
        raise UserError(f'no TPU compiler: pip install "jax[tpu]", on Linux ({str(e).splitlines()[0][:80]})') from None


def vocabulary(cfg: Config) -> int:
    return {"char": 65, "byte": 256, "bpe": cfg.vocab_size, "gpt2": 50_257}[cfg.tokenizer]  # char: Tiny Shakespeare's


def compile_step(cfg: Config, devices: list):
    """(Hardware, the compiled train step), or UserError if its memory does not suffice."""
    vocab_size = vocabulary(cfg)
    hw = train.make_mesh_and_shardings(cfg, train.make_init_state(cfg, vocab_size), devices)
    graph, _ = nnx.split(abstract_model(cfg, vocab_size, hw.dtype))
    batch = jax.ShapeDtypeStruct((cfg.batch_size, cfg.block_size + 1), np.int32, sharding=hw.batch)
    step = jax.ShapeDtypeStruct((), np.int32)
    try:
        return hw, train.make_train_step(cfg, graph, hw).lower(hw.state, batch, step).compile(COUNTABLE)
    except jax.errors.JaxRuntimeError as e:
        if not (why := re.search(r"(Ran|Out|ran|out) of memory.*", str(e))):
            raise
        raise DoesNotFit(f"DOES NOT FIT on {cfg.tpu} ({hw.description}): {why.group(0)}  {MORE_MEMORY}") from None


def plan(cfg: PlanConfig) -> dict:
    """Everything that is printed, as plain numbers: bytes, seconds, dollars."""
    devices = find_topology(cfg.tpu)
    hw, compiled = compile_step(cfg, devices)
    chip, n, tokens = CHIPS[devices[0].device_kind], len(devices), cfg.batch_size * cfg.block_size
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    traffic, collectives = read_program(compiled.as_text())
    n_params = train.count_parameters(hw.state.params, vocabulary(cfg))
    flops = cost["flops"] * cfg.grad_accum  # the compiler counts a loop's body once
    # Around a ring of devices, both ways: an all-reduce sends (almost) everything twice, the others once.
    sent = sum(size * (2 if kind == "all-reduce" else 1) for kind, (_, size) in collectives.items())
    seconds = dict(compute=flops / chip.flops, memory=traffic / chip.memory)
    if chip.link or not sent:
        seconds["links"] = sent / (2 * chip.link) if sent else 0.0
    fast, slow = max(seconds.values()), 2 * sum(seconds.values())
    formula = flops_per_token(cfg, n_params) * tokens / n
    runs = {}
    for name, wanted in ("max_steps", cfg.max_steps * tokens), ("20 tokens a parameter", 20 * n_params):
        hours = [wanted / tokens * step / 3600 for step in (fast, slow)]
        prices = dict(on_demand=chip.on_demand, spot=chip.spot)
        dollars = {kind: [h * n / chip.per_chip * price for h in hours] for kind, price in prices.items() if price}
        runs[name] = dict(hours=hours, dollars=dollars)
    return dict(
        fits=True,
        tpu=cfg.tpu,
        devices=n,
        hosts=len({device.process_index for device in devices}),
        description=hw.description,
        parameters=n_params,
        tokens_per_step=tokens,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        hbm=chip.gib * 2**30,
        flops=flops,
        flops_by_formula=formula,
        traffic=traffic,
        collectives=collectives,
        seconds=seconds,
        bound=max(seconds, key=seconds.get),
        step=[fast, slow],
        tokens_per_second=[tokens / slow, tokens / fast],
        mfu=[formula / chip.flops / step for step in (slow, fast)],
        runs=runs,
        prices=PRICES,
        sampling=4 * n_params + 8 * cfg.n_layer * cfg.n_embd * -(-cfg.block_size // PREFILL) * PREFILL,
    )


# --- for people ------------------------------------------------------------------------------------------------------


def span(low: float, high: float, form: str = "{:,.0f}") -> str:
    return f"{form.format(low)} to {form.format(high)}"


def describe(p: dict) -> str:
    """The same as text."""
    s, ratio = p["seconds"], p["flops"] / p["flops_by_formula"]
    gb = lambda size: f"{size / 1e9:,.2f} GB"
    ms = lambda seconds: f"{seconds * 1e3:,.2f} ms"
    sent = [f"{count} {kind}, {gb(size)}" for kind, (count, size) in p["collectives"].items()]
    ring = (
        f"{ms(s['links'])} around a ring, both ways"
        if "links" in s
        else "how fast they are is unknown, and left out below"
    )
    lines = [
        f"tpu       {p['tpu']}, {p['hosts']} host{'s' * (p['hosts'] > 1)}: {p['description']}",
        f"model     {p['parameters']:,} parameters; {p['tokens_per_step']:,} tokens a step",
        f"memory    of a device: {gb(p['arguments'])} arguments + {gb(p['temporaries'])} temporaries,"
        f" {gb(p['peak'])} at a time, of {gb(p['hbm'])}: FITS",
        f"compute   {p['flops']:.3g} FLOPs, {ratio:.2f} times the formula: {ms(s['compute'])} at the peak",
        f"memory    {gb(p['traffic'])} from and to it: {ms(s['memory'])} at its bandwidth",
        f"links     {'; '.join(sent) or 'nothing to send'}: {ring}",
        f"bound     by {p['bound']}",
        "PREDICTED, from all three at once to one after the other at half speed; nothing was run:",
        f"step      {span(*(x * 1e3 for x in p['step']), '{:,.1f}')} ms, {span(*p['tokens_per_second'])} tokens/s,"
        f" MFU {span(*(100 * x for x in p['mfu']))} %",
    ]
    for name, of in p["runs"].items():
        cost = [f"${span(*of['dollars'][kind], '{:,.2f}')} {kind.replace('_', ' ')}" for kind in of["dollars"]]
        time = " to ".join(duration(3600 * hours) for hours in of["hours"])
        lines.append(f"cost      {name}: {time}; {', '.join(cost) or 'no price known'}")
    lines.append(f"          {p['prices']}")
    lines.append(f"sampling  {gb(p['sampling'])}: the parameters in float32, and the cache of one text")
    return "\n".join(lines)


def prepare() -> None:
    """Before JAX starts: no TPU that is here is asked, and libtpu neither looks for what only a TPU's host has, nor
    minds another process that has loaded it."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for elsewhere cannot be read back
    os.environ |= dict(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-1", TPU_WORKER_HOSTNAMES="localhost")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"


def main(argv):
    prepare()
    cfg, on = parse(PlanConfig, argv, __doc__, json="print JSON")
    try:
        result = plan(cfg)
    except DoesNotFit as e:
        if on["json"]:
            print(json.dumps(dict(fits=False, tpu=cfg.tpu, why=str(e)), indent=1))
        raise
    print(json.dumps(result, indent=1) if on["json"] else describe(result))


if __name__ == "__main__":
    run(main)
