"""A client of a language server over stdin and stdout: definitions and implementations of names."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any
from urllib.parse import unquote, urlparse

SERVERS = {
    "pyrefly": [sys.executable, "-m", "pyrefly", "lsp", "--indexing-mode", "lazy-blocking"],
    "pyright": [sys.executable, "-m", "pyright.langserver", "--stdio"],
}


@dataclass(frozen=True)
class Step:
    """A function on a path, and the line in which it calls the next one."""

    code: CodeType
    line: int
    through: str = ""
    """The package of the functions between the previous step and this one, if there are any."""

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.code.co_filename)

    @property
    def name(self) -> str:
        """The name, with those of the classes and functions around it."""
        return self.code.co_qualname.replace(".<locals>", "")


class LanguageServer:
    """A server that runs until `stop`, with the configuration in the project's pyproject.toml."""

    def __init__(self, name: str, root: Path):
        self._server = subprocess.Popen(
            SERVERS[name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
        )
        self._name, self._next, self._opened = name, 0, set()
        folder = {"uri": root.as_uri(), "name": root.name}
        links = {"linkSupport": True}
        self._request(
            "initialize",
            processId=None,
            rootUri=root.as_uri(),
            workspaceFolders=[folder],
            capabilities={
                "workspace": {"configuration": True, "workspaceFolders": True},
                "textDocument": {"definition": links, "implementation": links},
            },
            initializationOptions={"pythonPath": sys.executable},
        )
        self._notify("initialized")
        self._notify("workspace/didChangeConfiguration", settings={})

    def stop(self) -> None:
        """Ends the server."""
        self._request("shutdown")
        self._notify("exit")
        self._server.wait(timeout=30)

    def follows(self, path: Sequence[Step], number: int) -> str:
        """How the function of step `number` is found from the lines in which the steps before it call the next.

        The step just before it should name it; an earlier one may have passed it as an argument.  The answer begins
        with "NOT" if none leads to it.
        """
        target = path[number]
        for before in range(number - 1, -1, -1):
            passed = "" if before == number - 1 else f", passed by step {before + 1}"
            if found := self._finds(path[before], target):
                return found + passed
        return f"NOT found from line {path[number - 1].line}"

    def _finds(self, caller: Step, step: Step) -> str:
        """How a step is found from a caller; empty if it is not."""
        function = _function(ast.parse(caller.path.read_text()), caller.code)
        target = _function(ast.parse(step.path.read_text()), step.code)
        if caller.path == step.path and function.lineno <= target.lineno <= (function.end_lineno or 0):
            return "defined in the function"
        line = [node for node in ast.walk(_statement(function, caller.line)) if _name(node)]
        others = [node for node in ast.walk(function) if _name(node) and node not in line]
        for nodes, where in ((line, ""), (others, ", elsewhere in the function")):
            for request in ("definition", "implementation"):
                for node in nodes:
                    for path, number in self._locations(request, caller.path, node):
                        if path == step.path and (role := _role(number, target, step)) is not None:
                            return f"{self._name}: {request} of `{_name(node)}`{role}, line {node.end_lineno}{where}"
        return ""

    def _locations(self, request: str, path: Path, node: Any) -> Iterator[tuple[Path, int]]:
        """The places that the server returns for a name, with line numbers from 1."""
        self._open(path)
        # Columns of the syntax tree count bytes; sources are ASCII where it matters.
        position = {"line": node.end_lineno - 1, "character": node.end_col_offset - len(_name(node))}
        found = self._request(
            f"textDocument/{request}", textDocument={"uri": path.as_uri()}, position=position, optional=True
        )
        for place in found if isinstance(found, list) else [found] if found else []:
            uri = place.get("targetUri") or place["uri"]
            lines = place.get("targetSelectionRange") or place["range"]
            yield Path(unquote(urlparse(uri).path)), lines["start"]["line"] + 1

    def _open(self, path: Path) -> None:
        if path not in self._opened:
            self._opened.add(path)
            document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": path.read_text()}
            self._notify("textDocument/didOpen", textDocument=document)

    def _notify(self, method: str, **params) -> None:
        self._send({"method": method, "params": params})

    def _request(self, method: str, *, optional: bool = False, **params) -> Any:
        self._next += 1
        self._send({"id": self._next, "method": method, "params": params})
        while True:
            message = self._receive()
            if message.get("id") == self._next and "method" not in message:
                if "error" in message and not optional:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message.get("result")
            if "id" in message and "method" in message:
                self._send({"id": message["id"], "result": self._answer(message)})

    def _answer(self, message: dict[str, Any]) -> Any:
        """The settings that the server requests from the editor."""
        if message["method"] != "workspace/configuration":
            return None
        settings = {"pythonPath": sys.executable, "analysis": {"diagnosticMode": "openFilesOnly"}}
        sections = [item.get("section", "") for item in message["params"]["items"]]
        return [settings if section == "python" else {} for section in sections]

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._server.stdin
        self._server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._server.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._server.stdout
        length = 0
        while (header := self._server.stdout.readline().strip()) or not length:
            if self._server.poll() is not None and not header:
                raise RuntimeError(f"the language server ended with {self._server.returncode}")
            if header.lower().startswith(b"content-length:"):
                length = int(header.split(b":")[1])
        return json.loads(self._server.stdout.read(length))


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _function(tree: ast.AST, code: CodeType) -> Function | ast.ClassDef:
    """The syntax of a function.  `co_firstlineno` is the line of its first decorator."""
    inner = None
    for node in ast.walk(tree):
        if isinstance(node, Function):
            first = _heads(node)[0]
            if first == code.co_firstlineno and getattr(node, "name", "<lambda>") == code.co_name:
                return node
            if first <= code.co_firstlineno <= (node.end_lineno or 0):
                inner = node  # of a comprehension, or a generator expression
    if inner is None:
        raise LookupError(f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}")
    return inner


def _statement(function: ast.AST, line: int) -> ast.AST:
    """The smallest statement that spans a line."""
    spans = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.stmt | ast.Lambda) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return min(spans, key=lambda node: (node.end_lineno or 0) - node.lineno, default=function)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _role(line: int, target: Any, step: Step) -> str | None:
    """What is defined in a line, in words that follow a name; None unless it is the function, or leads to it."""
    if line in _heads(target):
        return ""
    for node in ast.walk(ast.parse(step.path.read_text())):
        if isinstance(node, Function | ast.ClassDef) and line in _heads(node):
            inside = node.lineno <= target.lineno <= (node.end_lineno or 0)
            if isinstance(node, ast.ClassDef):
                made = step.code.co_name in ("__init__", "__post_init__", "__call__", "__enter__")
                return " (its class)" if made and inside else None
            return ", which makes it" if inside else None
    return None


def _heads(node: Any) -> range:
    """The lines of a definition from its first decorator to its name."""
    return range(min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))]), node.lineno + 1)
