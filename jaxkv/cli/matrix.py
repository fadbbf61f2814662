"""Print the support matrix (Markdown): which implementation supports which operation and entry format."""

import argparse

from jaxkv.support import support_matrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no options."""


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    del args
    print(support_matrix())
    return 0
