"""An engine with drafts: its tokens are those without, and it reuses, preempts, cancels and loads as without."""

import json
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models, serving
from jaxkv.offload import HostPool
from jaxkv.serving import Request
from jaxkv.serving.table import tables_of
from models.checkpoints.mtp import FOLDER, with_mtp
from serving.toy_engines import draw_ready
from support.cases import further, slow
from support.recorded import FOLDER as FAMILIES
from support.recorded import model as recorded_model
from support.recorded import recorded

BLOCK = 16
SIZES = dict(num_blocks=7, block_size=BLOCK, max_requests=2, chunk=16, max_num_batched_tokens=38, max_len=96)
"""The same for all engines, so that they are compiled once."""


def generate(engine, prompts, count, samplings=None):
    samplings = samplings or [models.Sampling()] * len(prompts)
    requests = [
        engine.submit(prompt, max_tokens=count, sampling=sampling, stop=())
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    stream = list(engine.run())
    for request in requests:
        assert [token for owner, token in stream if owner is request] == request.generated
    assert engine.pool.num_free == engine.pool.num_blocks
    return [request.generated for request in requests]


MTP, NGRAM = serving.MTP(2), serving.NGram(2, prompt_lookup_min=1)


def drafting(model=None, drafts=MTP, **options):
    return serving.Engine(model or predictable(), drafts=drafts, **SIZES, **options)


@pytest.mark.ci  # the toy models of the other tests draft and verify, too
def test_tokens_are_the_recorded_ones(tmp_path):
    """Random drafts, nearly all of which are wrong; requests are preempted; prompts in chunks."""
    model = models.load(with_mtp(tmp_path)[0], mtp=True)
    prompts, tokens = zip(*recorded(FOLDER.name), strict=True)
    sizes = dict(num_blocks=20, block_size=BLOCK, max_requests=3, chunk=48)
    engine = serving.Engine(model, drafts=serving.MTP(3), **sizes)
    assert generate(engine, prompts, 64) == [*tokens]
    assert 2.8 * engine.acceptance.steps < engine.acceptance.drafted < 3 * engine.acceptance.steps


@pytest.mark.parametrize("family", [further("llama"), slow("deepseek_v32")])
def test_tokens_with_ngrams_are_the_recorded_ones(family):
    """Prompts in chunks; a single token is searched, so that there are drafts, of which few are right."""
    prompts, tokens = zip(*recorded(family)[2:4], strict=True)
    sizes = dict(num_blocks=24, block_size=BLOCK, max_requests=3, chunk=48, max_num_batched_tokens=3 * 4 + 2 * 48)
    engine = serving.Engine(recorded_model(family), drafts=serving.NGram(3, prompt_lookup_min=1), **sizes)
    assert generate(engine, prompts, 64) == [*tokens]
    assert 0 < engine.acceptance.accepted < engine.acceptance.drafted


def brute_force(tokens, least, most):
    """Where the first occurrence ends of the last tokens, of as many as possible."""
    for count in range(most, least - 1, -1):
        for start in range(len(tokens) - count):
            if tokens[start : start + count] == tokens[-count:]:
                return start + count
    return 0


def test_ngrams_are_found_where_as_many_as_possible_of_the_last_tokens_occur_first():
    rng, found = np.random.default_rng(0), Counter()
    for _ in range(3000):
        # Ids whose bytes also occur across the ends of tokens.
        ids = [[0, 1, 256, 65536, 257], [7, 8]][rng.integers(2)]
        request = Request(tuple(rng.choice(ids, rng.integers(1, 9)).tolist()), 99, models.Sampling(), frozenset())
        least = int(rng.integers(1, 4))
        ngram = serving.NGram(int(rng.integers(1, 5)), int(rng.integers(least, 6)), least)
        for _ in range(3):
            request.tokens.append(int(rng.choice(ids)))
            drafts, end = ngram.following(request, ()), brute_force(request.tokens, least, ngram.prompt_lookup_max)
            assert drafts == (request.tokens[end : end + ngram.num_speculative_tokens] if end else [])
            found[len(drafts)] += 1
    assert min(found[count] for count in range(5)) > 100, found


def test_ngrams_need_numbers_and_a_cache_of_one_table():
    for wrong in ({"num_speculative_tokens": 0}, {"prompt_lookup_max": 1.5}, {"prompt_lookup_min": -1}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` is .*: expected a positive int"):
            serving.NGram(**wrong)
    with pytest.raises(ValueError, match="`prompt_lookup_min` is 5: expected at most `prompt_lookup_max`, 4"):
        serving.NGram(prompt_lookup_min=5)
    unsupported = {"deepseek_v4", "gpt_oss", "kimi_linear", "qwen3_next"}
    for folder in sorted(path.parent for path in FAMILIES.glob("*/truth.npz")):
        described = models.Model({}, models.ModelConfig.read(folder), "bf16")
        tables = tables_of(described.layout(1), described.usual_block_size)
        if folder.name in unsupported:
            with pytest.raises(ValueError, match=r"`drafts` is NGram\(.*: expected one table that keeps all entries"):
                serving.NGram().check(described, tables)
        else:
            serving.NGram().check(described, tables)


def toy():
    """A model of random weights, with one layer and an MTP layer."""
    values = json.loads((FOLDER / "config.json").read_text())
    values |= {"num_nextn_predict_layers": 1, "num_hidden_layers": 1}
    return models.random_model(models.ModelConfig.from_json(values), seed=3, mtp=True)


@cache
def predictable():
    """A model whose tokens mostly depend on the last token alone, and whose MTP layer therefore is often right.

    Attention and feed-forwards are small beside the residual, so that the head sees little more than the embedding of
    the last token; `eh_proj` passes the embedding of the token that it is given.
    """
    model = toy()

    def smaller(path, weight):
        name = path[-1].key
        if name == "embed":
            return weight * weight.shape[-1] ** 0.5
        return weight * 0.5 if name in ("o", "down") else weight

    params = jax.tree.map_with_path(smaller, model.params)
    hidden = params["norm"].shape[0]
    params["mtp"]["eh_proj"] = jnp.eye(hidden, 2 * hidden)
    return models.Model(params, model.config, model.entry_format)


SAMPLED = [models.Sampling(0.1, 0.9, seed, top_k=30, min_p=0.01) for seed in range(3)]


@pytest.mark.parametrize(
    ("drafts", "samplings"),
    [slow(MTP, None), further(MTP, SAMPLED), (NGRAM, None), further(NGRAM, SAMPLED)],
    ids=["greedy, MTP", "sampled, MTP", "greedy, n-grams", "sampled, n-grams"],
)
def test_accepted_drafts_leave_the_tokens_as_they_are(drafts, samplings):
    model = predictable()
    prompts = [[3, 1, 4, 1, 5], [9], list(range(40))]
    speculative = drafting(model, drafts)
    found = generate(speculative, prompts, 40, samplings)
    assert found == generate(serving.Engine(model, **SIZES), prompts, 40, samplings)
    acceptance = speculative.acceptance
    assert 0.2 < acceptance.rate < 1, acceptance
    # The first token of a request is that of the prefill; the last may be computed without drafts.  There are drafts of
    # n-grams in some of the steps.
    assert (3 * 38 if drafts is MTP else 40) <= acceptance.steps + acceptance.accepted <= 3 * 39


def test_no_token_follows_a_stop_token_or_the_last_in_the_middle_of_drafts(monkeypatch):
    """Every token as the stop token, and every number of tokens: some come before the last accepted draft of a step."""
    model = predictable()
    prompts = [[3, 1, 4, 1, 5], [9]]
    engine = drafting(model)
    truth = generate(engine, prompts, 40)
    first = {tuple(tokens): [n for n, token in enumerate(tokens) if token not in tokens[:n]] for tokens in truth}
    cases = [(tokens, end, 40) for tokens in truth for end in first[tuple(tokens)]]
    cases += [(tokens, None, most) for tokens in truth for most in range(1, 8)]
    cases += [(tokens, end, end + most) for tokens in truth for end in first[tuple(tokens)][1:6] for most in (0, 1, 2)]
    dropped, append = Counter(), engine._append

    def counted(span, tokens):
        before = len(span.request.generated)
        append(span, tokens)
        dropped[span.request.finish_reason] += span.samples * len(tokens) - (len(span.request.generated) - before)

    monkeypatch.setattr(engine, "_append", counted)
    held = [
        engine.submit(prompts[truth.index(tokens)], max_tokens=most, stop=() if end is None else (tokens[end],))
        for tokens, end, most in cases
    ]
    stream = list(engine.run())
    for request, (tokens, end, most) in zip(held, cases, strict=True):
        stops = end is not None and end < most
        assert request.generated == (tokens[: end + 1] if stops else tokens[:most])
        assert request.finish_reason == ("stop" if stops else "length")
        assert [token for owner, token in stream if owner is request] == request.generated
    assert engine.pool.num_free == engine.pool.num_blocks
    assert dropped["stop"] > 0
    assert not dropped["length"] + dropped[None]  # no more is drafted than `max_tokens`


def test_a_stop_token_or_nan_ends_the_request():
    model = predictable()
    engine = drafting(model)
    (tokens,) = generate(engine, [[3, 1, 4]], 30)
    assert 28 <= engine.acceptance.steps + engine.acceptance.accepted <= 29  # all, up to the first and the last
    stop = tokens[10]
    request = engine.submit([3, 1, 4], max_tokens=30, stop=(stop,))
    list(engine.run())
    assert request.generated == tokens[: tokens.index(stop) + 1]
    assert request.finish_reason == "stop"

    lost = {**model.params, "embed": model.params["embed"].at[tokens[5]].set(jnp.nan)}
    engine.model = models.Model(lost, model.config, model.entry_format)
    request = engine.submit([3, 1, 4], max_tokens=30, stop=())
    list(engine.run())
    assert request.generated == tokens[: tokens.index(tokens[5]) + 1]
    assert request.finish_reason == "nan"
    assert engine.pool.num_free == engine.pool.num_blocks


def test_prompts_and_stops_are_token_ids():
    engine = drafting()
    for wrong in ({"prompt": "hi"}, {"prompt": [1.5]}, {"prompt": [1], "stop": "x"}):
        with pytest.raises(TypeError, match="expected token ids"):
            engine.submit(**wrong)
    with pytest.raises(TypeError, match=r"`sampling` is 0.5: expected a Sampling"):
        engine.submit([1], sampling=0.5)
    with pytest.raises(ValueError, match=r"`logprobs` is 1, and the engine has `drafts`, whose program .* no logits"):
        engine.submit([1], logprobs=1)


LONG = [int(token) for token in np.random.default_rng(7).integers(0, 97, 40)]
MOST = 24


@cache
def alone(prompt, sampling):
    """The tokens of a request that is alone in an engine without drafts."""
    engine = serving.Engine(predictable(), **SIZES)
    request = engine.submit(prompt, max_tokens=MOST, sampling=sampling, stop=())
    list(engine.run())
    return request.generated


def submit(engine, prompt, **options):
    return engine.submit(prompt, **{"max_tokens": MOST, "stop": (), **options})


def assert_right(engine, *requests):
    """All tokens are those of each request alone, and nothing is held."""
    for request in requests:
        found = request.generated
        assert found == alone(request.prompt, request.sampling)[: len(found)]
        assert request.finish_reason == "cancelled" or len(found) == request.max_tokens
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.acceptance.accepted > 0


def preemptions(engine):
    """Counts the requests that are preempted from now on."""
    count, leave = Counter(), engine._leave

    def counted(request):
        count[request] += request.finish_reason is None
        leave(request)

    engine._leave = counted
    return count


def test_prefixes_are_reused():
    """In blocks of ended requests, with the next token or another one, and in the block that another request fills."""
    engine = drafting()
    first = submit(engine, LONG)
    list(engine.run())
    continued = submit(engine, first.tokens)
    list(engine.run())
    other = submit(engine, [*LONG[:32], 5, 3])
    list(engine.run())
    assert engine.prefix_stats.found == 63 + 32  # of 64 and 34
    running = submit(engine, LONG[::-1])
    for _ in range(5):
        engine.step()
    assert len(running.generated) > 1
    before, joined = engine.prefix_stats.found, submit(engine, [*LONG[::-1], *running.generated])
    list(engine.run())
    assert engine.prefix_stats.found - before > 40
    assert_right(engine, first, continued, other, running, joined)


def drafts_of(engine, prompt=LONG):
    """The drafts of a request after each step."""
    request, found = submit(engine, prompt), []
    while not request.finish_reason:
        engine.step()
        found.append([*request.drafts])
    return [drafts for drafts in found if drafts]


@pytest.mark.ci
def test_drafts_do_not_depend_on_where_blocks_end():
    """A step has the blocks of its drafts, and of the entries that the MTP layer writes after them."""
    engines = [serving.Engine(toy(), drafts=serving.MTP(4), **SIZES | sizes) for sizes in ({}, {"block_size": 64})]
    found = [drafts_of(engine, LONG[:32]) for engine in engines]
    assert found[0] == found[1]


def test_reused_entries_of_the_mtp_layer_give_the_same_drafts():
    """Of a model whose drafts depend on all tokens: computed, found in blocks, copied, and loaded."""
    model = toy()
    engine = drafting(model, connectors=[HostPool(model.layout(1, BLOCK), 32)])
    computed, in_blocks = drafts_of(engine), drafts_of(engine)
    submit(engine, LONG)
    for _ in range(3):
        engine.step()
    copied = drafts_of(engine)
    list(engine.run())
    assert engine.prefix_stats.found == 3 * 39
    for token in range(2):
        submit(engine, [token] * 80, max_tokens=1)
    list(engine.run())
    loaded = drafts_of(engine)
    assert engine.prefix_stats.loaded == 32
    assert len(computed) > MOST // 2
    assert computed == in_blocks == copied == loaded


def test_requests_are_preempted_if_blocks_run_out():
    """Two requests of 4 blocks each, of 7: the second comes back and continues with the same random numbers."""
    engine = drafting()
    count = preemptions(engine)
    requests = [submit(engine, prompt, sampling=SAMPLED[0]) for prompt in (LONG, LONG[::-1])]
    list(engine.run())
    assert not count[requests[0]]
    assert count[requests[1]]
    assert_right(engine, *requests)


def test_a_request_of_higher_priority_comes_first():
    engine = drafting()
    count = preemptions(engine)
    low = [submit(engine, LONG[n:]) for n in range(2)]
    for _ in range(6):
        engine.step()
    high, equal = submit(engine, [9], priority=1), submit(engine, [8])
    ended = [request for request, _ in engine.run() if request.finish_reason]
    order = [request for n, request in enumerate(ended) if request not in ended[:n]]
    assert order.index(high) < min(order.index(low[1]), order.index(equal))
    assert count[low[1]]
    assert not count[low[0]]
    assert_right(engine, *low, high, equal)


def test_requests_are_cancelled_while_they_wait_and_run():
    engine = drafting()
    requests = [submit(engine, prompt) for prompt in (LONG, LONG[5:], [7], [9])]
    for _ in range(5):
        engine.step()
    assert requests[0].drafts
    engine.cancel(requests[0])
    engine.cancel(requests[3])
    list(engine.run())
    assert [request.finish_reason for request in requests] == ["cancelled", "length", "length", "cancelled"]
    assert 0 < len(requests[0].generated) < MOST
    assert_right(engine, *requests)


def test_evicted_blocks_are_loaded_from_host_memory():
    model = predictable()
    engine = drafting(connectors=[HostPool(model.layout(1, BLOCK), 32)])
    first = submit(engine, LONG)
    list(engine.run())
    others = [submit(engine, LONG[n:]) for n in range(1, 5)]
    list(engine.run())
    continued = submit(engine, first.tokens)
    list(engine.run())
    assert engine.prefix_stats.loaded == 48
    assert_right(engine, first, *others, continued)


@pytest.mark.parametrize("drafts", [MTP, NGRAM], ids=["MTP", "n-grams"])
@pytest.mark.parametrize("seed", [further(n) for n in range(3)])
def test_any_interleaving_gives_the_tokens_of_requests_alone(seed, drafts):
    """Random submissions of prompts that share beginnings, priorities, cancellations and steps, on few blocks."""
    rng = np.random.default_rng(seed)
    engine = drafting(drafts=drafts, connectors=[HostPool(predictable().layout(1, BLOCK), 16)])
    count, requests = preemptions(engine), []
    for _ in range(300):
        if len(engine.waiting) < 3 and rng.random() < 0.3:
            prompt = [*LONG[: rng.integers(1, 40)], *LONG[: rng.integers(3)]]
            options = {"max_tokens": int(rng.integers(1, MOST)), "priority": int(rng.integers(2))}
            requests.append(submit(engine, prompt, sampling=[models.Sampling(), *SAMPLED][rng.integers(3)], **options))
        draw_ready(engine, rng)
        if rng.random() < 0.02 and (alive := engine.unfinished):
            engine.cancel(alive[rng.integers(len(alive))])
        engine.step()
    list(engine.run())
    assert_right(engine, *requests)
    stats, ends = engine.prefix_stats, Counter(request.finish_reason for request in requests)
    assert min(stats.loaded, stats.found - stats.loaded, ends["cancelled"], ends["length"], count.total()) > 0
