"""Time operations on this device, beside the ceilings of memory and arithmetic measured in the same run.

A row is one call on random data with shuffled blocks.  `ms` is device time: many dependent calls in one program, their
time over their number, the median of several such chains.  `MB` and `GFLOP` count what the call must move (cache
entries, queries, new values, results, each once) and multiply; `limit ms` is the larger of the two over its ceiling.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jaxlib

import jaxkv
from jaxkv.cli.timing import Ceilings, device_memory, measure_ceilings, time_workload
from jaxkv.cli.workloads import OPERATIONS, SUITES, WORKLOADS, Workload

MEMORY_FRACTION = 0.6
"""The part of the device's memory that a cache may take; where all layers do not fit, fewer are timed."""

COLUMNS = (
    ("layers", "layers", "d"),
    ("run by", "implementation", ""),
    ("ms", "ms", ".4f"),
    ("min ms", "min_ms", ".4f"),
    ("spread", "spread", ".0%"),
    ("MB", "megabytes", ".1f"),
    ("GFLOP", "gflop", ".2f"),
    ("GB/s", "gigabytes_per_s", ".1f"),
    ("TFLOP/s", "tflop_per_s", ".3f"),
    ("limit ms", "limit_ms", ".4f"),
    ("limit/ms", "fraction", ".2f"),
    ("compile s", "compile_s", ".1f"),
)
"""Heading, key of the row and format of what the table shows after the shape's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shapes to time, how, and where to put the numbers."""
    parser.add_argument("operations", nargs="*", choices=OPERATIONS, metavar="OPERATION", help=", ".join(OPERATIONS))
    parser.add_argument("--suite", choices=SUITES, help="default: cpu on CPUs, else peers and copies")
    parser.add_argument("--shape", nargs="+", choices=WORKLOADS, metavar="NAME", help="names as the table shows them")
    parser.add_argument("--implementation", choices=jaxkv.implementations(), help="default: the best that takes a call")
    parser.add_argument("--repeats", type=_positive, default=20, metavar="N", help="chains to time a shape (20)")
    parser.add_argument("--json", type=_file, metavar="FILE", help="also write device, versions, ceilings and rows")


def run(args: argparse.Namespace) -> int:
    """Prints the table; 2 where no shape is asked for."""
    device = jax.devices()[0]
    workloads = _selected(args, device)
    if not workloads:
        asked = " ".join([*args.operations, *([f"--suite {args.suite}"] if args.suite else []), *(args.shape or [])])
        names = ", ".join(
            name for name, w in WORKLOADS.items() if not args.operations or w.operation in args.operations
        )
        print(f"jaxkv bench: no shape is all of {asked}; there are {names}", file=sys.stderr)
        return 2
    ceilings = measure_ceilings(device, repeats=args.repeats)
    rows = []
    for number, workload in enumerate(workloads, 1):
        rows.append(_row(workload, args, device, ceilings))
        told = rows[-1].get("reason") or f"{rows[-1]['ms']:.4f} ms"
        print(f"[{number}/{len(workloads)}] {workload.name}: {told}", file=sys.stderr, flush=True)
    about = {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "ceilings": asdict(ceilings),
    }
    print("{device}, jax {versions[jax]}, jaxlib {versions[jaxlib]}, jaxkv {versions[jaxkv]}".format(**about))
    print(
        f"ceilings: read {ceilings.read / 1e9:.1f} GB/s, copy {ceilings.copy / 1e9:.1f} GB/s (read + written), ", end=""
    )
    print(f"bf16 products {ceilings.matmul / 1e12:.2f} TFLOP/s\n\n{_table(rows)}")
    if args.json:
        args.json.write_text(json.dumps({**about, "repeats": args.repeats, "rows": rows}, indent=1) + "\n")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in an existing folder")
    return path


def _selected(args: argparse.Namespace, device: jax.Device) -> list[Workload]:
    """What was asked for; a suite is assumed where no shapes are named."""
    suites = ("cpu",) if device.platform == "cpu" else ("peers", "copies", *(("models",) if args.operations else ()))
    suites = SUITES if args.shape else suites
    return [
        workload
        for name, workload in WORKLOADS.items()
        if workload.suite in ((args.suite,) if args.suite else suites)
        and (not args.shape or name in args.shape)
        and (not args.operations or workload.operation in args.operations)
    ]


def _row(workload: Workload, args: argparse.Namespace, device: jax.Device, ceilings: Ceilings) -> dict[str, Any]:
    """What the table and the JSON say of a shape; `reason` where it could not run."""
    fitted = workload.fitted(int(MEMORY_FRACTION * device_memory(device)))
    row = {"shape": workload.name, **asdict(fitted)}
    try:
        chosen, timing = time_workload(fitted, implementation=args.implementation, repeats=args.repeats)
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return {**row, "reason": str(error).splitlines()[0]}
    limit = ceilings.seconds(traffic=fitted.traffic, flops=fitted.flops, copies=not fitted.has_queries)
    return {
        **row,
        "implementation": chosen,
        "ms": timing.median * 1e3,
        "min_ms": timing.least * 1e3,
        "spread": timing.spread,
        "megabytes": fitted.traffic / 1e6,
        "gflop": fitted.flops / 1e9,
        "gigabytes_per_s": fitted.traffic / timing.median / 1e9,
        "tflop_per_s": fitted.flops / timing.median / 1e12,
        "limit_ms": limit * 1e3,
        "fraction": limit / timing.median,
        "compile_s": timing.compile,
        "calls_a_chain": timing.calls,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    """Aligned plain text, a line a shape."""
    lines = [["shape", *(heading for heading, _, _ in COLUMNS)]]
    for row in rows:
        lines.append([row["shape"], *(format(row[key], spec) if key in row else "" for _, key, spec in COLUMNS)])
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    texts = [" ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    reasons = ["", *(f"  not run: {row['reason']}" if "reason" in row else "" for row in rows)]
    return "\n".join(text + reason for text, reason in zip(texts, reasons, strict=True))
