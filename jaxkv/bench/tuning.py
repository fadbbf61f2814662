"""Searches for a kernel's best configuration for one workload, changing one field at a time from the default."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxkv_kernels import tuning


@dataclass(frozen=True)
class Trial:
    """A configuration that was tried."""

    config: Any
    seconds: float | None
    """Median time of a call; None if it could not run."""
    reason: str = ""
    """Why the configuration could not run; otherwise empty."""


def search(default: Any, measure: Callable[[Any], float]) -> Iterator[Trial]:
    """Yields trials, beginning with `default`.  For each field of its `SEARCH`, the best of all values is kept.

    `measure` returns the seconds of a call with a configuration; it raises if the configuration cannot run.
    """
    best = _trial(default, measure)
    yield best
    for field, values in type(default).SEARCH.items():
        start = best.config
        for value in values:
            if value == getattr(start, field):
                continue
            try:
                config = replace(start, **{field: value})
            except ValueError:  # not valid with the other fields' values
                continue
            trial = _trial(config, measure)
            yield trial
            if trial.seconds is not None and (best.seconds is None or trial.seconds < best.seconds):
                best = trial


def configurations(trace: Callable[[], Any]) -> list[Any]:
    """The configurations of the kernels that `trace` traces, in the order of first use."""
    with tuning.recording() as found:
        trace()
    return found


def _trial(config: Any, measure: Callable[[Any], float]) -> Trial:
    try:
        with tuning.using(config):
            return Trial(config, measure(config))
    except Exception as error:  # compilers may raise anything; the search continues with the next configuration
        return Trial(config, None, str(error).splitlines()[0] if str(error) else type(error).__name__)
