"""Servers as processes of their own, as users start them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from server import checkpoint
from support.jobs import ROOT

PACKAGES = ("openai", "httpx", "starlette", "uvicorn", "msgspec", "prometheus_client", "jinja2", "tokenizers")
"""The extra `serve`, and clients."""
collect_ignore_glob = ["test_*.py"] * any(find_spec(package) is None for package in PACKAGES)
KEY = "a key of the tests"


@dataclass
class Served:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str

    def stop(self, number: int) -> int:
        """Sends a signal and waits; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def serving(folder, *arguments: str) -> Iterator[Served]:
    """A server of a checkpoint on a free port."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "JAXKV_API_KEY": KEY}
    command = [sys.executable, "-m", "jaxkv", "serve", str(folder), "--port", "0", *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    seen = []
    try:
        for line in process.stderr:
            seen.append(line)
            if line == "ready\n":
                break
        else:
            raise AssertionError("".join(seen))
        url = next(match[1] for line in seen if (match := re.match(r"listening on (http://\S+);", line)))
        yield Served(process, url)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The checkpoint."""
    return checkpoint.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def served(folder):
    """A server that all tests use."""
    sizes = ("--blocks", "24", "--max-requests", "8", "--max-queued", "100", "--max-body", "20000")
    with serving(folder, *sizes, "--served-model-name", "tiny") as server:
        yield server
        assert server.process.poll() is None
        time.sleep(0)
