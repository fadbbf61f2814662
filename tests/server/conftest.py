"""Servers as processes of their own, as users start them."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from server import checkpoint
from support.jobs import environment

PACKAGES = ("openai", "httpx", "starlette", "uvicorn", "msgspec", "prometheus_client", "jinja2", "tokenizers")
"""The extra `serve`, and clients."""
collect_ignore_glob = ["test_*.py"] * any(find_spec(package) is None for package in PACKAGES)
KEY = "a key of the tests"
GREEDY = {"model": "tiny", "temperature": 0}


@dataclass
class Served:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str


@contextmanager
def serving(folder, *arguments: str) -> Iterator[Served]:
    """A server of a checkpoint on a free port."""
    command = [sys.executable, "-m", "jaxkv", "serve", str(folder), "--port", "0", *arguments]
    process = subprocess.Popen(command, env=environment(JAXKV_API_KEY=KEY), stderr=subprocess.PIPE, text=True)
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


def held(served):
    """Requests that the engine has, and blocks that they hold."""
    import httpx

    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    numbers = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = ("requests_waiting", "requests_running", "cache_usage")
    return [float(numbers[f"jaxkv_{name}"]) for name in names]


def wait_until_idle(served):
    for _ in range(2000):
        if held(served) == [0, 0, 0]:
            return
    pytest.fail(f"requests and blocks are still held: {held(served)}")
