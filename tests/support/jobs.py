"""Processes of one `jax.distributed` job."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def job(command: Callable[[str, int], Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of Python on CPUs, which are killed in the end.

    Args:
      command: the arguments of each, given the address of the coordinator and the number of the process.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": paths}
    processes = [
        subprocess.Popen(
            [sys.executable, *command(address, number)],
            env=env,
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
