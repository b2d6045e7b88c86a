"""README.md says what is true: its commands parse, its file table is complete, its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

import config
from cli import parse
from config import Config
from sample import SampleConfig

ROOT = Path(config.__file__).parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.S)
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line]


assert len(COMMANDS) >= 5, "the README's blocks of commands are not where this file looks for them"


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if re.search(r"\b(train|sample)\.py", c) and "--help" not in c]
)
def test_command_parses(command):
    name, *flags = shlex.split(command)[1:]
    switches = dict(fresh="", profile="") if name == "train.py" else dict(interactive="")
    parse(Config if name == "train.py" else SampleConfig, flags, "", **switches)


def test_test_command_is_the_one_that_ci_runs():
    command = next(c for c in COMMANDS if "pytest" in c)
    assert command in (ROOT / ".ci" / "run").read_text()


def test_file_table_names_every_file():
    """Each module with what it is for and its number of lines, and no file that is not there."""
    table = dict(re.findall(r"^\| \[(\S+?)\]\(\S+?\) \| (\d+) \|", README, re.M))
    modules = {p.name: str(len(p.read_text().splitlines())) for p in ROOT.glob("*.py")}
    assert table == modules


def test_local_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
