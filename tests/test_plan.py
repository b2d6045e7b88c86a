"""plan.py: reading compiled programs, predictions, and the table in scaling.md (which needs the TPU's compiler)."""

import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import plan
import train
from chips import CHIPS, Chip, chip_of
from cli import parse
from config import UserError
from hlo import read_program
from plan import PlanConfig, find_topology
from report import flops_per_token

SCALING = (Path(plan.__file__).parent / "scaling.md").read_text()
ROWS = re.findall(r"^\| (\w+(?: --\w+ \w+)*) \| (v\w+-\d+) \| .*$", SCALING, re.M)  # preset and flags, TPU

PROGRAM = """\
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%gather_begins (p: bf16[8,128]) -> bf16[64,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %part.1 = bf16[64,128]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}

%gather_ends (p: bf16[8,128]) -> bf16[64,128] {
  %p.2 = bf16[8,128]{1,0} parameter(0)
  ROOT %part.2 = bf16[64,128]{1,0} all-gather(%p.2), channel_id=7, dimensions={0}
}

%all-reduce-scatter.3 (p: f32[64,16]) -> f32[8,16] {
  %p.3 = f32[64,16]{1,0} parameter(0)
  %whole.3 = f32[64,16]{1,0} all-reduce(%p.3), channel_id=1, to_apply=%add
  ROOT %mine = f32[8,16]{1,0} dynamic-slice(%whole.3, %c, %c)
}

%less (state: (s32[], f32[1024], bf16[8,128])) -> pred[] {
  %turns = s32[] constant(3)
  ROOT %on = pred[] compare(%i, %turns), direction=LT
}

%multiply (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %y = f32[1024]{0} multiply(%x, %x)
}

%body (state: (s32[], f32[1024], bf16[8,128])) -> (s32[], f32[1024], bf16[8,128]) {
  %state = (s32[], f32[1024]{0}, bf16[8,128]{1,0}) parameter(0)
  %old = f32[1024]{0} get-tuple-element(%state), index=1
  %w = bf16[8,128]{1,0} get-tuple-element(%state), index=2
  %begun = bf16[64,128]{1,0:T(8,128)S(1)} fusion(%w), kind=kCustom, calls=%gather_begins
  %async-collective-done = bf16[64,128]{1,0:T(8,128)S(1)} fusion(%w), kind=kCustom, calls=%gather_ends
  %square = f32[1024]{0} fusion(%old), kind=kLoop, calls=%multiply
  %fetch = (f32[1024]{0}, f32[1024]{0:S(1)}, u32[]{:S(2)}) copy-start(%square)
  %fetched = f32[1024]{0:S(1)} copy-done(%fetch)
  ROOT %next = (s32[], f32[1024]{0}, bf16[8,128]{1,0}) tuple(%old, %square, %w)
}

ENTRY %main (g: f32[1000]) -> f32[1000] {
  %g = f32[1000]{0} parameter(0)
  %loop = (s32[], f32[1024]{0}, bf16[8,128]{1,0}) while(%init), condition=%less, body=%body
  %h = f32[24]{0} parameter(1)
  %reduced = (f32[1000]{0}, f32[24]{0}) all-reduce(%g, %h), channel_id=1, to_apply=%add
  %a = f32[64,16]{1,0:S(1)} parameter(2)
  %scattered = f32[8,16]{1,0:S(1)} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.3
  %plain = f32[8,16]{1,0:S(1)} reduce-scatter(%a), channel_id=1, dimensions={0}, to_apply=%add
  %sent = (f32[64,16]{1,0:S(1)}, f32[64,16]{1,0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%a)
  %gathered = (f32[64,16]{1,0:S(1)}, f32[512,16]{1,0:S(1)}) all-gather-start(%a), channel_id=9
  %summed = (f32[64,16]{1,0:S(1)}, f32[64,16]{1,0:S(1)}) all-reduce-start(%a, %a), channel_id=1
  ROOT %first = f32[1000]{0} get-tuple-element(%reduced), index=0
}
"""


def test_reading_a_program():
    """Counted by hand: the loop three times; a gather in two parts once a turn; what is on the chip moves nothing."""
    traffic, collectives = read_program(PROGRAM)
    assert collectives == {
        "all-gather": (3 + 1, 3 * 64 * 128 * 2 + 512 * 16 * 4),
        "all-reduce": (2, 1024 * 4 + 2 * 64 * 16 * 4),
        "reduce-scatter": (2, 2 * 64 * 16 * 4),
        "collective-permute": (1, 64 * 16 * 4),
    }
    gather, square, fetch = 2 * 8 * 128 * 2, 2 * 1024 * 4, 1024 * 4
    reduce = 2 * 1024 * 4
    assert traffic == 3 * (gather + square + fetch) + reduce


def test_topologies_have_as_many_devices_as_their_names_say():
    """v5e-8 is eight chips; v4-8 is four chips of two cores each."""
    for generation, sizes in plan.TORUS.items():
        for size, torus in sizes.items():
            chips = math.prod(map(int, torus.split("x")))
            assert size == (chips if generation in ("v5e", "v6e") else 2 * chips)


@pytest.mark.parametrize(
    "kind, flops",
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_chips_are_known_by_their_whole_name(kind, flops):
    chip = chip_of(kind)
    assert (chip and chip.flops) == flops


def test_prediction_by_hand(cfg, monkeypatch):
    """On a chip with round numbers, compiled for fake devices: the range of the step, then rates, hours and dollars."""
    chip = Chip(1e9, 16, 1e8, 1e7, on_demand=3.0, spot=1.0)
    monkeypatch.setattr(plan, "find_topology", lambda _: jax.devices())
    monkeypatch.setattr(plan, "COUNTABLE", {})
    monkeypatch.setitem(CHIPS, jax.devices()[0].device_kind, chip)
    cfg = PlanConfig(**vars(replace(cfg, max_steps=100)))
    p = plan.plan(cfg)
    tokens = cfg.batch_size * cfg.block_size
    formula = flops_per_token(cfg, p["parameters"]) * tokens / 8
    assert p["flops_by_formula"] == formula and 0.9 < p["flops"] / formula < 1.5
    sent = 2 * p["collectives"]["all-reduce"][1]
    times = [p["flops"] / 1e9, p["traffic"] / 1e8, sent / 2e7]
    assert list(p["seconds"].values()) == pytest.approx(times)
    fast, slow = max(times), 2 * sum(times)
    assert p["step"] == pytest.approx([fast, slow])
    assert p["tokens_per_second"] == pytest.approx([tokens / slow, tokens / fast])
    assert p["mfu"] == pytest.approx([formula / 1e9 / slow, formula / 1e9 / fast])
    run = p["runs"]["max_steps"]
    assert run["hours"] == pytest.approx([100 * fast / 3600, 100 * slow / 3600])
    assert run["dollars"]["on_demand"] == pytest.approx([8 * 3 * hours for hours in run["hours"]])
    assert p["runs"]["20 tokens a parameter"]["hours"][0] == pytest.approx(20 * p["parameters"] / tokens * fast / 3600)
    text = plan.describe(p)
    assert (
        p["hbm"] == 16 * 2**30
        and "17.18 GB: FITS" in text
        and "PREDICTED" in text
        and f"{p['parameters']:,} parameters" in text
    )


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--tpu", "v5e-7"], "--tpu v5e-7: choose from v2-8"),
        (["--tpu", "gpu"], "--tpu gpu: choose from v2-8"),
        (["--n_head", "7"], "n_embd 384 is not divisible by n_head 7"),
        (["--tpuu", "v5e-8"], "unknown flag --tpuu; did you mean --tpu?"),
    ],
)
def test_bad_use_is_refused(flags, says):
    with pytest.raises(UserError) as e:
        find_topology(parse(PlanConfig, flags, "")[0].tpu)
    assert says in str(e.value)


def test_without_the_compiler_it_says_what_to_install(monkeypatch):
    def missing(**_):
        raise RuntimeError("no libtpu\nand pages more")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(UserError, match=r'^no TPU compiler: pip install "jax\[tpu\]", on Linux \(no libtpu\)$'):
        find_topology("v5e-8")


# --- with the TPU's compiler -----------------------------------------------------------------------------------------


def row(p: dict, what: str) -> str:
    """A line of the table in scaling.md."""
    gb, ratio = (p["arguments"] + p["temporaries"]) / 1e9, p["flops"] / p["flops_by_formula"]
    mesh = re.search(r"data (\d+) x fsdp (\d+) x tensor (\d+)", p["description"]).groups()
    sent = (
        ", ".join(f"{size / 1e9:,.2f} GB {kind}" for kind, (_, size) in sorted(p["collectives"].items())) or "nothing"
    )
    low, high = (f"{1e3 * x:,.1f}" for x in p["step"])
    mfu = " to ".join(f"{100 * x:.0f}" for x in p["mfu"])
    cells = (
        what,
        p["tpu"],
        " x ".join(mesh),
        f"{gb:.2f} GB",
        f"{ratio:.2f}",
        sent,
        p["bound"],
        f"{low} to {high} ms",
        f"{mfu} %",
    )
    return f"| {' | '.join(cells)} |"


def check(what, tpu):
    plan.prepare()
    p = plan.plan(parse(PlanConfig, ["--preset", *what.split(), "--tpu", tpu], "")[0])
    assert row(p, what) in SCALING.splitlines()


IN_CI = [("tiny", "v5e-8"), ("tiny", "v2-8")]


@pytest.mark.tpu
@pytest.mark.parametrize("what, tpu", IN_CI)
def test_table(what, tpu):
    """The compiler says what scaling.md says: memory, FLOPs, what is sent, and the prediction that follows."""
    assert (what, tpu) in ROWS
    check(what, tpu)


@pytest.mark.long_tpu
@pytest.mark.parametrize("what, tpu", [row for row in ROWS if row not in IN_CI])
def test_rest_of_table(what, tpu):
    check(what, tpu)


@pytest.mark.tpu
def test_only_data_goes_between_slices():
    """Of two slices of v5e-16, each group of fsdp x tensor lies within one."""
    from jax.experimental import topologies

    plan.prepare()
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4", num_slices=2).devices
    cfg = PlanConfig(fsdp=4, tensor=2)
    hw = train.make_mesh_and_shardings(cfg, train.make_init_state(cfg, 65), devices)
    grid = hw.batch.mesh.devices
    assert grid.shape == (4, 4, 2) and {d.slice_index for d in grid.flat} == {0, 1}
    assert all(len({d.slice_index for d in group.flat}) == 1 for group in grid)
    with pytest.raises(UserError, match="2 slices need as many groups of fsdp x tensor, or a multiple; there are 1"):
        one = replace(cfg, fsdp=32, tensor=1)
        train.make_mesh_and_shardings(one, train.make_init_state(one, 65), devices)


@pytest.mark.tpu
def test_what_does_not_fit_is_refused_with_the_compilers_words():
    plan.prepare()
    flags = ["--preset", "tiny", "--tpu", "v5e-1", "--n_layer", "1", "--batch_size", "32768"]
    with pytest.raises(UserError, match=r"DOES NOT FIT on v5e-1 .*of memory.*--grad_accum"):
        plan.plan(parse(PlanConfig, flags, "")[0])
