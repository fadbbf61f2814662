"""Log probabilities of generated tokens: those of the model, for the requests that have them, and at no cost
for others."""

import numpy as np
import pytest

from jaxkv import serving
from jaxkv.models.sampling import Sampling
from jaxkv.serving.program import logprobs
from serving.toy_engines import PARAMS, engine, right
from support import toy_model
from support.toy_model import prompt

pytestmark = pytest.mark.usefixtures("toy")


def finish(served):
    for _ in served.run():
        pass


def check(request, count):
    """Compares with float64 NumPy, without a cache."""
    assert len(request.logprobs) == len(request.generated)
    for n, (token, (logprob, top)) in enumerate(zip(request.generated, request.logprobs, strict=True)):
        logits = toy_model.logits_without_cache(PARAMS, request.tokens[: len(request.prompt) + n])
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        order = np.argsort(-expected)[:count]
        assert [token for token, _ in top] == order.tolist()
        found = [logprob, *(value for _, value in top)]
        np.testing.assert_allclose(found, expected[[token, *order]], rtol=1e-4, atol=1e-4)
        assert all(type(value) is float for value in found)


def test_they_are_those_of_the_model_before_temperature_and_filters():
    served = engine(num_blocks=32)
    hot = Sampling(3.0, 0.9, 1, top_k=40, min_p=0.01)
    options = [(prompt(9), 3, Sampling()), (prompt(5), 0, hot), (prompt(17), 20, hot)]
    requests = [served.submit(p, max_tokens=8, logprobs=count, sampling=sampling) for p, count, sampling in options]
    plain = served.submit(prompt(11), max_tokens=8)
    finish(served)
    for request, (_, count, _) in zip(requests, options, strict=True):
        check(request, count)
    assert requests[0].generated == right(prompt(9), 8)
    assert [top[0][0] for _, top in requests[0].logprobs] == requests[0].generated
    assert (plain.logprobs, plain.generated) == ([], right(prompt(11), 8))


def test_a_preempted_request_has_one_per_token():
    served = engine(num_blocks=9)
    requests = [served.submit(prompt(7, seed=n), max_tokens=14, logprobs=2) for n in range(3)]
    preempted, preempt = [], served.preempt
    served.preempt = lambda request: preempted.append(request) or preempt(request)
    finish(served)
    assert any(request.logprobs for request in preempted)
    for request in requests:
        check(request, 2)


def test_steps_that_nobody_asked_for_them_run_no_further_program():
    served, calls = engine(), []
    compute = served._logprobs
    served._logprobs = lambda logits, tokens: calls.append(tokens) or compute(logits, tokens)
    served.submit(prompt(20), max_tokens=6)
    finish(served)
    assert not calls
    request = served.submit(prompt(20, seed=1), max_tokens=4, logprobs=1)
    served.submit(prompt(3), max_tokens=9)
    finish(served)
    assert len(calls) == len(request.generated) == 4  # not in steps with its prompt's first chunks, or after its end


def test_a_request_whose_logits_are_nan_has_none_for_them():
    poisoned = {**PARAMS, "embedding": PARAMS["embedding"].copy()}
    poisoned["embedding"][5] = np.nan
    served = serving.Engine(
        toy_model.ToyModel(poisoned), num_blocks=16, block_size=4, max_requests=3, chunk=7, max_len=48
    )
    request = served.submit((1, 5, 2), max_tokens=4, logprobs=2)
    finish(served)
    assert (request.finish_reason, request.generated, request.logprobs) == ("nan", [], [])


@pytest.mark.parametrize("count", [-1, 21, 1.5, True, "3"])
def test_meaningless_numbers_are_rejected(count):
    with pytest.raises(ValueError, match=f"`logprobs` is {count!r}: expected None, or an int, 0 to 20"):
        engine().submit([1], max_tokens=1, logprobs=count)


def test_a_vocabulary_may_be_smaller_than_what_is_computed():
    logits = np.log(np.asarray([[0.1, 0.2, 0.7], [0.25, 0.5, 0.25]], np.float32))
    found = logprobs(logits, np.asarray([0, 1], np.int32))
    np.testing.assert_allclose(np.exp(found.sampled), [0.1, 0.5], rtol=1e-6)
    assert found.top_tokens.tolist() == [[2, 1, 0], [1, 0, 2]]
