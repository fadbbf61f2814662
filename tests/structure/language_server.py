"""A client of a language server over stdin and stdout: definitions and implementations of names."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

SERVERS = {
    "pyrefly": [sys.executable, "-m", "pyrefly", "lsp"],
    "pyright": [sys.executable, "-m", "pyright.langserver", "--stdio"],
}


class LanguageServer:
    """A server that runs until `stop`, with the configuration in the project's pyproject.toml."""

    def __init__(self, name: str, root: Path):
        self._server = subprocess.Popen(
            SERVERS[name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
        )
        self._root, self._next, self._opened = root, 0, set()
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

    def follows(self, caller, step) -> str:
        """How the function of `step` is found from the function of `caller`, which calls it in `caller.line`.

        The answer begins with "NOT" if it is not found.
        """
        tree = ast.parse(caller.path.read_text())
        function = _function(tree, caller.code)
        target = _function(ast.parse(step.path.read_text()), step.code)
        if caller.path == step.path and function.lineno <= target.lineno <= (function.end_lineno or 0):
            return f"{_label(target)} is defined in it"
        line = [node for node in ast.walk(_statement(function, caller.line)) if _names(node)]
        rest = [node for node in ast.walk(function) if _names(node) and node not in line]
        for nodes, where in ((line, ""), (rest, ", elsewhere in it")):
            for request in ("definition", "implementation"):
                for node in nodes:
                    for path, number in self._locations(request, caller.path, node):
                        if path == step.path and _is_at(number, target, step):
                            return f"{request} of `{_names(node)}`, line {node.end_lineno}{where}"
        shown = ", ".join(dict.fromkeys(f"`{_names(node)}`" for node in line))
        return f"NOT found from line {caller.line}: {shown}"

    def _locations(self, request: str, path: Path, node: Any) -> Iterator[tuple[Path, int]]:
        """The places that the server returns for a name, with line numbers from 1."""
        self._open(path)
        # Columns of the syntax tree count bytes; sources are ASCII where it matters.
        position = {"line": node.end_lineno - 1, "character": node.end_col_offset - len(_names(node))}
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
        """What the server asks of an editor: its settings."""
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


def _function(tree: ast.AST, code) -> Function | ast.ClassDef:
    """The syntax of a function.  `co_firstlineno` is the line of its first decorator."""
    inner = None
    for node in ast.walk(tree):
        if isinstance(node, Function):
            first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
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


def _names(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _label(node: ast.AST) -> str:
    return f"`{getattr(node, 'name', 'lambda')}`"


def _is_at(line: int, target: Any, step) -> bool:
    """Whether a line is that of the function, or of the class that a call of creates and initialises."""
    first = min([target.lineno, *(x.lineno for x in getattr(target, "decorator_list", []))])
    if first <= line <= target.lineno:
        return True
    if step.code.co_name not in ("__init__", "__post_init__", "__call__", "__enter__"):
        return False
    classes = (node for node in ast.walk(ast.parse(step.path.read_text())) if isinstance(node, ast.ClassDef))
    return any(node.lineno == line and target.lineno <= (node.end_lineno or 0) for node in classes)
