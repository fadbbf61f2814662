"""A progress bar, which is shown only if standard error is a terminal and tqdm is installed."""

from collections.abc import Iterable

try:
    from tqdm import tqdm
except ImportError:  # It belongs to the extras `models` and `serve`.
    tqdm = None


def progress[T](items: Iterable[T], what: str) -> Iterable[T]:
    """The items, of which standard error shows how many have been processed."""
    return items if tqdm is None else tqdm(items, desc=what, leave=False, disable=None)
