"""The command line: `jaxkv demo`, `generate`, `serve`, `verify`, `doctor`, `layout`, `matrix` and `bench`.

`jaxkv bench` has a subcommand for each kind of measurement.
"""

import sys
import warnings
from collections.abc import Sequence

import jaxkv
from jaxkv.terminal import streams
from jaxkv.terminal.parser import Parser

COMMANDS = {
    "demo": "jaxkv.cli.demo",
    "generate": "jaxkv.cli.generate",
    "serve": "jaxkv.cli.serve",
    "verify": "jaxkv.cli.verify",
    "doctor": "jaxkv.cli.doctor",
    "layout": "jaxkv.cli.layout",
    "matrix": "jaxkv.cli.matrix",
}
"""The modules of commands, by name.  They are imported when they are chosen, because JAX takes seconds to import."""

BENCHMARKS = {
    "ops": "jaxkv.bench.ops",
    "step": "jaxkv.bench.step",
    "serve": "jaxkv.bench.serve",
    "ttft": "jaxkv.bench.ttft",
    "offload": "jaxkv.bench.offload",
    "hot-rows": "jaxkv.bench.hot_rows",
    "parallel": "jaxkv.bench.parallel",
    "transfer": "jaxkv.bench.transfer",
    "disaggregated": "jaxkv.bench.disaggregated",
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
    commands = parser.add_commands("COMMAND", COMMANDS)
    summary = "Time operations, whole models and transfers on this machine."
    commands.add_parser("bench", help=summary, description=summary).add_commands("SUBCOMMAND", BENCHMARKS)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.argv = argv  # recorded with measurements

    from jaxkv.terminal.mistakes import mistake  # imports JAX, which the command has imported too

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


def _show_warning(message, *_, **__) -> None:
    """Prints a warning in one line, without the place in the code."""
    streams.notice(f"jaxkv: {' '.join(str(message).split())}")
