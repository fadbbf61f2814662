"""Engines of models with sliding windows: the tokens of a cache that keeps every block, and far fewer blocks."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.offload import HostPool
from jaxkv.serving import Engine, Replicas
from jaxkv.serving.table import tables_of
from models.checkpoints.published_gqa import PUBLISHED_GQA
from support import toy_windows
from support.cases import further, slow
from support.many_devices import mesh_of, on_several_devices
from support.toy_model import prompt
from support.toy_windows import ALL, BLOCK, EVEN, LONGEST, UNEVEN, WINDOW, model, one_table

NUM_BLOCKS = 60


def in_kinds(choose):
    """Runs by default where as many layers have a window as have none; `choose` marks the other models."""
    return pytest.mark.parametrize("kinds", [EVEN, choose(UNEVEN), choose(ALL)], ids=["even", "uneven", "all"])


@pytest.fixture(autouse=True)
def _family(monkeypatch):
    toy_windows.install(monkeypatch)


@cache
def forward(kinds):
    held, blocks = one_table(model(kinds)), LONGEST // BLOCK
    tables = jnp.arange(blocks, dtype=jnp.int32)[None]
    slots = jnp.arange(LONGEST, dtype=jnp.int32)[None]

    @jax.jit
    def run(tokens):
        _, x = models.forward(held, held.cache(blocks, BLOCK), tokens, jnp.asarray([LONGEST]), tables, slots)
        return models.head(held, x)[0].argmax(-1)

    return run


def check(kinds, request):
    """All tokens of a request are those of one prefill, with one table, of all tokens before them."""
    tokens = np.zeros((1, LONGEST), np.int32)
    tokens[0, : len(request.tokens)] = request.tokens
    best, first = np.asarray(forward(kinds)(tokens)), len(request.prompt) - 1
    assert request.generated == best[first : first + len(request.generated)].tolist()


def engine(kinds, num_free=NUM_BLOCKS, **options):
    """An engine of which `num_free` blocks are free.  All have the same sizes, so that programs compile once."""
    defaults = {"block_size": BLOCK, "max_requests": 3, "chunk": 8, "max_num_batched_tokens": 27, "max_len": LONGEST}
    served = Engine(model(kinds), num_blocks=NUM_BLOCKS, **{**defaults, **options})
    for _ in range(NUM_BLOCKS - num_free):
        served.pool.allocate()
    return served


def finish(served, num_free=NUM_BLOCKS):
    list(served.run())
    assert served.pool.num_free == num_free
    assert all((array == -1).all() for array in served.block_manager.arrays.values())


@in_kinds(further)
def test_lengths_around_the_window_and_the_ends_of_blocks(kinds):
    served = engine(kinds)
    requests = [served.submit(prompt(length), max_tokens=11) for length in (1, 7, 8, 9, 10, 11, 16, 17, 18, 19, 41)]
    finish(served)
    for request in requests:
        check(kinds, request)


@in_kinds(further)
def test_blocks_before_the_window_are_released(kinds):
    served = engine(kinds, 24)
    request = served.submit(prompt(60), max_tokens=30)
    name = "" if kinds == ALL else "window"
    (table,) = (table for table in served.block_manager.tables if table.name == name)
    assert table.window == WINDOW
    most = {"prefill": 0, "decode": 0}
    while not request.finish_reason:
        served.step()
        held = [block for block in request.held[name].blocks if block >= 0]
        row = served.block_manager.arrays[name][request.place] if request.place >= 0 else np.asarray([-1])
        assert sorted(row[row >= 0]) == sorted(held)
        step = "decode" if request.generated else "prefill"
        most[step] = max(most[step], len(held))
    # Three chunks per step, of which the host has read the last one when the next one is launched.
    assert most["prefill"] <= table.most_held(90, 3 * 8) < table.up_to(90)
    assert most["decode"] <= -(-WINDOW // table.block_size) + 2 < table.up_to(60)
    check(kinds, request)
    finish(served, 24)


def test_the_cache_of_gpt_oss_20b_holds_half_as_much():
    """8 requests of 32,768 tokens: half of the layers need 128 of these."""
    config = models.ModelConfig.from_json(PUBLISHED_GQA["GPT-OSS"])
    described = jax.eval_shape(lambda: models.random_model(config))

    def held(of):
        layout = of.layout(1)
        first = next(iter(layout.values())) if isinstance(layout, jaxkv.PackedLayout) else layout
        blocks = sum(len(table.needed(32768)) for table in tables_of(layout, of.usual_block_size))
        return 8 * blocks * first.block_nbytes

    kept = one_table(described)
    assert held(kept) == 8 * 32768 * 24 * 8 * 2 * 64 * 2
    assert 0.5 < held(described) / held(kept) < 0.502


@pytest.mark.parametrize("num_free", [14, 18])
def test_out_of_blocks_requests_are_preempted_and_recomputed(num_free, monkeypatch):
    served = engine(EVEN, num_free)
    left, leave = [], served._leave
    monkeypatch.setattr(served, "_leave", lambda request: left.append(request) or leave(request))
    requests = [served.submit(prompt(20, seed=n), max_tokens=24) for n in range(4)]
    finish(served, num_free)
    assert len(left) > len(requests), "no request was preempted"
    for request in requests:
        check(EVEN, request)


@in_kinds(slow)
def test_prefixes_on_the_device_and_in_host_memory(kinds):
    host = HostPool(model(kinds).layout(1, BLOCK), 64)
    first, second = engine(kinds, connectors=[host]), engine(kinds, connectors=[host])
    tokens = prompt(40)
    for served, loads in ((first, False), (second, True)):
        for given, found in ((tokens, 39 if loads else 0), ((*tokens[:26], 1, 2, 3), 24), (tokens[:24], 23)):
            before = served.prefix_stats.found
            request = served.submit(given, max_tokens=7)
            finish(served)
            check(kinds, request)
            assert served.prefix_stats.found - before == found
        assert (served.prefix_stats.loaded > 0) == loads


@pytest.mark.slow  # compiles the programs of two engines
@on_several_devices
def test_devices_that_divide_heads_or_requests():
    divided = toy_windows.random_model(EVEN, parallel=models.TensorParallel(mesh_of(2), "x"))
    layout = divided.layout(1)
    assert [(group.num_heads, group.table) for group in layout.groups.values()] == [(1, ""), (1, "window")]
    replicas = toy_windows.random_model(EVEN, parallel=models.DataParallel(mesh_of(2), "x"))
    sizes = {"num_blocks": 40, "block_size": BLOCK, "max_requests": 2, "max_len": 48, "chunk": 8}
    for served in (Engine(divided, **sizes), Replicas(replicas, **sizes)):
        requests = [served.submit(prompt(length), max_tokens=8) for length in (9, 31)]
        list(served.run())
        for request in requests:
            check(EVEN, request)


def random_walk(kinds, seed, steps):
    rng = np.random.default_rng(seed)
    served = engine(kinds, 22, connectors=[HostPool(model(kinds).layout(1, BLOCK), 24)])
    requests = []
    for _ in range(steps):
        if len(served.waiting) < 4 and rng.random() < 0.3:
            tokens = (*prompt(40, seed=int(rng.integers(3)))[: rng.integers(1, 41)], *prompt(int(rng.integers(6))))
            priority = int(rng.integers(2))
            requests.append(served.submit(tokens, max_tokens=int(rng.integers(1, 16)), priority=priority))
        if rng.random() < 0.02 and (alive := [*served.waiting, *served.running]):
            served.cancel(alive[rng.integers(len(alive))])
        served.step()
    finish(served, 22)
    for request in requests:
        check(kinds, request)
        assert request.finish_reason == "cancelled" or len(request.generated) == request.max_tokens
    return served.prefix_stats


def test_a_random_walk():
    reuse = random_walk(EVEN, 0, 150)
    assert reuse.found > reuse.tokens / 8
    assert reuse.loaded > 0


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [EVEN, UNEVEN, ALL], ids=["even", "uneven", "all"])
def test_random_walks(kinds):
    for seed in range(1, 21):
        random_walk(kinds, seed, 300)
