"""The command line: `jaxkv demo`, `generate`, `verify`, `bench`, `step`, `ttft`, `offload`, `parallel`, `doctor`,
`layout`, `matrix`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("demo", "generate", "verify", "bench", "step", "ttft", "offload", "parallel", "doctor", "layout", "matrix")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status."""
    parser = argparse.ArgumentParser(prog="jaxkv", description="Paged KV caches for JAX, with strides.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"jaxkv.cli.{name}")
        told = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=told, description=told)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.argv = argv  # recorded with measurements
    return args.run(args)
