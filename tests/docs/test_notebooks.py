"""The notebooks run from a copy of one file, and are committed with the outputs of one whole run.

What they show of recorded measurements is what the files have now, and every picture has a description.
"""

import html
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support.cases import slow

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONG = ("3_a_tiny_deepseek", "4_performance", "5_moving_blocks")
"""What these call, the tests of models, measurements and pools call as well."""
FLAX = "9_sending_a_cache"
TRAINED = "8_a_trained_model"
"""It needs the folder of its model beside it, which the wheel does not have."""
TAG = "recorded"
"""The tag of cells that show recorded measurements, and of those that these cells need."""

# As Jupyter does it: one namespace for all cells, and a mistake names its cell.  It prints what each cell says: its
# text, and the descriptions of its pictures.
RUN = """
import contextlib, io, json, pathlib, sys

def display(figure, metadata):
    figure.canvas.draw()
    print(metadata["image/png"]["alt"])

path, tag = sys.argv[1:]
scope, said = {"__name__": "__main__", "display": display}, {}
for number, cell in enumerate(json.loads(pathlib.Path(path).read_text())["cells"]):
    if cell["cell_type"] != "code" or tag and tag not in cell["metadata"].get("tags", ()):
        continue
    first, _, rest = (source := "".join(cell["source"])).partition("\\n")
    if first.startswith("%%writefile "):
        pathlib.Path(first.split()[1]).write_text(rest)
        continue
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(source, f"cell {number}", "exec"), scope)
    said[number] = text.getvalue()
print(json.dumps(said))
"""


def run(path, folder, tag=""):
    """What the code cells say that have the tag, or all, by their numbers, in a process in an empty folder."""
    (folder / path.name).write_bytes(path.read_bytes())
    if path.stem == TRAINED:
        (folder / "trained").symlink_to(FOLDER / "trained")
    environment = os.environ | {"MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "error", "-c", RUN, path.name, tag]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {int(number): text for number, text in json.loads(done.stdout.splitlines()[-1]).items()}


def cells_of(path):
    return json.loads(path.read_text())["cells"]


def code_cells(path):
    return [cell for cell in cells_of(path) if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def pictures(cells):
    """The kind and the description of each picture of cells; None without a description."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    for output in outputs:
        for kind in output.get("data", {}):
            if kind.startswith("image/"):
                yield kind, output["metadata"].get(kind, {}).get("alt")


def committed(cell):
    """What the committed outputs of a cell say, as `run` returns it."""
    texts = []
    for output in cell["outputs"]:
        texts += output.get("text", ())
        texts += [f"{alt}\n" for _, alt in pictures([{"outputs": [output]}])]
    return "".join(texts)


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_the_model_of_flax_is_that_of_the_page():
    page = (FOLDER / "clients" / "flax.md").read_text()
    written = [source(cell) for cell in code_cells(FOLDER / f"{FLAX}.ipynb")]
    first = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert f"%%writefile flax_model.py\n{first}".rstrip() in written


@pytest.mark.ci
@pytest.mark.parametrize(
    "path", [slow(path) if path.stem in LONG else path for path in NOTEBOOKS], ids=lambda path: path.stem
)
def test_it_runs(path, tmp_path):
    if path.stem == FLAX:
        pytest.importorskip("flax", reason="the notebook has a model of Flax, which jaxkv does not need")
    run(path, tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_committed_and_of_one_run(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert "image/png" in dict(pictures(cells)), "a notebook teaches with pictures"
    assert path.stat().st_size < 1_000_000, "smaller pictures, please: every clone carries them"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_pictures_have_descriptions(path):
    found = list(pictures(code_cells(path)))
    assert found
    assert all(alt and len(alt) > 40 for _, alt in found), found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_site_has_the_descriptions(path):
    page = runpy.run_path(str(FOLDER.parent / ".ci" / "site_pages.py"))["with_descriptions"](path.read_text())
    outputs = [output for cell in json.loads(page)["cells"] for output in cell.get("outputs", ())]
    shown = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", ())]
    found = [html.unescape(re.match('<img alt="([^"]*)" src="data:image/', image)[1]) for image in shown]
    assert found == [alt for _, alt in pictures(code_cells(path))]
    assert not list(pictures([{"outputs": outputs}]))


RECORDED = [path for path in NOTEBOOKS if "recorded.read(" in path.read_text()]


def test_notebooks_show_recorded_measurements():
    assert RECORDED


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_it_shows_what_is_recorded(path, tmp_path):
    """The cells that show measurements say the same as in the outputs, and so draw the same numbers."""
    cells = cells_of(path)
    untagged = [source(cell) for cell in code_cells(path) if TAG not in cell["metadata"].get("tags", ())]
    assert not [text for text in untagged if "recorded." in text]
    for number, said in run(path, tmp_path, TAG).items():
        assert said == committed(cells[number]), f"run {path.name} again (CONTRIBUTING.md): it shows old measurements"
