"""Command lines: flags made from a dataclass of knobs, and what becomes of exceptions and signals.

No flag is written down twice: config.Config, generate.SampleConfig and the like say what there is, and this turns them
into flags, their --help and their refusals.
"""

import argparse
import difflib
import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager
from dataclasses import fields, replace

from config import PRESETS, Config, UserError

MORE_MEMORY = "more --grad_accum or --remat 1 shrink the activations, --fsdp the parameters and their moments"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line instead of argparse's usage page, with the nearest flag for a misspelt one."""
        if "unrecognized arguments" in message:
            flag = message.split(": ")[1].split()[0].split("=")[0]
            nearest = difflib.get_close_matches(flag, self._option_string_actions, 1, 0.5)
            message = f"unknown flag {flag}; " + (f"did you mean {nearest[0]}?" if nearest else "--help lists them all")
        raise UserError(message)


def parse(cls, argv: list[str], doc: str, **switches: str):
    """Command line -> (cls instance, the given switches).  One flag per field, plus the on/off switches named."""
    epilog = "\n".join(f"preset {name}: {knobs}" for name, knobs in PRESETS.items())
    parser = Parser(description=doc, epilog=epilog, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter)
    for f in fields(cls):
        names = f.metadata["choices"].replace(" ", ", ")
        meaning = f"{names}: {f.metadata['meaning']}" if names else f.metadata["meaning"]
        parser.add_argument(f"--{f.name}", type=f.type, help=f"{meaning}  ({f.default!r})", metavar="")
    for name, meaning in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    args = vars(parser.parse_args(argv))
    on = {name: args.pop(name) for name in switches}
    given = {name: value for name, value in args.items() if value is not None}
    preset = given.get("preset", cls.preset)
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: choose from {', '.join(PRESETS)}")
    cfg = cls(**{**(PRESETS[preset] if issubclass(cls, Config) else {}), **given})
    return (cfg if cfg.out_dir else replace(cfg, out_dir=os.path.join("out", preset))), on


def keep_compiled_programs() -> None:
    """A program is compiled once a machine, not once a process: JAX keeps it in the user's cache directory.

    JAX_COMPILATION_CACHE_DIR names another directory, for one that outlives a Colab runtime, say; set to nothing it
    turns this off.
    """
    import jax

    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for flag, value in (
        ("jax_compilation_cache_dir", os.path.join(home, "tpu-llm-from-scratch", "compiled")),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),  # JAX would leave out what took less than a second
    ):
        if flag.upper() not in os.environ:
            jax.config.update(flag, value)


def run(main) -> None:
    """Call a script's main and turn what it raises into the exit codes of this project."""
    keep_compiled_programs()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII console shows ? instead of crashing on an accent
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `python sample.py | head`: the reader has gone, and so may we
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as e:  # a full disk, a directory that may not be written
        print(f"error: {e}", file=sys.stderr)
        code = 1
    except Exception as e:
        if "RESOURCE_EXHAUSTED" in str(e):  # JAX's word for memory that does not suffice
            print(f"error: {str(e).splitlines()[0]}  {MORE_MEMORY}", file=sys.stderr)
            code = 2
        else:  # a fault in this program
            traceback.print_exc()
            code = 1
    # At once: Python would first wait, for minutes, for other processes, which wait for what we have not done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def deadline(seconds: float, message: str):
    """Ends the process with this message unless what is within ends in time.  For waits in C++, which end in no
    exception; the message says {} where the seconds belong."""

    def give_up():
        os.write(2, f"error: {message.format(seconds)}\n".encode())
        os._exit(2)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def noted_signals(several: bool):
    """Within, Ctrl-C, SIGTERM and SIGHUP (the terminal has gone) are only noted, in the list that this gives; a second
    one ends the process at once.

    With several processes, all must stop after the same step.  JAX's runtime catches SIGTERM and lets them agree on one
    (hw.preempted), so the other signals are passed on to it as SIGTERM, and only they end the process when they come
    twice.

    Python runs a signal's handler when its main thread comes back from C++, which may be compiling for a minute.  So a
    thread listens as well: Python's C code writes each signal's number into a pipe at the moment it arrives.
    """
    caught: list[int] = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def note(number, _):
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            caught.append(number)

    def listen():
        heard = 0
        while number := os.read(reader, 1):
            if number[0] in before:
                heard += 1
                if heard > 1:
                    os._exit(128 + number[0])
                name = signal.Signals(number[0]).name
                os.write(2, f"\n{name}: finishing this step and saving; once more ends at once\n".encode())

    wanted = [signal.SIGINT] + [signal.SIGTERM] * (not several) + [signal.SIGHUP] * hasattr(signal, "SIGHUP")
    wanted = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
    before = {number: signal.signal(number, note) for number in wanted}
    before_fd = signal.set_wakeup_fd(writer)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield caught
    finally:
        signal.set_wakeup_fd(before_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)  # ends the listener
        listener.join()
        os.close(reader)
