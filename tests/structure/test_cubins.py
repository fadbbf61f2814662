"""`tests/cubins.py`: which kernels it compiles, and that it notices every change of a figure, a text or a row."""

import ast
import json
from dataclasses import replace

import pytest

import cubins
from cubins import Call, Figures, Lowered, Row
from structure.imports import PACKAGES

CLEAN, SPILLED = Figures(168, 0, 0), Figures(168, 84, 108)
TABLE = {"call decode_mla": Row(SPILLED, "text 1"), "call combine": Row(CLEAN, "text 2")}
PRINTED = """\
ptxas warning : Registers are spilled to local memory in function 'decode_mla_mosaic_gpu_kernel', 84 bytes spill stores, 108 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_mla_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_mla_mosaic_gpu_kernel
    40 bytes stack frame, 84 bytes spill stores, 108 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 40 bytes cumulative stack size, 1 bytes smem
"""  # noqa: E501


def test_what_ptxas_prints_is_read():
    assert cubins.figures_of("kernel", PRINTED) == SPILLED


@pytest.mark.parametrize("printed", ["", PRINTED * 2], ids=["of no kernel", "of two kernels"])
def test_figures_of_another_number_of_kernels_are_an_error(printed):
    with pytest.raises(SystemExit, match="kernel: expected the registers and spills of one kernel"):
        cubins.figures_of("kernel", printed)


def test_a_table_without_differences():
    assert not [*cubins.differences(TABLE, TABLE)]
    assert not [*cubins.excesses(TABLE, TABLE)]


@pytest.mark.parametrize("figure", ["registers", "spill_stores", "spill_loads"])
@pytest.mark.parametrize(("step", "word"), [(1, "exceeds"), (-1, "is below")])
def test_a_change_of_a_figure_is_noticed(figure, step, word):
    figures = replace(SPILLED, **{figure: getattr(SPILLED, figure) + step})
    (line,) = cubins.differences({**TABLE, "call decode_mla": Row(figures, "text 3")}, TABLE)
    assert line == f"call decode_mla {word} its budget: it has {figures}; its budget is {SPILLED}"


def test_a_changed_text_is_noticed():
    (line,) = cubins.differences({**TABLE, "call combine": Row(CLEAN, "text 3")}, TABLE)
    assert line.startswith("call combine has another text than recorded, with the same figures")


def test_a_kernel_without_a_row_is_noticed_and_a_row_without_a_kernel():
    found = {**TABLE, "call plan_check": Row(CLEAN, "text 3")}
    assert [*cubins.differences(found, TABLE)] == [f"call plan_check has no row: it has {CLEAN}"]
    assert [*cubins.differences(TABLE, found)] == ["call plan_check has a row, but no call runs it"]


def test_kernels_of_other_calls_may_spill_as_much_as_those_of_the_table():
    found = {
        "other decode_mla": Row(SPILLED, "text 3"),
        "other combine 2": Row(replace(CLEAN, spill_loads=4), "text 4"),
    }
    (line,) = cubins.excesses(found, TABLE)
    assert line.startswith("other combine 2 has 168 registers")


def test_only_unknown_texts_are_compiled(monkeypatch):
    kernels = [Lowered("call decode_mla", "text 1", None), Lowered("call combine", "text 3", None)]
    compiled = []
    monkeypatch.setattr(cubins, "lowered", lambda call, compiling=False: kernels)
    monkeypatch.setattr(cubins, "compiled", lambda kernel: compiled.append(kernel.name) or CLEAN)
    known = {"text 1": SPILLED}
    for _ in range(2):
        rows = cubins.rows_of(Call("call", print, ()), known)
        assert rows == {"call decode_mla": Row(SPILLED, "text 1"), "call combine": Row(CLEAN, "text 3")}
    assert compiled == ["call combine"]


def test_the_command(monkeypatch, tmp_path, capsys):
    """A planted spill fails, with all that one needs to know, until the table is written."""
    now = {"jax": "0.12.0.1", cubins.COMPILER: "13.5.37"}
    found = {"call decode_mla": Row(replace(SPILLED, spill_stores=192), "text 3")}
    monkeypatch.setattr(cubins, "DATA", tmp_path)
    monkeypatch.setattr(cubins, "versions", lambda: now)
    monkeypatch.setattr(cubins, "calls", lambda workloads: {"call": lambda: "call"})
    monkeypatch.setattr(cubins, "rows_of", lambda call, known: found)
    cubins.write_table(tmp_path / "h200-jax-0.12.json", now, {"call decode_mla": TABLE["call decode_mla"]})

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["cubins.py", *arguments])
        return cubins.main(), capsys.readouterr().out

    code, printed = run()
    assert code == 1
    assert "call decode_mla exceeds its budget" in printed
    assert "spill stores of 192 bytes" in printed
    assert "spill stores of 84 bytes" in printed
    assert ".ci/cubins --update" in printed
    assert run("--update")[0] == 0
    assert cubins.read_table(tmp_path / "h200-jax-0.12.json") == (now, found)
    assert run()[0] == 0
    now["jax"] = "0.12.9"
    assert "was made with" in run()[1]


def names_in(path):
    """The names of kernels that a file launches, where it states them: `kernel_name`, or the name of the function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("kernel", "chunked"):
            stated = [word.value for word in node.keywords if word.arg == "kernel_name"] or node.args[:1]
            for part in (part for expression in stated for part in ast.walk(expression)):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part in stated:
                    yield part.id
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


@pytest.mark.parametrize("path", sorted(cubins.DATA.glob("h200-*.json")), ids=lambda path: path.stem)
def test_each_kernel_of_the_package_is_in_a_row(path):
    names = {name.split()[1] for name in json.loads(path.read_text())["kernels"]}
    for file in sorted((PACKAGES["jaxkv_kernels"] / "mosaic_gpu").rglob("*.py")):
        for name in set(names_in(file)) - {"body", "with_chunks"}:
            assert any(each.startswith(name) for each in names), (
                f"{path.name} has no row of the kernel {name} of {file.name}: name a call that runs it in "
                "`CHOSEN` of tests/cubins.py, and run `.ci/cubins --update`"
            )
