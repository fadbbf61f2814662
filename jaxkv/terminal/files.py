"""Writing results to files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Writes `found` as JSON; an OSError names the file."""
    with named(path):
        path.write_text(json.dumps(found, indent=1) + "\n")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Adds the file name to an OSError raised in the body.  Some errors, such as that of a full disk, lack it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
