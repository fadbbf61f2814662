"""Times the attention of a decode step of DeepSeek V3.2, in all layers, and its kernels, and computes its limits.

Each layer stores the latent and the indexer's key of a new token per request, scores all cached keys, selects the
tokens with the highest scores, and attends to them.  The projections around it and the feed-forward are left out.
Latents and keys of all layers share the blocks of one buffer, which is donated and updated in place.  This is
`jaxkv bench ops --sparse-step`.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv.bench.inputs import PATTERN_BLOCKS, random_buffer, random_values
from jaxkv.bench.kernel_times import kernels_of
from jaxkv.bench.timing import REST_SECONDS, SUSTAINED_SECONDS, Ceilings
from jaxkv.bench.workload import Shapes, Workload, with_fitting_layers, workload
from jaxkv.terminal.files import write_json
from jaxkv.terminal.formatting import size
from jaxkv.terminal.memory import device_memory
from jaxkv_kernels.addressing import one_array

MEMORY_FRACTION = 0.93
"""The fraction of the device's memory that the only cache may use.  If not all layers fit, fewer are timed."""

LATENT, KEY = jaxkv.MLAEntry("fp8_ds_mla"), jaxkv.IndexerEntry()


class Inputs(NamedTuple):
    """The inputs of a layer.  All layers share them: for realistic times, only the layers' caches must differ."""

    latent: jax.Array
    """bf16 [B, R], to be stored."""
    rope: jax.Array
    """bf16 [B, P], to be stored."""
    key: jax.Array
    """bf16 [B, D], the indexer's key, to be stored."""
    q_latent: jax.Array
    """bf16 [B, 1, Hq, R]."""
    q_pe: jax.Array
    """bf16 [B, 1, Hq, P]."""
    q_indexer: jax.Array
    """float8_e4m3fn [B, 1, Hi, D]."""
    weights: jax.Array
    """float32 [B, 1, Hi], of the indexer's heads."""
    tables: jax.Array
    """int32 [B, M], shuffled blocks."""
    lengths: jax.Array
    """int32 [B]."""


@dataclass(frozen=True, kw_only=True)
class SparseStep:
    """The sizes of a step: one new token for each of `requests` requests of `tokens` tokens, the new one included."""

    requests: int = 64
    tokens: int = 32768
    layers: int = 61
    heads: int = 128
    indexer_heads: int = 64
    chosen: int = 2048
    """Tokens that each query token attends to."""
    block_size: int = 64

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache: as many as the requests need."""
        return self.requests * -(-self.tokens // self.block_size)

    def groups(self, num_blocks: int) -> tuple[jaxkv.CacheLayout, jaxkv.CacheLayout]:
        """The layouts of latents and indexer keys in a buffer of `num_blocks` blocks."""
        groups = {"latent": jaxkv.Group(self.layers, LATENT), "indexer": jaxkv.Group(self.layers, KEY)}
        packed = jaxkv.PackedLayout(num_blocks=num_blocks, block_size=self.block_size, groups=groups)
        return packed["latent"], packed["indexer"]

    def fitted(self, limit: int) -> "SparseStep":
        """The same with as many layers as fit in `limit` bytes, at least one."""
        return with_fitting_layers(self, lambda step: step.groups(self.num_blocks)[0].nbytes <= limit)

    def parts(self) -> Iterator[Workload]:
        """The operations of one layer, with the bytes that each must move and the flops that it must compute."""
        part = partial(workload, suite="", requests=self.requests, layers=1, block_size=self.block_size)
        yield part(operation="write_mla", tokens=1, format=LATENT.format)
        yield part(operation="write_indexer_k", tokens=1)
        scored = partial(part, tokens=self.tokens, heads=self.indexer_heads)
        yield scored(operation="indexer_logits", query_dtype="float8_e4m3fn")
        yield part(operation="select_topk", tokens=self.tokens, chosen=self.chosen)
        yield part(operation="decode_mla_sparse", tokens=self.tokens, heads=self.heads, chosen=self.chosen)

    def limits(self, ceilings: Ceilings) -> dict[str, float]:
        """The least time of each operation of a layer, in seconds.

        It is the longer of two times: of its bytes at the rate of reading, and of its flops at the rate of bf16
        products.  e4m3 products may be twice as fast, which changes nothing: the indexer's keys take longer to read.
        """
        return {
            part.operation: max(part.traffic / ceilings.read, part.flops / ceilings.matmul) for part in self.parts()
        }

    def inputs(self) -> Inputs:
        """Random inputs, on the device."""
        rng, batch = np.random.default_rng(1), self.requests
        tables = rng.permutation(self.num_blocks).astype(np.int32).reshape(batch, -1)
        sizes, queries = (*LATENT.sizes, *KEY.sizes), (batch, 1, self.heads)
        shapes: Shapes = [
            *(((batch, n), "bfloat16") for n in sizes),
            *(((*queries, n), "bfloat16") for n in LATENT.sizes),
            ((batch, 1, self.indexer_heads, KEY.head_dim), "float8_e4m3fn"),
            ((batch, 1, self.indexer_heads), "float32"),
        ]
        values = random_values(shapes, rng)
        return Inputs(*values, tables=jnp.asarray(tables), lengths=jnp.full(batch, self.tokens, jnp.int32))

    def cache(self) -> jaxkv.KVCache:
        """A cache with random entries in every slot of every layer, as the view of the latents."""
        buffer = random_buffer(self.groups(PATTERN_BLOCKS), self.num_blocks)
        return jaxkv.KVCache(buffer, self.groups(self.num_blocks)[0])

    def attend(self, cache: jaxkv.KVCache, inputs: Inputs, *, implementation=None) -> tuple[jaxkv.KVCache, jax.Array]:
        """A step: the cache, and the result of the last layer, bf16 [B, 1, Hq, R]."""
        _, keys = self.groups(self.num_blocks)
        new, size, tables, lengths = inputs, self.block_size, inputs.tables, inputs.lengths
        written = jaxkv.slots_for(tables, lengths[:, None] - 1, cache)[:, 0]

        def of_layer(carry, layer):
            cache, _ = carry
            by = {"layer": layer, "implementation": implementation}
            cache = jaxkv.write_mla(cache, new.latent, new.rope, written, **by)
            indexer = jaxkv.write_indexer_k(cache.view(keys), new.key, written, **by)
            logits = jaxkv.indexer_logits(
                new.q_indexer, new.weights, indexer, tables, lengths, max_len=self.tokens, **by
            )
            slots = jaxkv.select_topk(
                logits, self.chosen, block_tables=tables, block_size=size, implementation=implementation
            )
            cache = indexer.view(cache.layout)
            out = jaxkv.decode_mla_sparse(new.q_latent, new.q_pe, cache, slots, scale=192**-0.5, **by)
            return (cache, out), None

        out = jnp.zeros(new.q_latent.shape, jnp.bfloat16)
        (cache, out), _ = lax.scan(of_layer, (cache, out), jnp.arange(self.layers, dtype=jnp.int32))
        return cache, out


SMALL_STEP = SparseStep(requests=2, tokens=1024, layers=4, heads=16, indexer_heads=16, chosen=256)
"""What is timed on CPUs."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of the step."""

    name: str
    per_layer: float
    """How often it runs, divided by the number of layers."""
    seconds: float
    """Its time per layer."""


@dataclass(frozen=True)
class Measured:
    """Times of one layer, in seconds: those of a step, divided by the number of layers."""

    layers: int
    burst: float
    """The median of single steps, each after a rest."""
    sustained: float
    """The mean over consecutive steps without rests."""
    kernels: tuple[Kernel, ...] | None
    """Longest first; None if there is no CUPTI."""
    cache_nbytes: int
    temporary_nbytes: int
    """Memory that the program needs besides its arguments and results."""


def compiled(step: SparseStep, inputs: Inputs, *, implementation: str | None = None) -> Any:
    """The compiled program of a step; RuntimeError if it does not update the cache in place."""
    cache = jax.eval_shape(lambda: jaxkv.KVCache.zeros(step.groups(step.num_blocks)[0]))
    attend: Any = partial(step.attend, implementation=implementation)
    program = jax.jit(attend, donate_argnums=0).lower(cache, inputs).compile()
    memory: Any = program.memory_analysis()
    nbytes = cache.layout.nbytes
    if memory.alias_size_in_bytes < nbytes or memory.temp_size_in_bytes >= nbytes:
        raise RuntimeError(
            f"the program copies the cache: of its {nbytes} bytes, {memory.alias_size_in_bytes} are updated in place, "
            f"and it needs {memory.temp_size_in_bytes} bytes of temporary memory"
        )
    return program


def measure(step: SparseStep, *, repeats: int, implementation: str | None = None) -> Measured:
    """Measures a step.  The cache must fit in memory once."""
    inputs = step.inputs()
    program = compiled(step, inputs, implementation=implementation)
    cache = step.cache()
    nbytes = one_array(cache.buffer).nbytes

    def once() -> jax.Array:
        nonlocal cache
        cache, out = program(cache, inputs)
        return out

    jax.block_until_ready(once())
    rest, sustain = (0, 0) if jax.default_backend() == "cpu" else (REST_SECONDS, SUSTAINED_SECONDS)
    bursts = []
    for _ in range(repeats):
        time.sleep(rest)
        bursts.append(_seconds(once, 1))
    burst = median(bursts)
    sustained = _seconds(once, max(2, round(sustain / burst)))
    found = kernels_of(once, repeats=3)
    kernels = None if found is None else _per_layer(found.kernels, step.layers)
    memory: Any = program.memory_analysis()
    return Measured(
        step.layers, burst / step.layers, sustained / step.layers, kernels, nbytes, memory.temp_size_in_bytes
    )


def _seconds(once: Callable[[], jax.Array], count: int) -> float:
    """Seconds per call of `count` consecutive calls."""
    start = time.perf_counter()
    out = once()
    for _ in range(count - 1):
        out = once()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / count


def _per_layer(kernels: tuple[tuple[str, float], ...], layers: int) -> tuple[Kernel, ...]:
    """The kernels of a step by name."""
    seconds: dict[str, list[float]] = {}
    for name, took in kernels:
        seconds.setdefault(name, []).append(took)
    found = (Kernel(name, len(each) / layers, sum(each) / layers) for name, each in seconds.items())
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds))


def report(args: argparse.Namespace, about: dict[str, Any], device: jax.Device, ceilings: Ceilings) -> int:
    """Prints the times of a step's layers, of their kernels and of their limits; `about` is written with them."""
    wanted = SMALL_STEP if device.platform == "cpu" else SparseStep()
    step = wanted.fitted(int(MEMORY_FRACTION * device_memory(device)))
    found, limits = measure(step, repeats=args.repeats, implementation=args.implementation), step.limits(ceilings)
    print(
        f"DeepSeek V3.2's attention of {step.requests} requests x {step.tokens:,} tokens with {step.heads} heads, in "
        f"{step.layers} layers of one cache of {size(found.cache_nbytes)} (and {size(found.temporary_nbytes)})"
    )
    print(f"us per layer: burst {1e6 * found.burst:.2f}, sustained {1e6 * found.sustained:.2f}", end="")
    print(f", the sum of limits {1e6 * sum(limits.values()):.2f}\n\n   limit")
    for operation, seconds in limits.items():
        print(f"{1e6 * seconds:8.2f} {operation}")
    if found.kernels:
        print(f"\nkernels: {1e6 * sum(kernel.seconds for kernel in found.kernels):.2f}")
    for kernel in found.kernels or ():
        print(f"{1e6 * kernel.seconds:8.2f} {kernel.name} ({kernel.per_layer:g} per layer)")
    if args.json:
        write_json(args.json, {**about, "step": asdict(step), "limits": limits, "seconds_per_layer": asdict(found)})
    return 0
