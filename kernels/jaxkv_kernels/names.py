"""What messages say about a name that is not among the known ones."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def expected_one_of(name: Any, names: Iterable[str]) -> str:
    """`expected one of a, b, c`, and after a semicolon the one that is spelled most like `name`, if one is."""
    known = {known.lower(): known for known in names}
    near = get_close_matches(str(name).lower(), known, n=1)
    return f"expected one of {', '.join(known.values())}" + (f"; did you mean {known[near[0]]!r}?" if near else "")
