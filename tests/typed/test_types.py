"""Type checkers find a user's typical mistakes, line by line, and nothing in right uses or in jaxkv's public modules.

mypy belongs to the tests' requirements.  The others check the same files where they are installed, as in CI.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

import jaxkv
from jaxkv.dispatch import Implementation
from jaxkv_kernels.formats.entries import IndexerFormat, KVFormat, MLAFormat

ROOT = Path(__file__).parents[2]
MISTAKES, USES = (Path(__file__).with_name(f"{name}.py") for name in ("mistakes", "uses"))

KINDS: Mapping[str, Mapping[str, set[str]]] = {
    "argument": {
        "mypy": {"arg-type", "call-overload", "dict-item", "list-item", "type-var"},
        "pyright": {"reportArgumentType", "reportCallIssue"},
        "pyrefly": {"bad-argument-type", "no-matching-overload", "bad-specialization", "bad-assignment"},
    },
    "missing": {
        "mypy": {"call-arg", "call-overload"},
        "pyright": {"reportCallIssue"},
        "pyrefly": {
            "missing-argument",
            "unexpected-keyword",
            "unexpected-positional-argument",
            "bad-argument-count",
            "no-matching-overload",
        },
    },
    "attribute": {
        "mypy": {"attr-defined"},
        "pyright": {"reportAttributeAccessIssue"},
        "pyrefly": {"missing-attribute", "missing-module-attribute"},
    },
    "assigned": {
        "mypy": {"assignment", "misc"},
        "pyright": {"reportAttributeAccessIssue", "reportAssignmentType"},
        "pyrefly": {"read-only", "bad-assignment"},
    },
}
"""The rules of each checker by the kind of a mistake: a wrong argument; a missing one, or one too many; ..."""


class Error(NamedTuple):
    """An error that a checker reported."""

    path: Path
    line: int
    rule: str
    message: str


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout


def mypy(cache: Path) -> list[Error]:
    """Also reports errors in modules that `import jaxkv` imports, but for those that pyproject.toml names."""
    lines = run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(cache), "--output", "json", str(MISTAKES), str(USES)]
    ).splitlines()
    found = (json.loads(line) for line in lines)
    return [Error(ROOT / x["file"], x["line"], x["code"], x["message"]) for x in found if x["severity"] == "error"]


def pyright(cache: Path) -> list[Error]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    found = json.loads(run([*command, str(MISTAKES), str(USES)]))["generalDiagnostics"]
    return [
        Error(Path(x["file"]), x["range"]["start"]["line"] + 1, x["rule"], x["message"])
        for x in found
        if x["severity"] == "error"
    ]


def pyrefly(cache: Path) -> list[Error]:
    command = [sys.executable, "-m", "pyrefly", "check", "--python-interpreter-path", sys.executable]
    found = json.loads(run([*command, "--output-format", "json", str(MISTAKES), str(USES)]))["errors"]
    return [Error(ROOT / x["path"], x["line"], x["name"], x["description"]) for x in found if x["severity"] == "error"]


CHECKERS: tuple[Callable[[Path], list[Error]], ...] = tuple(
    checker for checker in (mypy, pyright, pyrefly) if find_spec(checker.__name__)
)


class Mistake(NamedTuple):
    """A statement, and the comment before it."""

    first: int
    last: int
    kind: str
    words: str


def mistakes() -> list[Mistake]:
    """The mistakes of the file."""
    text = MISTAKES.read_text()
    before = dict(enumerate(text.split("\n"), 2))
    found = []
    for statement in ast.parse(text).body:
        if match := re.fullmatch(r"# (\w+): (.*)", before.get(statement.lineno, "")):
            found.append(Mistake(statement.lineno, statement.end_lineno or 0, match[1], match[2]))
    return found


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_every_mistake_is_flagged_as_what_it_is_and_nothing_else(checker, tmp_path):
    name, errors = checker.__name__, checker(tmp_path)
    problems, wrong = [], set()
    for mistake in mistakes():
        lines = range(mistake.first, mistake.last + 1)
        rules = {error.rule for error in errors if error.path == MISTAKES and error.line in lines}
        if not rules & KINDS[mistake.kind][name]:
            where = f"{MISTAKES.relative_to(ROOT)}:{mistake.first}: {mistake.words}"
            problems.append(f"{where}: {', '.join(sorted(rules)) or 'no error'}")
        wrong.update(lines)
    assert not problems, "\n".join([f"{name} does not flag:", *problems, "The signature's types are too wide."])
    others = [error for error in errors if error.path != MISTAKES or error.line not in wrong]
    listed = [f"{x.path.relative_to(ROOT)}:{x.line}: {x.message} [{x.rule}]" for x in others]
    assert not others, "\n".join([f"{name} flags what is right:", *listed])


def test_the_file_of_mistakes_has_no_other_statements():
    """A comment that is not recognised would leave its mistake untested."""
    marks = re.findall(r"^# (?:argument|missing|attribute|assigned)\b", MISTAKES.read_text(), re.MULTILINE)
    assert len(mistakes()) == len(marks) > 50
    assert {mistake.kind for mistake in mistakes()} == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(jaxkv.MLAEntry, MLAFormat), (jaxkv.KVEntry, KVFormat), (jaxkv.IndexerEntry, IndexerFormat)],
)
def test_formats_are_those_of_the_types(kind, names):
    missing = set(kind.formats) ^ set(get_args(names))
    assert not missing, f"{', '.join(missing)}: registered formats, and the names beside `Entry`, must be the same"


def test_implementations_are_those_of_the_type():
    assert tuple(jaxkv.implementations()) == get_args(Implementation)
