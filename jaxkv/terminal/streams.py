"""Standard output and standard error, as Unix tools treat them."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

INTERRUPTED, CLOSED_PIPE = 128 + 2, 128 + 13
"""Exit statuses that shells report for programs that SIGINT and SIGPIPE end."""


def notice(text: str, end: str = "\n") -> None:
    """Prints `text` to standard error at once.  If that fails, `text` is dropped, because results matter more."""
    with suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def guarded(run: Callable[[], int]) -> int:
    """Calls `run` and returns its exit status, without a traceback if standard output fails or on Ctrl-C.

    Output that cannot be written is reported in one line, with status 1.  A pipe whose reader went away is not
    reported.
    """
    _open_closed_streams()
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # what is still buffered may fail too
    except KeyboardInterrupt:
        notice("jaxkv: interrupted")
        status = INTERRUPTED
    except BrokenPipeError:
        status = CLOSED_PIPE
    except OSError as error:
        notice(f"jaxkv: standard output: {error.strerror}")
        status = 1
    _discard_unwritten()
    return status


def _open_closed_streams() -> None:
    """Opens streams that the caller has closed (`2>&-`): errors are dropped, and output fails as on any closed file.

    This occupies their descriptors.  Otherwise, a file that is opened later would receive what is meant for a stream.
    """
    for name, flags, mode in (("stdin", os.O_WRONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):  # do not fail on characters that the encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_unwritten() -> None:
    """Discards what could not be written to standard output, which the interpreter would try to write again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
