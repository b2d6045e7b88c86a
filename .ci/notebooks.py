"""Run the notebooks from top to bottom on a CPU, with training cut short: python .ci/notebooks.py WORK DATASETS"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient

work, data = Path(sys.argv[1]), sys.argv[2]
folder = Path(__file__).parent.parent / "notebooks"
os.environ |= dict(ANATOMY_STEPS="20", ANATOMY_OUT=str(work / "nano"), ANATOMY_DATA=data)
os.environ |= dict(QUICKSTART_PRESET="nano", QUICKSTART_STEPS="20", QUICKSTART_DATA=data)
os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # as on Kaggle
os.environ["QUICKSTART_MORE"] = "--n_layer 1 --max_steps 20 --eval_tokens 2000 --sample_tokens 50"


def run(path: Path) -> str:
    notebook = nbformat.read(path, 4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=dict(metadata=dict(path=folder)))
    client.execute(env=os.environ | dict(QUICKSTART_OUT=str(work / path.stem)))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text", "") for output in outputs]
    failed = [text for text in texts if "Traceback" in text or "error:" in text]
    assert not failed, failed  # in a process that a cell started: the cell does not fail with it
    return f"{path.name}: {len(notebook.cells)} cells, {len(outputs)} outputs"


with ThreadPoolExecutor(2) as pool:
    for line in pool.map(run, sorted(folder.glob("*.ipynb"))):
        print(line)
