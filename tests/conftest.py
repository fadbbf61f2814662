"""Quick compilations, a repeatable hypothesis, and the tests that can run on this machine."""

import gc
import itertools
import os
import zlib
from collections import defaultdict
from pathlib import Path

# Tests compile thousands of small programs and run each for microseconds.  XLA's newer emitters build a pipeline of
# MLIR passes for every fusion, and its code generator up to 32 LLVM modules a program: four fifths of the compiling.
# jax 0.12 no longer has the older emitters, and tests take nearly twice as long with it.
# An `XLA_FLAGS` that is set wins: `XLA_FLAGS= pytest ...` compiles as users do.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

# Pallas's GPU interpreter runs warpgroups as threads that wait for each other inside callbacks: a pool of as many
# threads as a small machine has cores would never finish.
os.environ.setdefault("NPROC", "16")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_num_cpu_devices", 8)  # for tests of several devices; the others use the first
hypothesis.settings.register_profile("jaxkv", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.register_profile("long", hypothesis.settings.get_profile("jaxkv"), max_examples=250)
hypothesis.settings.load_profile("jaxkv")

INTERPRETED_SECONDS = 240
"""A kernel that waits at a barrier for ever ends only with its process, which is what the timeout does."""


MACHINES = ("gpu", "triton", "devices")
"""Markers of tests that need devices or packages, and name what is `missing` here."""
FURTHER = {"ci", "slow"}
"""Markers of cases that do not run by default."""
BY_DEFAULT = pytest.StashKey[set[str]]()
"""The tests that have cases which run by default."""


def pytest_addoption(parser):
    """`--one-in`, for suites of whose cases there is time for a part."""
    text = "run one in N cases of each test, always the same ones, which a hash of their names chooses; at least one, "
    text += "unless these are further cases (-m ci) of a test that has others"
    parser.addoption("--one-in", type=int, default=1, metavar="N", help=text)


def pytest_configure(config):
    """Allows engines of recorded models, which have no stop tokens: the tests run to `max_tokens`."""
    config.stash[BY_DEFAULT] = set()
    config.addinivalue_line("filterwarnings", "ignore:the checkpoint states no stop tokens")


def pytest_itemcollected(item):  # before -m
    """Notes the tests that have cases which run by default."""
    if not _is_further(item):
        item.config.stash[BY_DEFAULT].add(_test_of(item))


def _is_further(item) -> bool:
    return not FURTHER.isdisjoint(mark.name for mark in item.iter_markers())


def _test_of(item) -> str:
    """The name of the test of which this is a case."""
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    """Deselects the tests that cannot run on this machine, and limits the time of interpreted ones.

    Tests that `-m` selects by such a mark are skipped instead, and the report has the reason.

    `--one-in N` keeps one in N cases of each test.  It keeps at least one, unless all of them are further cases (`ci`,
    `slow`) and the test also has cases that run by default.
    """
    selected, deselected = [], []
    for item in items:
        marks = [mark for mark in item.iter_markers() if mark.name in MACHINES and mark.kwargs["missing"]]
        asked_for = any(mark.name in config.option.markexpr for mark in marks)
        (deselected if marks and not asked_for else selected).append(item)
        for mark in marks:
            item.add_marker(pytest.mark.skip(reason="; ".join(mark.kwargs["missing"])))
        if "interpreted" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(INTERPRETED_SECONDS))
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in selected:
        cases[_test_of(item)].append(item)
    chosen = set[pytest.Item]()
    for test, found in cases.items():
        has_others = test in config.stash[BY_DEFAULT] and all(map(_is_further, found))
        count = max(len(found) // config.option.one_in, not has_others)
        chosen.update(sorted(found, key=lambda item: zlib.crc32(item.nodeid.encode()))[:count])
    config.hook.pytest_deselected(items=[*deselected, *(item for item in selected if item not in chosen)])
    items[:] = [item for item in selected if item in chosen]


def pytest_collection_finish():
    """Collects garbage rarely: tracing makes millions of small objects, few of which are in cycles."""
    gc.collect()
    gc.freeze()  # modules and test items, which live as long as the process
    gc.set_threshold(100_000, 20, 100)


MOST_MAPPINGS = 35_000
"""Memory mappings of a test process.  Compiled programs keep some; Linux allows 65,530, beyond which XLA crashes."""


TESTS_BETWEEN_COUNTS = 25
"""Counting the mappings takes milliseconds, which thousands of tests would notice."""
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _programs_are_dropped():
    """Drops compiled programs once there are many: a process runs thousands of tests."""
    yield
    if next(_tests) % TESTS_BETWEEN_COUNTS == 0 and _mappings() > MOST_MAPPINGS:
        jax.clear_caches()


def _mappings() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@pytest.fixture(scope="session")
def quick_lowering():
    """Lowers Mosaic GPU kernels in less time."""
    from support import hopper

    with hopper.quick_lowering():
        yield


@pytest.fixture
def interpreted():
    """Kernels run in Pallas's GPU interpreter, and none of them races."""
    from support.interpreter import without_races

    with without_races():
        yield


@pytest.fixture
def interpreting():
    """Kernels run in Triton's interpreter."""
    from jaxkv_kernels.triton import interpreter

    with interpreter.interpreting(True):
        yield
