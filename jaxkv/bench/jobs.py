"""Commands that form one job of `jax.distributed`: one per process, each with the address of process 0."""

import argparse
import socket

import jax

from jaxkv.terminal.options import integer

MOST_PROCESSES = 1024


def add_job(parser: argparse.ArgumentParser, most: int = MOST_PROCESSES) -> None:
    """Adds `--coordinator`, `--processes` (2 to `most`) and `--process`, which `join` reads."""
    address = "address of process 0: this command is one of --processes of one job, each with one device"
    parser.add_argument("--coordinator", type=_address, metavar="HOST:PORT", help=address)
    count = "processes of the job, with --coordinator"
    parser.add_argument("--processes", type=integer(2, most), metavar="N", help=count)
    which = "which of them this is, with --coordinator: from 0"
    parser.add_argument("--process", type=integer(0, most - 1), metavar="I", help=which)


def join(args: argparse.Namespace) -> bool:
    """Whether this command is one of a job, which it has joined.  Call it before any device is used.

    Raises:
      ValueError: some of the options are missing, or the processes did not form a job.
    """
    options = {"--coordinator": args.coordinator, "--processes": args.processes, "--process": args.process}
    if all(value is None for value in options.values()):
        return False
    if missing := [name for name, value in options.items() if value is None]:
        raise ValueError(f"{missing[0]} is missing: expected all of {', '.join(options)}, or none")
    if args.process >= args.processes:
        raise ValueError(f"--process is {args.process}: expected 0 to {args.processes - 1}, of --processes")
    try:
        socket.getaddrinfo(args.coordinator.rpartition(":")[0], None)  # where JAX ends the process if it is not known
        jax.distributed.initialize(args.coordinator, args.processes, args.process, initialization_timeout=60)
    except (RuntimeError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--coordinator is {args.coordinator!r}: the processes did not form a job: {reason}") from None
    return True


def say(line: str) -> None:
    """Prints a line at once, unless another process of the job does."""
    if jax.process_index() == 0:
        print(line, flush=True)


def _address(text: str) -> str:
    """Parses the address of a coordinator."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, with a port from 1 to 65535")
    return text
