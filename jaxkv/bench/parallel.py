"""Time attention on several devices that divide the tokens of long requests (context) or the heads of a batch (tensor).

Each row is one layer of `decode_mla` of so many query tokens per request on that many devices, measured over steps
through all layers of a cache.  `attention` is one device's part: under context parallelism, as if the last tokens that
it has were the new ones.  `collective` combines the parts: the merge (context), or the sum of [requests, query tokens,
7168] bf16 values that follows a layer's output projection (tensor).  Each is timed alone, then both together (`both`),
under context parallelism as `context.decode_mla`.  `share` is the fraction of `both` that comes on top of `attention`.
GB/s and TFLOP/s are those of one device's attention, which must read its part of the cache once.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import parallel
from jaxkv.bench.inputs import attention_nbytes
from jaxkv.bench.timing import measure_ceilings
from jaxkv.bench.workload import unit_scales
from jaxkv.parallel import context
from jaxkv.terminal.files import when_and_how, write_json
from jaxkv.terminal.formatting import counted
from jaxkv.terminal.memory import require_memory
from jaxkv.terminal.options import output_file, positive
from jaxkv.terminal.progress import progress

COLUMNS = (
    ("devices", "devices", 7, "d"),
    ("query", "query_tokens", 5, "d"),
    ("both ms", "both_ms", 9, ".4f"),
    ("attention", "attention_ms", 9, ".4f"),
    ("collective", "collective_ms", 10, ".4f"),
    ("share", "collective_share", 5, ".0%"),
    ("GB/s", "gigabytes_per_s", 7, ".1f"),
    ("TFLOP/s", "tflop_per_s", 7, ".1f"),
    ("peak GB", "peak_gigabytes", 7, ".2f"),
)
"""Heading, key of the row, width and format; None is shown as `-`."""

AXIS, BLOCK_SIZE, SCALE = "x", 64, 192**-0.5
HIDDEN = 7168
"""Width of the output projection, whose results tensor parallelism sums: that of DeepSeek V3."""
CHUNK = 2**14
"""Tokens of a request that are written at once when a cache is filled."""
LEAST_SECONDS = 0.2
"""Consecutive steps are timed for at least this long."""

Parts = tuple[jax.Array, jax.Array]
"""Results bf16 [requests, query tokens, heads, values] and their log-sum-exps, of one device."""
Step = Callable[[Parts, jax.Array], Parts]
"""What one layer does with the results of the layer before it.  The second argument is the layer."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the whole problem.  If it cannot be divided evenly, the first device has the largest part."""

    divided: str
    """`context`: the tokens of each request; `tensor`: the heads."""
    requests: int
    tokens: int
    heads: int
    query_tokens: tuple[int, ...]
    """Per request: ascending numbers, which are measured one after the other."""
    layers: int
    format: str

    @property
    def entry(self) -> jaxkv.MLAEntry:
        """The entry that the cache stores."""
        return jaxkv.MLAEntry(self.format, latent=512, rope=64)  # type: ignore[arg-type]

    @property
    def scales(self) -> dict[str, Any]:
        """Scales of the entries, as keyword arguments."""
        return unit_scales(self.entry)

    def blocks(self, devices: int) -> int:
        """Blocks of a request on each of `devices` devices."""
        shards = devices if self.divided == "context" else 1
        return -(-self.tokens // (shards * BLOCK_SIZE))

    def bytes_read(self, devices: int) -> int:
        """Bytes of one layer of the cache that one of `devices` devices reads."""
        shards = devices if self.divided == "context" else 1
        return self.requests * self.tokens * self.entry.nbytes // shards

    def flops(self, devices: int, query_tokens: int) -> int:
        """Flops of one layer on one of `devices` devices, for both products of attention."""
        products = sum(self.entry.sizes) + self.entry.value_dim
        return 2 * self.requests * query_tokens * self.heads * self.tokens * products // devices


class Division:
    """The cache, the queries and the programs.  The cache holds the same tokens on any number of devices.

    Args:
      sizes: the whole problem.
      devices: the number of devices.
      implementation: the implementation of the attention; None selects the first that supports it.
    """

    def __init__(self, sizes: Sizes, devices: int, implementation: str | None):
        self._sizes, self._implementation = sizes, implementation
        long = sizes.divided == "context"
        self._mesh = jax.make_mesh((devices,), (AXIS,), devices=jax.devices()[:devices])
        self._cache_spec, self._heads = (P(AXIS), P()) if long else (P(), P(None, None, AXIS))
        blocks = sizes.blocks(devices)
        layout = jaxkv.CacheLayout(
            num_layers=sizes.layers,
            num_blocks=sizes.requests * blocks,
            block_size=BLOCK_SIZE,
            entry=sizes.entry,
            shards=jaxkv.TokenShards(devices if long else 1, BLOCK_SIZE),
        )
        on_host = devices if jax.default_backend() == "cpu" else 1  # simulated devices share the host's memory
        queries = max(sizes.query_tokens) * attention_nbytes(sizes.entry, sizes.requests, sizes.heads)  # of one device
        what = f"the cache on {counted(devices, 'devices')}, and the queries of {counted(sizes.heads, 'heads')}"
        require_memory(what, on_host * layout.nbytes + queries)
        tables = np.random.default_rng(0).permutation(layout.num_blocks).astype(np.int32)
        self._tables = self._placed(tables.reshape(sizes.requests, blocks), P())
        cache = parallel.zeros(layout, self._mesh, AXIS if long else ())
        fill = self._on_each(self._fill, (self._cache_spec, P()), self._cache_spec)
        self._cache = fill(cache, self._tables)

    def attention(self, query_tokens: int, repeats: int) -> tuple[float, np.ndarray]:
        """Seconds per layer of the attention without the collective, and the result of a step's last layer."""
        return self._timed(self._attention, query_tokens, repeats)

    def collective(self, query_tokens: int, repeats: int) -> float:
        """Seconds per layer of the collective that combines the parts, without the attention."""
        return self._timed(lambda *_: lambda parts, layer: self._unite(*parts), query_tokens, repeats)[0]

    def both(self, query_tokens: int, repeats: int) -> tuple[float, np.ndarray]:
        """Like `attention`, but with the collective."""
        return self._timed(self._united, query_tokens, repeats)

    def free(self) -> None:
        """Frees the memory of the cache, even if there are references to it."""
        self._cache.buffer.delete()

    def _timed(self, make_step: Callable[..., Step], query_tokens: int, repeats: int) -> tuple[float, np.ndarray]:
        """Times consecutive steps through all layers; each layer depends on the result of the one before.

        `make_step(q, cache, tables)` returns what a layer does.
        """

        def layers(parts, q, cache, tables):
            step = make_step(q, cache, tables)
            numbers = jnp.arange(self._sizes.layers, dtype=jnp.int32)
            return lax.scan(lambda parts, layer: (step(parts, layer), None), parts, numbers)[0]

        program = self._on_each(layers, (self._heads, self._heads, self._cache_spec, P()), self._heads)
        entry, shape = self._sizes.entry, (self._sizes.requests, query_tokens, self._sizes.heads)
        keys = zip(jax.random.split(jax.random.key(1)), entry.sizes, strict=True)
        q = self._placed([jax.random.normal(key, (*shape, n), jnp.bfloat16) for key, n in keys], self._heads)
        parts = jnp.zeros((*shape, entry.value_dim), jnp.bfloat16), jnp.zeros(shape)
        parts = self._placed(parts, self._heads)

        def run(count: int) -> float:
            nonlocal parts
            start = time.perf_counter()
            for _ in range(count):
                parts = program(parts, q, self._cache, self._tables)
                if jax.default_backend() == "cpu":
                    # Simulated devices share threads, so several steps in flight could deadlock.
                    jax.block_until_ready(parts)
            jax.block_until_ready(parts)
            return time.perf_counter() - start

        run(1)  # compiles the program
        first = np.asarray(parts[0].astype(jnp.float32))
        count = max(1, round(LEAST_SECONDS / min(run(1) for _ in range(2))))
        return float(np.median([run(count) for _ in range(repeats)])) / (count * self._sizes.layers), first

    def _attention(self, q, cache, tables) -> Step:
        """Attention to the tokens of this device, the last of which are the new ones."""
        lengths = context.local_lengths(self._lengths(), shards=cache.layout.shards, shard=self._shard())
        return self._attend(jaxkv, q, cache, tables, lengths)

    def _united(self, q, cache, tables) -> Step:
        """Attention to the tokens of all devices, or of all heads followed by the sum over the devices."""
        if self._sizes.divided == "context":
            return self._attend(context, q, cache, tables, self._lengths(), axis=AXIS)
        attend = self._attention(q, cache, tables)
        return lambda parts, layer: self._unite(*attend(parts, layer))

    def _attend(self, package: Any, q, cache, tables, lengths, **options) -> Step:
        """Attention by `decode_mla` of `package`, with a plan for all layers."""
        options |= {"implementation": self._implementation}
        _, query_tokens, heads, _ = q[0].shape
        plan = package.plan_decode(cache, tables, lengths, num_heads=heads, q_len=query_tokens, **options)

        def step(parts, layer):
            q_latent, q_pe = q
            q_latent += parts[0][..., : q_latent.shape[-1]]
            call = partial(package.decode_mla, q_latent, q_pe, cache, tables, lengths, layer=layer, scale=SCALE)
            return call(plan=plan, return_lse=True, **options, **self._sizes.scales)

        return step

    def _unite(self, out, lse) -> Parts:
        if self._sizes.divided == "context":
            return context.merge_states(out, lse, axis=AXIS)
        # A sum of the size of the one after the output projection, which is not computed here.
        x = lax.psum(jnp.broadcast_to(out[:, :, :1, 0], (*out.shape[:2], HIDDEN)), AXIS)
        return out + x[:, :, None, : out.shape[-1]], lse

    def _lengths(self) -> jax.Array:
        """Tokens of each request on all devices, int32 [requests]."""
        return jnp.full(self._sizes.requests, self._sizes.tokens, jnp.int32)

    def _shard(self) -> jax.Array | int:
        """Which share of the tokens this device has; 0, which has all, if heads are divided."""
        return 0 if self._sizes.divided == "tensor" else lax.axis_index(AXIS)

    def _fill(self, cache, tables):
        """Random entries of all tokens in all layers.  All devices draw the same, and each keeps its share."""
        sizes = self._sizes
        chunks = -(-sizes.tokens // CHUNK)

        def write(i, cache):
            layer, row = jnp.divmod(i, sizes.requests * chunks)
            request, chunk = jnp.divmod(row, chunks)
            positions = chunk * CHUNK + jnp.arange(min(CHUNK, sizes.tokens), dtype=jnp.int32)
            positions = jnp.where(positions < sizes.tokens, positions, -1)
            slots = context.local_slots(
                tables[request][None], positions[None], layout=cache.layout, shard=self._shard()
            )
            keys = zip(jax.random.split(jax.random.fold_in(jax.random.key(0), i)), sizes.entry.sizes, strict=True)
            kv_c, k_pe = (jax.random.normal(key, (len(positions), n), jnp.bfloat16) for key, n in keys)
            return jaxkv.write_mla(cache, kv_c, k_pe, slots[0], layer=layer, **sizes.scales)

        return lax.fori_loop(0, sizes.layers * sizes.requests * chunks, write, cache)

    def _placed(self, arrays, spec: P):
        return jax.device_put(arrays, NamedSharding(self._mesh, spec))

    def _on_each(self, function, in_specs, out_specs):
        sharded = jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(sharded, donate_argnums=0)


@dataclass(frozen=True)
class Row:
    """The measurements on `devices` devices, for `query_tokens` per request."""

    devices: int
    query_tokens: int
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
    """Adds the options: what is divided, the batch, and the numbers of devices and query tokens."""
    parser.add_argument("divided", choices=("context", "tensor"), help="divide tokens of each request, or heads")
    parser.add_argument("--devices", type=positive, nargs="+", metavar="N", help="default: 1, 2, 4, ... up to all")
    requests, tokens = "requests: 1 (context), 128 (tensor)", "cached tokens per request: 1,000,000, 4,096"
    parser.add_argument("--requests", type=positive, metavar="N", help=requests)
    parser.add_argument("--tokens", type=positive, metavar="N", help=f"{tokens}; on CPUs 2,000 or 100")
    parser.add_argument("--heads", type=positive, default=128, metavar="N", help="query heads (128)")
    query = "query tokens per request, one or several numbers (1)"
    parser.add_argument("--query-tokens", type=positive, nargs="+", default=[1], metavar="N", help=query)
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
    if max(sizes.query_tokens) > sizes.tokens:
        raise ValueError(f"--query-tokens has {max(sizes.query_tokens)}: expected at most --tokens, {sizes.tokens}")
    measured: list[tuple[Row, np.ndarray]] = []
    # The reported peak of memory never falls, so measure in the order of rising peaks: the most devices first.
    for count in progress(sorted(counts, reverse=True), "measuring"):
        division = Division(sizes, count, args.implementation)
        for query_tokens in sizes.query_tokens:
            measured.append(_measured(division, sizes, count, query_tokens, args.repeats))
        division.free()
    ceilings = measure_ceilings(device, repeats=args.repeats)
    measured.sort(key=lambda of: (of[0].query_tokens, of[0].devices))
    rows = [row for row, _ in measured]
    print(f"{sizes.divided} parallel on {device.device_kind}, jax {jax.__version__}, jaxkv {jaxkv.__version__}")
    names = "requests", "tokens", "heads", "layers"
    requests, tokens, heads, layers = (counted(getattr(sizes, name), name) for name in names)
    print(f"{requests} x {tokens} in {sizes.format}, {heads}, {layers}\n")
    print(" ".join(heading.rjust(width) for heading, _, width, _ in COLUMNS))
    for row in rows:
        print(" ".join(_cell(asdict(row)[key], width, form) for _, key, width, form in COLUMNS))
    print(f"\nceilings: read {ceilings.read / 1e9:.1f} GB/s, bf16 products {ceilings.matmul / 1e12:.2f} TFLOP/s")
    for _, same in groupby(measured, key=lambda of: of[0].query_tokens):
        (first, right), *others = same
        for row, result in others:
            error = np.linalg.norm(result - right) / np.linalg.norm(right)
            print(
                f"{counted(row.query_tokens, 'query tokens')}: {row.devices} devices take "
                f"{row.both_ms / first.both_ms:.3f} times as long as {first.devices}; results differ by {error:.1e} "
                "(relative, by norm)"
            )
    if args.json:
        about = {
            **when_and_how(args.argv),
            "device": device.device_kind,
            "jax": jax.__version__,
            "sizes": asdict(sizes),
        }
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
    query_tokens = tuple(sorted({*args.query_tokens}))
    sizes = {name: getattr(args, name) or value for name, value in usual.items()}
    return Sizes(divided=args.divided, format=args.format, query_tokens=query_tokens, **sizes)


def _measured(division: Division, sizes: Sizes, count: int, query_tokens: int, repeats: int) -> tuple[Row, np.ndarray]:
    """The row, and the results of a step: merged under context parallelism, otherwise the heads of all devices."""
    attention, parts = division.attention(query_tokens, repeats)
    collective = division.collective(query_tokens, repeats) if count > 1 else None
    both, united = division.both(query_tokens, repeats) if count > 1 else (attention, parts)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    row = Row(
        devices=count,
        query_tokens=query_tokens,
        both_ms=1e3 * both,
        attention_ms=1e3 * attention,
        collective_ms=None if collective is None else 1e3 * collective,
        collective_share=None if collective is None else 1 - attention / both,
        gigabytes_per_s=sizes.bytes_read(count) / attention / 1e9,
        tflop_per_s=sizes.flops(count, query_tokens) / attention / 1e12,
        peak_gigabytes=None if peak is None else peak / 1e9,
    )
    return row, united if sizes.divided == "context" else parts


def _cell(value: Any, width: int, form: str) -> str:
    return ("-" if value is None else format(value, form)).rjust(width)
