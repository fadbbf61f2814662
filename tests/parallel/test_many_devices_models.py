"""Models and the engine on several devices: the tokens are Hugging Face's, whatever the devices divide."""

import shutil
import threading
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models, parallel, serving
from jaxkv.offload import DiskPool, HostPool
from jaxkv.serving.program import run_layers
from jaxkv.serving.step_inputs import Bundle, InputBatch, StepBatches
from support.cases import further
from support.compare import assert_close, assert_same_bits
from support.many_devices import mesh_of, on_several_devices
from support.recorded import FOLDER, recorded

pytestmark = on_several_devices

BLOCK = 16
SMALL = "youtu"
"""Has no experts."""


def tensor(devices):
    return models.TensorParallel(mesh_of(devices), "x")


def context(devices, interleave=1):
    return models.ContextParallel(mesh_of(devices), "x", interleave)


def data(devices):
    return models.DataParallel(mesh_of(devices), "x")


@cache
def load(family, divided=None):
    return models.load(FOLDER / family, parallel=divided)


def serve(engine, family, count=12):
    """Every recorded prompt twice, and its tokens are right; the blocks shared and the requests sent back meanwhile."""
    twice = [pair for pair in recorded(family) for _ in range(2)]
    todo = [(engine.submit(prompt, max_tokens=count, stop=()), right) for prompt, right in twice]
    engines, shared, sent_back = getattr(engine, "engines", [engine]), 0, 0
    while any(one.running or one.waiting for one in engines):
        engine.step()
        for one in engines:
            held = [block for request in one.running for block in request.blocks]
            shared += len(held) - len(set(held))
            sent_back += sum(bool(request.generated) for request in one.waiting)
    for request, right in todo:
        assert request.generated == right[:count]
    assert all(one.pool.num_free == one.pool.num_blocks for one in engines)
    return shared, sent_back


@pytest.mark.parametrize(
    ("family", "divided"),
    [
        pytest.param("deepseek_v32", partial(tensor, 2), id="tensor 2", marks=pytest.mark.ci),
        pytest.param("deepseek_v3", partial(tensor, 4), id="tensor 4", marks=pytest.mark.slow),
        pytest.param("deepseek_v2_lite", partial(context, 2), id="context 2 by token", marks=pytest.mark.slow),
        pytest.param("youtu", partial(context, 8, 2), id="context 8 by block", marks=pytest.mark.slow),
        pytest.param(  # some layers share selected tokens
            "glm5", partial(context, 2, 4), id="sparse context 2", marks=pytest.mark.slow
        ),
        pytest.param("deepseek_v32", partial(context, 2, 4), id="sparse context 2, V3.2", marks=pytest.mark.slow),
        # What these divide is divided in other families, too.
        *(
            pytest.param(family, partial(tensor, 2), id=f"tensor 2, {family}", marks=pytest.mark.slow)
            for family in ("axk1", "glm5", "kimi_k25", "longcat_flash", "mistral4", "qwen3_moe")
        ),
        pytest.param("llama", partial(tensor, 2), id="KV heads"),
        pytest.param("llama", partial(context, 4, 2), id="KV context", marks=pytest.mark.slow),
        pytest.param("gpt_oss", partial(context, 2), id="KV context, windows", marks=pytest.mark.slow),
        pytest.param("gpt_oss", partial(context, 2, 4), id="windows of several lengths", marks=pytest.mark.slow),
    ],
)
def test_the_engine(family, divided):
    # 14 blocks of 16 tokens, which the longest request needs: some wait, some are computed again; requests of one
    # prompt share blocks, and copy the last of them.
    model = load(family, divided())
    shared, sent_back = serve(
        serving.Engine(model, num_blocks=14, block_size=BLOCK, max_requests=4, chunk=64, max_num_batched_tokens=132),
        family,
    )
    assert shared
    assert sent_back


@pytest.mark.ci  # other tests of replicas draw short answers
@pytest.mark.parametrize("family", [SMALL, "llama"])
def test_replicas_serve_the_recorded_prompts(family):
    served = serving.Replicas(
        load(family, data(2)), num_blocks=20, block_size=BLOCK, max_requests=4, chunk=64, max_num_batched_tokens=132
    )
    serve(served, family, count=8)


@pytest.mark.ci
def test_replicas():
    served = serving.Replicas(
        load(SMALL, data(2)), num_blocks=20, block_size=BLOCK, max_requests=4, chunk=64, max_num_batched_tokens=132
    )
    assert [engine.cache.buffer.devices() for engine in served.engines] == [{device} for device in jax.devices()[:2]]
    served.warm_up()
    requests = [served.submit([3, 1, 4], max_tokens=2) for _ in range(4)]
    assert [len(engine.waiting) for engine in served.engines] == [2, 2]
    assert (served.stats.waiting, served.stats.num_blocks, served.stats.free_blocks) == (4, 40, 40)
    served.cancel(requests[3])
    stream = list(served.run())
    assert [len([token for owner, token in stream if owner is request]) for request in requests] == [2, 2, 2, 0]
    assert requests[3].finish_reason == "cancelled"
    with pytest.raises(ValueError, match="neither waits nor runs"):
        served.cancel(requests[0])
    requests = [served.submit([3, 1, 4], max_tokens=4) for _ in range(2)]
    stream = served.run()
    assert next(stream)[0] is requests[0]
    served.cancel(requests[1])
    assert requests[1] not in [request for request, _ in stream]
    with serving.AsyncEngine(served) as threaded:
        streams = [threaded.submit([3, 1, 4], max_tokens=4) for _ in range(3)]
        assert [list(stream) for stream in streams] == 3 * [requests[0].generated]
        assert threaded.stats.running == 0


def test_the_default_block_size_is_divided_evenly():
    described = replace(load(SMALL), parallel=context(3, interleave=2))
    assert described.usual_block_size == 192
    assert described.layout(4).block_size == 64


@pytest.mark.ci
def test_where_a_replica_raises_all_continue(monkeypatch):
    """The others finish their step first, and its tokens are not lost."""
    served = serving.Replicas(
        load(SMALL, data(2)), num_blocks=20, block_size=BLOCK, max_requests=4, chunk=64, max_num_batched_tokens=132
    )
    prompts, right = zip(*recorded(SMALL)[1:3], strict=True)
    requests = [served.submit(prompt, max_tokens=4, stop=()) for prompt in prompts]
    stream = [*served.step(), *served.step()]
    broken, healthy = served.engines
    release, steps = threading.Event(), []

    def slow(schedule, shape, *, batches=healthy.batches):
        assert release.wait(20)
        steps.append(schedule)
        return batches(schedule, shape)

    def failing(*, behind):
        release.set()
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(healthy, "batches", slow)
        patch.setattr(broken, "read", failing)
        with pytest.raises(ZeroDivisionError):
            served.step()
    assert steps
    assert served.waiting == [requests[0]]
    assert healthy.running == [requests[1]]
    assert broken.pool.num_free == 20
    stream += served.run()
    for request, tokens in zip(requests, right, strict=True):
        assert request.generated == tokens[:4]
        assert [token for owner, token in stream if owner is request] == tokens[:4]


def test_a_replica_that_ends_ends_all(monkeypatch):
    served = serving.Replicas(load(SMALL, data(2)), num_blocks=20, block_size=BLOCK, max_requests=4, chunk=64)
    request = served.submit([3, 1, 4])
    cause = RuntimeError("the device is lost")

    def failing(*args, **kwargs):
        raise cause

    monkeypatch.setattr(served.engines[0], "schedule", interrupted)
    monkeypatch.setattr(served.engines[0], "_allocate", failing)
    with pytest.raises(KeyboardInterrupt):
        served.step()
    assert served.waiting == [request]
    calls = served.step, served.run, served.warm_up, lambda: served.submit([1]), lambda: served.cancel(request)
    for call in (*calls, *(engine.step for engine in served.engines)):
        with pytest.raises(RuntimeError, match=r"this engine has ended, .*: RuntimeError: the device is") as found:
            call()
        assert found.value.__cause__ is cause
    for engine in served.engines:
        assert engine.pool.num_free == 20
        assert engine.cache.buffer.is_deleted()


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def step(model, cache, prompts, blocks, columns=64):
    """A prefill of the last `columns` tokens of prompts [B] that have one block each; logits [B, vocab]."""
    rows = [np.asarray(prompt[:columns], np.int32) for prompt in prompts]
    tokens = np.stack([np.pad(row, (columns - len(row), 0)) for row in rows])
    lengths = np.asarray([len(row) for row in rows], np.int32)
    positions = lengths[:, None] - columns + np.arange(columns, dtype=np.int32)
    slots = np.where(positions < 0, -1, np.asarray(blocks)[:, None] * columns + positions).astype(np.int32)
    program = jax.jit(models.prefill, donate_argnums=1)
    return program(model, cache, tokens, lengths, np.asarray(blocks, np.int32)[:, None], slots)


@pytest.mark.ci
def test_data_parallel_batches():
    """Rows are divided, and each device's are in its own cache."""
    divided, family = data(2), SMALL
    prompts = [recorded(family)[i][0] for i in (1, 2, 0, 1)]
    model = load(family, divided)
    _, found = step(model, model.cache(2, 64), prompts, [1, 0] * 2)
    _, right = step(load(family), load(family).cache(4, 64), prompts, range(4))
    assert found.sharding.spec == jax.P("x")
    assert_close(found, np.asarray(right), roundings=256)
    with pytest.raises(ValueError, match=r"`tokens` has 3 rows: expected a multiple of the 2 devices"):
        step(model, model.cache(2, 64), prompts[:3], [0] * 3)


@pytest.mark.parametrize(("family", "devices"), [("deepseek_v3", 4), ("llama", 2)])
def test_every_device_holds_its_share(family, devices):
    whole, divided = load(family), load(family, tensor(devices))
    for (path, array), one in zip(
        jax.tree.leaves_with_path(divided.params), jax.tree.leaves(whole.params), strict=True
    ):
        assert_same_bits(array, one, path)
        name, share = path[-1].key, array.addressable_shards[1].data.size
        is_divided = name in models.parallel.tensor.DIVIDED
        assert share == one.size // (devices if is_divided else 1), path
    sizes = dict(num_blocks=6, block_size=BLOCK)
    one = whole.cache(**sizes).buffer.size
    kinds = (tensor(devices), context(devices))
    held = [
        [shard.data.size for shard in load(family, kind).cache(**sizes).buffer.addressable_shards] for kind in kinds
    ]
    heads = devices if family == "llama" else 1  # of the cache, divided
    assert held == [[one // heads] * devices, [one // devices] * devices]


def test_the_indexer_is_replicated():
    """Its matrix of queries has the name of the attention's."""
    indexer = load("deepseek_v32", tensor(2)).params["layers"][0]["attention"]["indexer"]
    assert {weight.sharding.is_fully_replicated for weight in indexer.values()} == {True}


@pytest.mark.ci
@pytest.mark.parametrize("divided", [further(partial(tensor, 2)), partial(context, 2)], ids=["tensor", "context"])
def test_no_program_copies_the_cache(divided):
    model = load(SMALL, divided())
    cache = model.cache(2**13)
    layout = cache.layout
    assert layout.nbytes > 100e6
    rows = InputBatch.of([], 4, 1, tables={"": np.full((4, 8), -1, np.int32)}, block_size=64)
    inputs = Bundle.of(StepBatches(None, rows))
    program = jax.jit(run_layers, donate_argnums=1).lower(model, cache, np.zeros(4, np.int32), inputs)
    memory = program.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= layout.nbytes
    assert memory.temp_size_in_bytes < layout.nbytes / 10


class TestTransferBlocks:
    """Prefill on devices 0 and 1, decode on others."""

    def decoding(self, first, second, family=SMALL):
        prompts = [prompt for prompt, _ in recorded(family)[1:3]]
        here, there = load(family, first), load(family, second)
        cache, logits = step(here, here.cache(4, 64), prompts, [2, 0])
        target = parallel.transfer_blocks(cache, [2, 0], there.cache(5, 64), [4, 1])
        first = np.asarray(logits).argmax(-1).astype(np.int32)
        lengths = np.asarray([64, 65], np.int32)
        tables = np.asarray([[4, 0], [1, 3]], np.int32)
        slots = np.asarray([4 * 64 + 63, 3 * 64], np.int32)
        _, logits = jax.jit(models.decode, donate_argnums=1)(there, target, first, lengths, tables, slots)
        second = np.asarray(logits).argmax(-1)
        return [pair.tolist() for pair in np.stack([first, second], 1)]

    def right(self, family=SMALL):
        return [right[:2] for _, right in recorded(family)[1:3]]

    def test_between_two_devices(self):
        (last,) = mesh_of(1, first=7).devices
        layout = load(SMALL).layout(4, BLOCK)
        values = np.random.default_rng(0).standard_normal(layout.size).astype(layout.dtype)
        source = jaxkv.KVCache(jax.device_put(values, jax.devices()[0]), layout)
        target = jaxkv.KVCache.zeros(layout, device=last)
        found = parallel.transfer_blocks(source, [3, 0], target, [1, 2])
        assert found.buffer.devices() == {last}
        right = jaxkv.write_blocks(
            jaxkv.KVCache.zeros(layout), jnp.asarray([1, 2]), jaxkv.read_blocks(source, jnp.asarray([3, 0]))
        )
        assert_same_bits(found.buffer, right.buffer)

    @pytest.mark.ci
    def test_tensor_parallel(self):
        others = mesh_of(4, first=2, axis="y")
        assert self.decoding(tensor(2), models.TensorParallel(others, "y")) == self.right()

    @pytest.mark.ci
    def test_tensor_parallel_heads_of_the_cache(self):
        others = mesh_of(2, first=2, axis="y")
        found = self.decoding(tensor(2), models.TensorParallel(others, "y"), "llama")
        assert found == self.right("llama")

    @pytest.mark.ci
    def test_context_parallel(self):
        others = mesh_of(2, first=6, axis="y")
        assert self.decoding(context(2, 16), models.ContextParallel(others, "y", 16)) == self.right()

    @pytest.mark.parametrize("interleave", [1, 8])
    def test_between_other_divisions_of_tokens(self, interleave):
        """The blocks have as many bytes, but hold other tokens of a request."""
        model, before = load(SMALL), context(2, 16)
        source = replace(model, parallel=before).cache(4, 64)
        after = models.ContextParallel(mesh_of(2, first=6, axis="y"), "y", interleave)
        target = replace(model, parallel=after).cache(4, 64)
        message = rf"`shards` is .*interleave=16\) in `source` and .*interleave={interleave}\) in `target`"
        with pytest.raises(ValueError, match=message):
            parallel.transfer_blocks(source, [0], target, [0])
        assert source.layout.fingerprint != target.layout.fingerprint

    def test_between_caches_of_requests_and_of_tokens(self):
        """As many caches: of 4 devices with requests of their own, or of 2 times 2 and 4 that divide tokens."""
        mesh, layout = mesh_of(4), load(SMALL).layout(4, BLOCK)
        square = jax.make_mesh((2, 2), ("a", "b"), devices=mesh.devices.reshape(-1))
        caches = [
            parallel.zeros(replace(layout, shards=jaxkv.TokenShards(shards)), *where)
            for shards, where in ((1, (mesh, "x")), (2, (square, ("a", "b"))), (4, (mesh, "x")))
        ]
        for source in caches:
            for target in caches:
                if source is not target:
                    with pytest.raises(ValueError, match=r"`shards` is .* in `source` and .* in `target`"):
                        parallel.transfer_blocks(source, [0], target, [0])

    def test_over_other_numbers_of_devices(self):
        layout = load(SMALL).layout(4, BLOCK)
        source, target = (parallel.zeros(layout, mesh_of(devices), "x") for devices in (2, 4))
        with pytest.raises(ValueError, match=r"`target` is divided over 4 devices: expected as many as `source`, 2"):
            parallel.transfer_blocks(source, [0], target, [0])

    @pytest.mark.ci
    def test_of_other_blocks(self):
        source, target = (load(SMALL).cache(4, block_size) for block_size in (16, 32))
        sizes = {name: getattr(source.layout, name) for name in ("num_layers", "num_blocks", "block_size", "entry")}
        padded = jaxkv.CacheLayout(**sizes, block_padding=8)
        with pytest.raises(ValueError, match="`block_size` is 16 in `source` and 32 in `target`"):
            parallel.transfer_blocks(source, [0], target, [0])
        with pytest.raises(ValueError, match=r"same entries as `source` in another order.*convert_blocks"):
            parallel.transfer_blocks(source, [0], jaxkv.KVCache.zeros(padded), [0])

    def test_of_blocks_with_other_groups(self):
        """The group that both view is the same, and so are the bytes of a block."""
        entries = [jaxkv.MLAEntry("bf16", 8, 4), *(jaxkv.IndexerEntry(kind, 16) for kind in ("bf16", "f16"))]
        latent, *others = (jaxkv.Group(2, entry) for entry in entries)
        sizes = dict(num_blocks=4, block_size=4, dtype="uint8")
        ours, theirs = (jaxkv.PackedLayout(**sizes, groups={"latent": latent, "keys": keys}) for keys in others)
        alone = jaxkv.CacheLayout(num_layers=2, num_blocks=4, block_size=4, entry=latent.entry, dtype="uint8")
        message = f"`target` has other groups packed in its blocks than `source`.*{ours.fingerprint}, `target` has "
        for layout, has in ((theirs["latent"], f"those of .*{theirs.fingerprint}"), (alone, "one group")):
            source, target = jaxkv.KVCache.zeros(ours["latent"]), jaxkv.KVCache.zeros(layout)
            with pytest.raises(ValueError, match=message + has):
                parallel.transfer_blocks(source, [0], target, [0])
        more = jaxkv.PackedLayout(**sizes | {"num_blocks": 7}, groups={"latent": latent, "keys": others[0]})
        parallel.transfer_blocks(source, [0], jaxkv.KVCache.zeros(more["keys"]), [6])

    @pytest.mark.parametrize(
        ("source", "target", "message"),
        [
            ([0.5], [0], r"`source_blocks` is \[0.5\]: expected block ids"),
            ([0], [0, 1], "`target_blocks` has 2 ids: expected as many as `source_blocks`, 1"),
            ([4], [0], "`source_blocks` contains 4: expected block ids of the cache, from 0 to 3"),
            ([0], [-1], "`target_blocks` contains -1: expected block ids of the cache, from 0 to 3"),
            ([2**32], [0], f"`source_blocks` contains {2**32}: expected"),
            ([0, 1], [2, 2], "`target_blocks` contains 2 more than once"),
        ],
    )
    def test_ids_that_do_not_fit(self, source, target, message):
        ours = load(SMALL).cache(4, 16)
        with pytest.raises(ValueError, match=message):
            parallel.transfer_blocks(ours, source, ours, target)

    def test_what_is_no_cache(self):
        ours = load(SMALL).cache(4, 16)
        with pytest.raises(ValueError, match=r"`source` is float32\[.*\]: expected a KVCache"):
            parallel.transfer_blocks(ours.buffer, [0], ours, [0])
        with pytest.raises(ValueError, match="`target` is None: expected a KVCache"):
            parallel.transfer_blocks(ours, [0], None, [0])

    def test_of_no_blocks(self):
        ours = load(SMALL).cache(4, 16)
        before = np.asarray(ours.buffer)
        assert_same_bits(parallel.transfer_blocks(load(SMALL).cache(4, 16), [], ours, []).buffer, before)


def test_a_model_rejects_a_cache_of_other_tokens():
    """The engine's keys of prefixes differ, too."""
    ours, theirs = (replace(load(SMALL), parallel=context(2, interleave)) for interleave in (8, 1))
    args = np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=r"`cache` has tokens of .*interleave=1\): expected .*interleave=8\)"):
        models.decode(ours, theirs.cache(4, BLOCK), *args)
    prints = [one.layout(4, BLOCK).fingerprint for one in (ours, theirs, replace(ours, parallel=context(4, 2)))]
    assert len({*prints, load(SMALL).layout(4, BLOCK // 2).fingerprint}) == 4
    engines = [serving.Engine(load(SMALL, context(2, n)), num_blocks=4, block_size=BLOCK) for n in (8, 1)]
    requests = [engine.submit([1] * BLOCK, max_tokens=1) for engine in engines]
    for engine, request in zip(engines, requests, strict=True):
        engine.block_manager.extend_keys(request)
    assert requests[0].keys_of("") != requests[1].keys_of("")


WRONG = {
    "heads": (lambda: load("deepseek_v3", tensor(3)), ["`parallel`", "3 devices", "num_heads is 4"]),
    "KV heads": (lambda: load("llama", tensor(3)), ["`parallel`", "3 devices", "num_kv_heads is 2"]),
    "inner values": (
        lambda: models.random_model(replace(load(SMALL).config, intermediate_size=63), parallel=tensor(2)),
        ["`parallel`", "2 devices", "intermediate_size is 63"],
    ),
    "blocks": (lambda: load("youtu", context(8, 4)).cache(4, 16), ["`block_size` is 16", "8 devices", "interleave 4"]),
    "no interleave": (lambda: context(2, 0), ["`interleave`", "0", "positive"]),
    "no way to divide": (lambda: load(SMALL, "tensor"), ["`parallel`", "'tensor'", "expected"]),
    "no axis": (lambda: models.TensorParallel(mesh_of(2), "y"), ["`axis`", "'y'", "x"]),
    "an engine of data": (lambda: serving.Engine(load("deepseek_v3", data(2)), num_blocks=4), ["`model`", "Replicas"]),
    "replicas of one pool": (
        lambda: serving.Replicas(load(SMALL, data(2)), num_blocks=4, connectors=[object()]),
        ["`connectors`", "several engines cannot share them"],
    ),
    "replicas of heads": (
        lambda: serving.Replicas(load("deepseek_v3", tensor(4)), num_blocks=4),
        ["`model`", "TensorParallel", "DataParallel", "Engine"],
    ),
}


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_models_that_cannot_be_divided_are_rejected(call, words):
    with pytest.raises(ValueError, match=r"^`") as refusal:
        call()
    for word in words:
        assert word in str(refusal.value), refusal.value


@pytest.mark.parametrize(
    ("family", "divided"),
    [
        ("llama", tensor(2)),  # each device has its heads
        (SMALL, context(2, 8)),  # and its tokens
        further("deepseek_v3", tensor(4)),  # each device has whole blocks
        further("llama", context(4, 2)),
    ],
    ids=str,
)
def test_blocks_of_several_devices_come_back_from_each_connector(family, divided, tmp_path):
    model, one = load(family, divided), load(family).layout(1, BLOCK)
    layout, devices = model.layout(1, BLOCK), model.cache_devices

    def pools():
        disk = DiskPool(tmp_path, layout, model=models.fingerprint(model), devices=devices)
        return HostPool(layout, 32, disk=disk, devices=devices)

    def served(*connectors):
        sizes = {"num_blocks": 32, "block_size": BLOCK, "max_requests": 2, "chunk": 64}
        return serving.Engine(model, **sizes, connectors=connectors)

    def found(engine):
        (prompt, right), before = recorded(family)[-1], engine.prefix_stats.found
        request = engine.submit(prompt, max_tokens=8, stop=())
        list(engine.run())
        assert request.generated == right[:8]
        assert engine.pool.num_free == 32
        return engine.prefix_stats.found - before

    host = pools()
    assert host.block_nbytes == one.block_nbytes  # each device stores its part, and whole blocks are stored once
    first = served(host)
    assert found(first) == 0
    exported = first.export(recorded(family)[-1][0])
    second = served(host)
    assert found(second) == second.prefix_stats.loaded == 192
    host.flush()
    host = pools()
    third = served(host)
    assert found(third) == third.prefix_stats.loaded == 192
    assert host.stats.read == 12
    fourth = served()
    assert fourth.adopt(replace(exported, rows=np.asarray(exported.rows))) == 200
    assert found(fourth) == 199


def test_connectors_of_another_number_of_devices_are_rejected(tmp_path):
    model = load("llama", tensor(2))
    layout = model.layout(4, BLOCK)
    with pytest.raises(ValueError, match=r"`connectors\[0\]` has blocks .* over 1 devices: expected `devices=2`"):
        serving.Engine(model, num_blocks=4, block_size=BLOCK, connectors=[HostPool(layout, 4)])
    with pytest.raises(ValueError, match="`disk` holds blocks that are divided over 1 devices: expected 2, `devices`"):
        HostPool(layout, 4, disk=DiskPool(tmp_path, layout, model="llama"), devices=2)
    with pytest.raises(ValueError, match="those of the pool over 1: expected a pool with `devices=2`"):
        HostPool(layout, 4).store(model.cache(4, BLOCK), [0], [b"key"])
    shares = load(SMALL, context(2, 8)).layout(4, BLOCK)
    with pytest.raises(ValueError, match="`devices` is 3: expected 2, because a block has the shares of all devices"):
        HostPool(shares, 4, devices=3)


def test_pools_with_other_parts_than_those_of_this_process_are_rejected(tmp_path):
    model = load("llama", tensor(2))
    layout = model.layout(4, BLOCK)
    assert model.cache_parts == (0, 1)
    assert load(SMALL, tensor(2)).cache_parts == load(SMALL).cache_parts == (0,)
    pool = HostPool(layout, 4, devices=2, parts=[1])
    assert pool.row.size * 2 == HostPool(layout, 4, devices=2, parts=model.cache_parts).row.size
    wrong = r"has the parts \(1,\) of 2, and the devices of this process have \(0, 1\): expected `parts=\(0, 1\)`"
    with pytest.raises(ValueError, match=f"the pool {wrong}"):
        pool.store(model.cache(4, BLOCK), [0], [b"key"])
    with pytest.raises(ValueError, match=rf"`connectors\[0\]` {wrong}"):
        serving.Engine(model, num_blocks=4, block_size=BLOCK, connectors=[pool])
    disk = DiskPool(tmp_path, layout, model="llama", devices=2, parts=[0])
    with pytest.raises(ValueError, match=r"`disk` has the parts \(0,\) of blocks: expected \(1,\), `parts`"):
        HostPool(layout, 4, disk=disk, devices=2, parts=[1])
    for parts in ([], [2], [-1], [1, 0], [0, 0], ["0"]):
        for make in (partial(HostPool, layout, 4), partial(DiskPool, tmp_path, layout, model="llama")):
            with pytest.raises(ValueError, match=r"^`parts` is .* and `devices` 2: expected one or more of the parts"):
                make(devices=2, parts=parts)


def test_files_with_other_parts_of_a_block_are_absent(tmp_path):
    layout = load("llama", tensor(2)).layout(4, BLOCK)

    def disk(**parts):
        return DiskPool(tmp_path, layout, model="llama", **parts)

    first = disk(devices=2, parts=[0])
    row = np.zeros(HostPool(layout, 1, devices=2, parts=[0]).row.shape, load("llama").layout(1).dtype)
    first.store(b"key", row)
    others = [disk(devices=2, parts=[1]), disk(devices=4, parts=[0]), disk(), disk(devices=2)]
    assert len({pool.file(b"key") for pool in (first, *others)}) == 4  # the last two have all parts of the layout
    for other in others:
        assert b"key" not in other
        shutil.copy(first.file(b"key"), other.file(b"key"))
        reopened = disk(devices=other.devices, parts=other.parts)
        assert b"key" in reopened
        with pytest.raises(KeyError):
            reopened.load(b"key")
    assert b"key" in disk(devices=2, parts=[0])
    assert HostPool(layout, 1, devices=2, parts=[0]).fingerprint != HostPool(layout, 1, devices=2).fingerprint
