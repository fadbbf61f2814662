"""The program `jaxkv`, apart from its package, which takes seconds to import: Ctrl-C may come meanwhile."""

import os
import signal
import sys


def main() -> int:
    """Runs the command line; its exit status."""
    # An exception would not do: extension modules that are being imported replace or swallow it.
    handler = signal.signal(signal.SIGINT, _end)
    from jaxkv.cli import main

    signal.signal(signal.SIGINT, handler)
    return main()


def _end(*_):
    if sys.stderr is not None:
        os.write(sys.stderr.fileno(), b"jaxkv: interrupted\n")
    os._exit(128 + signal.SIGINT)
