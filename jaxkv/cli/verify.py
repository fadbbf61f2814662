"""Check on this machine that every operation returns the same bits on every layout.

Each operation runs on caches of every order, whose memory around the entries is full of random bytes, and on a twin: a
layer-major cache whose memory around the entries is 0.  Results must be equal bit for bit, and a write or a copy must
leave every other byte as it was.  With `--calls`, the fuzzer makes that many random calls on random layouts instead.

On GPUs, XLA chooses algorithms for products by timing them, for each program, so that results of `xla` may differ in
their last bits.  `XLA_FLAGS=--xla_gpu_autotune_level=0` avoids this.
"""

import argparse
import time

import jax

import jaxkv
from jaxkv.terminal.formatting import counted
from jaxkv.terminal.options import positive, seed
from jaxkv.terminal.progress import progress
from jaxkv.testing import equivalence
from jaxkv.testing.fuzz import fuzz


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: which implementation to check, and how."""
    parser.add_argument("--implementation", choices=jaxkv.implementations(), default="xla")
    parser.add_argument("--calls", type=positive, metavar="N", help="make N random calls of random layouts and shapes")
    parser.add_argument("--seed", type=seed, default=0, metavar="S", help="first seed of --calls (0)")


def run(args: argparse.Namespace) -> int:
    """Prints one line per operation and format; returns 1 if any result differs.  ValueError if nothing was checked."""
    if args.calls is not None:
        return 1 if fuzz(calls=args.calls, seed=args.seed, implementation=args.implementation) else 0
    start, every = time.perf_counter(), []
    verified = equivalence.verify_all(args.implementation)
    for entry, cases in zip(progress(equivalence.ENTRIES, "verifying"), verified, strict=True):
        for operation in dict.fromkeys(case.operation for case in cases):
            outcome = _summary([case for case in cases if case.operation == operation])
            print(f"{operation:18} {entry.format:13} {outcome}")
        every += cases
    checked = [case for case in every if not case.rejected]
    if not checked:
        raise ValueError(
            f"nothing was checked: {args.implementation} supports no call on this machine ({every[0].rejected})"
        )
    wrong = sum(bool(case.wrong) for case in checked)
    total = f"{len(checked)} cases on {jax.devices()[0].device_kind} in {time.perf_counter() - start:.0f} s"
    print(f"{wrong} of {total} differ" if wrong else f"all of {total}: equal bit for bit")
    return 1 if wrong else 0


def _summary(cases: list[equivalence.Outcome]) -> str:
    """The outcomes of one operation, as one line of text."""
    right = [case for case in cases if not (case.wrong or case.rejected)]
    outcomes = [f"ok on {counted(len(right), 'orders')}"] if right else []
    outcomes += [f"{case.order}: {case.wrong}" for case in cases if case.wrong]
    for reason in dict.fromkeys(case.rejected for case in cases if case.rejected):
        orders = sum(case.rejected == reason for case in cases)
        outcomes.append(f"rejected on {counted(orders, 'orders')}: {reason}")
    return "; ".join(outcomes)
