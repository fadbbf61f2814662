"""One of two processes that share requests' tokens, and a model's heads; `test_parallel.py` starts both.

python two_processes.py ADDRESS NUMBER
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import models, parallel, serving
from jaxkv.parallel import context
from support.compare import assert_close

MODEL = Path(__file__).parents[1] / "data" / "models" / "deepseek_v3"
HEADS, TOKENS, BLOCK, INTERLEAVE = 4, 20, 4, 2
LENGTHS = np.asarray([0, 1, 2, 7, TOKENS], np.int32)

rng = np.random.default_rng(0)  # the same numbers in both
entry = jaxkv.MLAEntry("f32", latent=32, rope=8)
tables = rng.permutation(25).reshape(5, 5).astype(np.int32)
new = [rng.standard_normal((TOKENS, 5, n)).astype(np.float32) for n in entry.sizes]
queries = [rng.standard_normal((TOKENS, 5, HEADS, n)).astype(np.float32) for n in entry.sizes]
layout = jaxkv.CacheLayout(num_layers=2, num_blocks=25, block_size=BLOCK, entry=entry)


def generate(cache, slots_of, decode):
    """Every request, token by token: each is written, and attends to all so far.  Results [TOKENS, 5, HEADS, 32]."""

    def step(cache, inputs):
        position, new, q = inputs
        lengths = jnp.minimum(position + 1, LENGTHS)
        slots = slots_of(tables, jnp.where(position < LENGTHS, position, -1)[:, None])[:, 0]
        cache = jaxkv.write_mla(cache, *new, slots, layer=1)
        return cache, decode(*q, cache, tables, lengths, layer=1, scale=0.1)

    return jax.lax.scan(step, cache, (jnp.arange(TOKENS, dtype=jnp.int32), new, queries))[1]


def on_one_device():
    return generate(jaxkv.KVCache.zeros(layout), partial(jaxkv.slots_for, cache=layout), jaxkv.decode_mla)


def on_a_share(cache):
    return generate(
        cache,
        lambda *args: context.local_slots(*args, layout=cache.layout, shard=jax.lax.axis_index("x")),
        lambda *args, **keywords: context.decode_mla(*args, axis="x", **keywords),
    )


def main(address, number):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, num_processes=2, process_id=int(number), initialization_timeout=60)
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    shares = replace(layout, shards=jaxkv.TokenShards(mesh.size, INTERLEAVE))
    cache = parallel.zeros(shares, mesh, "x")
    assert not cache.buffer.is_fully_addressable
    on_shares = jax.shard_map(on_a_share, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    found = jax.jit(on_shares)(cache)
    assert_close(np.asarray(found), np.asarray(jax.jit(on_one_device)()), roundings=64, magnitude=1)
    send_blocks(mesh)
    model = models.load(MODEL, parallel=models.TensorParallel(mesh, "x"))
    engine = serving.Engine(model, num_blocks=4, max_requests=2)
    with np.load(MODEL / "truth.npz") as truth:
        prompt, right = truth["prompts"][1, :63].tolist(), truth["tokens"][1, :8].tolist()
    requests = [engine.submit([*prompt, *right[:known]], max_tokens=8 - known) for known in (0, 4)]
    list(engine.run())
    assert [request.tokens for request in requests] == [prompt + right] * 2
    serve_from_process_0(model, int(number))
    serve_own_requests(mesh, int(number))
    print("equal")


def send_blocks(mesh):
    """Blocks of each device, to the next one: half of them to the other process."""
    rows = np.arange(mesh.size * layout.size, dtype=np.float32).reshape(mesh.size, layout.num_blocks, -1)
    perm = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def permuted(cache):
        ids = jnp.asarray([[3, 0, 24], [1, 3, 7]])
        return parallel.permute_blocks(cache, *ids, perm, axis="x", pieces=2)

    buffer = jax.make_array_from_callback((rows.size,), NamedSharding(mesh, P("x")), lambda at: rows.reshape(-1)[at])
    found = permuted(jaxkv.KVCache(buffer, layout)).buffer
    right = rows.copy()
    for sender, receiver in perm:
        right[receiver, [1, 3, 7]] = rows[sender, [3, 0, 24]]
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, right.reshape(-1)[shard.index])


def serve_from_process_0(model, number):
    """One process takes requests, and the other follows, with chunks, priorities, preemption, samples and an end."""
    sizes = {"num_blocks": 24, "block_size": 16, "max_requests": 3, "chunk": 16, "max_num_batched_tokens": 35}
    engine = serving.Engine(model, **sizes)
    if number:
        serving.follow(engine)
        assert not engine.unfinished
        return
    with np.load(MODEL / "truth.npz") as truth:
        columns = (truth[name].tolist() for name in ("prompts", "prompt_lens", "tokens"))
        pairs = [(prompt[:length], tokens[:24]) for prompt, length, tokens in zip(*columns, strict=True)]
    leader = serving.Leader(engine)
    requests = [leader.submit(prompt, max_tokens=24, stop=()) for prompt, _ in pairs[:2]]
    for step in range(400):
        leader.step()
        if step == 4:
            requests += [leader.submit(prompt, max_tokens=24, stop=(), priority=1) for prompt, _ in pairs[2:]]
            sampled = leader.submit(pairs[0][0], max_tokens=8, sampling=models.Sampling(1.0, seed=3), cache_salt="a")
            ended = leader.submit(pairs[1][0], max_tokens=24, stop=())
        if step == 16:
            leader.cancel(ended, finish_reason="enough")
        if step > 16 and not leader.unfinished:
            break
    leader.close()
    assert [request.generated for request in requests] == [tokens for _, tokens in pairs]
    assert (len(sampled.generated), ended.finish_reason) == (8, "enough")
    assert engine.pool.num_free == 24


def serve_own_requests(mesh, number):
    """The processes divide the experts, and each has requests of its own: one of them more, or none."""
    model = models.load(MODEL, dtype="float32", parallel=models.DataExpertParallel(mesh, "x"))
    replicas = serving.Replicas(model, num_blocks=24, block_size=16, max_requests=2, chunk=16)
    with np.load(MODEL / "truth.npz") as truth:
        columns = (truth[name].tolist() for name in ("prompts", "prompt_lens", "tokens"))
        pairs = [(prompt[:length], tokens[:24]) for prompt, length, tokens in zip(*columns, strict=True)]
    for own in [pairs[:3], pairs[3:]][number], [[], pairs[:1]][number]:
        requests = [replicas.submit(prompt, max_tokens=24, stop=()) for prompt, _ in own]
        list(replicas.run())
        assert [request.generated for request in requests] == [tokens for _, tokens in own]
    assert all(engine.pool.num_free == 24 for engine in replicas.engines)
    if number:
        replicas.engines[0].schedule = None
    expected = "'NoneType' object is not callable" if number else "process 1 has ended its engine"
    with pytest.raises((TypeError, RuntimeError), match=expected):
        replicas.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
