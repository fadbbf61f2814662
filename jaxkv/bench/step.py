"""Time a decode step of a whole model on this machine, given its config.json, or a step of a prefill.

The weights are random, which does not change the time.  Every request has the same number of cached tokens.  On NVIDIA
GPUs, the time of a step is divided into kinds of kernels, and the gaps between kernels.

With --coordinator, several commands, one per device, form one job of `jax.distributed`, whose devices divide the model
as --parallel says.  Process 0 prints:

    CUDA_VISIBLE_DEVICES=0 jaxkv bench step CONFIG --parallel data-expert --coordinator localhost:5555 --processes 2 \
        --process 0 &
    CUDA_VISIBLE_DEVICES=1 jaxkv bench step CONFIG --parallel data-expert --coordinator localhost:5555 --processes 2 \
        --process 1
"""

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

import jaxkv
from jaxkv import models
from jaxkv.bench import jobs, random_models
from jaxkv.bench.inputs import with_random_layer
from jaxkv.bench.kernel_times import by_kind, describe_shares, kernels_of, shares
from jaxkv.models import Model, prefill
from jaxkv.models.parallel.base import Parallel
from jaxkv.serving.table import TableKind, tables_of
from jaxkv.terminal.files import write_json
from jaxkv.terminal.formatting import counted, size
from jaxkv.terminal.memory import nbytes
from jaxkv.terminal.options import output_file, positive
from jaxkv_kernels.addressing import one_array, slots_for

WAYS = {
    "tensor": models.TensorParallel,
    "expert": models.ExpertParallel,
    "context": models.ContextParallel,
    "data": models.DataParallel,
    "data-expert": models.DataExpertParallel,
}
"""The choices of `--parallel`."""

LEAST_SECONDS = 1.0
"""Consecutive steps are timed for about this long."""
RUNS = 4
"""How often the host waits for the device in this time.  After each wait, the device waits for the host's next step."""
RANDOM, SET = 0x87, 0x38
"""The bits of a byte that are random, and those that are set, so that it is a finite number, or part of one, in every
format: floats have magnitudes below 2.
"""


def blocks_for(model: Model, tokens: int, new_tokens: int = 1) -> int:
    """Blocks of a request of `tokens` tokens, the new ones included."""
    return sum(_count(table, tokens, new_tokens) for table in _tables(model))


def blocks_per_cache(model: Model, requests: int, tokens: int, new_tokens: int = 1) -> int:
    """Blocks of each cache; ValueError if devices divide the requests and cannot do so evenly."""
    each, rest = divmod(requests, model.parallel.divisions_of_rows)
    if rest:
        raise ValueError(
            f"there are {requests} requests: expected a multiple of the {model.parallel.divisions_of_rows} devices, "
            "which divide them"
        )
    return each * blocks_for(model, tokens, new_tokens)


def _tables(model: Model) -> tuple[TableKind, ...]:
    return tables_of(model.layout(1), model.usual_block_size)


def _held(table: TableKind, tokens: int, new_tokens: int) -> list[int]:
    """The numbers of the blocks of a table that a step reads or writes."""
    start = tokens - new_tokens
    return sorted({*table.needed(start), *table.written(start, tokens)})


def _count(table: TableKind, tokens: int, new_tokens: int) -> int:
    """The length of `_held`, which may be too long to be made."""
    start = tokens - new_tokens
    needed, written = table.needed(start), table.written(start, tokens)
    both = range(max(needed.start, written.start), min(needed.stop, written.stop))
    return len(needed) + len(written) - len(both)


def filled(model: Model, num_blocks: int) -> jaxkv.KVCache:
    """A cache with random entries in every slot of every layer.

    If the model has several block tables, whose blocks differ, all bytes are random, but numbers are finite.
    """
    if len(model.tables) > 1:
        return jax.jit(partial(_with_random_bytes, model, num_blocks))()

    def fill():
        cache = model.cache(num_blocks)
        return model.parallel.per_device(partial(_with_random_entries, model))(cache)

    return jax.jit(fill)()


def _with_random_entries(model: Model, cache: jaxkv.KVCache) -> jaxkv.KVCache:
    """One device's cache with random entries, and random keys if the model has an indexer."""
    layout, indexer = cache.layout, model.config.indexer
    cache = _with_random_layers(cache)
    if indexer is None:
        return cache
    packed = model.packed_layout(indexer, layout.num_blocks, layout.block_size)
    return _with_random_layers(cache.view(packed["indexer"])).view(layout)


def _with_random_layers(cache: jaxkv.KVCache) -> jaxkv.KVCache:
    def layer(i, cache):
        return with_random_layer(cache, i, jax.random.key(i))

    return lax.fori_loop(0, cache.layout.num_layers, layer, cache)


def _with_random_bytes(model: Model, num_blocks: int) -> jaxkv.KVCache:
    cache = model.cache(num_blocks)
    random = np.random.default_rng(0).integers(0, 256, 2**20, np.uint8) & RANDOM | SET
    buffer = one_array(cache.buffer)
    return jaxkv.KVCache(jnp.resize(random.view(buffer.dtype), buffer.shape), cache.layout)


class Steps:
    """Consecutive steps of requests with the same number of cached tokens; each call makes the next step.

    Args:
      model: the model.
      cache: from `filled`, with the blocks of `blocks_per_cache`; steps donate it and replace it in `self.cache`.
      requests: rows of the batch.
      tokens: cached tokens of each request, the new ones included.
      new_tokens: new tokens of each request; 1 for a decode step.
    """

    def __init__(self, model: Model, cache: jaxkv.KVCache, *, requests: int, tokens: int, new_tokens: int = 1):
        self.cache, self._model = cache, model
        self.new_tokens = requests * new_tokens
        """New tokens per step, of all requests."""
        # Shuffled blocks, as after hours of service.
        count, caches = blocks_per_cache(model, requests, tokens, new_tokens), model.parallel.divisions_of_rows
        rng, tables = np.random.default_rng(0), {}
        blocks = np.stack([rng.permutation(count) for _ in range(caches)]).astype(np.int32)
        for table in _tables(model):
            held = _held(table, tokens, new_tokens)
            own, blocks = np.split(blocks, [requests // caches * len(held)], axis=1)
            tables[table.name] = np.full((requests, table.up_to(tokens)), -1, np.int32)
            tables[table.name][:, held] = own.reshape(requests, -1)
        tables = {name: jnp.asarray(table) for name, table in tables.items()}
        first = next(iter(tables.values()))
        positions = jnp.broadcast_to(jnp.arange(tokens - new_tokens, tokens), (requests, new_tokens))
        slots = slots_for(first, positions, block_size=model.usual_block_size)
        self._index = jnp.full(requests, tokens, jnp.int32), tables if len(tables) > 1 else first, slots
        # Random ones: equal tokens would all choose the same experts, and the others' weights would not be read.
        self._tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, (requests, new_tokens), np.int32))
        options = model.compiler_options(prefill=new_tokens > 1)
        self._run: Any = jax.jit(_step, donate_argnums=(1, 2), compiler_options=options)

    def compile(self) -> None:
        """Compiles the step, which may be done in a thread."""
        self._run.lower(self._model, self.cache, self._tokens, self._index).compile()

    def __call__(self) -> jax.Array:
        """Makes a step; returns its tokens, which the next step donates."""
        self.cache, self._tokens = self._run(self._model, self.cache, self._tokens, self._index)
        return self._tokens

    def seconds(self) -> float:
        """Seconds per step, over steps that each use the previous one's tokens."""
        for _ in range(2):  # the first run compiles
            jax.block_until_ready(self())
        count = max(10, round(LEAST_SECONDS / RUNS / self._timed(10)))
        count = int(multihost_utils.broadcast_one_to_all(np.int32(count)))  # as many in every process
        return sum(self._timed(count) for _ in range(RUNS)) / RUNS

    def _timed(self, count: int) -> float:
        """Seconds per step of `count` steps, after which the host waits for the device."""
        start = time.perf_counter()
        for _ in range(count - 1):
            self()
        jax.block_until_ready(self())
        return (time.perf_counter() - start) / count


def _step(model: Model, cache: jaxkv.KVCache, tokens, index) -> tuple[jaxkv.KVCache, jax.Array]:
    """A step: the cache, and the tokens with the most likely next one of each request at the end."""
    cache, logits = prefill(model, cache, tokens, *index)
    drawn = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return cache, jnp.concatenate([tokens[:, 1:], drawn], axis=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the batch, and the format and layout of the cache."""
    random_models.add_arguments(parser)
    parser.add_argument("--requests", type=positive, default=32, metavar="N", help="rows of the batch (32)")
    tokens = "cached tokens of each request, the new ones included (4096)"
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help=tokens)
    new = "new tokens of each request (1); with more, the step is that of a prefill"
    parser.add_argument("--new-tokens", type=positive, default=1, metavar="N", help=new)
    parser.add_argument("--parallel", choices=WAYS, help="how several devices divide the model; default: one device")
    parser.add_argument("--devices", type=positive, metavar="N", help="how many, with --parallel; default: all")
    jobs.add_job(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, versions, sizes and times")


def run(args: argparse.Namespace) -> int:
    """Prints the sizes, the time of a step and, on NVIDIA GPUs, the shares of kernels and gaps."""
    if args.new_tokens > args.tokens:
        raise ValueError(f"--new-tokens is {args.new_tokens}: expected at most the {args.tokens} --tokens")
    jobs.join(args)
    parallel, devices = _parallel(args)
    described = random_models.described_model(args, parallel)
    num_blocks = blocks_per_cache(described, args.requests, args.tokens, args.new_tokens)
    rows = args.requests // described.parallel.divisions_of_rows
    needed = random_models.Needed(num_blocks, rows, rows * args.new_tokens)
    model = random_models.random_model(args, described, needed)
    config, batch = model.config, f"{counted(args.requests, 'requests')} x {counted(args.tokens, 'tokens')}"
    if args.new_tokens > 1:
        batch += f", {args.new_tokens:,} of them new"
    # Raises here, before anything is printed, if the model does not fit.
    cache = jax.block_until_ready(filled(model, num_blocks))
    kind = jax.devices()[0].device_kind
    on = kind if devices == 1 else f"{devices} x {kind}, {args.parallel} parallel"
    jobs.say(f"{config.architecture} of {counted(config.num_layers, 'layers')} on {on}")
    jobs.say(f"weights {size(nbytes(model.params))}, cache {size(nbytes(cache))} of {model.entry_format} entries")
    sizes = {"requests": args.requests, "tokens": args.tokens, "new_tokens": args.new_tokens}
    steps = Steps(model, cache, **sizes)
    del cache  # which the steps donate
    seconds = steps.seconds()
    rate = args.requests * args.new_tokens / seconds
    jobs.say(f"a step of {batch}: {1e3 * seconds:.3f} ms, {rate:,.0f} tokens/s")
    divided = _divided(steps, seconds)
    if args.json and jax.process_index() == 0:
        about = {
            **random_models.described(args, model),
            "bytes": {"weights": nbytes(model.params), "cache": nbytes(steps.cache)},
            "fp8_weights": args.fp8_weights,
            "parallel": args.parallel,
            "devices": devices,
            "processes": jax.process_count(),
            **sizes,
            "ms": 1e3 * seconds,
            **divided,
        }
        write_json(args.json, about)
    return 0


def _parallel(args: argparse.Namespace) -> tuple[Parallel, int]:
    """How the model is divided, and over how many devices; ValueError if the machine has fewer."""
    here = jax.device_count()
    if args.parallel is None:
        if args.devices is not None:
            raise ValueError(f"--devices {args.devices}: expected --parallel with it, one of {', '.join(WAYS)}")
        if jax.process_count() > 1:
            raise ValueError(f"--parallel is missing: with --coordinator, expected one of {', '.join(WAYS)}")
        return models.OneDevice(), 1
    devices = args.devices or here
    if devices > here:
        raise ValueError(f"--devices is {devices}: expected at most the {here} of this machine")
    if devices < here and jax.process_count() > 1:
        raise ValueError(f"--devices is {devices}: with --coordinator, expected all {here} of the job")
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    return WAYS[args.parallel](mesh, "x"), devices


def _divided(steps: Steps, seconds: float) -> dict[str, Any]:
    """Prints and returns how a step of `seconds` is spent, in ms; empty if kernels cannot be timed.

    - "busy_ms": the time in which at least one kernel runs.
    - "shares_ms": this time by kind of kernel, in which overlapping time counts for the earlier kernel, and the gaps.
    - "whole_ms": by kind of kernel, the sum of the times from each kernel's start to its end.
    """
    found = kernels_of(steps, repeats=3)
    if found is None:
        return {}
    divided, whole = shares(found.kernels, seconds), by_kind(found.whole)
    jobs.say(f"{len(found.kernels)} kernels per step: {describe_shares(divided, seconds)}")
    jobs.say(f"each kernel from its start to its end: {describe_shares(whole, seconds)}")
    jobs.say(
        f"these sum to {1e3 * sum(whole.values()):.3f} ms; at least one kernel runs for {1e3 * found.median:.3f} ms"
    )
    return {
        "busy_ms": 1e3 * found.median,
        "shares_ms": {name: 1e3 * took for name, took in divided.items()},
        "whole_ms": {name: 1e3 * took for name, took in whole.items()},
    }
