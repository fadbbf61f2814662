"""Standard output and standard error, as Unix tools treat them."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

INTERRUPTED, CLOSED_PIPE = 128 + 2, 128 + 13
"""Exit statuses that shells report for programs that SIGINT and SIGPIPE end."""


def notice(text: str, end: str = "\n") -> None:
    """`text` on standard error, at once; dropped where that cannot be written, for results matter more."""
    with suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def guarded(run: Callable[[], int]) -> int:
    """The exit status of `run()`, which ends without a traceback where standard output fails, and on Ctrl-C.

    Output that cannot be written gives a line and status 1, but a pipe whose reader went away is nothing to report.
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
    """Where the caller has closed a stream (`2>&-`): errors go nowhere, and output fails as on any closed file.

    The descriptors are taken, lest a file that is opened later gets what is meant for a stream.
    """
    for name, flags, mode in (("stdin", os.O_WRONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that its encoding lacks is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_unwritten() -> None:
    """Has what standard output could not take go nowhere, or the interpreter would try again as it exits, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
