"""The engine on recorded checkpoints: the tokens are Hugging Face's, whoever runs beside a request."""

from functools import cache
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from jaxkv import KVCache, models
from jaxkv.serving import program
from jaxkv.serving.engine import Engine
from jaxkv.serving.step_inputs import Bundle, InputBatch, StepBatches
from serving.toy_engines import draw_ready
from support.cases import further, slow

FOLDER = Path(__file__).parents[1] / "data" / "models"


@cache
def model(family="deepseek_v3"):
    return models.load(FOLDER / family)


@cache
def truth(family):
    with np.load(FOLDER / family / "truth.npz") as recorded:
        return {name: recorded[name].tolist() for name in ("prompts", "prompt_lens", "tokens")}


def recorded(family, request, known=0):
    """A recorded prompt with its first `known` tokens, and the tokens that follow."""
    found = truth(family)
    prompt, tokens = found["prompts"][request][: found["prompt_lens"][request]], found["tokens"][request]
    return prompt + tokens[:known], tokens[known:]


def limit_traces(monkeypatch, most):
    chex.clear_trace_counter()
    for function in ("run_layers", "draw"):
        monkeypatch.setattr(program, function, chex.assert_max_traces(getattr(program, function), n=most))


@pytest.mark.parametrize("family", [slow("deepseek_v3"), slow("deepseek_v32"), "llama"])
def test_twenty_requests_come_and_go(family, monkeypatch):
    # Requests of one prompt come in pairs and share it.  17 blocks of 16 tokens, which the longest request takes:
    # some wait, and some are computed again.
    limit_traces(monkeypatch, 7)  # two shapes with chunks and requests, two with chunks alone, and three without chunks
    served = Engine(model(family), num_blocks=17, block_size=16, max_requests=4, chunk=64, max_num_batched_tokens=196)
    rng, requests, sent_back, shared = np.random.default_rng(0), [], set(), 0
    while len(requests) < 20 or served.running or served.waiting:
        if len(requests) < 20 and rng.random() < 0.4:
            prompt, follows = recorded(family, len(requests) // 2 % 5, int(rng.integers(0, 48)))
            follows = follows[: int(rng.integers(1, len(follows)))]
            requests.append((served.submit(prompt, max_tokens=len(follows), stop=()), follows))
        draw_ready(served, rng)
        served.step()
        sent_back |= {request for request in served.waiting if request.generated}
        held = [block for request in served.running for block in request.blocks]
        shared += len(held) - len(set(held))
    assert sent_back
    assert shared
    for request, follows in requests:
        assert request.generated == follows
    assert served.pool.num_free == 17


@pytest.mark.ci
@pytest.mark.parametrize("order", ["LBNHC", slow("BLNHC")])
def test_all_lengths_at_once_in_chunks_of_seven(order, monkeypatch):
    limit_traces(monkeypatch, 2)  # with and without chunks
    served = Engine(model(), num_blocks=10, order=order, max_requests=5, chunk=7)
    requests = [served.submit(recorded("deepseek_v3", n)[0], max_tokens=64, stop=()) for n in range(5)]
    for _ in served.run():
        pass
    for n, request in enumerate(requests):
        assert request.generated == recorded("deepseek_v3", n)[1]


@pytest.mark.parametrize(
    "family",
    [
        name if name == "llama" else further(name) if name == "deepseek_v4" else slow(name)
        for name in sorted(path.parent.name for path in FOLDER.glob("*/truth.npz"))
    ],
)
def test_strict_programs_may_run_the_engine(family):
    """No promotion of ranks and dtypes, 64-bit numbers by default, and no NaN: the tokens are the recorded ones."""
    prompt, follows = recorded(family, 1)
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with strict[0], strict[1], jax.enable_x64(True), jax.debug_nans(True):
        loaded = models.load(FOLDER / family)
        served = Engine(loaded, num_blocks=40, max_requests=2, chunk=64, max_num_batched_tokens=66)
        requests = [served.submit(prompt, max_tokens=2, sampling=models.Sampling(t)) for t in (0.0, 0.7)]
        list(served.run())
        assert models.fingerprint(loaded) == models.fingerprint(model(family))
    assert requests[0].generated == follows[:2]
    assert len(requests[1].generated) == 2


@pytest.mark.ci
@pytest.mark.parametrize("chunks", [True, False])
def test_no_program_copies_the_cache(chunks):
    layout = model().layout(4096)
    assert layout.nbytes > 400e6
    cache = KVCache(jax.ShapeDtypeStruct((layout.size,), layout.dtype), layout)
    sizes = {"tables": {"": np.full((32, 8), -1, np.int32)}, "block_size": 64}
    prefill, decode = InputBatch.of([], 4, 64, **sizes), InputBatch.of([], 32, 1, **sizes)
    batches = StepBatches(prefill if chunks else None, decode)
    layers = jax.jit(program.run_layers, donate_argnames="cache")
    memory = layers.lower(model(), cache, np.zeros(32, np.int32), Bundle.of(batches)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= layout.nbytes
    assert memory.temp_size_in_bytes < layout.nbytes / 10
