"""`jaxkv bench serve --soak`: random requests are served, and what is lost, held or wrong is found."""

import json
from itertools import count
from pathlib import Path

import pytest

from jaxkv.bench import soak as soak_module
from jaxkv.bench.soak import WAITING, Compared, Soaked, compare, soak
from jaxkv.cli import main
from jaxkv.serving import Engine
from serving.toy_engines import engine, right
from support import toy_model
from support.toy_model import prompt

MODELS = Path(__file__).parents[1] / "data" / "models"


@pytest.fixture(scope="module")
def soaked():
    """A soak of 150 calls of its clock, on too few blocks, and how many requests waited at most."""
    ticks, most, waiting = count(), 0, Engine.step

    def step(self):
        nonlocal most
        most = max(most, len(self.waiting))
        return waiting(self)

    with pytest.MonkeyPatch.context() as patch:
        toy_model.install(patch)
        patch.setattr(Engine, "step", step)
        served = engine(num_blocks=12)
        found = soak(served, [5, 20, 30, 1], [9, 10, 3, 4], 150, clock=lambda: float(next(ticks)))
        assert served.pool.num_free == served.pool.num_blocks
        return found, most, served.prefix_stats.found


def test_more_requests_wait_than_run(soaked):
    found, most, reused = soaked
    assert WAITING * 3 <= most <= (WAITING + 1) * 3  # running ones may be preempted
    assert found.seconds > 150
    assert {*found.ended} == {"cancelled", "length"}
    assert found.lost == []
    assert found.preempted
    assert reused
    assert {request.priority for request in found.tokens} == {0, 1, 2}
    lengths = [(len(request.prompt), request.max_tokens) for request in found.tokens]
    assert lengths[:5] == [(5, 9), (20, 10), (30, 3), (1, 4), (5, 9)]
    assert 0 < len(found.greedy) < found.ended["length"]
    for request in found.greedy:
        assert request.generated == right(request.prompt, request.max_tokens)


def test_requests_without_a_reason_or_all_their_tokens_are_lost(soaked):
    tokens = soaked[0].tokens
    whole = next(request for request in tokens if request.finish_reason == "length" and request.max_tokens > 3)
    cancelled = next(request for request in tokens if request.finish_reason == "cancelled" and request.generated)
    assert Soaked({whole: whole.generated, cancelled: cancelled.generated[:-1]}).lost == []
    for request, returned in (
        (whole, whole.generated[:-1]),
        (whole, [*whole.generated[:-1], 96 - whole.generated[-1]]),
        (whole, [*whole.generated, 5]),
        (cancelled, [96 - cancelled.generated[0]]),
    ):
        assert Soaked({request: returned}).lost == [request]
    toy = engine().new_request([1], max_tokens=4, stop=())
    assert Soaked({toy: []}).lost == [toy]  # it has not ended
    toy.finish("nan")
    assert Soaked({toy: []}).lost == [toy]


def test_wrong_tokens_are_found_and_equally_likely_ones_are_not(monkeypatch):
    toy_model.install(monkeypatch)
    served = engine()
    requests = [served.submit(prompt(9, seed=n), max_tokens=6, stop=(), logprobs=2) for n in range(3)]
    list(served.run())
    assert compare(engine(), requests) == Compared(equal=3)
    # The second most likely token, and after it the right ones.
    second = requests[1].logprobs[2].top[1][0]
    prefix = [*requests[1].prompt, *requests[1].generated[:2], second]
    requests[1].tokens = [*prefix, *right(tuple(prefix), 3)]
    assert compare(engine(), requests) == Compared(equal=2, wrong=[2])
    monkeypatch.setattr(soak_module, "ROUNDINGS", 1e9)
    assert compare(engine(), requests) == Compared(equal=2, rounded=1)
    requests[0].tokens[-1] = requests[0].logprobs[5].top[1][0]  # its last token, after which none is left to compare
    assert compare(engine(), requests) == Compared(equal=1, rounded=2)
    # A token that is far from likely is wrong nevertheless.
    likely = {token for token, _ in engine_logprobs(requests[2])}
    requests[2].tokens[-1] = next(token for token in range(97) if token not in likely)
    assert compare(engine(), requests) == Compared(rounded=2, wrong=[3])


def engine_logprobs(request):
    """The most likely tokens in the place of a request's last one."""
    served = engine()
    other = served.submit(request.tokens[:-1], max_tokens=1, stop=(), logprobs=20)
    list(served.run())
    return other.logprobs[0].top


@pytest.mark.ci
def test_a_soak_is_printed_and_recorded(tmp_path, capsys):
    file = tmp_path / "found.json"
    sizes = ["--max-requests", "2", "--requests", "8", "--chunk", "16", "--max-num-batched-tokens", "34"]
    lengths = ["--prompt", "20", "--output", "6", "--blocks", "2"]
    assert main(["bench", "serve", str(MODELS / "youtu"), *sizes, *lengths, "--soak", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["soak"]
    assert found["requests"] == sum(found["ended"].values()) > 8
    assert (found["held_blocks"], found["lost"], found["wrong"]) == (0, [], [])
    assert 0 < found["equal"] <= found["ended"]["length"]
    printed = capsys.readouterr().out
    assert f"{found['requests']} requests in " in printed
    assert f" greedy requests, {found['equal']} are equal, " in printed
