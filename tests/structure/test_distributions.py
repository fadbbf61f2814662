"""`.ci/distributions.py`, which checks the wheel and the sdist, and the version, which is stated once."""

import re
import runpy
import tomllib

import pytest

import jaxkv
from structure.imports import ROOT

SCRIPT = runpy.run_path(str(ROOT / ".ci" / "distributions.py"))
REPORT = "jaxkv_kernels/reports/gpu.json"
TRACKED = {"LICENSE", "jaxkv/py.typed", "jaxkv/a.py", "kernels/jaxkv_kernels/py.typed", "kernels/jaxkv_kernels/b/c.py"}
TRACKED |= {f"kernels/{REPORT}", "notebooks/h100/a.json"}
WHEEL = SCRIPT["in_wheel"](TRACKED)


def test_a_wheel_has_modules_reports_measurements_marks_of_types_and_the_license():
    names = {name for name in WHEEL if ".dist-info/" not in name}
    data = {REPORT, "jaxkv/bench/measurements/h100/a.json"}
    assert names == {"jaxkv/a.py", "jaxkv/py.typed", "jaxkv_kernels/b/c.py", "jaxkv_kernels/py.typed"} | data
    assert f"{SCRIPT['INFORMATION']}/licenses/LICENSE" in WHEEL
    assert not SCRIPT["compare"]("wheel", WHEEL, WHEEL)


@pytest.mark.parametrize(
    "name",
    [
        "tests/conftest.py",
        ".ci/run",
        "jaxkv/README.md",
        "jaxkv/guide.ipynb",
        "jaxkv/__pycache__/a.cpython.pyc",
        "notebooks/h100/a.py",
        "notebooks/1.ipynb",
        "notebooks/trained/model/model.safetensors",
    ],
)
def test_other_files_must_not_be_in_it_even_if_they_are_tracked(name):
    expected = SCRIPT["in_wheel"](TRACKED | {name})
    assert SCRIPT["compare"]("wheel", WHEEL | {name}, expected) == [f"wheel: {name} must not be in it"]


@pytest.mark.parametrize("name", sorted(WHEEL))
def test_a_missing_file_is_named(name):
    expected = SCRIPT["in_wheel"]({x for x in TRACKED if not x.endswith("py.typed")})
    assert SCRIPT["compare"]("wheel", WHEEL - {name}, expected) == [f"wheel: {name} is missing"]


def test_links_that_lead_nowhere_are_found():
    files = SCRIPT["FILES"]
    good = f"[a](https://x.example/a), [b]({files}jaxkv/a.py#b) and [c]({files}kernels/jaxkv_kernels)"
    wrong = ["b.png", "#c", "jaxkv/a.py", f"{files}#c", f"{files}jaxkv/d.py"]
    text = good + "".join(f", ![x]({link})" for link in wrong)
    assert SCRIPT["wrong_links"](text, TRACKED) == wrong


def test_the_version_is_that_of_the_project_and_the_newest_in_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(
        r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest
    assert newest[1] == project["version"] == jaxkv.__version__
