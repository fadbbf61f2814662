"""Processes of one `jax.distributed` job."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def environment(**settings: str) -> dict[str, str]:
    """The variables of this process, for one of Python on CPUs that imports this library and the tests."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **settings}


@contextmanager
def job(command: Callable[[str, int], Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of Python on CPUs, which are killed in the end.

    Args:
      command: the arguments of each, given the address of the coordinator and the number of the process.
    """
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, *command(address, number)],
            env=environment(XLA_FLAGS=""),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
