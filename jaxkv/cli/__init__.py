"""The command line: `jaxkv demo`, `generate`, `verify`, `bench`, `step`, `ttft`, `offload`, `parallel`, `doctor`,
`layout`, `matrix`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

import jax

from jaxkv.terminal import streams

COMMANDS = ("demo", "generate", "verify", "bench", "step", "ttft", "offload", "parallel", "doctor", "layout", "matrix")

MISTAKES = (ValueError, ImportError, OSError, NotImplementedError, MemoryError)
"""What a user's mistake raises: it ends in one line.  Anything else is a fault of jaxkv, and keeps its traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: its name and options; default those of the process.

    Returns:
      The exit status: 0 where all went well, 1 where a result is wrong or could not be written, 130 after Ctrl-C, 141
      where the reader of standard output went away, as of a program that SIGINT or SIGPIPE ends.

    Raises:
      SystemExit: options are misused (status 2), or the command cannot do what they ask for (a line, status 1).
    """
    return streams.guarded(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
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
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except MISTAKES as error:
        told = str(error) or type(error).__name__
    except jax.errors.JaxRuntimeError as error:
        if "Out of memory" not in str(error):
            raise
        told = f"does not fit in memory, take smaller sizes ({error})"
    except Exception:
        if not (told := _without_device()):
            raise
    raise SystemExit(f"jaxkv {args.command}: {' '.join(told.split())}")


def _without_device() -> str:
    """Why JAX has no device, if it has none: it fails wherever it first needs one, and not always with a message."""
    try:
        jax.devices()
    except Exception as error:
        platforms = jax.config.jax_platforms
        return f"JAX has no device with JAX_PLATFORMS={platforms!r}, `jaxkv doctor` reports more: {error!r}"
    return ""
