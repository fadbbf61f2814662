"""Check on this machine that every operation returns the same bits on every layout.

Each operation runs on caches of every order, whose memory around the entries is full of random bytes, and on a twin: a
layer-major cache whose memory around the entries is 0.  Results must be equal bit for bit, and a write or a copy must
leave every other byte as it was.  With `--calls`, the fuzzer makes that many random calls on random layouts instead.

With `--report`, the results are also written to a file, with the times of a few calls if there is a GPU.  If your GPU
is of a generation on which kernels have not been run (`jaxkv matrix`), please send such a file for `--implementation
triton`, and for `mosaic_gpu` if it supports the GPU: with it, calls choose these kernels on GPUs like yours.

On GPUs, XLA chooses algorithms for products by timing them, for each program, so that results of `xla` may differ in
their last bits.  `XLA_FLAGS=--xla_gpu_autotune_level=0` avoids this.
"""

import argparse
import time
from typing import Any

import jax
import jaxlib

import jaxkv
from jaxkv.bench.program import Program
from jaxkv.bench.suites import WORKLOADS
from jaxkv.terminal.files import when_and_how, write_json
from jaxkv.terminal.formatting import counted
from jaxkv.terminal.options import output_file, positive, seed
from jaxkv.terminal.progress import progress
from jaxkv.testing import equivalence
from jaxkv.testing.fuzz import fuzz
from jaxkv_kernels.generations import capability

TIMED = (
    "decode_mla-64x16x1x4096-1",
    "decode_mla-64x128x1x4096-1",
    "decode_kv-64x64x1x4096-1",
    "write_kv-8x1024-61",
    "gather_kv-8x1024-61",
    "copy_blocks-1x4096-61",
)
"""The calls of the benchmark that a report has the times of."""
REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: which implementation to check, and how."""
    parser.add_argument("--implementation", choices=jaxkv.implementations(), default="xla")
    parser.add_argument("--calls", type=positive, metavar="N", help="make N random calls of random layouts and shapes")
    text = "also write the results, which can be sent to the developers"
    parser.add_argument("--report", type=output_file, metavar="FILE", help=text)
    parser.add_argument("--seed", type=seed, default=0, metavar="S", help="first seed of --calls (0)")


def run(args: argparse.Namespace) -> int:
    """Prints one line per operation and format; returns 1 if any result differs.  ValueError if nothing was checked."""
    if args.calls is not None:
        if args.report:
            raise ValueError("--report and --calls are given: expected one of them; a report has every operation")
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
    if args.report:
        write_json(args.report, _report(args, every))
    return 1 if wrong else 0


def _report(args: argparse.Namespace, cases: list[equivalence.Outcome]) -> dict[str, Any]:
    """What `jaxkv_kernels.generations` reads, and what else helps to judge it."""
    operations: dict[str, dict[str, Any]] = {}
    for operation in dict.fromkeys(case.operation for case in cases):
        own = [case for case in cases if case.operation == operation]
        right = not any(case.wrong for case in own) and any(not case.rejected for case in own)
        operations[operation] = {"right": right, "outcome": _summary(own)}
    device = jax.devices()[0]
    return {
        **when_and_how(args.argv),
        "device": device.device_kind,
        "compute_capability": capability(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "implementation": args.implementation,
        "operations": operations,
        "ms": _times(args.implementation) if device.platform == "gpu" else {},
    }


def _times(implementation: str) -> dict[str, float | str]:
    """Milliseconds of each call of `TIMED`, or why it was not timed."""
    found: dict[str, float | str] = {}
    for name in progress(TIMED, "timing"):
        try:
            measured = Program(WORKLOADS[name], implementation=implementation).compile().measure(repeats=REPEATS)
            found[name] = 1e3 * measured.timing.median
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            found[name] = str(error).splitlines()[0]
    return found


def _summary(cases: list[equivalence.Outcome]) -> str:
    """The outcomes of one operation, as one line of text."""
    right = [case for case in cases if not (case.wrong or case.rejected)]
    outcomes = [f"ok on {counted(len(right), 'orders')}"] if right else []
    outcomes += [f"{case.order}: {case.wrong}" for case in cases if case.wrong]
    for reason in dict.fromkeys(case.rejected for case in cases if case.rejected):
        orders = sum(case.rejected == reason for case in cases)
        outcomes.append(f"rejected on {counted(orders, 'orders')}: {reason}")
    return "; ".join(outcomes)
