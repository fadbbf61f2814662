"""Time operations on this device, and compare them with the memory and arithmetic ceilings measured in the same run.

Each row is one call on random data with shuffled blocks.

- `ms` is device time per call: a program runs a chain of many dependent calls, and the time of the chain is divided by
  their number.  The median of several chains is shown.  On GPUs, the device is idle for a moment before each chain.  On
  Hopper, time is read from the GPU's clock; elsewhere, from the host's clock, less the time to launch the program.
- `sustained` is the same for one chain that runs for a second, long enough for a GPU to reach its power limit.
- `kernel ms` is the time in which the kernels of one call run, without the gaps between them.  It is measured by CUPTI
  on NVIDIA GPUs.
- `MB` is what the call must move: cache entries, queries, new values and results, each once.  `GFLOP` is what it must
  compute.  `/max` is the fraction of the measured ceiling.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, fields
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

import jaxkv
from jaxkv.bench import sparse_step, tuning
from jaxkv.bench.program import Program
from jaxkv.bench.suites import SUITES, WORKLOADS
from jaxkv.bench.timing import Ceilings, measure_ceilings
from jaxkv.bench.workload import FAMILIES, Workload
from jaxkv.terminal.files import when_and_how, write_json
from jaxkv.terminal.memory import device_memory
from jaxkv.terminal.options import output_file, positive
from jaxkv.terminal.progress import progress
from jaxkv.terminal.streams import notice

MEMORY_FRACTION = 0.6
"""The fraction of the device's memory that a cache may use.  If not all layers fit, fewer are timed."""

BATCH = 8
"""Shapes that are compiled before any of them is timed.  Lowering and compiling overlap, but not with timing."""

COMPILERS = max((os.cpu_count() or 1) // 4, 1)
"""Programs that are compiled at once.  Each compilation uses several cores some of the time."""

COLUMNS = (
    ("layers", "layers", 6, "d"),
    ("run by", "implementation", 10, ""),
    ("ms", "ms", 9, ".4f"),
    ("sustained", "sustained_ms", 9, ".4f"),
    ("kernel ms", "kernel_ms", 9, ".4f"),
    ("MB", "megabytes", 8, ".1f"),
    ("GB/s", "gigabytes_per_s", 7, ".1f"),
    ("/max", "memory_fraction", 4, ".2f"),
    ("GFLOP", "gflop", 8, ".2f"),
    ("TFLOP/s", "tflop_per_s", 7, ".3f"),
    ("/max", "matmul_fraction", 4, ".2f"),
    ("compile s", "compile_s", 9, ".1f"),
)
"""Heading, key of the row, width and format of each column after the shape's name; None is shown as `-`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: which shapes to time, how, and where to write the results."""
    parser.add_argument("operations", nargs="*", choices=FAMILIES, metavar="OPERATION", help=", ".join(FAMILIES))
    parser.add_argument(
        "--suite",
        choices=SUITES,
        help="default: cpu on CPUs, else peers and copies, and models where operations are named",
    )
    parser.add_argument("--shape", nargs="+", choices=WORKLOADS, metavar="NAME", help="names as the table shows them")
    parser.add_argument("--implementation", choices=jaxkv.implementations(), help="default: the first that supports it")
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="chains timed per shape (20)")
    step = "time DeepSeek V3.2's attention in all layers instead, and its kernels beside what its bytes and flops take"
    parser.add_argument("--sparse-step", action="store_true", help=step)
    parser.add_argument("--tune", action="store_true", help="search for the best configuration of each kernel instead")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write device, versions, ceilings and rows"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the table.  Returns 2 if no shape is selected; ValueError if none could be timed."""
    device = jax.devices()[0]
    workloads = _selected(args, device)
    if not workloads:
        selection = " ".join(
            [*args.operations, *([f"--suite {args.suite}"] if args.suite else []), *(args.shape or [])]
        )
        names = ", ".join(
            name for name, w in WORKLOADS.items() if not args.operations or w.operation in args.operations
        )
        notice(f"jaxkv bench ops: no shape matches {selection}: expected some of {names}")
        return 2
    about: dict[str, Any] = {
        **when_and_how(args.argv),
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "repeats": args.repeats,
    }
    print("{device}, jax {versions[jax]}, jaxlib {versions[jaxlib]}, jaxkv {versions[jaxkv]}".format(**about))
    if args.tune:
        limit = int(MEMORY_FRACTION * device_memory(device))
        return tuning.tune([workload.fitted(limit) for workload in workloads], args, about)
    ceilings = measure_ceilings(device, repeats=args.repeats)
    about["ceilings"] = asdict(ceilings)
    print(
        f"ceilings: read {ceilings.read / 1e9:.1f} GB/s, copy {ceilings.copy / 1e9:.1f} GB/s (read + written), ", end=""
    )
    print(f"bf16 products {ceilings.matmul / 1e12:.2f} TFLOP/s\n")
    if args.sparse_step:
        return sparse_step.report(args, about, device, ceilings)
    width = max(len(workload.name) for workload in workloads)
    print(_line("shape", width, [heading for heading, *_ in COLUMNS]), flush=True)
    rows: list[dict[str, Any]] = []
    for row in _rows(workloads, args, device, ceilings):
        rows.append(row)
        print(_table_line(row, width), flush=True)
        if args.json:  # written after every row, because a run may be cut short
            write_json(args.json, {**about, "rows": rows})
    if all("reason" in row for row in rows):
        raise ValueError(f"nothing was timed: {rows[0]['reason']}")
    if ratios := _ratios(rows):
        print("\nmany layers in one buffer / one packed layer:")
        for shape, ms, kernel_ms in ratios:
            print(f"{shape.ljust(width)} {ms:.3f}" + (f", kernels {kernel_ms:.3f}" if kernel_ms else ""))
    return 0


def _selected(args: argparse.Namespace, device: jax.Device) -> list[Workload]:
    """The selected workloads: those named by the options, otherwise the default suite of the device."""
    suites = ("cpu",) if device.platform == "cpu" else ("peers", "copies", *(("models",) if args.operations else ()))
    suites = SUITES if args.shape else suites
    return [
        workload
        for name, workload in WORKLOADS.items()
        if workload.suite in ((args.suite,) if args.suite else suites)
        and (not args.shape or name in args.shape)
        and (not args.operations or workload.operation in args.operations)
    ]


def _rows(workloads: list[Workload], args, device: jax.Device, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Yields one row per workload, as soon as it is measured."""
    limit = int(MEMORY_FRACTION * device_memory(device))
    if device.platform != "cpu":
        # An allocator that grows on demand keeps a region of memory for each size.  The first region must therefore be
        # large enough for all caches.
        jnp.zeros(max(workload.fitted(limit).layout.nbytes for workload in workloads), jnp.uint8).delete()
    compiler = ThreadPoolExecutor(max_workers=COMPILERS)
    try:
        for batch in batched(workloads, BATCH):
            fitted = [workload.fitted(limit) for workload in batch]
            programs = [
                _compiling(compiler, workload, args.implementation) for workload in progress(fitted, "lowering")
            ]
            wait(programs)
            for workload, ready, program in zip(batch, fitted, programs, strict=True):
                yield {"shape": workload.name, **asdict(ready), **_figures(ready, program, args.repeats, ceilings)}
    finally:
        compiler.shutdown(cancel_futures=True)  # after Ctrl-C, do not compile what is still queued


def _compiling(compiler: ThreadPoolExecutor, workload: Workload, implementation: str | None) -> Future[Program]:
    """The workload's program, lowered by this call and compiled in the background."""
    try:
        return compiler.submit(Program(workload, implementation=implementation).compile)
    except NotImplementedError as error:
        unsupported: Future[Program] = Future()
        unsupported.set_exception(error)
        return unsupported


def _figures(workload: Workload, program: Future[Program], repeats: int, ceilings: Ceilings) -> dict[str, Any]:
    """What the table and the JSON file show besides the shape; only `reason` if the workload could not run."""
    try:
        found = program.result().measure(repeats=repeats)
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return {"reason": str(error).splitlines()[0]}
    seconds, kernels = found.timing.median, found.kernels
    memory = ceilings.read if workload.has_queries else ceilings.copy
    return {
        "implementation": found.implementation,
        "ms": seconds * 1e3,
        "min_ms": found.timing.least * 1e3,
        "spread": found.timing.spread,
        "sustained_ms": found.timing.sustained and found.timing.sustained * 1e3,
        "kernel_ms": kernels and kernels.median * 1e3,
        "kernels_ms": kernels and [(name, median * 1e3) for name, median in kernels.kernels],
        "megabytes": workload.traffic / 1e6,
        "gigabytes_per_s": workload.traffic / seconds / 1e9,
        "memory_fraction": workload.traffic / seconds / memory,
        "gflop": workload.flops / 1e9,
        "tflop_per_s": workload.flops / seconds / 1e12,
        "matmul_fraction": workload.flops / seconds / ceilings.matmul,
        "compile_s": found.compile,
        "calls_timed": found.timing.calls,
    }


def _table_line(row: dict[str, Any], width: int) -> str:
    """A row as a line of the table."""
    if "reason" in row:
        return f"{row['shape'].ljust(width)} not run: {row['reason']}"
    return _line(
        row["shape"], width, ["-" if row[key] is None else format(row[key], spec) for _, key, _, spec in COLUMNS]
    )


def _line(shape: str, width: int, cells: Iterable[str]) -> str:
    widths = [width for _, _, width, _ in COLUMNS]
    return " ".join([shape.ljust(width), *map(str.rjust, cells, widths)])


def _ratios(rows: list[dict[str, Any]]) -> list[tuple[str, float, float | None]]:
    """(shape, ratio of ms, ratio of kernel ms) of each shape that ran with many layers and with one packed layer."""
    same = [field.name for field in fields(Workload) if field.name not in ("suite", "layers", "blocks")]
    timed = [(tuple(row[name] for name in same), row) for row in rows if "ms" in row]
    packed = {shape: row for shape, row in timed if row["layers"] == 1 and row["blocks"] == "plain"}
    found = []
    for shape, row in timed:
        one = packed.get(shape)
        if one and row is not one:
            kernels = row["kernel_ms"] / one["kernel_ms"] if one["kernel_ms"] and row["kernel_ms"] else None
            found.append((row["shape"], row["ms"] / one["ms"], kernels))
    return found
