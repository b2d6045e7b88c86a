"""Compile a preset for a TPU that you do not have: does it fit, what limits it, what does it cost?

    pip install "jax[tpu]"                                  # on Linux; no TPU needed
    python plan.py --preset tiny --tpu v5e-8
    python plan.py --preset scaled --tpu v5e-16 --fsdp 16 --json

The very step that train.py runs goes through the TPU's own compiler.  Sizes, FLOPs and collectives are what it made of
it; times and prices are computed from them and from chips.py, and are predictions.
"""

import json
import math
import os
import re
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

import train
from chips import CHIPS, PRICES
from cli import parse, run
from config import Config, UserError, knob
from generate import PREFILL
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
VOCABULARY = {"char": 65, "byte": 256, "gpt2": 50_257}  # char: Tiny Shakespeare's
ADVICE = "more --grad_accum or --remat 1 shrink the activations, --fsdp the parameters and their moments"
# XLA may turn a product with gathered weights into a loop that computes while it sends.  Here it does not: what happens
# in such a loop is not counted.  On a TPU the step may so be somewhat quicker than here.
COUNTABLE = dict(xla_jf_spmd_threshold_for_windowed_einsum_mib="1000000")


class DoesNotFit(UserError):
    pass


@dataclass(frozen=True)
class PlanConfig(Config):
    tpu: str = knob("v5e-8", f"to compile for: {', '.join(f'{g}-{n}' for g in TORUS for n in TORUS[g])}")


def find_topology(tpu: str) -> list:
    """The devices of a TPU that is not there.  They can be compiled for, and can hold no array."""
    generation, _, size = tpu.partition("-")
    torus = TORUS.get(generation, {}).get(int(size) if size.isdigit() else None)
    if torus is None:
        raise UserError(f"--tpu {tpu}: choose from {', '.join(f'{g}-{n}' for g in TORUS for n in TORUS[g])}")
    options = {}
    if generation == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as on the real ones
    if generation in ("v5e", "v6e") and int(size) <= 8:
        options["chips_per_host_bounds"] = (
            *map(int, torus.split("x")),
            1,
        )  # one host; larger ones have four chips each
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{torus}", **options).devices
    except Exception as e:
        raise UserError(f'no TPU compiler: pip install "jax[tpu]", on Linux ({str(e).splitlines()[0][:80]})') from None


def compile_step(cfg: Config, devices: list):
    """(Hardware, the compiled train step), or UserError if its memory does not suffice."""
    vocab_size = VOCABULARY[cfg.tokenizer]
    hw = train.make_mesh_and_shardings(cfg, train.make_init_state(cfg, vocab_size), devices)
    graph, _ = nnx.split(abstract_model(cfg, vocab_size, hw.dtype, hw.stream))
    batch = jax.ShapeDtypeStruct((cfg.batch_size, cfg.block_size + 1), np.int32, sharding=hw.batch)
    step = jax.ShapeDtypeStruct((), np.int32)
    try:
        return hw, train.make_train_step(cfg, graph, hw).lower(hw.state, batch, step).compile(COUNTABLE)
    except jax.errors.JaxRuntimeError as e:
        if not (why := re.search(r"(Ran|Out|ran|out) of memory.*", str(e))):
            raise
        raise DoesNotFit(f"DOES NOT FIT on {cfg.tpu} ({hw.description}): {why.group(0)}  {ADVICE}") from None


# --- what the compiler made of it ------------------------------------------------------------------------------------

BYTES = dict(f32=4, bf16=2, s32=4, u32=4, f16=2, s16=2, u16=2, s8=1, u8=1, pred=1)
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
NO_TRAFFIC = "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "opt-barrier"


def array_sizes(shapes: str) -> list[tuple[int, bool]]:
    """(bytes, in HBM?) of each array in e.g. `(f32[8,128]{1,0:T(8,128)S(1)}, s32[])`; S(1) and up are on the chip."""
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?", shapes)
    return [
        (BYTES[d] * math.prod(int(n) for n in dims.split(",") if n), "S(" not in at)
        for d, dims, at in found
        if d in BYTES
    ]


def read_program(text: str):
    """(bytes to and from HBM, {collective: (count, bytes)}) of one device in one run of a compiled program.

    text: the program as HLO, XLA's language, one line an instruction.  A loop counts as often as its condition says,
    from zero in steps of one.  What a fusion does inside stays on the chip: only its operands and results move.  The
    bytes of a collective are those of its whole array: what is gathered, what is added up.
    """
    computations, entry, collectives = {}, "", {}
    for block in re.split(r"\n(?=\S)", text):
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(", block):
            line = r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)"
            found = [re.match(line, text) for text in block.split("\n")[1:]]
            computations[head.group(2)] = [match.groups() for match in found if match]
            entry = head.group(2) if head.group(1) else entry

    def walk(name: str, times: int, fused: bool = False) -> int:
        """Bytes to and from HBM; adds what is sent to `collectives`."""
        results, traffic = {}, 0
        for result, shapes, op, rest in computations[name]:
            results[result] = shapes
            sizes, kind = array_sizes(shapes), op.removesuffix("-start")
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            read = [size for operand in operands for size in array_sizes(results.get(operand, ""))]
            if kind in COLLECTIVES:
                # The larger side; a gather that starts has the operand among its results.
                moved = max(sum(size for size, _ in read), 0 if op != kind else sum(size for size, _ in sizes))
                if op == "all-gather-start":
                    moved = sizes[-1][0]
                if name.startswith("all-reduce-scatter"):  # a TPU's way to say so
                    kind = "reduce-scatter"
                count, before = collectives.get(kind, (0, 0))
                collectives[kind] = count + times, before + times * moved
            if op == "while":
                condition, body = (re.search(rf"{part}=%([\w.\-]+)", rest).group(1) for part in ("condition", "body"))
                bounds = [rest for _, _, op, rest in computations[condition] if op == "constant"]
                traffic += walk(body, times * int(bounds[0].split(")")[0]), fused)
                continue
            # What works in the background is three fusions with the same collective: begin, meanwhile, done.
            called = re.search(r"calls=%([\w.\-]+)", rest)
            if called and not called.group(1).startswith("async_collective") and "collective-done" not in result:
                walk(called.group(1), times, fused=True)
            if fused or op in NO_TRAFFIC or op.endswith("-done"):
                continue
            if op in ("copy-start", "slice-start"):  # from HBM to the chip or back
                traffic += times * sizes[1][0]
            else:
                traffic += times * sum(size for size, in_hbm in sizes + read if in_hbm)
        return traffic

    return walk(entry, 1), collectives


def plan(cfg: PlanConfig) -> dict:
    """Everything that is printed, as plain numbers: bytes, seconds, dollars."""
    devices = find_topology(cfg.tpu)
    hw, compiled = compile_step(cfg, devices)
    chip, n, tokens = CHIPS[devices[0].device_kind], len(devices), cfg.batch_size * cfg.block_size
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    traffic, collectives = read_program(compiled.as_text())
    n_params = train.count_parameters(hw.state.params, VOCABULARY[cfg.tokenizer])
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
