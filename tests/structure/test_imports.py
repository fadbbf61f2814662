"""Imports go in one direction: without circles, from jaxkv to kernels, and from dispatch alone to implementations."""

import pytest

from jaxkv.dispatch import BACKENDS
from structure.imports import PACKAGES, circles, imports_of, module_files

IMPLEMENTATIONS = tuple(f"jaxkv_kernels.{backend.name}" for backend in BACKENDS)
DISPATCH = "jaxkv.dispatch"
PLAIN = "jaxkv_kernels.xla"
"""Plain JAX, which the other implementations may build on."""


@pytest.fixture(scope="module")
def imports():
    return imports_of(module_files())


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def listed(found) -> str:
    return "\n".join(f"  {x}" for x in found)


def test_imports_have_no_circle(imports):
    found = circles(imports)
    circle_list = "\n\n".join(listed(circle) for circle in found)
    assert not found, (
        f"{len(found)} sets of modules import each other.  A shortest circle of each:\n{circle_list}\n\n"
        "Move what both need into a module that imports neither, or pass it as an argument.  Importing it inside a "
        "function does not open a circle."
    )


def test_kernels_do_not_import_jaxkv(imports):
    found = [x for x in imports if inside(x.importer, "jaxkv_kernels") and inside(x.imported, "jaxkv")]
    assert not found, (
        f"jaxkv_kernels works on arrays and strides, and can be used without jaxkv:\n{listed(found)}\n"
        "Move what is needed into jaxkv_kernels, or let the operation in jaxkv pass it in the call's record."
    )


def test_only_dispatch_imports_an_implementation(imports):
    found = [
        x
        for x in imports
        for implementation in IMPLEMENTATIONS
        if inside(x.imported, implementation)
        and not inside(x.importer, implementation)
        and not inside(x.importer, DISPATCH)
        and not (implementation == PLAIN and any(inside(x.importer, other) for other in IMPLEMENTATIONS))
    ]
    assert not found, (
        f"{len(found)} imports of an implementation from outside it:\n{listed(found)}\n"
        "Which implementation runs a call is decided in jaxkv.dispatch alone: make a record of jaxkv_kernels.calls and "
        "pass it to jaxkv.dispatch.run.  Move what several implementations need into a module beside them."
    )


def test_packages_of_implementations_exist():
    assert {*IMPLEMENTATIONS, DISPATCH} <= set(module_files())


SOURCES = {
    "a/__init__.py": "from a.b import f",
    "a/b.py": "def f():\n    from a import c\n    return c",
    "a/c.py": "from . import d\nfrom .e.g import h",
    "a/d.py": "import importlib\nimportlib.import_module('a.b')",
    "a/e/__init__.py": "",
    "a/e/g.py": "from ..d import importlib as h",
}
"""b imports c late, c imports d and e.g relatively, and d imports b by a string."""


def test_late_relative_and_named_imports_are_found(tmp_path):
    for name, source in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    imports = imports_of(module_files({"a": tmp_path / "a"}))
    found = {(x.importer, x.imported, x.line) for x in imports}
    assert found == {
        ("a", "a.b", 1),
        ("a.b", "a.c", 2),
        ("a.c", "a.d", 1),
        ("a.c", "a.e.g", 2),
        ("a.d", "a.b", 2),
        ("a.e.g", "a.d", 1),
    }
    (circle,) = circles(imports)
    assert [(x.importer, x.imported) for x in circle] == [("a.b", "a.c"), ("a.c", "a.d"), ("a.d", "a.b")]


def test_packages_have_modules():
    assert all(any(inside(module, package) for module in module_files()) for package in PACKAGES)
