"""Runs that are stopped, killed and damaged.  What they share: the same command goes on, and ends where an undisturbed
run ends, to the last bit."""

import os
import random
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from scripts import SMALL, arrays, assert_same_run, finish, metrics, read_until, script, train, wait_for

import checkpoint
from storage import hold, run_path


@pytest.fixture
def flags(text_file):
    return [*SMALL, "--dataset", text_file, "--eval_interval", 10, "--checkpoint_interval", 10]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """(flags) -> the directory of a run that nothing happened to, made once for all tests that compare with it."""
    runs = {}

    def run(*flags, **env):
        if flags not in runs:
            runs[flags] = tmp_path_factory.mktemp("undisturbed") / "run"
            assert train(*flags, "--out_dir", runs[flags], **env)[0] == 0
        return runs[flags]

    return run


def steps(run):
    return sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())


# --- stopped and killed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout, grad_accum, at", [(0, 1, 10), (0.2, 1, 13), (0, 2, 13), (0.2, 2, 10)])
def test_ten_steps_and_ten_in_a_new_process_are_twenty(flags, tmp_path, undisturbed, dropout, grad_accum, at):
    """Parameters, moments, logged losses, rates and evaluations; also when the stop falls on an evaluation."""
    run = tmp_path / "run"
    flags += ["--dropout", dropout, "--grad_accum", grad_accum, "--max_steps", 20]
    assert train(*flags, "--out_dir", run, CTRL_C_AT=at - 1)[0] == 130
    assert steps(run)[-1] == at
    code, out, _ = train(*flags, "--out_dir", run)
    assert code == 0 and f"going on after step {at} of 20" in out
    assert_same_run(run, undisturbed(*flags))


@pytest.mark.parametrize("kills, devices", [(15, 1), pytest.param(120, 2, marks=pytest.mark.long)])
def test_kill_at_any_moment(flags, tmp_path, kills, devices):
    """kill -9 at random moments, among them within saves and evaluations, which are slowed down to be hit.  From the
    first checkpoint on there is always one that can be read, never an older one than before."""
    rng, run = random.Random(kills), tmp_path / "run"
    flags += ["--eval_interval", 6, "--checkpoint_interval", 4, "--max_steps", 12 * kills, "--log_interval", 2]
    flags += ["--eval_tokens", 600, "--out_dir"]
    slow = dict(SLOW_FILES=0.05, SLOW_EVALUATION=0.1, JAX_NUM_CPU_DEVICES=devices)
    hits, newest = dict(save=0, evaluation=0, deletion=0), 0
    for _ in range(kills):
        process = script("train", *flags, run, **slow)
        read_until(process, rng.choice(["compiling", "compiled", "compiled", "compiled"]))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.1, 2))
        process.kill()
        rest, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, (process.returncode, err)
        said = [line for line in rest.splitlines() if line.startswith(("evaluating", "evaluated"))]
        hits["evaluation"] += bool(said) and said[-1].startswith("evaluating")
        hits["save"] += any("tmp" in p.name for folder in ("checkpoints", "best") for p in (run / folder).glob("*"))
        hits["deletion"] += any(run.glob("*/*.deleted"))
        path = checkpoint.find(run)
        assert path is not None or newest == 0
        if path is not None:
            assert newest <= int(path.name) == arrays(path)["rest['step']"]
            newest = int(path.name)
        for path, _ in checkpoint.whole(run):
            arrays(path)
    print(hits, "newest", newest)
    assert hits["save"] and hits["evaluation"] and 0 < newest
    assert train(*flags, run, JAX_NUM_CPU_DEVICES=devices)[0] == 0
    assert train(*flags, tmp_path / "undisturbed", JAX_NUM_CPU_DEVICES=devices)[0] == 0
    assert_same_run(run, tmp_path / "undisturbed")
    files = lambda folder: sorted(p.name for p in folder.glob("*/*"))
    assert files(run) == files(tmp_path / "undisturbed"), "what the kills left was not cleared"


@pytest.mark.parametrize(
    "moment, number",
    [("step", signal.SIGINT), ("compile", signal.SIGTERM), ("evaluation", signal.SIGINT), ("save", signal.SIGTERM)],
)
def test_signal_ends_a_run_in_good_order(flags, tmp_path, undisturbed, moment, number):
    """The step is finished and saved, the exit code is the signal's, and the same command goes on from that step."""
    run = tmp_path / "run"
    flags += ["--max_steps", 40]
    slow = dict(step={}, compile=dict(JAX_COMPILATION_CACHE_DIR=""), evaluation=dict(SLOW_EVALUATION=0.2))
    process = script("train", *flags, "--out_dir", run, **slow.get(moment, dict(SLOW_FILES=0.3)))
    if moment == "compile":
        read_until(process, "step 0 | val_loss")
    elif moment == "evaluation":
        read_until(process, "step 10 | loss")
        read_until(process, "evaluating 1")
    elif moment == "save":
        wait_for(lambda: any("tmp" in p.name for p in (run / "checkpoints").glob("10*")), process)
    else:
        read_until(process, "compiled")
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == 128 + number and err.count("\n") == 2 and "once more ends at once" in err, err
    said, step = re.search(r"stopped by (SIG\w+) after step (\d+)", out).groups()
    assert said == signal.Signals(number).name and steps(run)[-1] == int(step)
    if moment in ("compile", "evaluation"):
        assert step == dict(compile="1", evaluation="10")[moment]
    code, out, _ = train(*flags, "--out_dir", run)
    assert code == 0 and f"going on after step {step} of 40" in out
    assert_same_run(run, undisturbed(*flags))


def test_second_ctrl_c_ends_at_once(flags, tmp_path):
    """Even while Python waits for C++: a first one alone would never be obeyed here."""
    process = script("train", *flags, "--max_steps", 40, "--out_dir", tmp_path / "run", STUCK_AT=3)
    read_until(process, "stuck")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n" and "SIGINT: finishing this step" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def pair(*flags, **env):
    """Two processes, two devices each, that train together: jax.distributed over loopback."""
    address = dict(JAX_COORDINATOR_ADDRESS=f"localhost:{random.randrange(20_000, 30_000)}", JAX_NUM_PROCESSES=2)
    return [script("train", *flags, JAX_PROCESS_ID=i, **address, **dict(JAX_NUM_CPU_DEVICES=2) | env) for i in range(2)]


def slurm(n, *flags, **env):
    """n tasks of a Slurm job, two devices each, as srun would start them: JAX finds the others by these variables."""
    job = dict(SLURM_JOB_ID=random.randrange(4096), SLURM_NTASKS=n, SLURM_STEP_NODELIST="localhost", SLURM_LOCALID=0)
    return [script("train", *flags, **job, SLURM_PROCID=i, JAX_NUM_CPU_DEVICES=2, **env) for i in range(n)]


def test_two_processes_start_from_weights(flags, tmp_path):
    """Of a run of one process, whose validation loss is then theirs; nothing is asked of JAX before they have met."""
    run = tmp_path / "run"
    assert train(*flags, "--max_steps", 10, "--out_dir", run)[0] == 0
    more = ["--max_steps", 1, "--init_from", run, "--out_dir", tmp_path / "two"]
    done = [finish(process) for process in pair(*flags, *more)]
    assert [code for code, _, _ in done] == [0, 0], done
    assert metrics(tmp_path / "two")[0]["val_loss"] == pytest.approx(metrics(run)[-1]["val_loss"], rel=1e-5)


def test_two_processes_stop_after_the_same_step(flags, tmp_path):
    """SIGTERM goes to the second; both save the same step, and the rerun goes on from it with the losses of one process
    that has as many devices."""
    flags += ["--max_steps", 400, "--log_interval", 1, "--sample_tokens", 20, "--out_dir"]
    first, second = pair(*flags, tmp_path / "two")
    head = read_until(first, "step 30 | loss")
    second.send_signal(signal.SIGTERM)
    (code, out, _), (code2, out2, _) = finish(first), finish(second)
    assert (code, code2) == (143, 143)
    assert all(line.startswith("[Gloo]") for line in out2.splitlines()), "only one process prints"
    step = int(re.search(r"stopped by SIGTERM after step (\d+)", out).group(1))
    assert step >= 30 and steps(tmp_path / "two")[-1] == step and "devices   4 x cpu" in "".join(head)
    done = [finish(p) for p in pair(*flags, tmp_path / "two", "--max_steps", step + 20)]
    assert [code for code, _, _ in done] == [0, 0] and f"going on after step {step} of" in done[0][1]
    assert train(*flags, tmp_path / "one", JAX_NUM_CPU_DEVICES=4, CTRL_C_AT=30)[0] == 130
    two, one = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert [r["step"] for r in two if "loss" in r] == list(range(1, step + 21))
    for a, b in zip(two[:30], one[:30]):
        assert a.keys() == b.keys() and a == pytest.approx(b, rel=1e-4)


def test_four_processes_are_as_one(flags, tmp_path):
    """Tasks of a Slurm job.  On data 4 x fsdp 2 each makes a quarter of the batch, no row twice; the losses are those
    of one process with as many devices."""
    flags += ["--max_steps", 10, "--log_interval", 1, "--fsdp", 2, "--sample_tokens", 8, "--out_dir"]
    ends = [finish(process) for process in slurm(4, *flags, tmp_path / "four", SHOW_ROWS=1)]
    assert [code for code, _, _ in ends] == [0] * 4, ends
    rows = [[int(row) for row in re.search(r"^rows (.*)$", err, re.M).group(1).split()] for _, _, err in ends]
    assert [len(mine) for mine in rows] == [4] * 4 and sorted(sum(rows, [])) == list(range(16))
    assert train(*flags, tmp_path / "one", JAX_NUM_CPU_DEVICES=8)[0] == 0
    for a, b in zip(metrics(tmp_path / "four"), metrics(tmp_path / "one"), strict=True):
        assert a.keys() == b.keys() and a == pytest.approx(b, rel=1e-4)


def test_a_task_that_slurm_says_little_about_trains_alone(flags, tmp_path):
    """As in a shell within an allocation; it says so."""
    code, out, err = train(*flags, "--max_steps", 2, "--out_dir", tmp_path / "run", SLURM_NTASKS=2)
    assert code == 0 and "devices   1 x cpu" in out and err.startswith("NOTE      no word of other hosts (")


@pytest.mark.parametrize("here", [0, 1])
def test_missing_process_is_not_waited_for_for_ever(flags, tmp_path, here):
    """Whether it is the first one, which the others come to, or another."""
    address = f"localhost:{19_990 + here}"
    numbers = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=here)
    code, out, err = train(*flags, "--out_dir", tmp_path / "run", DEADLINE=3, **numbers)
    assert (code, out) == (2, "") and not (tmp_path / "run").exists()
    assert f"error: not all 2 processes came to {address} within 3.0 s: is one missing?" in err


@pytest.mark.parametrize(
    "change", [dict(JAX_PROCESS_ID=2), dict(JAX_NUM_PROCESSES="two"), dict(JAX_COORDINATOR_ADDRESS="")]
)
def test_bad_process_numbers_are_refused(flags, tmp_path, change):
    """Also if only some are there: a process that trains alone would spoil the others' run."""
    numbers = dict(JAX_COORDINATOR_ADDRESS="localhost:19989", JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=0) | change
    code, _, err = train(*flags, "--out_dir", tmp_path / "run", **numbers)
    name, value = next(iter(change.items()))
    assert code == 2 and err.count("\n") == 1 and f"{name}={value}" in err and "needed are host:port" in err


def test_two_processes_fall_back_and_are_refused_together(flags, tmp_path):
    """Parameters are cut over both, and what the second has to read is damaged: both go on from the checkpoint before.
    A folder that another run holds is refused by both, at once and with one reason."""
    run = tmp_path / "run"
    flags += ["--max_steps", 100, "--fsdp", 2, "--out_dir", run]
    ends = [finish(p) for p in pair(*flags, JAX_NUM_CPU_DEVICES=1, CTRL_C_AT=22)]
    assert [code for code, _, _ in ends] == [143, 143], ends
    before, newest = steps(run)
    damage(run / "checkpoints" / str(newest) / "params" / "ocdbt.process_1", "cut")
    held = hold(run_path(run))
    start = time.monotonic()
    (code, _, err), (code2, _, err2) = [finish(p) for p in pair(*flags, JAX_NUM_CPU_DEVICES=1)]
    assert (code, code2) == (2, 2) and time.monotonic() - start < 60
    assert "another process is training" in err and "the first process cannot use" in err2
    assert "Traceback" not in err + err2
    os.close(held)
    (code, out, err), (code2, _, _) = [finish(p) for p in pair(*flags, JAX_NUM_CPU_DEVICES=1)]
    assert (code, code2) == (0, 0) and f"going on after step {before} of 100" in out
    assert f"checkpoints/{newest} is damaged" in err


@pytest.mark.parametrize(
    "saved, then",  # (devices, fsdp, tensor); data takes the rest
    [
        ((8, 1, 1), [(1, 1, 1), (4, 2, 2)]),
        ((8, 8, 1), [(2, 1, 1), (8, 4, 2)]),
        ((8, 4, 2), [(1, 1, 1), (8, 1, 1)]),
    ],
)
def test_goes_on_with_other_devices(flags, tmp_path, undisturbed, saved, then):
    """Saved on one mesh, continued on others: the losses of a run on one device.  Sampled on one device."""
    flags += ["--log_interval", 1, "--max_steps", 16]

    def on(mesh, run, **env):
        more = ["--fsdp", mesh[1], "--tensor", mesh[2], "--out_dir", run]
        return train(*flags, *more, JAX_NUM_CPU_DEVICES=mesh[0], **env)[0]

    assert on(saved, tmp_path / "saved", CTRL_C_AT=9) == 130
    expected = [r["loss"] for r in metrics(undisturbed(*flags)) if "loss" in r]
    for mesh in then:
        run = tmp_path / str(mesh)
        shutil.copytree(tmp_path / "saved", run)
        assert on(mesh, run) == 0
        np.testing.assert_allclose([r["loss"] for r in metrics(run) if "loss" in r], expected, rtol=1e-4)
    ask = ["--out_dir", tmp_path / "saved", "--prompt", "ROMEO:", "--max_new_tokens", 5]
    code, out, _ = finish(script("sample", *ask))
    assert code == 0 and re.fullmatch(r"(?s)ROMEO:.{5}\n", out)


# --- disks -----------------------------------------------------------------------------------------------------------


def test_full_disk(flags, tmp_path):
    """No file may grow beyond 150 kB, and one array of this model alone has 700: the run ends with a message, the
    checkpoint before is whole, and with space the run goes on from it."""
    run = tmp_path / "run"
    flags += ["--n_embd", 256, "--max_steps", 40, "--out_dir"]
    assert train(*flags, run, CTRL_C_AT=12)[0] == 130
    before = arrays(checkpoint.find(run))
    code, out, err = train(*flags, run, before=["prlimit", "--fsize=150000"])
    assert code == 1 and "going on after step 13" in out
    last = err.splitlines()[-1]
    assert last.startswith(f"error: a checkpoint could not be written in {run}") and "goes on from" in last, err
    after = arrays(checkpoint.find(run))
    assert checkpoint.find(run).name == "13" and all(np.array_equal(before[name], after[name]) for name in before)
    assert train(*flags, run)[0] == 0
    assert train(*flags, tmp_path / "undisturbed")[0] == 0
    assert_same_run(run, tmp_path / "undisturbed")


def test_directory_that_may_not_be_written(flags, tmp_path):
    """One line, whether it shall be made there or is there already; what is in it stays as it is."""
    code, _, err = train(*flags, "--out_dir", "/sys/run")
    assert code == 1 and re.fullmatch(r"error: .*'?/sys/run'?.*\n", err)
    run = tmp_path / "run"
    assert train(*flags, "--max_steps", 10, "--out_dir", run)[0] == 0
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    as_user = []
    if os.geteuid() == 0:  # root may write anywhere, unless it gives that right up
        as_user = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
    for path in run, *run.iterdir():
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        code, _, err = train(*flags, "--max_steps", 20, "--out_dir", run, before=as_user)
    finally:
        for path in run, *run.iterdir():
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert code == 1 and "error: " in err.splitlines()[-1] and str(run) in err.splitlines()[-1], err
    assert files.items() <= {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}.items()


def damage(path, how):
    """The largest file of a checkpoint, which holds arrays: cut in half, or gone."""
    file = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if how == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.unlink()


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damaged_and_foreign_directories(flags, tmp_path, undisturbed, how):
    """The newest checkpoint that can be read is used, what cannot is named and moved aside, what does not look like a
    checkpoint is left alone, and nothing is lost of either."""
    run = tmp_path / "run"
    flags += ["--max_steps", 40]
    assert train(*flags, "--out_dir", run, CTRL_C_AT=22)[0] == 130
    assert steps(run) == [20, 23]
    damage(run / "checkpoints" / "23", how)
    (run / "checkpoints" / "500").mkdir()
    (run / "checkpoints" / "600").write_text("not a directory")
    (run / "checkpoints" / "20.orbax-checkpoint-tmp-1").mkdir()
    (run / "metrics.jsonl").open("ab").write(b'{"step": 4\xff\n12\n')
    mine = [run / name / "mine" for name in ("checkpoints/notes", "checkpoints/.ipynb_checkpoints", "notes/2024")]
    for file in mine:
        file.parent.mkdir(parents=True)
        file.write_text("kept")
    code, out, err = train(*flags, "--out_dir", run)
    assert code == 0 and "going on after step 20 of 40" in out
    for name in 23, 500, 600:
        assert re.search(rf"checkpoints/{name} is damaged or no checkpoint .* moved to {name}\.damaged\.1", err)
        assert (run / "checkpoints" / f"{name}.damaged.1").exists()
    assert all(file.read_text() == "kept" for file in mine)
    assert_same_run(run, undisturbed(*flags))


def test_nothing_but_damage_is_not_a_new_run(flags, tmp_path):
    """If no checkpoint can be read the run is refused and nothing is touched; sampling names each of them."""
    run = tmp_path / "run"
    flags += ["--max_steps", 40, "--out_dir", run]
    assert train(*flags, CTRL_C_AT=12)[0] == 130
    for path in *(run / "checkpoints").iterdir(), *(run / "best").iterdir():
        damage(path / "params", "cut")
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    code, _, err = train(*flags)
    assert code == 2 and err.splitlines()[-1].startswith(f"error: no checkpoint in {run} can be read")
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files
    code, out, err = finish(script("sample", "--out_dir", run))
    assert code == 2 and out == "" and f"error: no checkpoint in {run} can be read" in err


def test_sampling_goes_on_to_the_next_that_can_be_read(flags, tmp_path):
    """The best first, then the latest; neither needs the corpus."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    shutil.copy(flags[flags.index("--dataset") + 1], text)
    assert train(*flags, "--dataset", text, "--max_steps", 14, "--out_dir", run, CTRL_C_AT=12)[0] == 130
    text.unlink()
    ask = ["--out_dir", run, "--prompt", "ROMEO:", "--max_new_tokens", 5]
    for which, step in ("best", 10), ("latest", 13):
        code, out, err = finish(script("sample", *ask, "--which", which))
        assert code == 0 and f"{run}, step {step}\n" in err and out.startswith("ROMEO:")
    damage(run / "best" / "10" / "params", "gone")
    code, _, err = finish(script("sample", *ask))
    assert code == 0 and f"{run}/best/10 cannot be read" in err and f"{run}, step 13\n" in err


# --- one directory, one run ------------------------------------------------------------------------------------------


def test_two_writers(flags, tmp_path):
    """The second is refused while the first lives, with --fresh too, and goes on when the first was killed."""
    run = tmp_path / "run"
    flags += ["--out_dir", run]
    first = script("train", *flags, "--max_steps", 1_000_000)
    wait_for(lambda: checkpoint.find(run), first)
    for more in [], ["--fresh"]:
        code, out, err = train(*flags, "--max_steps", 1_000_000, *more)
        assert (
            code == 2
            and out == ""
            and err == f"error: another process is training in {run}: let it end, or use" + (" another --out_dir\n")
        )
    first.kill()
    first.communicate()
    done = int(checkpoint.find(run).name)
    code, out, _ = train(*flags, "--max_steps", done + 5)
    assert code == 0 and f"going on after step {done} of {done + 5}" in out.replace(",", "")
    assert not (tmp_path / "run.1").exists()


def test_another_run_is_refused(flags, tmp_path, text_file):
    """Another architecture, tokenizer or corpus: both values are named.  --fresh moves the run aside."""
    run, other = tmp_path / "run", tmp_path / "other.txt"
    other.write_text(text_file.read_text() + "!")
    flags += ["--max_steps", 2, "--out_dir", run]
    assert train(*flags)[0] == 0
    for change, says in (
        (["--n_embd", 64], "was trained with n_embd 32, not 64"),
        (["--tokenizer", "byte"], "was trained with tokenizer char, not byte"),
        (["--dataset", other], r"was trained on .*play.txt \(sha256 .*\), not on .*other.txt \(sha256 .*\)"),
    ):
        code, out, err = train(*flags, *change)
        assert code == 2 and out == ""
        assert re.fullmatch(rf"error: .*{says}: use another --out_dir, or --fresh, .*\n", err), err
    code, out, _ = train(*flags, "--fresh", "--max_steps", 3)
    assert code == 0 and steps(run) == [3] and steps(tmp_path / "run.1") == [2]


def test_infinite_loss_stops_the_run(flags, tmp_path):
    """A rate far too high: exit 1 with the step, and whatever is saved is finite."""
    run = tmp_path / "run"
    wild = ["--learning_rate", 1e38, "--min_lr", 0, "--warmup_steps", 0, "--checkpoint_interval", 1]
    code, out, err = train(*flags, *wild, "--max_steps", 20, "--out_dir", run)
    step = int(re.search(r"not finite at step (\d+)", out).group(1))
    assert code == 1 and err == "" and 1 < step <= 20
    assert checkpoint.find(run).name == str(step - 1)
    for path, _ in checkpoint.whole(run):
        assert all(np.isfinite(x).all() for x in arrays(path).values())


# --- compiled programs -----------------------------------------------------------------------------------------------


def test_programs_are_compiled_once_a_machine(flags, tmp_path):
    """In the user's cache directory, or where JAX_COMPILATION_CACHE_DIR says; a second process adds nothing to it."""
    flags += ["--max_steps", 10, "--out_dir"]
    environment = dict(XDG_CACHE_HOME=tmp_path / "user", JAX_COMPILATION_CACHE_DIR=tmp_path / "named")
    assert train(*flags, tmp_path / "run", **environment)[0] == 0
    programs = lambda folder: {p.name for p in folder.glob("*-cache")}
    first = programs(tmp_path / "named")
    assert any("train_step" in name for name in first) and not (tmp_path / "user" / "tpu-llm-from-scratch").exists()
    assert train(*flags, tmp_path / "again", **environment)[0] == 0
    assert programs(tmp_path / "named") == first
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_COMPILATION_CACHE_DIR")
        assert train(*flags, tmp_path / "default", XDG_CACHE_HOME=tmp_path / "user")[0] == 0
    names = lambda programs: {name.rsplit("-", 2)[0] for name in programs}  # the key may hold the folder's path
    assert names(programs(tmp_path / "user" / "tpu-llm-from-scratch" / "compiled")) == names(first)
