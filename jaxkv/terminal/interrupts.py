"""Ctrl-C ends a command soon, whatever it is doing."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

INTERRUPTED = 128 + 2
"""The exit status that shells report for programs ended by SIGINT."""
GRACE = 2.0
"""Seconds from Ctrl-C to the end of the process if KeyboardInterrupt has not been caught by then."""


class Interrupts:
    """A context in which Ctrl-C ends the process if KeyboardInterrupt cannot.

    Python raises KeyboardInterrupt when its main thread executes Python again.  While that thread is in a compiler,
    this may take minutes: after `GRACE` seconds, a thread of this class ends the process with status 130.

    The context has no effect in an interactive session, such as a notebook, which has to go on; if it is entered by
    another thread than the main one, which alone receives signals; or if Ctrl-C does not raise KeyboardInterrupt.

    Args:
      report: prints that the command was interrupted.
    """

    def __init__(self, report: Callable[[], None]):
        self._report = report
        self._pressed, self._done = False, threading.Event()
        self._restore = ExitStack()

    def __enter__(self) -> "Interrupts":
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        interactive = hasattr(sys, "ps1")
        if usual and not interactive and threading.current_thread() is threading.main_thread():
            # A handler in C writes the number of each signal at once, whatever the main thread is doing.
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            self._restore.callback(os.close, writer)
            self._restore.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
            self._restore.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, self._interrupt))
            threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._restore.close()

    def caught(self) -> None:
        """To be called when KeyboardInterrupt has been caught.  Reports it and, after Ctrl-C, ends the process.

        It ends with status 130 and at once.  Otherwise the interpreter would wait for threads that cannot be stopped,
        such as those that compile, and another Ctrl-C would print a traceback.
        """
        self._done.set()
        self._report()
        if self._pressed:
            os._exit(INTERRUPTED)

    def _interrupt(self, number: int, frame: object) -> None:
        """Handles Ctrl-C in the main thread."""
        if not self._done.is_set():
            self._pressed = True
            raise KeyboardInterrupt

    def _watch(self, reader: int) -> None:
        """Reads the numbers of signals until the context ends."""
        with os.fdopen(reader, "rb", buffering=0) as signals:
            while arrived := signals.read(1):
                if arrived[0] == signal.SIGINT and not self._done.wait(GRACE):
                    self._report()
                    os._exit(INTERRUPTED)
