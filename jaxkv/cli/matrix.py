"""Print which implementation supports which operation and entry format, and has been run on which GPUs (Markdown)."""

import argparse

from jaxkv.support import generation_table, support_matrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no options."""


def run(args: argparse.Namespace) -> int:
    """Prints both tables."""
    del args
    print(f"{support_matrix()}\n\n{generation_table()}")
    return 0
