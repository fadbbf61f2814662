"""An engine in which a call raises: it ends, no token is wrong, nothing is kept, and another engine continues."""

import contextlib
import dataclasses
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxkv.offload
import jaxkv.serving
from jaxkv import models
from jaxkv.models.weights.fingerprint import fingerprint
from jaxkv.offload import DiskPool, HostPool
from jaxkv.serving import MTP, Engine
from support import toy_hybrid, toy_model
from support.cases import slow
from support.recorded import FOLDER
from support.toy_model import prompt

FOLDERS = tuple(str(Path(package.__file__).parent) for package in (jaxkv.serving, jaxkv.offload))
TOOL = 3
"""An id of `sys.monitoring` that no debugger or profiler has."""
TRANSFERS = (
    "jit.",
    "jax.",
    "jaxlib.",
    "numpy.asarray",
    "numpy.empty",
    *(f"jaxkv.{module}." for module in ("ops", "offload", "serving.pool", "serving.tiers")),
)
"""Beginnings of the names of what launches, reads, loads, stores or allocates; compiled functions are of "jit"."""


class Calls:
    """Counts all calls that are made by code of the engines and pools, and raises before one of them.

    A call is known by its place in the code, and by how often it has been made.  Calls of other threads do not count.
    """

    def __init__(self, site=None, number=0, error=None):
        self.seen, self.raised = Counter(), False
        self._site, self._number, self._error = site, number, error
        self._thread = threading.get_ident()

    def __enter__(self):
        sys.monitoring.use_tool_id(TOOL, "calls")
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.CALL, self._called)
        sys.monitoring.restart_events()
        sys.monitoring.set_events(TOOL, sys.monitoring.events.CALL)
        return self

    def __exit__(self, *_):
        sys.monitoring.set_events(TOOL, 0)
        sys.monitoring.free_tool_id(TOOL)

    def _called(self, code, offset, function, first):
        if not code.co_filename.startswith(FOLDERS):
            return sys.monitoring.DISABLE
        if threading.get_ident() == self._thread:
            module = getattr(function, "__module__", None) or type(function).__module__
            module = "jit" if hasattr(function, "eval_shape") else module
            name = getattr(function, "__name__", type(function).__name__)
            if name == "__exit__":
                return None  # Python does not interrupt between the body of a `with` and this
            site = f"{module}.{name} in {code.co_qualname}, {offset}"
            self.seen[site] += 1
            if (site, self.seen[site]) == (self._site, self._number):
                self.raised = True
                raise self._error
        return None


class Sizes(NamedTuple):
    num_blocks: int
    max_requests: int
    chunk: int
    max_num_batched_tokens: int
    max_len: int


class Served:
    """An engine with requests: they wait for blocks, and their prompts are computed in chunks."""

    def __init__(self):
        self.engine = self.another()
        self.requests = [self.engine.submit(tokens, max_tokens=count, stop=()) for tokens, count in self.prompts]

    def run(self):
        for _ in range(100):
            if not self.engine.unfinished:
                return
            self.engine.step()
        raise AssertionError("the requests never end")

    def check_pools(self):
        pass


class Toy(Served):
    """`Engine`: requests also share, copy, await, store and load blocks, are preempted and cancelled."""

    install, params, block_size = toy_model.install, toy_model.random_params(), 4
    model = toy_model.ToyModel(params)
    prompts = (prompt(9), 9), (prompt(9) + prompt(3, 1), 5), (prompt(13, 2), 3), (prompt(9, 3), 6), (prompt(9), 2)
    host_blocks = 16
    sizes = Sizes(num_blocks=7, max_requests=2, chunk=7, max_num_batched_tokens=58, max_len=24)
    reached = (
        "run_layers",
        "likeliest",
        "asarray in Engine._read",
        "copy_blocks",
        "read_blocks",
        "write_blocks",
        "to_host",
    )

    def __init__(self, folder):
        layout = self.model.layout(1, self.block_size)
        self.host = HostPool(layout, self.host_blocks, disk=DiskPool(folder, layout, model=fingerprint(self.model)))
        super().__init__()

    def another(self):
        return Engine(self.model, block_size=self.block_size, offload=self.host, **self.sizes._asdict())

    def run(self):
        for _ in range(4):
            self.engine.step()
        if self.engine.running:
            self.engine.cancel(self.engine.running[-1])
        super().run()

    @classmethod
    @cache
    def right(cls, tokens, count):
        return toy_model.greedy_without_cache(cls.params, tokens, count)

    def check_pools(self):
        assert not self.host._holds
        self.host.flush()


class Hybrid(Toy):
    """The same with windows and states."""

    install, params, block_size = toy_hybrid.install, toy_hybrid.random_params(), 8
    model = toy_hybrid.HybridModel(params)
    host_blocks = 6
    sizes = Sizes(num_blocks=16, max_requests=2, chunk=8, max_num_batched_tokens=18, max_len=24)
    reached = *(name for name in Toy.reached if name != "copy_blocks"), "DiskPool.load"

    @classmethod
    @cache
    def right(cls, tokens, count):
        return toy_hybrid.greedy_without_cache(cls.params, tokens, count, cls.model.config.layers)


@cache
def with_drafts():
    config = models.ModelConfig.read(FOLDER / "deepseek_v3")
    config = dataclasses.replace(config, num_layers=1, num_nextn_predict_layers=1)
    return models.random_model(config, mtp=True, dtype="float32")


class Drafts(Served):
    """`Engine` with drafts."""

    prompts = ((3, 1, 4, 1, 5), 5), (tuple(range(20)), 3), ((9,), 4)
    reached = "verify_and_draft", "asarray in Engine._read"

    def __init__(self, _):
        super().__init__()

    @staticmethod
    def install(monkeypatch):
        pass

    @staticmethod
    def another():
        options = {"num_blocks": 5, "block_size": 16, "max_requests": 2, "chunk": 16, "max_num_batched_tokens": 38}
        return Engine(with_drafts(), drafts=MTP(2), **options)

    @classmethod
    @cache
    def right(cls, tokens, count):
        other = cls.another()
        request = other.submit(tokens, max_tokens=count, stop=())
        list(other.run())
        return request.generated


def assert_right(served):
    """Every request has tokens that are right, and all of them if it has ended by itself."""
    for request in served.requests:
        right = served.right(request.prompt, request.max_tokens)
        assert request.generated == right[: len(request.generated)]
        assert request.finish_reason in (None, "length", "cancelled")
        assert len(request.generated) == request.max_tokens or request.finish_reason != "length"


def assert_ended(served, error):
    """All later calls are refused, and nothing is kept."""
    engine = served.engine
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.running
    assert [request for request in served.requests if request.finish_reason is None] == sorted(
        engine.waiting, key=served.requests.index
    )
    assert not any(request.blocks for request in engine.waiting)
    assert engine.cache.buffer.is_deleted()
    calls = {
        "submit": lambda: engine.submit([1]),
        "step": engine.step,
        "run": engine.run,
        "warm_up": engine.warm_up,
        "cancel": lambda: engine.cancel(served.requests[0]),
    }
    for name, call in calls.items():
        if hasattr(engine, name):
            with pytest.raises(
                RuntimeError, match=f"this engine has ended, .* raised {type(error).__name__}: "
            ) as found:
                call()
            assert found.value.__cause__ is error


def assert_another_continues(served):
    """With the same model and pools, from the tokens that were read."""
    other, left = served.another(), {}
    for request in served.engine.waiting:
        if count := request.max_tokens - len(request.generated):
            left[request] = other.submit(request.tokens, max_tokens=count, stop=())
    list(other.run())
    for request, continued in left.items():
        assert request.generated + continued.generated == served.right(request.prompt, request.max_tokens)
    assert other.pool.num_free == other.pool.num_blocks


def interrupt(kind, folder, site, number, error):
    """Serves until a call raises, if that is made, and checks what is left; returns whether the engine has ended."""
    served, calls = kind(folder), Calls(site, number, error)
    with contextlib.suppress(type(error)), calls:
        served.run()
    ended = served.engine._ended_by is not None
    if ended:
        assert_ended(served, error)
    else:
        served.run()  # it was handled, or nothing had changed
        assert all(request.finish_reason for request in served.requests)
    assert_right(served)
    assert_another_continues(served)
    served.check_pools()
    return calls.raised, ended


def all_calls(kind, folder):
    """The calls of a run that nothing interrupts, each with how often it is made; compiling makes others, once."""
    for name in ("compiling", "compiled"):
        served = kind(folder / name)
        with Calls() as calls:
            served.run()
        assert all(request.finish_reason for request in served.requests)
        assert_right(served)
        served.check_pools()
    return calls.seen


@pytest.mark.ci
@pytest.mark.parametrize("kind", [slow(Hybrid), Drafts, slow(Toy)])
def test_a_call_that_launches_reads_loads_stores_or_allocates_raises(kind, monkeypatch, tmp_path):
    kind.install(monkeypatch)
    found = {site.split(",")[0]: site for site in all_calls(kind, tmp_path) if site.startswith(TRANSFERS)}
    outcomes = [interrupt(kind, tmp_path / name, site, 1, KeyboardInterrupt()) for name, site in found.items()]
    assert outcomes == [(True, True)] * len(found)
    for name in kind.reached:
        assert any(name in call for call in found), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Toy, Hybrid, Drafts])
def test_any_call_is_interrupted(kind, monkeypatch, tmp_path):
    """In the middle of the times that it is made."""
    kind.install(monkeypatch)
    cases = [(site, 1 + count // 2) for site, count in all_calls(kind, tmp_path).items()]
    outcomes = Counter(interrupt(kind, tmp_path / str(i), *case, KeyboardInterrupt()) for i, case in enumerate(cases))
    assert outcomes[True, True] > 0.9 * len(cases), outcomes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* could not be written to disk:UserWarning")
@pytest.mark.parametrize("kind", [Toy, Hybrid, Drafts])
def test_any_call_that_can_fail_raises(kind, monkeypatch, tmp_path):
    """A transfer between device, host and disk that fails costs time, but does not end the engine."""
    kind.install(monkeypatch)
    seen = all_calls(kind, tmp_path)
    cases = [(site, 1 + count // 2) for site, count in seen.items() if site.startswith(TRANSFERS)]
    outcomes = Counter(interrupt(kind, tmp_path / str(i), *case, RuntimeError("no")) for i, case in enumerate(cases))
    assert outcomes[True, True] > len(cases) / 5, outcomes
    assert outcomes[True, False] > len(cases) / 3 or kind is Drafts, outcomes


def test_an_exception_in_the_warm_up(monkeypatch):
    """It ends the engine if programs run; before that, nothing has changed."""
    toy_model.install(monkeypatch)
    served = Engine(
        Toy.model, num_blocks=7, block_size=4, max_requests=2, chunk=7, max_num_batched_tokens=16, max_len=24
    )
    request = served.submit(prompt(9), max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(served.buckets, "compile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.warm_up()
    list(served.run())
    assert request.generated == Toy.right(request.prompt, 3)
    served.block_manager.warm_up = interrupted
    with pytest.raises(KeyboardInterrupt):
        served.warm_up()
    for call in (served.step, served.warm_up, served.schedule, lambda: served.read(behind=False)):
        with pytest.raises(
            RuntimeError, match="this engine has ended, because a step raised KeyboardInterrupt: make a new"
        ):
            call()


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_second_interrupt_while_the_engine_ends(monkeypatch):
    """The next call releases what is left."""
    toy_model.install(monkeypatch)
    served = Engine(Toy.model, num_blocks=7, block_size=4, max_requests=2, chunk=7, max_len=24)
    requests = [served.submit(prompt(length), max_tokens=3) for length in (9, 6)]
    served.step()
    monkeypatch.setattr(served, "batches", interrupted)
    with monkeypatch.context() as patch:
        patch.setattr(served.pool, "clear", interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.step()
        assert served.pool.num_free < 7
    with pytest.raises(RuntimeError, match="this engine has ended"):
        served.step()
    assert served.pool.num_free == 7
    assert served.waiting == requests
    assert [request.finish_reason for request in requests] == [None, None]
