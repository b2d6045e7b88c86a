"""README.md, scaling.md and tpu_access.md say what is true: commands parse, files and links are there."""

import re
import shlex
from pathlib import Path

import pytest

import config
from cli import parse
from config import Config
from export import ExportConfig
from generate import SampleConfig
from plan import PlanConfig

ROOT = Path(config.__file__).parent
README, SCALING, ACCESS = ((ROOT / name).read_text() for name in ("README.md", "scaling.md", "tpu_access.md"))


def commands(text):
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line]


assert min(len(commands(README)), len(commands(SCALING)), len(commands(ACCESS)) - 15) >= 5, (
    "commands are not where this file looks for them"
)
KNOBS = {
    "train.py": (Config, dict(fresh="", profile="")),
    "sample.py": (SampleConfig, dict(interactive="")),
    "plan.py": (PlanConfig, dict(json="")),
    "export.py": (ExportConfig, {}),
}


@pytest.mark.parametrize(
    "command",
    [
        *commands(README),
        *commands(SCALING),
        *commands(ACCESS),
        *re.findall(r"`(python [^`]*)`", README + SCALING + ACCESS),
    ],
)
def test_command_parses(command):
    """Ours, alone or within one of another tool."""
    shlex.split(command)
    for name, flags in re.findall(r"python (\w+\.py)((?: (?:--?[\w.=:/-]+|\"[^\"]*\"|[\w.:/-]+))*)", command):
        if "--help" not in flags and "<" not in command:
            cls, switches = KNOBS[name]  # a KeyError is a script that is not there
            parse(cls, shlex.split(flags), "", **switches)


def test_test_command_is_the_one_that_ci_runs():
    command = next(c for c in commands(README) if "pytest" in c)
    assert command in (ROOT / ".ci" / "run").read_text()


def test_file_table_names_every_file():
    """Each module with what it is for and its number of lines, and no file that is not there."""
    table = dict(re.findall(r"^\| \[(\S+?)\]\(\S+?\) \| (\d+) \|", README, re.M))
    modules = {p.name: str(len(p.read_text().splitlines())) for p in ROOT.glob("*.py")}
    assert table == modules


def test_local_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README + SCALING + ACCESS):
        assert (ROOT / target).exists(), target


def test_tracebacks_name_the_lines_that_are_there():
    """Of the worked example, which deletes a line: what is after that stands one line higher."""
    code = [line.strip() for line in (ROOT / "model.py").read_text().splitlines()]
    quoted = re.findall(r'File "\.\.\./model\.py", line (\d+), in \w+\n +(.*)', ACCESS)
    assert len(quoted) == 3
    for number, line in quoted:
        assert line in code[int(number) - 1 : int(number) + 1], (number, line)
