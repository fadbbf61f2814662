"""Writing results to files, with what they need to be repeated."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Writes `found` as JSON; an OSError names the file."""
    with named(path):
        path.write_text(json.dumps(found, indent=1) + "\n")


def when_and_how(argv: Sequence[str]) -> dict[str, str]:
    """The date and the command of a measurement, to be written with it; `argv` are the arguments of `jaxkv`."""
    return {"date": datetime.now(UTC).date().isoformat(), "command": shlex.join(["jaxkv", *argv])}


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Adds the file name to an OSError raised in the body.  Some errors, such as that of a full disk, lack it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
