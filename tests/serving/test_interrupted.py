"""An engine in which a call raises: the next call continues all requests with the tokens that they would have had."""

import contextlib
import dataclasses
import gc
import os
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import jax
import pytest

import jaxkv.offload
import jaxkv.serving
from jaxkv import models
from jaxkv.models.weights.fingerprint import fingerprint
from jaxkv.offload import DiskPool, HostPool, transfers
from jaxkv.serving import MTP, Engine, HostLatents, Request
from jaxkv.serving.block_manager import BlockManager
from serving.toy_engines import fail
from support import toy_hybrid, toy_model
from support.cases import further
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
    *(f"jaxkv.{module}." for module in ("offload.disk", "offload.host", "ops.rows", "serving.pool", "serving.tiers")),
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


class Immediately:
    """Reads and writes files in the thread of the engine, so that all runs are the same and calls are counted."""

    def submit(self, function, *args):
        done = Future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class Served:
    """An engine with requests: they wait for blocks, and their prompts are computed in chunks."""

    sampling = models.Sampling()
    copies: ClassVar = {}
    """The programs that copy blocks; each is compiled once."""

    def __init__(self):
        self.engine = self.another()
        manager = self.engine.block_manager
        manager._copy = self.copies.setdefault(type(self), manager._copy)
        options = {"sampling": self.sampling, "stop": ()}
        self.requests = [self.engine.submit(tokens, max_tokens=count, **options) for tokens, count in self.prompts]
        self.stream = {request: [] for request in self.requests}
        self.restored = 0
        restore = self.engine._restore

        def counted():
            self.restored += 1
            restore()

        self.engine._restore = counted

    def step(self):
        for request, token in self.engine.step():
            self.stream[request].append(token)

    def begin(self):
        """The first steps, in which tests may do more."""

    def run(self):
        for _ in range(100):
            if not self.engine.unfinished:
                return
            self.step()
        raise AssertionError("the requests never end")

    def check_pools(self):
        pass


class Toy(Served):
    """`Engine`: requests also share, copy, await, store and load blocks, are preempted and cancelled."""

    params, block_size = toy_model.random_params(), 4
    model = toy_model.ToyModel(params)
    prompts = (prompt(9), 9), (prompt(9) + prompt(3, 1), 5), (prompt(13, 2), 3), (prompt(9, 3), 6), (prompt(9), 2)
    host_blocks = 16
    sizes = Sizes(num_blocks=7, max_requests=2, chunk=7, max_num_batched_tokens=58, max_len=24)
    reached = (
        "run_layers",
        "asarray in Engine._read",
        "copy_blocks",
        "ops.rows.read_rows",
        "ops.rows.write_rows",
        "to_host",
    )

    @classmethod
    def install(cls, monkeypatch, module=toy_model):
        module.install(monkeypatch)
        monkeypatch.setattr(os, "fsync", lambda file: None)

    def __init__(self, folder):
        layout = self.model.layout(1, self.block_size)
        self.host = HostPool(layout, self.host_blocks, disk=DiskPool(folder, layout, model=fingerprint(self.model)))
        self.host._reader = self.host._writer = Immediately()
        super().__init__()

    def another(self):
        return Engine(self.model, block_size=self.block_size, connectors=[self.host], **self.sizes._asdict())

    def begin(self):
        for _ in range(4):
            self.step()
        if self.engine.running:
            self.engine.cancel(self.engine.running[-1])

    @classmethod
    @cache
    def right(cls, tokens, count):
        return toy_model.greedy_without_cache(cls.params, tokens, count)

    def check_pools(self):
        assert not any(self.host._held.maps)
        self.host.flush()


class Hybrid(Toy):
    """The same with windows and states."""

    params, block_size = toy_hybrid.random_params(), 8
    model = toy_hybrid.HybridModel(params)
    host_blocks = 6
    sizes = Sizes(num_blocks=16, max_requests=2, chunk=8, max_num_batched_tokens=18, max_len=24)
    reached = *(name for name in Toy.reached if name != "copy_blocks"), "DiskPool.load"

    @classmethod
    def install(cls, monkeypatch, module=toy_hybrid):
        super().install(monkeypatch, module)

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
    """`Engine` with drafts of tokens that are drawn."""

    sampling = models.Sampling(1.0, 0.9, seed=3)
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
        request = other.submit(tokens, max_tokens=count, sampling=cls.sampling, stop=())
        list(other.run())
        return request.generated


@cache
def sparse():
    config = models.ModelConfig.read(FOLDER / "deepseek_v32")
    return models.random_model(dataclasses.replace(config, num_layers=1), dtype="float32")


class Split(Served):
    """`Engine` with latents in host memory, which later steps and other requests use again."""

    prompts = (prompt(70), 5), (prompt(70) + prompt(3, 1), 5), (prompt(33, 2), 3), (prompt(70), 2)
    reached = "run_layers", "asarray in Engine._read", "copy_block", "forget"
    options: ClassVar = {"num_blocks": 7, "block_size": 16, "max_requests": 2, "chunk": 32, "max_len": 80}

    def __init__(self, _):
        super().__init__()
        self.engine._forget = self.copies.setdefault("forget", self.engine._forget)

    @staticmethod
    def install(monkeypatch):
        pass

    @classmethod
    def another(cls):
        return Engine(sparse(), **cls.options, max_num_batched_tokens=66, host_latents=HostLatents(64))

    @classmethod
    @cache
    def right(cls, tokens, count):
        other = Engine(sparse(), **cls.options, max_num_batched_tokens=66)
        request = other.submit(tokens, max_tokens=count, stop=())
        list(other.run())
        return request.generated


def assert_right(served, *, streamed=True):
    """Every request has ended with the right tokens, and the caller has got each of them once; no block is held."""
    for request in served.requests:
        right = served.right(request.prompt, request.max_tokens)
        assert request.finish_reason in ("length", "cancelled")
        assert request.generated == (right if request.finish_reason == "length" else right[: len(request.generated)])
        if streamed and request.finish_reason == "length":
            assert served.stream[request] == request.generated
    assert served.engine.pool.num_free == served.engine.pool.num_blocks
    served.check_pools()


def assert_restored(served):
    """All requests wait, with tokens that are right, and nothing is held."""
    engine = served.engine
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.running
    assert engine.waiting == [request for request in served.requests if request.finish_reason is None]
    assert not any(request.blocks for request in engine.waiting)
    assert not any(array.is_deleted() for array in jax.tree.leaves(engine.cache))
    for request in engine.waiting:
        assert request.generated == served.right(request.prompt, request.max_tokens)[: len(request.generated)]


def interrupt(kind, folder, site, number, error):
    """Serves while one call raises, if that is made; returns whether it was, and how often the engine was restored."""
    served, calls = kind(folder), Calls(site, number, error)
    with contextlib.suppress(type(error)), calls:
        served.begin()
        served.run()
    if served.restored:
        assert_restored(served)
    served.run()
    # What `step` was about to return is lost if it is interrupted then.
    assert_right(served, streamed="in EngineBase.step" not in site)
    return calls.raised, served.restored


def all_calls(kind, folder):
    """The calls of a run that nothing interrupts, each with how often it is made; compiling makes others, once."""
    for name in ("compiling", "compiled"):
        served = kind(folder / name)
        with Calls() as calls:
            served.begin()
            served.run()
        assert_right(served)
    return calls.seen


@pytest.mark.parametrize("kind", [Toy, further(Hybrid), further(Drafts), further(Split)])
def test_a_call_that_launches_reads_loads_stores_or_allocates_raises(kind, monkeypatch, tmp_path):
    kind.install(monkeypatch)
    found = {site.split(",")[0]: site for site in all_calls(kind, tmp_path) if site.startswith(TRANSFERS)}
    found = {name: site for name, site in found.items() if "<genexpr>" not in name}
    outcomes = [interrupt(kind, tmp_path / name, site, 1, KeyboardInterrupt()) for name, site in found.items()]
    assert [name for name, outcome in zip(found, outcomes, strict=True) if outcome != (True, 1)] == []
    for name in kind.reached:
        assert any(name in call for call in found), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Toy, Hybrid, Drafts, Split])
def test_any_call_is_interrupted(kind, monkeypatch, tmp_path):
    """In the middle of the times that it is made."""
    kind.install(monkeypatch)
    cases = [(site, 1 + count // 2) for site, count in all_calls(kind, tmp_path).items()]
    outcomes = Counter(interrupt(kind, tmp_path / str(i), *case, KeyboardInterrupt()) for i, case in enumerate(cases))
    assert outcomes[True, 1] > 0.9 * len(cases), outcomes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* could not be written to disk:UserWarning")
@pytest.mark.parametrize("kind", [Toy, Hybrid, Drafts, Split])
def test_any_call_that_can_fail_raises(kind, monkeypatch, tmp_path):
    """A transfer between device, host and disk that fails costs time, but does not end the engine."""
    kind.install(monkeypatch)
    seen = all_calls(kind, tmp_path)
    cases = [(site, 1 + count // 2) for site, count in seen.items() if site.startswith(TRANSFERS)]
    outcomes = Counter(interrupt(kind, tmp_path / str(i), *case, RuntimeError("no")) for i, case in enumerate(cases))
    assert outcomes[True, 1] > len(cases) / 5, outcomes
    assert outcomes[True, 0] > len(cases) / 3 or kind in (Drafts, Split), outcomes


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.fixture
def served(monkeypatch, tmp_path):
    """An engine that has requests, and steps in flight."""
    Toy.install(monkeypatch)
    served = Toy(tmp_path)
    served.step()
    served.step()
    return served


def test_an_exception_in_the_warm_up(served, monkeypatch):
    """The engine is restored if programs run; before that, nothing has changed."""
    with monkeypatch.context() as patch:
        patch.setattr(served.engine.buckets, "compile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.engine.warm_up()
    assert served.restored == 0
    with monkeypatch.context() as patch:
        patch.setattr(served.engine.buckets, "compile", lambda *_, wait: None)
        patch.setattr(BlockManager, "warm_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.engine.warm_up()
    assert served.restored == 1
    served.run()
    assert_right(served)


def test_an_interrupt_just_before_a_request_gets_its_token(served, monkeypatch):
    """The caller does not get it twice."""
    with monkeypatch.context() as patch:
        patch.setattr(Request, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.run()
    served.run()
    assert_right(served)


def test_restoring_is_interrupted(served, monkeypatch):
    """Wherever that is; the next call restores what is left."""
    with Calls() as calls:
        served.engine.changing = True
        served.engine.check_usable()
    second = 0
    for site in calls.seen:
        served.step()
        with monkeypatch.context() as patch, Calls(site, 1, KeyboardInterrupt("second")):
            patch.setattr(served.engine, "schedule", interrupted)
            with pytest.raises(KeyboardInterrupt) as found:
                served.step()
        second += str(found.value) == "second"
    assert second > 20  # the other calls depend on the stores that are in flight
    served.run()
    assert_right(served)


def test_no_second_cache_is_kept_while_the_cache_is_made_again(served, monkeypatch):
    """The frames of the exception have one that is newer than the engine's, and there may be no memory for both."""

    def caches():
        return sum(array.shape == shape for array in jax.live_arrays())

    def copy(cache, *args):
        later = copied(cache, *args)
        raise ZeroDivisionError
        return later

    def allocate():
        counts.append(caches())
        allocated()

    shape, counts = served.engine.cache.buffer.shape, []
    before = caches()
    copied, allocated = served.engine.block_manager._copy, served.engine._allocate
    monkeypatch.setattr(served.engine, "_allocate", allocate)
    with monkeypatch.context() as patch:
        patch.setattr(served.engine.block_manager, "_copy", copy)
        with pytest.raises(ZeroDivisionError) as raised:
            served.run()
    assert raised.traceback[-1].name == "copy"
    assert counts == [before - 1]
    served.run()
    assert_right(served)


def test_blocks_that_a_failed_program_computed_leave_the_pool(served, monkeypatch):
    """The program fails after its launch, when its blocks are on their way to host memory."""

    class Failed:
        is_ready = staticmethod(lambda: False)
        block_until_ready = staticmethod(fail)

    def to_host(rows):
        stores.append(len(rows))
        return Failed()

    served.host.flush()
    stores, before = [], len(served.host)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "to_host", to_host)
        while not stores:
            served.step()
        patch.setattr(served.engine, "batches", interrupted)
        assert len(served.host) == before + sum(stores)
        with pytest.raises(KeyboardInterrupt):
            served.step()
    assert len(served.host) == before
    served.run()
    assert_right(served)


def test_an_engine_that_has_ended_releases_its_host_memory():
    served = Split(None)
    engine = served.engine
    for _ in range(3):
        engine.step()
    (host, *_) = engine._new_cache.args
    kept = weakref.ref(host)
    del host
    engine.end(RuntimeError("the device is lost"))
    gc.collect()
    assert kept() is None
    assert engine.waiting


def test_an_engine_that_cannot_be_restored_ends(served, monkeypatch):
    """All later calls are refused, and nothing is kept; another engine continues with the tokens that were read."""
    engine, cause = served.engine, RuntimeError("the device is lost")

    def lost():
        raise cause

    monkeypatch.setattr(engine, "batches", interrupted)
    monkeypatch.setattr(engine, "_allocate", lost)
    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "clear", interrupted)  # a second interrupt, while the engine is restored
        with pytest.raises(KeyboardInterrupt):
            served.step()
    calls = {
        "submit": lambda: engine.submit([1]),
        "step": engine.step,
        "run": engine.run,
        "warm_up": engine.warm_up,
        "cancel": lambda: engine.cancel(served.requests[0]),
    }
    for call in calls.values():
        with pytest.raises(RuntimeError, match=r"this engine has ended, .*: RuntimeError: the device is") as found:
            call()
        assert found.value.__cause__ is cause
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.cache.buffer.is_deleted()
    assert not engine.running
    assert engine.waiting == [request for request in served.requests if request.finish_reason is None]
    other, left = served.another(), {}
    for request in engine.waiting:
        count = request.max_tokens - len(request.generated)
        left[request] = other.submit(request.tokens, max_tokens=count, stop=())
    list(other.run())
    for request, continued in left.items():
        assert request.generated + continued.generated == served.right(request.prompt, request.max_tokens)
