"""Values of options, as the commands' parsers read them."""

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def model_folder(text: str) -> Path:
    """The folder of a model, which may be told by its config.json."""
    path = Path(text)
    return path.parent if path.name == "config.json" else path


def output_file(text: str) -> Path:
    """A file that can be written: in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in an existing folder")
    return path
