"""notebooks/: what is stored in them.  That they run is for .ci/run, which executes them from top to bottom."""

import json
import re
import shlex
from pathlib import Path

import pytest

import config
from cli import parse
from config import Config
from generate import SampleConfig

NOTEBOOKS = sorted((Path(config.__file__).parent / "notebooks").glob("*.ipynb"))
assert [path.stem for path in NOTEBOOKS] == ["anatomy", "colab_quickstart", "kaggle_quickstart"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def cells(request):
    """(type, source, execution count, outputs) of each cell"""
    found = json.loads(request.param.read_text("utf-8"))["cells"]
    return [(c["cell_type"], "".join(c["source"]), c.get("execution_count"), c.get("outputs", [])) for c in found]


def text_of(output) -> str:
    return "".join(output.get("text", "")) + "".join(output.get("data", {}).get("text/plain", ""))


def test_outputs_are_of_one_run_without_errors(cells):
    """Every code cell was run once, in order; what it wrote is text or a picture, and says nothing of the machine's
    folders."""
    code = [cell for cell in cells if cell[0] == "code"]
    assert [count for _, _, count, _ in code] == list(range(1, len(code) + 1)) and len(code) >= 7
    for _, _, _, outputs in code:
        for output in outputs:
            assert output["output_type"] in ("stream", "display_data", "execute_result")
            assert output.get("name") != "stderr"
            assert not re.search(r"/root|/home/|Traceback", text_of(output)), text_of(output)[:300]
            assert output["output_type"] != "stream" or not re.search(r"\x1b\[|\r", text_of(output)), "no lines of text"
    silent = [source for _, source, _, outputs in code if not outputs]
    assert all(re.match(r"(import|from|RUN|PRESET|def|optimizer)", source) for source in silent), silent


def test_machine_of_the_outputs_is_named(cells):
    first = " ".join(source for kind, source, _, _ in cells[:2] if kind == "markdown")
    assert re.search(r"stored .*AMD EPYC.*jax \d+\.\d+.*20\d\d-\d\d-\d\d", first, re.S)


def test_cells_are_numbered(cells):
    headings = [int(n) for kind, source, _, _ in cells for n in re.findall(r"^## (\d+)\. ", source, re.M)]
    assert headings == list(range(headings[0], headings[-1] + 1)) and headings[0] <= 2 and headings[-1] >= 8


def test_no_model_code_and_commands_that_parse(cells):
    """Nothing is defined here that belongs into the repository's files; its scripts are called with flags they have."""
    known = dict(train=(Config, dict(fresh="", profile="")), sample=(SampleConfig, dict(interactive="")))
    for kind, source, _, _ in cells:
        if kind == "code":
            assert not re.search(r"nnx\.(Module|Param)|optax|value_and_grad|^class ", source, re.M)
            for script, flags in re.findall(r"^ *!python (train|sample)\.py (.*?)(?: 2>| \||$)", source, re.M):
                flags = flags.replace("{SHORT}", "--max_steps 100").replace("{MORE}", "").replace("{PRESET}", "tiny")
                flags = re.sub(r"\{(temperature|top_k|fsdp|k|n)\}", "1", re.sub(r"\{(OUT|DATA)\}", "x", flags))
                parse(known[script][0], shlex.split(flags), "", **known[script][1])
