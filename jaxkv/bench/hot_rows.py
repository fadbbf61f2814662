"""Time sparse attention to a cache in host memory, of which the device has the rows used last, beside one that fits.

In each call, every request selects tokens at random positions.  A part of them (the hit rate) was selected by the call
before; the others are fetched from host memory.  The limit is the time in which the link copies as many bytes, at the
rate of one large array, plus attention in a cache that fits.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv import offload
from jaxkv.bench.inputs import attention_nbytes
from jaxkv.bench.offload import large_rates
from jaxkv.bench.timing import Chain
from jaxkv.terminal.files import when_and_how, write_json
from jaxkv.terminal.memory import require_memory
from jaxkv.terminal.options import Sizes, add_sizes, output_file, with_defaults

BLOCK_SIZE = 64
ENTRY = jaxkv.MLAEntry("fp8_ds_mla")
HIT_RATES = 0.5, 0.8, 0.95
MOST_LISTS = 64
"""Calls until the same tokens are selected again, at most: each one reads other places of host memory."""
LEAST = 5e-5
"""No call takes less, in seconds."""
CHECKED = 6
"""Calls whose results are compared with those of a cache that fits."""

SIZES: Sizes = {
    "layers": ("layers in host memory, of which one is used (2)", 2, 2),
    "requests": ("requests (16; 2 on CPUs)", 16, 2),
    "tokens": ("tokens of each (131072; 2048 on CPUs)", 131072, 2048),
    "selected": ("tokens that each request attends to (2048; 64 on CPUs)", 2048, 64),
    "rows": ("rows of each request on the device (4096; 128 on CPUs)", 4096, 128),
    "heads": ("query heads (128; 16 on CPUs)", 128, 16),
    "repeats": ("repetitions of each measurement (5; 1 on CPUs)", 5, 1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: sizes, whose defaults depend on the device."""
    add_sizes(parser, SIZES)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the results")


def run(args: argparse.Namespace) -> int:
    """Compares results with those of a cache that fits, then prints the times; 1 if results differ."""
    device = jax.devices()[0]
    sizes = with_defaults(args, SIZES, device)
    print(f"{device.device_kind}, jax {jax.__version__}")
    case = _Case(args)
    rate = large_rates(case.link_bytes, args.repeats)["load"]
    case.compile()
    fits = case.time_fitting()
    print(f"one large array to the device {rate:.1f} GB/s; attention in a cache that fits {1e6 * fits:.1f} us")
    found = []
    for hit_rate in HIT_RATES:
        moved = args.requests * case.new_tokens(hit_rate) * ENTRY.nbytes
        limit, took = moved / rate / 1e9 + fits, case.time_fetching(hit_rate)
        found.append({"hit_rate": hit_rate, "bytes": moved, "us": 1e6 * took, "limit_us": 1e6 * limit})
        print(f"{hit_rate:.0%} hits: {1e6 * took:.1f} us, {took / limit:.2f} of the limit ({1e6 * limit:.1f} us)")
    if not case.same_results():
        print("attention to rows from host memory DIFFERS from attention to a cache that fits")
        return 1
    print(f"{CHECKED} calls have the same bits as with a cache that fits")
    if args.json:
        about = {"device": device.device_kind, "jax": jax.__version__, **sizes, "entry": ENTRY.format}
        about = {**when_and_how(args.argv), **about}
        write_json(args.json, {**about, "load": rate, "fits_us": 1e6 * fits, "hit_rates": found})
    return 0


class _Case:
    """Random entries in host memory and in a cache on the device, random queries, and the calls that are timed."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.layer = args, args.layers - 1
        rng, pages = np.random.default_rng(0), -(-args.tokens // BLOCK_SIZE)
        self.layout = jaxkv.CacheLayout(
            num_layers=args.layers, num_blocks=args.requests * pages, block_size=BLOCK_SIZE, entry=ENTRY
        )
        self.lists = min(args.tokens // self.new_tokens(HIT_RATES[0]), MOST_LISTS)
        rows = args.requests * (args.layers * args.rows * ENTRY.nbytes + 4 * self.lists * args.selected)
        needed = self.layout.nbytes + rows + attention_nbytes(ENTRY, args.requests, args.heads)
        what = f"a cache of {args.requests} requests of {args.tokens} tokens with {args.heads} heads, also on the host"
        require_memory(what, needed, on_host=self.layout.nbytes)
        if (fewest := self.lists * self.new_tokens(HIT_RATES[-1])) < args.rows + args.selected:
            raise ValueError(
                f"{self.lists} calls at {HIT_RATES[-1]:.0%} hits select {fewest} tokens: expected at least "
                f"--rows + --selected ({args.rows + args.selected}), so that none is in a row when it is selected again"
            )
        self.cache = _filled(self.layout, self.layer)
        self.host = offload.HostEntries(self.layout)
        for part in np.array_split(np.arange(self.layout.num_blocks), 8):
            self.host.store(self.cache, part, part)
        self.tables = jnp.asarray(rng.permutation(self.layout.num_blocks).reshape(args.requests, pages), jnp.int32)
        keys = zip(jax.random.split(jax.random.key(0)), ENTRY.sizes, strict=True)
        shape = args.requests, 1, args.heads
        self.queries = [jax.random.normal(key, (*shape, size), jnp.bfloat16) for key, size in keys]
        self.out = jnp.zeros_like(self.queries[0])

    @property
    def link_bytes(self) -> int:
        """The size of the array that shows the rate of the link."""
        return min(2**28, self.layout.nbytes) if jax.default_backend() != "cpu" else 2**24

    def new_tokens(self, hit_rate: float) -> int:
        """Tokens of a call that are fetched."""
        return max(round(self.args.selected * (1 - hit_rate)), 1)

    def compile(self) -> None:
        """Compiles the chains at the same time."""
        hot, out, lists = jax.eval_shape(lambda: (self._hot_rows(), self.out, self._selected(HIT_RATES[0])))
        self._fitting = Chain(self._attend_fitting, (out, jnp.int32(0)), (self.cache, lists), least=LEAST)
        self._fetching = Chain(self._fetch_and_attend, (hot, out), lists, least=LEAST)
        with ThreadPoolExecutor() as threads:
            list(threads.map(Chain.compile, (self._fitting, self._fetching)))

    def same_results(self) -> bool:
        """Whether a few calls have the same bits as with a cache that fits."""
        return bool(jax.jit(self._compare)(self._hot_rows(), self.cache, self._selected(HIT_RATES[0])))

    def time_fitting(self) -> float:
        """Seconds per call of attention in a cache that fits."""
        carry, fixed = (self.out + 0, jnp.int32(0)), (self.cache, self._selected(HIT_RATES[0]))
        return self._fitting.time(carry, fixed, repeats=self.args.repeats).median

    def time_fetching(self, hit_rate: float) -> float:
        """Seconds per call that fetches rows and attends to them."""
        carry, selected = (self._hot_rows(), self.out + 0), self._selected(hit_rate)
        return self._fetching.time(carry, selected, repeats=self.args.repeats).median

    def _compare(self, hot, cache, lists):
        def call(i, state):
            hot, same = state
            hot, out = self._fetch_and_attend(i, (hot, self.out), lists)
            right, _ = self._attend_fitting(i, (self.out, i), (cache, lists))
            return hot, same & (out == right).all()

        return lax.fori_loop(0, CHECKED, call, (hot, jnp.bool(True)))[1]

    def _attend_fitting(self, i, carry, fixed):
        cache, lists = fixed
        slots = jaxkv.slots_for(self.tables, lists[i % self.lists], cache)
        return lax.optimization_barrier((self._attend(cache, slots), carry[1]))

    def _fetch_and_attend(self, i, carry, lists):
        hot, slots = carry[0].fetch(lists[i % self.lists], self.tables, layer=self.layer)
        return lax.optimization_barrier((hot, self._attend(hot.cache, slots)))

    def _attend(self, cache, slots):
        q_nope, q_pe = self.queries
        return jaxkv.decode_mla_sparse(q_nope, q_pe, cache, slots, layer=self.layer, scale=192**-0.5)

    def _hot_rows(self) -> offload.HotRows:
        requests, rows, tokens = self.args.requests, self.args.rows, self.args.tokens
        return offload.HotRows.zeros(self.host, num_requests=requests, rows=rows, max_tokens=tokens)

    def _selected(self, hit_rate: float) -> jax.Array:
        """Positions [lists, B, 1, K]: a window over a permutation of the tokens, which moves with every list."""
        args, new, rng = self.args, self.new_tokens(hit_rate), np.random.default_rng(1)
        used = self.lists * new

        def of_request() -> Iterator[Any]:
            tokens = rng.permutation(args.tokens)[:used]
            for first in range(0, used, new):
                yield rng.permutation(tokens[(first + np.arange(args.selected)) % used])

        lists = np.stack([np.stack(list(of_request())) for _ in range(args.requests)], axis=1)
        return jnp.asarray(lists[:, :, None], jnp.int32)


def _filled(layout: jaxkv.CacheLayout, layer: int) -> jaxkv.KVCache:
    """A cache with random entries in one layer."""

    @jax.jit
    def fill():
        def block(i, cache):
            keys = zip(jax.random.split(jax.random.key(i)), layout.entry.sizes, strict=True)
            latents, rotary = (jax.random.normal(key, (count, size), jnp.bfloat16) for key, size in keys)
            slots = i * count + jnp.arange(count, dtype=jnp.int32)  # those beyond the last block are skipped
            return jaxkv.write_mla(cache, latents, rotary, slots, layer=layer)

        count = min(2**16, layout.num_slots)
        return lax.fori_loop(0, -(-layout.num_slots // count), block, jaxkv.KVCache.zeros(layout))

    return jax.block_until_ready(fill())
