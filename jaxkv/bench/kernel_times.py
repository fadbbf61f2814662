"""The time in which a call's kernels run on a GPU, without the gaps between them, and what these kernels compute."""

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData, ProfileOptions

from jaxkv.terminal.streams import notice

COPIES = "Memcpy", "Memset"
"""Prefixes of the names of events that are not kernels."""

KINDS = {
    "experts": r"experts_",
    "collectives": r"nccl|psum|all_?(reduce|gather|to_?all)",
    "attention": r"^_?(decode|plan|indexer|select|attend|combine|merge)_?|sdpa|fmha|flash|topk_",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|split_?k|dot|linear_",
}
"""What a kernel computes, by a pattern that its name contains.  The first that fits is its kind.

Products are those of dense weights, by XLA, cuBLAS or `scaled_linear`.  Small sums over devices are parts of XLA's
fusions.  Kernels that fit none are "others": XLA's fusions, among which are its products of a weight and a single
token, and copies of entries.
"""

Span = tuple[str, float, float]
"""A kernel's name, start and end; times in nanoseconds."""


@dataclass(frozen=True)
class KernelTimes:
    """Seconds in which the kernels of one call run."""

    median: float
    """The median over calls of the time of all kernels together."""
    kernels: tuple[tuple[str, float], ...]
    """(name, median) of each kernel, in order of start times.  Overlapping time counts for the earlier kernel only."""
    whole: tuple[tuple[str, float], ...] = ()
    """The same from each kernel's start to its end, so that overlapping time counts for every kernel.

    Kernels that run side by side overlap, and those that start while the kernel before them ends, and wait for it.
    """

    def divided(self, calls: int) -> "KernelTimes":
        """The times per call if `calls` calls were timed as one: of each kernel by name."""
        if calls == 1:
            return self
        return KernelTimes(self.median / calls, _by_name(self.kernels, calls), _by_name(self.whole, calls))


def _by_name(kernels: tuple[tuple[str, float], ...], calls: int) -> tuple[tuple[str, float], ...]:
    """The sum of the times of each name, divided by `calls`."""
    seconds: dict[str, float] = {}
    for name, took in kernels:
        seconds[name] = seconds.get(name, 0) + took / calls
    return tuple(seconds.items())


def time_kernels(call: Callable[..., Any], *args, repeats: int) -> KernelTimes | None:
    """Kernel times of `repeats` runs of `jit(call)`, from the timeline of CUPTI, NVIDIA's profiling interface.

    None if there is no timeline (no CUPTI, or another profiler uses it); the reason is printed to standard error.
    """
    run = jax.jit(call)
    return kernels_of(lambda: run(*args), repeats=repeats)


def kernels_of(run: Callable[[], Any], *, repeats: int) -> KernelTimes | None:
    """The same for `repeats` runs of compiled programs, such as those that donate and keep their arguments."""
    if "cuda" not in jax.devices()[0].client.platform_version.lower():
        return None
    try:
        return _medians(_timeline(run, repeats), repeats)
    except RuntimeError as error:
        notice(f"no kernel times: {error}")
        return None


def _timeline(run: Callable[[], Any], repeats: int) -> list[Span]:
    """The kernels that ran on the first GPU, in order of start times."""
    jax.block_until_ready(run())  # compiles the program and touches all its memory
    options = ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(repeats - 1):
                run()  # the next run may donate the results
            jax.block_until_ready(run())
        file = next(Path(folder).rglob("*.xplane.pb"), None)
        if file is None:
            raise RuntimeError("the profiler left no timeline")
        return sorted(_spans(ProfileData.from_file(str(file))), key=lambda span: span[1])


def _spans(profile: ProfileData) -> Iterator[Span]:
    """The kernels of the first GPU."""
    plane = profile.find_plane_with_name("/device:GPU:0")
    for line in plane.lines if plane else ():
        if line.name.startswith("Stream"):  # other lines repeat the same events by operation or module
            for event in line.events:
                if not event.name.startswith(COPIES):
                    yield event.name, event.start_ns, event.end_ns


def _medians(spans: list[Span], repeats: int) -> KernelTimes:
    """Medians over `repeats` calls; RuntimeError if the calls did not run the same kernels.

    Kernels that run side by side may begin in another order in each call; then they are sorted by name.
    """
    each, rest = divmod(len(spans), repeats)
    names = [name for name, *_ in spans]
    calls = [names[first : first + each] for first in range(0, len(spans), max(each, 1))]
    if not each or rest or any(sorted(call) != sorted(calls[0]) for call in calls):
        raise RuntimeError(f"the timeline has {len(spans)} kernels of {repeats} calls: expected the same of each")
    times = [list(_added(spans)), [end - begin for _, begin, end in spans]]
    added, whole = np.reshape(times, (2, repeats, each)) / 1e9
    if any(call != calls[0] for call in calls):
        orders = [np.argsort(call, kind="stable") for call in calls]
        added, whole = (np.take_along_axis(times, np.stack(orders), axis=1) for times in (added, whole))
        names = sorted(calls[0])
    kernels, whole = (
        tuple(zip(names[:each], np.median(times, axis=0).tolist(), strict=True)) for times in (added, whole)
    )
    return KernelTimes(float(np.median(added.sum(axis=1))), kernels, whole)


def _added(spans: Iterable[Span]) -> Iterator[float]:
    """The nanoseconds of each span that do not overlap with earlier spans."""
    ended = -math.inf
    for _, begin, end in spans:
        yield max(end - max(begin, ended), 0.0)
        ended = max(ended, end)


def kind(kernel: str) -> str:
    """The kind of the kernel of that name."""
    found = (name for name, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, "others")


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The seconds of each kind of kernel, of (name, seconds) of each kernel; without kinds that take none."""
    found = dict.fromkeys([*KINDS, "others"], 0.0)
    for name, took in kernels:
        found[kind(name)] += took
    return {name: took for name, took in found.items() if took}


def shares(kernels: Iterable[tuple[str, float]], seconds: float) -> dict[str, float]:
    """The seconds of each kind of kernel, and of "gaps", in a step that takes `seconds`.

    `kernels` are those of `KernelTimes`.  Their times come from a profile, and `seconds` from a run without one.
    """
    found = by_kind(kernels)
    gaps = seconds - sum(found.values())
    return {**found, "gaps": gaps} if gaps > 0 else found


def describe_shares(found: dict[str, float], seconds: float) -> str:
    """One line: milliseconds and percentage of each share."""
    parts = (f"{name} {1e3 * took:.3f} ms ({took / seconds:.0%})" for name, took in found.items())
    return ", ".join(parts)
