"""The imports between the modules of jaxkv and jaxkv_kernels, read from their source."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"jaxkv": ROOT / "jaxkv", "jaxkv_kernels": ROOT / "kernels" / "jaxkv_kernels"}


@dataclass(frozen=True)
class Import:
    """One import of a module by another: at the head of the file, inside a function, or by a name in a string."""

    importer: str
    imported: str
    """The module, not a name that it defines."""
    path: Path
    line: int

    def __str__(self):
        return f"{self.path}:{self.line}: {self.importer} imports {self.imported}"


def module_files(packages: Mapping[str, Path] = PACKAGES) -> dict[str, Path]:
    """The files of all modules, by the name that imports use."""
    files = {}
    for package, folder in packages.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return files


def imports_of(files: Mapping[str, Path]) -> list[Import]:
    """All imports among these modules, late ones included.

    A package counts as imported where a name of its own is: `from jaxkv.models import load` imports `jaxkv.models`,
    but `from jaxkv.models import config` imports the module `jaxkv.models.config` alone.  Modules that `jaxkv` shows to
    type checkers, and loads on first use, do not count as imported by it.
    """
    return sorted(
        {
            Import(importer, imported, path.relative_to(ROOT) if path.is_relative_to(ROOT) else path, line)
            for importer, path in files.items()
            for imported, line in _imported(importer, path, files)
        },
        key=lambda found: (str(found.path), found.line, found.imported),
    )


def _imported(importer: str, path: Path, modules: Iterable[str]) -> Iterator[tuple[str, int]]:
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    tree = ast.parse(path.read_text(), str(path))
    shown = {
        node
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module == importer
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if node in shown:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            names = [node.value] if node.value in modules else []  # for importlib
        for name in names:
            module = name
            while module and module not in modules:
                module = module.rpartition(".")[0]
            if module and module != importer:
                yield module, node.lineno


def circles(imports: Iterable[Import]) -> list[list[Import]]:
    """For each set of modules that import each other, the imports of a shortest circle among them."""
    steps: dict[str, dict[str, Import]] = {}
    for found in imports:
        steps.setdefault(found.importer, {}).setdefault(found.imported, found)
    shortest = []
    left = set(steps)
    while left:
        start = min(left)
        reached = _reached(start, steps)
        mutual = {start} | {module for module in reached if start in _reached(module, steps)}
        left -= mutual
        if len(mutual) > 1:
            shortest.append(min((_circle_through(module, steps) for module in sorted(mutual)), key=len))
    return shortest


def _reached(start: str, steps: Mapping[str, Mapping[str, Import]]) -> dict[str, Import]:
    """The modules that `start` imports, indirectly too, and the last import on a shortest way to each."""
    found: dict[str, Import] = {}
    border = [start]
    while border:
        border = [
            module
            for importer in border
            for module, step in steps.get(importer, {}).items()
            if module not in found and found.setdefault(module, step) is step
        ]
    return found


def _circle_through(module: str, steps: Mapping[str, Mapping[str, Import]]) -> list[Import]:
    last = _reached(module, steps)
    way = [last[module]]
    while way[0].importer != module:
        way.insert(0, last[way[0].importer])
    return way
