"""A progress bar, which is shown only if standard error is a terminal."""

import sys
from collections.abc import Iterable, Iterator, Sized

from jaxkv.terminal.streams import notice

WIDTH = 30


def progress[T](items: Iterable[T], what: str) -> Iterator[T]:
    """Yields the items, and shows on standard error how many have been processed."""
    items = items if isinstance(items, Sized) else list(items)
    total = len(items)
    shown = sys.stderr.isatty()
    for done, item in enumerate(items):
        if shown:
            filled = WIDTH * done // total
            notice(f"\r{what} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}", end="")
        yield item
    if shown:
        notice("\r" + " " * (len(what) + WIDTH + 20) + "\r", end="")
