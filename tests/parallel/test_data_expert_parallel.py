"""Requests and experts divided over the same devices: tokens are Hugging Face's, whatever way they are exchanged."""

import json
import re
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType

import jaxkv
from jaxkv import models, serving
from jaxkv.models.parallel import exchange
from jaxkv.models.parallel.expert import local_experts
from jaxkv.models.sampling import Sampling, SamplingBatch
from models.checkpoints.mtp import with_mtp
from serving.toy_engines import join_compilers
from support.cases import each_value, further, slow
from support.compare import assert_close, assert_same_bits
from support.many_devices import mesh_of, on_several_devices
from support.recorded import FOLDER, recorded

pytestmark = on_several_devices

BLOCK = 64


def divided(devices):
    return models.DataExpertParallel(mesh_of(devices), "x")


def with_24_experts(folder, family):
    """The recorded checkpoint with 12 more experts, which are never chosen: 8 devices then have 3 each.

    Every second expert of a group is new.  The bias of its scores is so low that it is neither chosen nor counted for
    its group.
    """
    shutil.copytree(FOLDER / family, folder, ignore=shutil.ignore_patterns("truth.npz"), dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["n_routed_experts"] == 12
    (folder / "config.json").write_text(json.dumps({**config, "n_routed_experts": 24}))
    weights = {}
    for name, weight in safetensors.numpy.load_file(folder / "model.safetensors").items():
        expert = re.fullmatch(r"(.*\.mlp\.experts\.)(\d+)(\..*)", name)
        if expert:
            for copy in (0, 1):
                weights[f"{expert[1]}{2 * int(expert[2]) + copy}{expert[3]}"] = weight
        elif ".mlp.gate." in name:
            new = np.full_like(weight, -1e4) if "bias" in name else weight
            weights[name] = np.stack([weight, new], 1).reshape(24, *weight.shape[1:])
        else:
            weights[name] = weight
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


def generate(model, prompts, count):
    """`count` tokens of each prompt, in as many rows as devices need; each row has the same blocks of its own cache."""
    devices = model.parallel.divisions_of_rows
    rows = -(-len(prompts) // devices) * devices
    columns = max(map(len, prompts))
    blocks = -(-(columns + count) // BLOCK)
    # Rows of one device follow each other, and need different blocks.
    share = rows // devices
    tables = np.arange(share * blocks).reshape(share, blocks)[np.arange(rows) % share].astype(np.int32)
    lengths = np.asarray([len(prompt) for prompt in prompts] + [0] * (rows - len(prompts)), np.int32)
    tokens = np.zeros((rows, columns), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, columns - len(prompt) :] = prompt

    def slots(lengths, new):
        positions = lengths[:, None] - new + np.arange(new)
        return np.where(
            (positions >= 0) & (lengths > 0)[:, None],
            np.take_along_axis(tables, np.maximum(positions, 0) // BLOCK, axis=1) * BLOCK + positions % BLOCK,
            -1,
        ).astype(np.int32)

    prefill, decode = (jax.jit(step, donate_argnums=1) for step in (models.prefill, models.decode))
    cache, logits = prefill(model, model.cache(share * blocks, BLOCK), tokens, lengths, tables, slots(lengths, columns))
    found = [np.asarray(logits).argmax(-1).astype(np.int32)]
    for _ in range(count - 1):
        lengths = np.where(lengths > 0, lengths + 1, 0).astype(np.int32)
        cache, logits = decode(model, cache, found[-1], lengths, tables, slots(lengths, 1)[:, 0])
        found.append(np.asarray(logits).argmax(-1).astype(np.int32))
    return np.stack(found, 1)[: len(prompts)].tolist()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "room"),
    [slow("deepseek_v32", None), ("deepseek_v3", 5), slow("deepseek_v3", None), slow("deepseek_v32", 5)],
)
def test_tokens_on_eight_devices(family, room, tmp_path, monkeypatch):
    """Tokens are gathered, or sent: with room for 5 tokens per pair of devices, a prefill takes several rounds."""
    monkeypatch.setattr(exchange, "capacity", lambda *sizes: room)
    prompts, right = zip(*recorded(family), strict=True)
    model = models.load(with_24_experts(tmp_path, family), dtype="float32", parallel=divided(8))
    assert generate(model, prompts, 12) == [tokens[:12] for tokens in right]


@pytest.mark.slow  # more devices, with more experts, are above
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("family", ["deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "longcat_flash"])
def test_tokens_with_several_requests_per_device(family, devices):
    prompts, right = zip(*recorded(family), strict=True)
    model = models.load(FOLDER / family, dtype="float32", parallel=divided(devices))
    assert generate(model, prompts, 12) == [tokens[:12] for tokens in right]


DEVICES, EXPERTS, CHOSEN, WIDTH, INNER = 8, 16, 3, 8, 4


def exchanged(function, tokens, chosen, shares, matrices):
    """The results of all tokens, by `function(experts, tokens, chosen, shares)` on each device."""

    def on_each(tokens, chosen, shares, *matrices):
        def experts(tokens, chosen, shares):
            return jaxkv.grouped_swiglu(tokens, local_experts(chosen, EXPERTS, "x"), shares, *matrices)

        return function(experts, tokens, chosen, shares)

    mesh = mesh_of(DEVICES, axis_type=AxisType.Auto)
    specs = (jax.P("x"),) * (3 + len(matrices))
    program = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=jax.P("x"), check_vma=False))
    return program, (tokens, chosen, shares, *matrices)


def sizes(each, choose):
    """Tokens, experts, weights and matrices; `choose(rng)` draws a token's experts."""
    rng = np.random.default_rng(each)
    tokens = rng.standard_normal((DEVICES * each, WIDTH)).astype(np.float32)
    chosen = np.stack([choose(rng) for _ in tokens]).astype(np.int32)
    shares = rng.random(chosen.shape, np.float32)
    shapes = ((EXPERTS, INNER, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    return tokens, chosen, shares, [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def evenly(rng):
    return rng.permutation(EXPERTS)[:CHOSEN]


def with_skipped_ids(rng):
    return [-1, *rng.permutation(EXPERTS)[: CHOSEN - 2], -1]


def to_one_device(rng):
    return [14, 15, rng.integers(14)]


SENT = partial(exchange.sent, axis="x", held=EXPERTS // DEVICES)
WAYS = {
    "gathered": partial(exchange.gathered, axis="x"),
    "many rounds": partial(SENT, capacity=1),
    "several rounds": partial(SENT, capacity=7),
    "one round": partial(SENT, capacity=20),
    "more room than tokens": partial(SENT, capacity=64),
}


@each_value(("way", "choose"), [*WAYS], [evenly, with_skipped_ids, to_one_device])
def test_no_token_is_dropped(way, choose):
    tokens, chosen, shares, matrices = sizes(20, choose)
    right = jaxkv.grouped_swiglu(tokens, chosen, shares, *matrices)
    program, arguments = exchanged(WAYS[way], tokens, chosen, shares, matrices)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = program(*arguments)
    assert_close(found, np.asarray(right), roundings=64)


@pytest.mark.parametrize("way", ["gathered", "one round"])
def test_weights_of_experts_have_no_gradients(way):
    tokens, chosen, shares, matrices = sizes(20, evenly)
    program, (tokens, chosen, shares, *matrices) = exchanged(WAYS[way], tokens, chosen, shares, matrices)
    with pytest.raises(NotImplementedError, match="where devices exchange them as integers"):
        jax.jvp(lambda shares: program(tokens, chosen, shares, *matrices), (shares,), (shares,))


@pytest.mark.parametrize("way", ["gathered", "one round"])
def test_collectives(way):
    """What the table of jaxkv/models/README.md says."""
    program, arguments = exchanged(WAYS[way], *sizes(20, evenly))
    text = program.lower(*arguments).as_text()
    count = {name: len(re.findall(rf'"stablehlo.{name}"', text)) for name in ("all_gather", "reduce_scatter")}
    count["all_to_all"] = len(re.findall(r'"stablehlo.all_to_all"', text))
    # Routing and tokens; the loop of rounds has a third all-to-all, for results, and the number of rounds is agreed on.
    assert count == (
        {"all_gather": 2, "reduce_scatter": 1, "all_to_all": 0}
        if way == "gathered"
        else {"all_gather": 0, "reduce_scatter": 0, "all_to_all": 3}
    )


@pytest.mark.parametrize(
    ("tokens", "per_token", "devices", "room"),
    [
        (16, 8, 32, None),  # collectives of so few tokens take as long as they take to start
        (1, 8, 2048, None),  # there is no less than one
        (4096, 8, 8, None),  # most devices have an expert of a token
        (4096, 8, 16, None),
        (4096, 8, 18, 1996),
        (512, 8, 32, 176),
        (4096, 8, 64, 673),
        (16, 8, 256, 3),
    ],
)
def test_tokens_are_sent_if_that_moves_half_the_bytes(tokens, per_token, devices, room):
    assert exchange.capacity(tokens, per_token, devices) == room
    if room is not None:
        assert 2 * room <= tokens


def test_every_device_holds_its_experts_and_all_else():
    whole = models.load(FOLDER / "deepseek_v3")
    model = models.load(FOLDER / "deepseek_v3", parallel=divided(4))
    stacks = 0
    for (path, array), one in zip(jax.tree.leaves_with_path(model.params), jax.tree.leaves(whole.params), strict=True):
        assert_same_bits(array, one, path)
        share = array.addressable_shards[0].data
        if any(getattr(key, "key", None) == "experts" for key in path):
            stacks += 1
            assert share.shape == (3, *one.shape[1:])
        else:
            assert share.shape == one.shape
    assert stacks == 6
    sizes = dict(num_blocks=6, block_size=16)
    one = whole.cache(**sizes).buffer.size
    assert [shard.data.size for shard in model.cache(**sizes).buffer.addressable_shards] == [one] * 4


SIZES = dict(num_blocks=14, block_size=16, max_requests=2, chunk=16, max_num_batched_tokens=38)


class TestServing:
    @pytest.mark.parametrize(("family", "devices"), [further("deepseek_v3", 4), slow("deepseek_v32", 2)])
    def test_replicas_serve_the_recorded_prompts(self, family, devices):
        """Engines have different numbers of requests, and some have none while others prefill."""
        model = models.load(FOLDER / family, dtype="float32", parallel=divided(devices))
        served = serving.Replicas(model, **SIZES)
        served.warm_up()
        assert [engine.cache.buffer.devices() for engine in served.engines] == [{x} for x in jax.devices()[:devices]]
        prompts, right = zip(*recorded(family), strict=True)
        order = [4, 0, 1, 2, 3, 0, 2]
        requests = [served.submit(prompts[i], max_tokens=8 + i, stop=()) for i in order]
        stream = list(served.run())
        for i, request in zip(order, requests, strict=True):
            assert request.generated == right[i][: 8 + i]
            assert [token for owner, token in stream if owner is request] == request.generated
        for engine in served.engines:
            assert not engine.running
            assert engine.pool.num_free == engine.pool.num_blocks

    @pytest.mark.parametrize(
        ("parallel", "drafts"),
        [
            further(models.DataExpertParallel, serving.MTP(2)),
            slow(models.DataParallel, serving.MTP(2)),
            slow(models.DataExpertParallel, serving.NGram(2, prompt_lookup_min=1)),
        ],
    )
    def test_replicas_draft(self, parallel, drafts, tmp_path):
        folder, _ = with_mtp(tmp_path)
        model = models.load(folder, mtp=True, parallel=parallel(mesh_of(2), "x"))
        served = serving.Replicas(model, drafts=drafts, **SIZES)
        served.warm_up()
        prompts, right = zip(*recorded("deepseek_v3"), strict=True)
        requests = [served.submit(prompt, max_tokens=8, stop=()) for prompt in (*prompts[:4], prompts[0])]
        list(served.run())
        assert [request.generated for request in requests] == [tokens[:8] for tokens in (*right[:4], right[0])]
        for engine in served.engines:
            assert engine.acceptance.drafted > 0
            assert engine.pool.num_free == engine.pool.num_blocks

    @pytest.mark.ci
    def test_requests_join_while_others_run(self):
        model = models.load(FOLDER / "deepseek_v2_lite", dtype="float32", parallel=divided(2))
        served = serving.Replicas(model, max_time_between_tokens=1e-9, **SIZES)
        served.warm_up(wait=False)
        prompts, right = zip(*recorded("deepseek_v2_lite"), strict=True)
        first = served.submit(prompts[0], max_tokens=12, stop=())

        def places():
            return [engine.cache.buffer.unsafe_buffer_pointer() for engine in served.engines]

        before = places()
        for _ in range(4):
            served.step()
        assert places() == before  # caches are updated in place
        cancelled, second = (served.submit(prompts[i], max_tokens=6, stop=()) for i in (1, 2))
        served.step()
        served.cancel(cancelled)
        list(served.run())
        assert first.generated == right[0][:12]
        assert second.generated == right[2][:6]
        assert cancelled.finish_reason == "cancelled"
        assert served.step() == []  # nothing is left
        join_compilers()
        assert {*served.engines[1].buckets.ready} == {*served.engines[1].buckets.shapes}
        # All engines are in every step, and wait together.
        times, total = [engine.host_time for engine in served.engines], served.stats.host_time
        assert times[0] == times[1]
        assert (total.step_ms, total.busy_ms) == (times[0].step_ms, times[0].busy_ms)
        assert times[0].steps > 12
        assert 0 < times[0].waited < times[0].seconds
        # After an exception in one engine all are restored: one program steps them, and donates all caches.
        requests = [served.submit(prompts[i], max_tokens=4, stop=()) for i in (1, 2, 0)]
        stream = [*served.step(), *served.step()]
        served.engines[1].launched = None
        with pytest.raises(TypeError):
            served.step()
        del served.engines[1].launched
        assert sorted(map(id, served.waiting)) == sorted(map(id, requests))
        for engine in served.engines:
            assert engine.pool.num_free == engine.pool.num_blocks
        stream += served.run()
        for i, request in zip((1, 2, 0), requests, strict=True):
            assert request.generated == right[i][:4]
            assert [token for owner, token in stream if owner is request] == right[i][:4]


@pytest.mark.slow  # the MTP layer is a decoder layer like others
def test_drafts(tmp_path):
    folder, _ = with_mtp(tmp_path)
    prompt, table = jnp.asarray([[5, 7, 11, 2]] * 4), jnp.zeros((4, 1), jnp.int32)
    lengths, slots = jnp.full(4, 4), jnp.tile(jnp.arange(4), (4, 1))
    found = []
    for parallel, rows in ((None, 1), (divided(4), 4)):
        model = models.load(folder, mtp=True, parallel=parallel)
        batch = [x[:rows] for x in (prompt, lengths, table, slots)]
        greedy = SamplingBatch.of([Sampling()] * rows)
        cache, hidden, sampled, _ = jax.jit(models.verify)(model, model.cache(1), *batch, greedy)
        longer = jnp.tile(jnp.arange(6), (4, 1))[:rows]
        _, drafts = jax.jit(models.draft)(model, cache, hidden, sampled, batch[1], batch[2], longer)
        found.append(np.asarray(drafts))
    assert_same_bits(found[1], np.tile(found[0], (4, 1)))


def on_two_axes():
    mesh_of(4)  # skips the test where there are not so many
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    serving.Replicas(models.load(FOLDER / "deepseek_v3", parallel=models.DataExpertParallel(mesh, "x")), num_blocks=4)


def generate_rows(rows):
    model = models.load(FOLDER / "deepseek_v2_lite", parallel=divided(2))
    empty = jnp.zeros((rows, 1), jnp.int32)
    models.prefill(model, model.cache(1), empty, empty[:, 0], empty, empty)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: models.load(FOLDER / "deepseek_v3", parallel=divided(8)),
            "`parallel` divides the experts over 8 devices, and the model has 12: expected a multiple",
        ),
        (
            lambda: models.load(FOLDER / "llama", parallel=divided(2)),
            "`parallel` divides experts, and the model has none: expected DataParallel",
        ),
        (
            lambda: serving.Engine(models.load(FOLDER / "deepseek_v3", parallel=divided(2)), num_blocks=4),
            "`model` is data parallel.*expected `Replicas`",
        ),
        (on_two_axes, "on a mesh of {'x': 2, 'y': 2}.*expected 'x' as the only axis"),
        (
            lambda: generate_rows(3),
            "`tokens` has 3 rows: expected a multiple of the 2 devices",
        ),
    ],
)
def test_mistakes_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
