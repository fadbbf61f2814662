"""Option types and options that several commands share."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jaxkv_kernels.formats.entries import KVEntry, MLAEntry

MOST = 2**31 - 1
"""Sizes and counts are int32 on the device."""


def integer(least: int, most: int = MOST) -> Callable[[str], int]:
    """A parser of integers from `least` to `most`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {least} to {most}")
        return number

    return read


positive = integer(1)
"""Parses a size or a count."""

seed = integer(0, 2**32 - 1)
"""Parses the seed of random numbers."""


Sizes = Mapping[str, tuple[str, int, int]]
"""Options by name: help text, default on GPUs, default on CPUs."""


def add_sizes(parser: argparse.ArgumentParser, sizes: Sizes) -> None:
    """Adds options whose defaults depend on the device; `with_defaults` sets those that are not given."""
    for name, (description, *_) in sizes.items():
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=description)


def with_defaults(args: argparse.Namespace, sizes: Sizes, device: jax.Device) -> dict[str, int]:
    """Sets the sizes that were not given to their defaults for `device`; returns all of them by name."""
    for name, (_, gpu_default, cpu_default) in sizes.items():
        default = cpu_default if device.platform == "cpu" else gpu_default
        setattr(args, name, getattr(args, name) or default)
    return {name: getattr(args, name) for name in sizes}


ENTRY_FORMATS = tuple(dict.fromkeys((*MLAEntry.formats, *KVEntry.formats)))
"""Of latents, and of keys and values."""


def add_entry_format(parser: argparse.ArgumentParser) -> None:
    """Adds `--entry-format`, the format of a model's cache."""
    entry_format = "format of the cached entries; default: the dtype of the weights"
    parser.add_argument("--entry-format", choices=ENTRY_FORMATS, help=entry_format)


def output_folder(text: str) -> Path:
    """Parses the path of a folder, which need not exist yet."""
    path = Path(text)
    try:
        if not text or (path.exists() and not path.is_dir()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    except OSError as error:  # such as a name that is too long
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from None
    return path


def output_file(text: str) -> Path:
    """Parses the path of a file that can be written, in an existing folder."""
    path = Path(text)
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing folder")
    except OSError as error:  # such as a name that is too long
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return path
