"""Standard output and standard error, handled as Unix tools do."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from jaxkv.terminal.interrupts import INTERRUPTED, Interrupts

CLOSED_PIPE = 128 + 13
"""The exit status that shells report for programs ended by SIGPIPE."""


def notice(text: str) -> None:
    """Prints `text` to standard error at once.  If that fails, `text` is dropped, because results matter more."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def guarded(run: Callable[[], int]) -> int:
    """Calls `run` and returns its exit status; prints no traceback if standard output fails or on Ctrl-C.

    If output cannot be written, a one-line message is printed and the status is 1.  If the reader of a pipe went away,
    nothing is printed, and the status is 141.  After Ctrl-C, the status is 130, with which the process ends at once.
    """
    _open_closed_streams()
    with Interrupts(report=partial(notice, "jaxkv: interrupted")) as interrupts:
        try:
            try:
                return run()
            finally:
                sys.stdout.flush()  # writing what is still buffered may fail too
        except KeyboardInterrupt:
            interrupts.caught()
            status = INTERRUPTED
        except BrokenPipeError:
            status = CLOSED_PIPE
        except OSError as error:
            notice(f"jaxkv: standard output: {error.strerror}")
            status = 1
        _discard_unwritten()
        return status


def _open_closed_streams() -> None:
    """Opens standard streams that the caller has closed (`2>&-`), on the null device.

    Text for standard error is then dropped, and writes to standard output fail as on any closed file.  Without this, a
    file that is opened later could get the stream's descriptor and receive its output.
    """
    for name, flags, mode in (("stdin", os.O_WRONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):  # do not fail on characters that the encoding cannot represent
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_unwritten() -> None:
    """Discards what could not be written to standard output, which the interpreter would try to write again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
