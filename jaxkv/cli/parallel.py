"""Time attention on several devices that divide the tokens of long requests (context) or the heads of a batch (tensor).

Each row is one layer of `decode_mla` on that many devices, measured over steps through all layers of a cache.
`attention` is one device's part.  `collective` combines the parts: the merge (context), or the sum of [requests, 7168]
bf16 values that follows a layer's output projection (tensor).  Each is timed alone, then both together (`both`).
`share` is the fraction of `both` that the collective adds.  GB/s and TFLOP/s are those of one device's attention.
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

import jaxkv
from jaxkv.bench.division import Division, Sizes
from jaxkv.bench.timing import measure_ceilings
from jaxkv.cli.options import output_file, positive
from jaxkv.terminal.files import write_json
from jaxkv.terminal.formatting import counted
from jaxkv.terminal.progress import progress

COLUMNS = (
    ("devices", "devices", 7, "d"),
    ("both ms", "both_ms", 9, ".4f"),
    ("attention", "attention_ms", 9, ".4f"),
    ("collective", "collective_ms", 10, ".4f"),
    ("share", "collective_share", 5, ".0%"),
    ("GB/s", "gigabytes_per_s", 7, ".1f"),
    ("TFLOP/s", "tflop_per_s", 7, ".1f"),
    ("peak GB", "peak_gigabytes", 7, ".2f"),
)
"""Heading, key of the row, width and format; None is shown as `-`."""


@dataclass(frozen=True)
class Row:
    """The measurements on `devices` devices."""

    devices: int
    both_ms: float
    attention_ms: float
    collective_ms: float | None
    """None on one device."""
    collective_share: float | None
    gigabytes_per_s: float
    tflop_per_s: float
    peak_gigabytes: float | None
    """Of the first device; None if JAX does not report it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: what is divided, the batch, and the numbers of devices."""
    parser.add_argument("divided", choices=("context", "tensor"), help="divide tokens of each request, or heads")
    parser.add_argument("--devices", type=positive, nargs="+", metavar="N", help="default: 1, 2, 4, ... up to all")
    requests, tokens = "requests: 1 (context), 128 (tensor)", "cached tokens per request: 1,000,000, 4,096"
    parser.add_argument("--requests", type=positive, metavar="N", help=requests)
    parser.add_argument("--tokens", type=positive, metavar="N", help=f"{tokens}; on CPUs 2,000 or 100")
    parser.add_argument("--heads", type=positive, default=128, metavar="N", help="query heads (128)")
    parser.add_argument("--layers", type=positive, metavar="N", help="layers of the cache: 61, on CPUs 2")
    form = "format of the cached latents (bf16)"
    parser.add_argument("--format", choices=jaxkv.MLAEntry.formats, default="bf16", help=form)
    best = "default: the first that supports a call"
    parser.add_argument("--implementation", choices=jaxkv.implementations(), help=best)
    repeats = "runs of several steps each, for the median (5)"
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help=repeats)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, sizes, ceilings and rows")


def run(args: argparse.Namespace) -> int:
    """Prints the table, and how far the results differ from those on the fewest devices."""
    sizes, device = _sizes(args), jax.devices()[0]
    counts = args.devices or [2**i for i in range(jax.device_count().bit_length())]
    for count in counts:
        if count > jax.device_count():
            raise ValueError(f"--devices has {count}: expected 1 to {jax.device_count()}, as this machine has")
        if sizes.divided == "tensor" and sizes.heads % count:
            raise ValueError(f"--devices has {count}: expected divisors of the {sizes.heads} heads")
    measured: list[tuple[Row, np.ndarray]] = []
    # The reported peak of memory never falls, so measure in the order of rising peaks: the most devices first.
    for count in progress(sorted(counts, reverse=True), "measuring"):
        division = Division(sizes, count, args.implementation)
        measured.append(_measured(division, sizes, count, args.repeats))
        division.free()
    ceilings = measure_ceilings(device, repeats=args.repeats)
    rows, results = zip(*reversed(measured), strict=True)
    print(f"{sizes.divided} parallel on {device.device_kind}, jax {jax.__version__}, jaxkv {jaxkv.__version__}")
    names = "requests", "tokens", "heads", "layers"
    requests, tokens, heads, layers = (counted(getattr(sizes, name), name) for name in names)
    print(f"{requests} x {tokens} in {sizes.format}, {heads}, {layers}\n")
    print(" ".join(heading.rjust(width) for heading, _, width, _ in COLUMNS))
    for row in rows:
        print(" ".join(_cell(asdict(row)[key], width, form) for _, key, width, form in COLUMNS))
    print(f"\nceilings: read {ceilings.read / 1e9:.1f} GB/s, bf16 products {ceilings.matmul / 1e12:.2f} TFLOP/s")
    for row, result in zip(rows[1:], results[1:], strict=True):
        error = np.linalg.norm(result - results[0]) / np.linalg.norm(results[0])
        print(
            f"{row.devices} devices take {row.both_ms / rows[0].both_ms:.3f} times as long as {rows[0].devices}; "
            f"results differ by {error:.1e} (relative, by norm)"
        )
    if args.json:
        about = {"device": device.device_kind, "jax": jax.__version__, "sizes": asdict(sizes)}
        found = {**about, "ceilings": asdict(ceilings), "rows": [asdict(row) for row in rows]}
        write_json(args.json, found)
    return 0


def _sizes(args: argparse.Namespace) -> Sizes:
    on_cpu, long = jax.default_backend() == "cpu", args.divided == "context"
    usual = {
        "requests": 1 if long else 128,
        "tokens": (2_000 if on_cpu else 1_000_000) if long else (100 if on_cpu else 4_096),
        "layers": 2 if on_cpu else 61,
        "heads": args.heads,
    }
    sizes = {name: getattr(args, name) or value for name, value in usual.items()}
    return Sizes(divided=args.divided, format=args.format, **sizes)


def _measured(division: Division, sizes: Sizes, count: int, repeats: int) -> tuple[Row, np.ndarray]:
    """The row, and the results of a step: merged under context parallelism, otherwise the heads of all devices."""
    attention, parts = division.attention(repeats)
    collective = division.collective(repeats) if count > 1 else None
    both, united = division.both(repeats) if count > 1 else (attention, parts)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    row = Row(
        devices=count,
        both_ms=1e3 * both,
        attention_ms=1e3 * attention,
        collective_ms=None if collective is None else 1e3 * collective,
        collective_share=None if collective is None else 1 - attention / both,
        gigabytes_per_s=sizes.bytes_read(count) / attention / 1e9,
        tflop_per_s=sizes.flops(count) / attention / 1e12,
        peak_gigabytes=None if peak is None else peak / 1e9,
    )
    return row, united if sizes.divided == "context" else parts


def _cell(value: Any, width: int, form: str) -> str:
    return ("-" if value is None else format(value, form)).rjust(width)
