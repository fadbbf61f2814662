"""`jaxkv bench --tune`: searches for the best configurations of the kernels that the selected shapes run."""

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jaxkv.bench.programs import Program
from jaxkv.bench.tuning import Trial, configurations, search
from jaxkv.bench.workload import Workload
from jaxkv.terminal.files import write_json


def run(workloads: list[Workload], args: Namespace, about: dict[str, Any]) -> int:
    """Prints a line per trial, and the best configuration.  ValueError if no selected shape runs a tunable kernel."""
    rows: list[dict[str, Any]] = []
    for workload in workloads:
        for default in _configurations(workload, args.implementation):
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
        raise ValueError("no selected shape runs attention on mosaic_gpu or triton, whose kernels can be tuned")
    return 0


def _configurations(workload: Workload, implementation: str | None) -> list[Any]:
    try:
        return configurations(lambda: Program(workload, implementation=implementation))
    except NotImplementedError as error:
        print(f"{workload.name} not run: {str(error).splitlines()[0]}", flush=True)
        return []


def _trials(workload: Workload, default: Any, args: Namespace) -> Iterator[Trial]:
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
