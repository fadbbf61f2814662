"""The notebooks run, cell by cell in a process of their own, and are committed with the outputs of one whole run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cases import slow

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONG = ("3_a_tiny_deepseek", "4_performance", "5_moving_blocks")
"""What these call, the tests of models, measurements and pools call as well."""

# As Jupyter does it, but for what it shows: one namespace for all cells, and a mistake names its cell.
RUN = """
import json, pathlib, sys
for number, cell in enumerate(json.loads(pathlib.Path(sys.argv[1]).read_text())["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), globals())
"""


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.ci
@pytest.mark.parametrize(
    "path", [slow(path) if path.stem in LONG else path for path in NOTEBOOKS], ids=lambda path: path.stem
)
def test_it_runs(path):
    environment = os.environ | {"MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "error", "-c", RUN, path.name]
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_committed_and_of_one_run(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert "image/png" in kinds, "a notebook teaches with pictures"
    assert path.stat().st_size < 1_000_000, "smaller pictures, please: every clone carries them"
