"""Command lines: flags made from a dataclass of knobs, and what a script's exceptions become.

No flag is written down twice: config.Config and sample.SampleConfig say what there is, and this turns them into flags,
their --help and their refusals.
"""

import argparse
import difflib
import os
import sys
from dataclasses import fields, replace

from config import PRESETS, Config, UserError


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
        parser.add_argument(f"--{f.name}", type=f.type, help=f"{f.metadata['meaning']}  ({f.default!r})", metavar="")
    for name, meaning in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    args = vars(parser.parse_args(argv))
    on = {name: args.pop(name) for name in switches}
    given = {name: value for name, value in args.items() if value is not None}
    preset = given.get("preset", cls.preset)
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: choose from {', '.join(PRESETS)}")
    cfg = cls(**{**(PRESETS[preset] if cls is Config else {}), **given})
    return (cfg if cfg.out_dir else replace(cfg, out_dir=os.path.join("out", preset))), on


def run(main) -> None:
    """Call a script's main and turn what it raises into the exit codes of this project."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII console shows ? instead of crashing on an accent
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `python sample.py | head`: the reader has gone, and so may we
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as e:  # a full disk, a directory that may not be written
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
