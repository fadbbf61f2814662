"""Engines with latents in host memory: the tokens are those of engines without, whatever happens to requests."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models.parallel import DataExpertParallel, DataParallel, TensorParallel
from jaxkv.offload import HostPool
from jaxkv.serving import Engine, HostLatents, NGram, Replicas
from jaxkv.serving.request import Held
from jaxkv.serving.step_inputs import Span
from jaxkv.terminal.memory import nbytes
from models.checkpoints.published import PUBLISHED
from serving.toy_engines import draw_ready
from support import recorded
from support.cases import further
from support.many_devices import mesh_of, on_several_devices

BLOCK, BLOCKS, ROWS = 16, 17, 64
"""A query token attends to up to 64 tokens, so that there cannot be fewer rows.  The longest request takes all blocks.
"""
SIZES = {"num_blocks": BLOCKS, "block_size": BLOCK, "max_requests": 2, "chunk": 64, "max_num_batched_tokens": 130}
"""All engines of a model have these sizes, so that their programs are compiled once."""
COUNT = 64
ROUNDING = 1e-4
"""How much logarithms of probabilities may differ.  The requests that run beside, and how a prompt is divided into
chunks, change logits by rounding."""


load = recorded.model


@cache
def model():
    """One random layer."""
    config = replace(models.ModelConfig.read(recorded.FOLDER / "deepseek_v32"), num_layers=1)
    return models.random_model(config, dtype="float32")


def engine(of=None, **options):
    return Engine(of or model(), **{**SIZES, "host_latents": HostLatents(ROWS), **options})


@cache
def continued():
    """Prompts, most of them longer than the rows, with the tokens that follow them if latents are on the device, and
    the logarithms of their probabilities."""
    served, rng = engine(host_latents=None), np.random.default_rng(0)
    prompts = [rng.integers(0, 97, length).tolist() for length in (1, 63, 64, 65, 200)]
    requests = [served.submit(prompt, max_tokens=COUNT, stop=(), logprobs=0) for prompt in prompts]
    finish(served)
    return [(list(request.prompt), request.generated, logarithms(request)) for request in requests]


def logarithms(request):
    return [found.logprob for found in request.logprobs]


def finish(served):
    list(served.run())
    assert served.pool.num_free == served.pool.num_blocks
    assert all((array == -1).all() for array in served.block_manager.arrays.values())


def come_and_go(served, truth, *, logprobs=None):
    """Serves 24 requests whose continuations are known, of which some are cancelled; returns those.

    They wait, are preempted, share prefixes, and have rows that others have left, in steps of any shape.
    """
    rng, requests, preempted, cancelled, places, shared = np.random.default_rng(0), [], set(), [], set(), 0
    while len(requests) < 24 or served.unfinished:
        if len(requests) < 24 and rng.random() < 0.3:
            prompt, follows, *more = truth[len(requests) // 2 % 5]
            known = int(rng.integers(0, 40))
            count = int(rng.integers(1, len(follows) - known))
            options = {"max_tokens": count, "stop": (), "logprobs": logprobs}
            request = served.submit([*prompt, *follows[:known]], **options)
            requests.append((request, *(each[known:] for each in (follows, *more))))
        if served.running and rng.random() < 0.03:
            cancelled.append(served.running[int(rng.integers(0, len(served.running)))])
            served.cancel(cancelled[-1])
        draw_ready(served, rng)
        served.step()
        preempted |= {request for request in served.waiting if request.generated}
        places |= {(request.place, request) for request in served.running}
        held = [block for request in served.running for block in request.blocks]
        shared += len(held) - len(set(held))
    assert preempted
    assert cancelled
    assert len(places) > len({place for place, _ in places})
    assert shared
    assert served.prefix_stats.found
    for request, follows, *_ in requests:
        assert request.generated == follows[: len(request.generated)]
        assert request.cancelled or len(request.generated) == request.max_tokens
    finish(served)
    return requests


def test_requests_come_and_go():
    for request, _, right in come_and_go(engine(), continued(), logprobs=0):
        np.testing.assert_allclose(logarithms(request), right[: len(request.logprobs)], atol=ROUNDING)


@pytest.mark.parametrize("family", [further("deepseek_v32"), further("glm5")])
def test_requests_of_recorded_models_come_and_go(family):
    """Not all layers of GLM-5 have an indexer."""
    sizes = {"max_requests": 4, "max_num_batched_tokens": 132}  # so many that some are preempted
    come_and_go(engine(load(family), **sizes), recorded.recorded(family))


def with_and_without(of, sampling):
    """The tokens of the prompts and the logarithms of their probabilities, without the option and with it."""
    for option in (None, HostLatents(ROWS)):
        served = engine(of, host_latents=option)
        requests = [
            served.submit(prompt, max_tokens=30, stop=(), logprobs=0, sampling=replace(sampling, seed=n))
            for n, (prompt, *_) in enumerate(continued())
        ]
        finish(served)
        yield [(request.generated, logarithms(request)) for request in requests]


def test_drawn_tokens():
    """Steps are the same, and so are the bits of the results."""
    right, found = with_and_without(model(), models.Sampling(0.9))
    assert found == right


@pytest.mark.ci
def test_entries_with_scales():
    """Of each layer, in a format of 8 bits."""
    config = replace(model().config, num_layers=2)
    two = models.random_model(config, dtype="float32", entry_format="fp8")
    scales = {"kv_scale": np.asarray([0.01, 0.02], np.float32)}
    right, found = with_and_without(replace(two, params={**two.params, "entry_scales": scales}), models.Sampling())
    assert found == right


class TestPrefixes:
    def test_end_inside_blocks_that_are_copied(self):
        served = engine()
        prompt, follows, _ = continued()[4]
        for tokens, found in [
            (prompt, 0),
            ([*prompt, *follows[:30]], 219),  # what the first request has filled
            ([*prompt[:105], *prompt[:64]], 105),
        ]:
            alone, before = engine(host_latents=None), served.prefix_stats.found
            request, right = (each.submit(tokens, max_tokens=20, stop=(), logprobs=0) for each in (served, alone))
            finish(served)
            finish(alone)
            assert served.prefix_stats.found - before == found
            assert request.generated == right.generated
            np.testing.assert_allclose(logarithms(request), logarithms(right), atol=ROUNDING)

    def test_of_a_prompt_that_is_known_whole(self):
        """The request decodes at once, in a place where others have left tokens at the same positions."""
        served = engine()
        prompt, follows, right = continued()[4]
        served.submit([*prompt, *follows[:8]], max_tokens=1, stop=())
        finish(served)
        others = [served.submit(tokens[::-1], max_tokens=40, stop=()) for tokens in (prompt[:100], prompt[:120])]
        finish(served)
        request = served.submit([*prompt, *follows[:8]], max_tokens=20, stop=(), logprobs=0)
        finish(served)
        assert all(len(other.generated) == 40 for other in others)
        assert request.generated == follows[8:28]
        np.testing.assert_allclose(logarithms(request), right[8:28], atol=ROUNDING)


@pytest.mark.ci
def test_chunks_of_prompts_that_do_not_fit_on_the_device_are_left_to_later_steps(monkeypatch):
    processed, batches = [], Engine.batches

    def noted(self, schedule, shape):
        processed.append([span.request for span in schedule.prefill])
        return batches(self, schedule, shape)

    (long, *_), (short, after, _) = continued()[4], continued()[3]
    monkeypatch.setattr(Engine, "batches", noted)
    # One layer of 13 blocks is on the device.  The first request needs 12 and the second 5 of them at last.
    served = engine(max_len=208, num_blocks=40, max_num_batched_tokens=2 + 5 * 64)
    requests = [served.submit(tokens, max_tokens=9, stop=()) for tokens in (long[:190], short)]
    finish(served)
    assert processed[:2] == [requests[:1] * 3, requests[1:] * 2]
    assert requests[1].generated == after[:9]


def test_how_many_chunks_fit_on_the_device():
    served = engine()
    first, second = (served.submit([1] * 200, max_tokens=1) for _ in range(2))
    first.held[""], second.held[""] = Held([*range(13)]), Held([0, 1, 2, *range(13, 23)])

    def most(*ends):
        return served._most_staged([Span(request, 0, end, False) for request, end in ends])

    assert most((first, 64), (first, 128), (first, 200)) == 3
    assert most((first, 64), (second, 200)) == 2
    assert most((first, 128), (second, 192), (second, 193)) == 2  # 8 + 9 blocks and 3 shared ones, then one more
    assert most((first, 200), (second, 112)) == 2
    assert most((first, 200), (second, 113)) == 1


@pytest.mark.ci
@on_several_devices
def test_replicas_have_host_memory_of_their_own():
    config = model().config
    divided = models.random_model(config, dtype="float32", parallel=DataParallel(mesh_of(2), "x"))
    served = Replicas(divided, **SIZES, host_latents=HostLatents(ROWS))
    requests = [(served.submit(prompt, max_tokens=12, stop=()), follows) for prompt, follows, _ in continued()]
    list(served.run())
    assert all(request.generated == follows[:12] for request, follows in requests)
    devices = {next(iter(each.cache.keys.buffer.devices())) for each in served.engines}
    assert len(devices) == 2


class TestMemory:
    def test_is_what_the_arrays_take(self):
        served = engine(host_latents=HostLatents(), max_len=200)
        sizes = {"num_blocks": BLOCKS, "block_size": BLOCK, "max_requests": 2, "max_len": 200}
        memory = served.host_latents.memory(served.model, **sizes)
        assert memory.device == nbytes(served.cache) - 4 * 3  # the address, and the number of writes
        assert memory.host == served.model.split_layouts(BLOCKS, BLOCK).latents.nbytes
        assert memory.keys == served.cache.keys.buffer.nbytes
        assert served.cache.hot.hot.rows == 128  # twice those that a query token attends to

    def test_rows_by_default(self):
        rows = HostLatents().rows_of
        assert rows(model(), block_size=16, max_len=512) == 128
        assert rows(model(), block_size=16, max_len=112) == 112
        assert rows(model(), block_size=48, max_len=480) == 144

    @pytest.mark.parametrize(("entry_format", "requests", "without"), [("fp8_ds_mla", 91, 12), ("bf16", 53, 6)])
    def test_holds_more_requests_than_the_device(self, entry_format, requests, without):
        """Of 32,768 tokens of DeepSeek V3.2, with 16 GB of the device for latents."""
        v32 = published(entry_format=entry_format)
        sizes = {"num_blocks": 512 * requests, "max_requests": requests, "max_len": 32768}
        memory = HostLatents().memory(v32, **sizes)
        assert memory.requests + memory.staged < 16e9 < memory.requests + memory.staged + memory.per_request
        assert without == 16e9 // v32.split_layouts(512).latents.nbytes
        assert requests >= 4 * without


@cache
def published(**options):
    """DeepSeek V3.2 without weights."""
    config = models.ModelConfig.from_json(PUBLISHED["DeepSeek-V3.2"])
    return jax.eval_shape(lambda: models.random_model(config, **options))


def described(family, **options):
    """A model without weights."""
    config = models.ModelConfig.read(recorded.FOLDER / family)
    return jax.eval_shape(lambda: models.random_model(config, **options))


REFUSED = {
    "another attention": (
        lambda: engine(described("deepseek_v3")),
        "`host_latents`.*whose attention has no indexer over latents",
    ),
    "compressed": (
        lambda: engine(described("deepseek_v4")),
        "`host_latents`.*whose attention has no indexer over latents",
    ),
    "an order": (lambda: engine(order="BLHNC"), "`host_latents` .*, and `order` is 'BLHNC': expected BLNHC"),
    "drafts": (lambda: engine(drafts=NGram(2)), "`host_latents` .*, and `drafts` is .*: expected one of the two"),
    "pools": (
        lambda: engine(connectors=[HostPool(model().layout(1, BLOCK), 4)]),
        "`host_latents` .*, and `connectors` are given: expected one of the two",
    ),
    "few rows": (lambda: engine(host_latents=HostLatents(48)), "has 48 `rows`: expected .* at least 64"),
    "parts of blocks": (lambda: engine(host_latents=HostLatents(72)), "has 72 `rows`: expected a multiple of .* 16"),
    "no rows": (lambda: HostLatents(0), "`rows` is 0: expected a positive int"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@on_several_devices
def test_divided_models_are_refused():
    message = "`host_latents` is .*, and `model` has `parallel` {}: expected"
    divided = described("deepseek_v32", parallel=TensorParallel(mesh_of(2), "x"))
    with pytest.raises(ValueError, match=message.format("TensorParallel")):
        engine(divided)
    divided = described("deepseek_v32", parallel=DataExpertParallel(mesh_of(2), "x"))
    with pytest.raises(ValueError, match=message.format("DataExpertParallel")):
        Replicas(divided, **SIZES, host_latents=HostLatents(ROWS))


def test_another_option_is_refused():
    with pytest.raises(TypeError, match="`host_latents` is True: expected a HostLatents"):
        engine(host_latents=True)


def test_blocks_do_not_leave_the_engine():
    served = engine()
    for call in (lambda: served.export([1, 2, 3]), lambda: served.adopt(None)):
        with pytest.raises(ValueError, match="and the engine has `host_latents`: expected an engine without"):
            call()
