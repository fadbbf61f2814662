"""The command line: `jaxkv demo`, `generate`, `serve`, `verify`, `doctor`, `layout`, `matrix` and `bench`.

`jaxkv bench` has a subcommand for each kind of measurement.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType

import jaxkv
from jaxkv.bench import disaggregated, hot_rows, offload, ops, parallel, step, transfer, ttft
from jaxkv.bench import serve as bench_serve
from jaxkv.cli import demo, doctor, generate, layout, matrix, serve, verify
from jaxkv.terminal import streams
from jaxkv.terminal.mistakes import mistake
from jaxkv.terminal.options import Parser

COMMANDS = {
    "demo": demo,
    "generate": generate,
    "serve": serve,
    "verify": verify,
    "doctor": doctor,
    "layout": layout,
    "matrix": matrix,
}
"""Commands by name: modules with a docstring, `add_arguments(parser)` and `run(args) -> int`."""

BENCHMARKS = {
    "ops": ops,
    "step": step,
    "serve": bench_serve,
    "ttft": ttft,
    "offload": offload,
    "hot-rows": hot_rows,
    "parallel": parallel,
    "transfer": transfer,
    "disaggregated": disaggregated,
}
"""The subcommands of `jaxkv bench`, likewise."""


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
    parser = Parser(prog="jaxkv", description="Paged KV caches for JAX, with explicit strides.")
    parser.add_argument("--version", action="version", version=f"jaxkv {jaxkv.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add(commands, COMMANDS)
    summary = "Time operations, whole models and transfers on this machine."
    bench = commands.add_parser("bench", help=summary, description=summary)
    _add(bench.add_subparsers(metavar="SUBCOMMAND", required=True), BENCHMARKS)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.argv = argv  # recorded with measurements
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return args.run(args)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not (message := mistake(error)):
            raise
    raise SystemExit(f"{args.prog}: {' '.join(message.split())}")


def _add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", modules: Mapping[str, ModuleType]) -> None:
    """Adds a command for each of `modules`."""
    for name, module in modules.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run, prog=command.prog)


def _show_warning(message, *_, **__) -> None:
    """Prints a warning in one line, without the place in the code."""
    streams.notice(f"jaxkv: {' '.join(str(message).split())}")
