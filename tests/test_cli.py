"""The two scripts as a user runs them, in processes of their own: exit codes and streams."""

import os
import re
import signal
import subprocess
import sys
import termios
from dataclasses import fields
from pathlib import Path

import pytest
from scripts import SMALL, finish, script

import config
from cli import parse
from config import PRESETS, Config, UserError
from export import ExportConfig
from generate import SampleConfig

ROOT = Path(config.__file__).parent


def test_train_resume_and_sample(text_file, tmp_path):
    """The README's commands in a row; the last one with a prompt, and on a console, that knows ASCII only."""
    flags = [*SMALL, "--dataset", text_file, "--tokenizer", "byte", "--out_dir", tmp_path / "run"]
    code, out, err = finish(script("train", *flags, "--max_steps", 10))
    assert (code, err) == (0, "") and "step 10 | val_loss" in out
    code, out, err = finish(script("train", *flags, "--max_steps", 20))
    assert code == 0 and "going on after step 10 of 20" in out and "max_steps 10 -> 20" in out
    ask = ["--out_dir", tmp_path / "run", "--prompt", "ROMÉO:", "--max_new_tokens", 30]
    code, out, err = finish(script("sample", *ask, PYTHONIOENCODING="ascii"))
    assert code == 0 and re.fullmatch(r"(?s)ROM\?O:.{1,30}\n", out)
    assert "Traceback" not in err


def test_ctrl_c_while_sampling(text_file, tmp_path):
    """The text so far stays, the exit code is 130, and there is no traceback."""
    run = ["--out_dir", tmp_path / "run"]
    assert finish(script("train", *SMALL, "--dataset", text_file, "--max_steps", 2, *run))[0] == 0
    process = script("sample", *run, "--prompt", "ROMEO:", "--max_new_tokens", 10_000_000)
    assert process.stdout.read(60).startswith("ROMEO:")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and "Traceback" not in err


def test_benchmark_of_sampling():
    """Runs, and its ratios are those of the figures that stand beside them."""
    code, out, err = finish(script("benchmarks/sampling", "--preset", "nano", "--max_new_tokens", 16, "--rounds", 1))
    assert code == 0, err
    one, many, slow = (int(x.replace(",", "")) for x in re.findall(r"([\d,]+) tokens/s", out))
    ratios = [float(x) for x in re.findall(r"tokens/s .*?([\d.]+) x", out)]
    assert ratios == pytest.approx([many / one, one / slow], rel=0.02, abs=0.06)  # they have one decimal


@pytest.mark.parametrize(
    "name, flags, says",
    [
        ("train", ["--learnin_rate", "1"], "unknown flag --learnin_rate; did you mean --learning_rate?"),
        ("train", ["--max_steps", "many"], "argument --max_steps: invalid int value: 'many'"),
        ("train", ["--dataset", "/none.txt"], "--dataset /none.txt: No such file or directory"),
        ("sample", ["--out_dir", "/none"], "no checkpoint in /none; train first: python train.py"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(tmp_path, name, flags, says):
    if name == "train":
        flags = [*flags, "--out_dir", tmp_path / "run"]
    code, out, err = finish(script(name, *flags))
    assert code == 2 and out == ""
    assert err.startswith(f"error: {says}") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("cls", [Config, SampleConfig])
def test_help_shows_every_knob_with_default_and_meaning(cls, capsys):
    with pytest.raises(SystemExit) as e:
        parse(cls, ["--help"], "doc", fresh="start over")
    assert e.value.code == 0
    out = capsys.readouterr().out
    for f in fields(cls):
        assert re.search(rf"--{f.name}\s[^-]*{re.escape(f.metadata['meaning'])}", out), f.name
        assert re.search(rf"--{f.name}\s[^(]*.*\({re.escape(repr(f.default))}\)", out), f.name
    assert "--fresh" in out and all(f"preset {name}" in out for name in PRESETS)


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--n_embd", "100"], "n_embd 100 is not divisible by n_head 6; n_embd 102 would be"),
        (["--n_embd", "18"], "n_embd 18 / n_head 6: rotary embedding needs an even head width"),
        (["--batch_size", "10", "--grad_accum", "4"], "batch_size 10 is not divisible by grad_accum 4"),
        (["--dropout", "1"], "--dropout 1.0: must be 0 or more and less than 1"),
        (["--learning_rate", "nan"], "--learning_rate nan: must be 0"),
        (["--learning_rate", "inf"], "--learning_rate inf: must be 0"),
        (["--min_lr", "1"], "min_lr 1.0 is above learning_rate 0.001"),
        (["--block_size", "1"], "--block_size 1: must be 2 or more"),
        (["--dtype", "float8"], "--dtype float8: choose from auto, float32, bfloat16"),
        (["--tokenizer", "word"], "--tokenizer word: choose from char, byte, bpe, gpt2"),
        (["--vocab_size", "100"], "--vocab_size 100: must be 256 or more"),
        (["--preset", "medium"], "--preset medium: choose from nano, tiny"),
        (["--max_step", "5"], "unknown flag --max_step; did you mean --max_steps?"),
        (["5"], "unknown flag 5; --help lists them all"),
    ],
)
def test_bad_knobs_are_refused(flags, says):
    with pytest.raises(UserError) as e:
        parse(Config, flags, "")
    assert str(e.value).startswith(says)


def test_flags_go_over_presets_and_presets_over_defaults():
    cfg, on = parse(Config, ["--preset=nano", "--n_layer", "3", "--fresh"], "", fresh="", profile="")
    assert (cfg.n_layer, cfg.dropout, cfg.seed) == (3, PRESETS["nano"]["dropout"], Config.seed)
    assert cfg.out_dir == os.path.join("out", "nano") and on == {"fresh": True, "profile": False}


def test_every_knob_is_read_somewhere():
    """A knob that no line reads would be a lie."""
    modules = "config cli data tokenizer corpus model checkpoint generate sample export report train".split()
    code = "".join((ROOT / f"{name}.py").read_text() for name in modules)
    for f in fields(Config):
        assert re.search(rf"\b(cfg|self)\.{f.name}\b|\"{f.name}\"", code), f.name
    for f in fields(SampleConfig):
        assert f.name == "preset" or f"how.{f.name}" in code, f.name
    for f in fields(ExportConfig):
        assert f.name == "preset" or f"how.{f.name}" in (ROOT / "export.py").read_text(), f.name


def test_memory_that_does_not_suffice_is_one_line():
    """JAX's own error, of an array of 140 TB, as it comes out of a script."""
    code = "import cli, jax; cli.run(lambda argv: jax.numpy.zeros(1 << 45).block_until_ready())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: RESOURCE_EXHAUSTED: ") and "more --grad_accum" in done.stderr


@pytest.mark.parametrize("notebook", [False, True])
def test_progress_bar_is_for_terminals(text_file, tmp_path, notebook):
    """On a terminal there is a bar, which is drawn over; in a cell of a notebook, which looks like one, there are lines
    and nothing else."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1"} | ({"JPY_PARENT_PID": "1"} if notebook else {})
    flags = [*SMALL, "--dataset", text_file, "--max_steps", 2, "--out_dir", tmp_path / "run"]
    command = [sys.executable, ROOT / "train.py", *map(str, flags)]
    process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while block := os.read(ours, 4096):
            seen += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0 and b"step 2 | loss" in seen
    bars = seen.replace(b"\r\n", b"\n").count(b"\r")
    assert (bars == 0 and b"step/s" not in seen) if notebook else (bars > 2 and b"step/s" in seen)
