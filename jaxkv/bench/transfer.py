"""Time blocks on their way: to contiguous rows, between two devices of one program, and between two processes.

The blocks are those of a model's cache, scattered at random.  First they are read to rows, next to the device's rate of
copying.  Then they are sent between two devices, by `permute_blocks`, next to `lax.ppermute` of as many bytes.  At last
they are sent between two independent processes, each with a device of its own, by every transport that is installed:
each part of the way alone, and all of it.

With --coordinator, two commands, one per device, form one job of `jax.distributed`, which sends blocks between its
devices.  Process 0 prints:

    CUDA_VISIBLE_DEVICES=0 jaxkv bench transfer CONFIG --coordinator localhost:5555 --processes 2 --process 0 &
    CUDA_VISIBLE_DEVICES=1 jaxkv bench transfer CONFIG --coordinator localhost:5555 --processes 2 --process 1
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import parallel
from jaxkv.bench import jobs, random_models
from jaxkv.bench.ends import TRANSPORTS, Source, Target, filled
from jaxkv.bench.peers import Peer, share_memory
from jaxkv.bench.timing import Chain, measure_ceilings
from jaxkv.terminal.files import when_and_how, write_json
from jaxkv.terminal.formatting import counted, size
from jaxkv.terminal.memory import require_memory
from jaxkv.terminal.options import Sizes, add_sizes, output_file, positive, with_defaults
from jaxkv.terminal.streams import notice

AXIS = "x"
CALLS = 10
"""Consecutive calls that are timed together."""
SIZES: Sizes = {
    "blocks": ("blocks to send (512; 8 on CPUs)", 512, 8),
    "repeats": ("repetitions of each measurement (5; 3 on CPUs)", 5, 3),
}


@dataclass(frozen=True)
class Row:
    """What was measured on one way."""

    name: str
    bytes: int
    """Of the blocks that have arrived."""
    ms: float
    gigabytes_per_s: float
    """Of `bytes`."""
    ratio: float | None = None
    """To the rate of what `of` says."""
    of: str | None = None

    @staticmethod
    def timed(name: str, nbytes: int, seconds: float, of: tuple[str, float] | None = None) -> "Row":
        """The row of blocks that took so many seconds; `of` names something else, with its bytes per second."""
        rate = nbytes / seconds
        what, other = of or (None, None)
        return Row(name, nbytes, 1e3 * seconds, rate / 1e9, other and rate / other, what)

    def __str__(self):
        ratio = "" if self.ratio is None else f"  {self.ratio:.2f} of {self.of}"
        return f"{self.name:58}{self.ms:10.3f} ms{self.gigabytes_per_s:9.2f} GB/s{ratio}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the blocks, and the processes of a job."""
    random_models.add_arguments(parser, weights=False)
    add_sizes(parser, SIZES)
    pieces = "pieces in which `permute_blocks` sends them; default its own"
    parser.add_argument("--pieces", type=positive, metavar="N", help=pieces)
    jobs.add_job(parser, most=2)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, versions, sizes and rows")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each row; returns 1 if blocks have arrived with other contents."""
    share_memory()
    job = jobs.join(args)
    with_defaults(args, SIZES, jax.local_devices()[0])
    layout = _layout(args, 2 * args.blocks)  # blocks to read, and blocks to write
    devices = _pair() if job or jax.device_count() > 1 else None
    moved = args.blocks * layout.block_nbytes
    here = len(devices) if devices and jax.default_backend() == "cpu" else 1  # simulated devices share the memory
    require_memory(f"{args.blocks} blocks, a cache of twice as many, and rows", 5 * here * moved, on_host=2 * moved)
    found, wrong = list[dict[str, Any]](), list[str]()
    about = {
        **when_and_how(args.argv),
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxkv": jaxkv.__version__},
        "blocks": args.blocks,
        "block_bytes": layout.block_nbytes,
        "processes": jax.process_count(),
        "rows": found,
        "wrong": wrong,
    }
    blocks = counted(args.blocks, "blocks")
    jobs.say(f"{about['device']}, jax {jax.__version__}: {blocks} of {size(layout.block_nbytes)}, {size(moved)} in all")

    def record(rows: Iterator[Row | str]) -> None:
        """Prints and writes each row, and the name of what is wrong."""
        for row in rows:
            if isinstance(row, str):
                wrong.append(row)
                print(f"wrong: {row}", flush=True)  # also if another process has not noticed it
            else:
                found.append(asdict(row))
                jobs.say(str(row))
            if args.json and jax.process_index() == 0:
                write_json(args.json, about)

    if not job:
        record(_reads(args, layout))
    if devices:
        record(_between_devices(args, layout, devices))
    else:
        notice("there is one device: nothing is sent between devices of one program")
    if not job:
        record(_between_processes(args, layout, len(devices or [None])))
    return 1 if wrong else 0


def _layout(args: argparse.Namespace, num_blocks: int) -> jaxkv.CacheLayout:
    described = random_models.described_model(args)
    return jax.eval_shape(lambda: described.cache(num_blocks)).layout


def _pair() -> list[jax.Device]:
    """Two devices, one of each process if there are several."""
    if jax.process_count() == 1:
        return jax.devices()[:2]
    return [next(device for device in jax.devices() if device.process_index == i) for i in range(2)]


def _ids(layout: jaxkv.CacheLayout) -> tuple[np.ndarray, np.ndarray]:
    """Half of the blocks, and the other half, int32, scattered."""
    first, second = np.split(np.random.default_rng(0).permutation(layout.num_blocks).astype(np.int32), 2)
    return first, second


def _reads(args: argparse.Namespace, layout: jaxkv.CacheLayout) -> Iterator[Row]:
    """`read_blocks`, whose bytes are read and written once each, as those of a copy."""
    cache = jax.block_until_ready(jax.jit(partial(filled, layout))(0))
    ids = jnp.asarray(_ids(layout)[0])

    def read(i, carry, cache):
        rows = jaxkv.read_blocks(cache, carry[0], implementation=args.implementation)
        return lax.optimization_barrier((carry[0], rows))  # the next call's ids depend on these rows

    rows = jnp.zeros((args.blocks, layout.pages.block_elements), layout.dtype)
    least = rows.nbytes / 4e12
    chain = Chain(read, (ids, rows), cache, least=least).compile()
    seconds = chain.time((ids, rows), cache, repeats=args.repeats).median
    del cache
    copy = measure_ceilings(jax.devices()[0], repeats=args.repeats).copy
    yield Row.timed("read_blocks", rows.nbytes, seconds, ("the rate of copying", copy / 2))


def _between_devices(
    args: argparse.Namespace, layout: jaxkv.CacheLayout, devices: Sequence[jax.Device]
) -> Iterator[Row | str]:
    """Blocks between two devices of this job, one way and both ways, and as many bytes by `lax.ppermute`."""
    mesh, (sources, targets) = Mesh(np.asarray(devices), (AXIS,)), _ids(layout)
    moved = args.blocks * layout.block_nbytes
    for ways, perm in (("one way", [(0, 1)]), ("both ways", [(0, 1), (1, 0)])):

        @partial(_on_each, mesh, donate=False)  # XLA would copy the result to the memory of the argument
        def ppermute(x, perm=perm):
            return lax.ppermute(x, AXIS, perm)

        @partial(_on_each, mesh)
        def permute(cache, perm=perm):
            return parallel.permute_blocks(
                cache, sources, targets, perm, axis=AXIS, pieces=args.pieces, implementation=args.implementation
            )

        plain, x = _timed(ppermute, _made(mesh, lambda _: jnp.zeros(moved // 4, jnp.uint32)), args.repeats)
        x.delete()
        name = f"lax.ppermute, {ways}"
        yield Row.timed(name, moved, plain)
        seconds, cache = _timed(permute, _made(mesh, partial(filled, layout)), args.repeats)
        yield Row.timed(f"permute_blocks, {ways}", moved, seconds, (name, moved / plain))
        if not _has_arrived(mesh, cache, sources, targets, perm):
            yield f"permute_blocks, {ways}: blocks have arrived with other contents"
        del cache
    if jax.process_count() == 1:
        yield from _transferred(args, layout, devices, moved)


def _transferred(
    args: argparse.Namespace, layout: jaxkv.CacheLayout, devices: Sequence[jax.Device], moved: int
) -> Iterator[Row]:
    """`transfer_blocks`, which is called outside of programs."""
    sources, targets = _ids(layout)
    source, target = (
        jax.block_until_ready(jax.device_put(jax.jit(partial(filled, layout))(seed), device))
        for seed, device in enumerate(devices)
    )

    def transfer(target):
        return parallel.transfer_blocks(source, sources, target, targets, implementation=args.implementation)

    seconds, _ = _timed(transfer, target, args.repeats)
    yield Row.timed("transfer_blocks, one way", moved, seconds)


def _on_each(mesh: Mesh, function: Callable[..., Any], *, donate: bool = True) -> Callable[..., Any]:
    """The function compiled for each device's part of its argument, which is donated or not."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return jax.jit(mapped, donate_argnums=0 if donate else ())


def _made(mesh: Mesh, make: Callable[[jax.Array], Any]) -> Any:
    """Arrays that each device makes from its index."""
    mapped = jax.shard_map(
        lambda: make(lax.axis_index(AXIS)), mesh=mesh, in_specs=(), out_specs=P(AXIS), check_vma=False
    )
    return jax.block_until_ready(jax.jit(mapped)())


def _has_arrived(mesh: Mesh, cache: jaxkv.KVCache, sources, targets, perm: Sequence[tuple[int, int]]) -> bool:
    """Whether blocks `targets` of the receivers that this process has are blocks `sources` of the senders."""

    @partial(jax.shard_map, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    def differ(cache):
        sent, found = (jaxkv.read_blocks(cache, ids) for ids in (sources, targets))
        receives = jnp.isin(lax.axis_index(AXIS), jnp.asarray([receiver for _, receiver in perm]))
        return ((lax.ppermute(sent, AXIS, perm) != found).any() & receives)[None]

    return not any(shard.data.any() for shard in jax.jit(differ)(cache).addressable_shards)


def _timed(step: Callable[[Any], Any], state: Any, repeats: int) -> tuple[float, Any]:
    """The median seconds per call of consecutive calls `state = step(state)`, and the last state."""
    state, found = jax.block_until_ready(step(state)), []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(CALLS):
            state = step(state)
            if jax.default_backend() == "cpu":
                # Simulated devices share threads, so several calls in flight could deadlock.
                jax.block_until_ready(state)
        jax.block_until_ready(state)
        found.append((time.perf_counter() - start) / CALLS)
    return median(found), state


def _between_processes(args: argparse.Namespace, layout: jaxkv.CacheLayout, devices: int) -> Iterator[Row | str]:
    """Blocks between two processes, each with one device, or with the same if there is only one."""
    (sources, targets), authkey = _ids(layout), os.urandom(16)
    moved, rounds = args.blocks * layout.block_nbytes, itertools.count()

    def keys() -> list[bytes]:
        """New ones for all blocks."""
        number = next(rounds)
        return [f"{number} {block}".encode().rjust(32) for block in range(args.blocks)]

    def row(name: str, seconds: Callable[[], float]) -> Row:
        """The median of several measurements, after one that compiles."""
        return Row.timed(name, moved, median([seconds() for _ in range(1 + args.repeats)][1:]))

    with (
        Peer(0, Source, layout, sources, authkey) as source,
        Peer(devices - 1, Target, layout, targets, authkey, source.call("addresses")) as target,
    ):
        names = [name for name in source.call("names") if name in target.call("names")]
        yield row("HostPool.store: device to host", lambda: source.call("store", keys()))
        stored = keys()
        source.call("store", stored)
        yield row("HostPool.rows: host to arrays that are offered", lambda: source.call("copy_out", stored))
        for name in names:

            def fetched(name: str = name) -> float:
                seconds = target.call("fetch", name, source.call("offer", name, stored))
                source.call("release")
                return seconds

            yield row(f"{TRANSPORTS[name].__name__}: host to host", fetched)
        yield row("write_rows: host to device", lambda: target.call("load"))
        for name in names:

            def whole(name: str = name) -> float:
                new = keys()
                start, pulled = time.perf_counter(), target.begin("pull", name, new)
                source.call("store", new)
                pulled.result()
                return time.perf_counter() - start

            way = f"RemoteBlocks, {TRANSPORTS[name].__name__}:"
            yield row(f"{way} host to device", partial(target.call, "pull", name, stored))
            yield row(f"{way} device to device", whole)
            if source.call("digest") != target.call("digest"):
                yield f"{way} blocks have arrived with other contents"
            stored = keys()
            source.call("store", stored)
    for name in TRANSPORTS.keys() - names:
        notice(f"{TRANSPORTS[name].__name__} is not installed")
