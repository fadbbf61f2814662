"""Searches for a kernel's best configuration for one workload, changing one field at a time from the default.

This is `jaxkv bench ops --tune`.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxkv.bench.program import Program
from jaxkv.bench.workload import Workload
from jaxkv.terminal.files import write_json
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


def tune(workloads: list[Workload], args: argparse.Namespace, about: dict[str, Any]) -> int:
    """Searches for the best configurations of the kernels that the shapes run.

    Prints a line per trial, and the best configuration; `about` is written with them.  ValueError if no selected shape
    runs a tunable kernel.
    """
    rows: list[dict[str, Any]] = []
    for workload in workloads:
        for default in _defaults(workload, args.implementation):
            print(f"{workload.name}, {type(default).__name__}")
            trials = list(_trials(workload, default, args))
            best = min(trials, key=lambda trial: trial.seconds or math.inf)
            if best.seconds is not None:
                print(f"best: {_difference(best.config, default) or 'the default'}\n", flush=True)
            rows += [
                {"shape": workload.name, "config": _fields(trial.config), "seconds": trial.seconds,
                 "reason": trial.reason, "best": trial is best}
                for trial in trials
            ]  # fmt: skip
            if args.json:
                write_json(args.json, {**about, "trials": rows})
    if not rows:
        raise ValueError("no selected shape runs a kernel that can be tuned, such as attention on mosaic_gpu or triton")
    return 0


def _defaults(workload: Workload, implementation: str | None) -> list[Any]:
    """The configurations of the kernels that the workload runs; none, with a message, if it cannot run."""
    try:
        return configurations(lambda: Program(workload, implementation=implementation))
    except NotImplementedError as error:
        print(f"{workload.name} not run: {str(error).splitlines()[0]}", flush=True)
        return []


def _trials(workload: Workload, default: Any, args: argparse.Namespace) -> Iterator[Trial]:
    """The trials, each printed as it ends."""

    def seconds(config: Any) -> float:
        program = Program(workload, implementation=args.implementation).compile()
        return program.measure(repeats=args.repeats).timing.median

    for trial in search(default, seconds):
        changed = _difference(trial.config, default) or "default"
        figure = trial.reason if trial.seconds is None else f"{trial.seconds * 1e3:.4f} ms"
        print(f"  {figure}  {changed}", flush=True)
        yield trial


def _difference(config: Any, default: Any) -> str:
    """The fields in which `config` differs from `default`, written as keyword arguments."""
    fields = [name for name in type(default).SEARCH if getattr(config, name) != getattr(default, name)]
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in fields)


def _fields(config: Any) -> dict[str, Any]:
    return {"type": f"{type(config).__module__}.{type(config).__name__}", **asdict(config)}
