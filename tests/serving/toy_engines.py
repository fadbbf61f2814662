"""Engines of a toy model, with pools behind them."""

import threading
from contextlib import contextmanager
from functools import cache

import jax

from jaxkv.models.weights.fingerprint import fingerprint
from jaxkv.offload import DiskPool, HostPool
from jaxkv.serving.engine import Engine
from support import toy_model

PARAMS = toy_model.random_params()
MODEL = toy_model.ToyModel(PARAMS)
BLOCK = 4


def engine(num_blocks=16, **options):
    defaults = {"block_size": BLOCK, "max_requests": 3, "chunk": 7, "max_len": 48}
    return Engine(MODEL, num_blocks=num_blocks, **{**defaults, **options})


def host_pool(num_blocks=64, disk=None, order="BLNHC"):
    return HostPool(MODEL.layout(1, BLOCK, order), num_blocks, disk=disk)


def disk_pool(folder, **options):
    return DiskPool(folder, MODEL.layout(1, BLOCK), model=fingerprint(MODEL), **options)


@cache
def right(tokens, count):
    """The greedy continuation, without a cache."""
    return toy_model.greedy_without_cache(PARAMS, tokens, count)


def serve(served, tokens, count=6):
    """The continuation of a prompt, which must be right, and how many tokens were found for it."""
    before = served.prefix_stats.found
    request = served.submit(tokens, max_tokens=count)
    for _ in served.run():
        pass
    assert request.generated == right(tuple(tokens), count)
    assert served.pool.num_free == served.pool.num_blocks
    return served.prefix_stats.found - before


def check_positions(pool):
    """In an engine with one table, exactly the blocks that can be found by key can be found by their first tokens."""
    assert pool._positions.keys() == pool._keys.keys()
    followers = [(block, (after, of)) for after, blocks in pool._followers.items() for of, block in blocks]
    assert len(followers) == len(pool._positions)
    assert dict(followers) == pool._positions
    assert all(blocks and blocks == sorted(blocks) for blocks in pool._followers.values())


def draw_ready(served, rng):
    """Has the next steps run any of the programs that hold them, as if others were not compiled yet."""
    buckets = served.buckets
    buckets.ready = {*buckets.largest, *(shape for shape in buckets.shapes if rng.random() < 0.5)}


COMPILED = "/jax/core/compile/backend_compile_duration"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@contextmanager
def names_of(event):
    """Collects the names of the programs for which JAX reports this event."""
    names = []

    def listener(reported, seconds, *, fun_name="", **_):
        if reported == event:
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def join_compilers():
    """Waits until all programs are compiled that are compiled in the background."""
    for thread in threading.enumerate():
        if thread.name.startswith("jaxkv-compile"):
            thread.join(60)


def fail(*args, **kwargs):
    raise RuntimeError("injected")
