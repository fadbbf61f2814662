"""The command line: `jaxkv demo`, `generate`, `verify`, `bench`, `step`, `ttft`, `serve-bench`, `offload`,
`hot-rows`, `parallel`, `doctor`, `layout`, `matrix`.
"""

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence

import jax

import jaxkv
from jaxkv.terminal import streams

COMMANDS = (
    "demo", "generate", "verify", "bench", "step", "ttft", "serve-bench", "offload", "hot-rows", "parallel",
    "doctor", "layout", "matrix",
)  # fmt: skip

MISTAKES = (ValueError, ImportError, OSError, NotImplementedError, MemoryError)
"""Exceptions of user errors, which are reported in one line.  Other exceptions are bugs and keep their traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the command's name and options; by default `sys.argv[1:]`.

    Returns:
      The exit status: 0 on success; 1 if a result is wrong or could not be written; 130 after KeyboardInterrupt; 141 if
      the reader of standard output went away.  Shells report the last two for programs ended by SIGINT and SIGPIPE.
      Ctrl-C ends the process with status 130, because a compiler that runs cannot be stopped otherwise; except in
      interactive sessions, such as a notebook.

    Raises:
      SystemExit: an option is unknown or invalid (status 2), or the command cannot run with the options (status 1, with
        a one-line message).
    """
    return streams.guarded(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="jaxkv", description="Paged KV caches for JAX, with explicit strides.")
    parser.add_argument("--version", action="version", version=f"jaxkv {jaxkv.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"jaxkv.cli.{name.replace('-', '_')}")
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.argv = argv  # recorded with measurements
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return args.run(args)
    except BrokenPipeError:
        raise
    except MISTAKES as error:
        message = str(error) or type(error).__name__
    except jax.errors.JaxRuntimeError as error:
        if "Out of memory" not in str(error):
            raise
        message = f"does not fit in memory: choose smaller sizes ({error})"
    except Exception:
        if not (message := _without_device()):
            raise
    raise SystemExit(f"jaxkv {args.command}: {' '.join(message.split())}")


def _show_warning(message, *_, **__) -> None:
    """Prints a warning in one line, without the place in the code."""
    streams.notice(f"jaxkv: {' '.join(str(message).split())}")


def _without_device() -> str:
    """Why JAX has no device; empty if it has one.  JAX's own error does not always have a message."""
    try:
        jax.devices()
    except Exception as error:
        platforms = jax.config.jax_platforms
        return f"JAX has no device with JAX_PLATFORMS={platforms!r} (see `jaxkv doctor`): {error!r}"
    return ""
