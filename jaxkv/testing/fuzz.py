"""Many random calls of every operation, each checked: `jaxkv verify --calls N`."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxkv.terminal.streams import notice
from jaxkv.testing.buffers import address_map
from jaxkv.testing.case import Case
from jaxkv.testing.check import checker
from jaxkv.testing.families import FAMILIES, draw_case

CALLS_PER_CASE = 250
"""Calls per compiled program: compiling takes seconds, a call milliseconds."""

CALL_SECONDS, COMPILE_SECONDS = 60, 600
"""If a call or a compilation takes longer, it is reported as hanging and the process ends."""

SHOWN = 3
"""Wrong calls of a case that are reported one by one; the others are only counted."""


@dataclass(frozen=True)
class Prepared:
    """A case whose program is being compiled."""

    seed: int
    case: Case
    program: Future[Any]


def fuzz(*, calls: int, seed: int, implementation: str) -> int:
    """Makes `calls` random calls and checks each; prints one line per case, and returns the number of wrong calls.

    Successive seeds, from `seed` on, draw one case each, and up to `CALLS_PER_CASE` calls are made of it.  A case and
    its calls depend on the seed alone: `calls=j + 1, seed=s` repeats call j of seed s.  A case that the implementation
    supports but fails to compile counts as one wrong call.

    Raises:
      ValueError: the implementation supports none of the cases, so nothing was checked.
    """
    begin, made, wrong, running = time.perf_counter(), 0, 0, 0.0
    for prepared in _prepared(-(-calls // CALLS_PER_CASE), seed, implementation):
        try:
            with _watched(f"compiling seed {prepared.seed}: {prepared.case}", COMPILE_SECONDS):
                program = prepared.program.result()
        except Exception as error:
            wrong += 1
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"seed {prepared.seed}: DOES NOT COMPILE, {reason}: {prepared.case}", flush=True)
            continue
        count = min(CALLS_PER_CASE, calls - made)
        start = time.perf_counter()
        bad = list(_wrong_calls(prepared, program, count))
        seconds = time.perf_counter() - start
        made, wrong, running = made + count, wrong + len(bad), running + seconds
        verdict = f"{len(bad)} WRONG" if bad else "ok"
        print(
            f"seed {prepared.seed}: {count} calls {verdict}, {count / seconds:.0f} per second: {prepared.case}",
            flush=True,
        )
        for call, errors in bad[:SHOWN]:
            factors = ", ".join(f"{error:.2f}" for error in errors)
            print(f"  call {call}: errors {factors} x tolerance; again: --seed {prepared.seed} --calls {call + 1}")
    if not made and not wrong:
        raise ValueError(f"nothing was checked: {implementation} supports no call on this machine (reasons above)")
    rate = f"{made / running:.0f} per second, {time.perf_counter() - begin:.0f} s in total" if made else "none compiled"
    print(f"{made} calls of {implementation} on {jax.devices()[0].device_kind}: {wrong} wrong; {rate}")
    return wrong


def _prepared(count: int, seed: int, implementation: str) -> Iterator[Prepared]:
    """The first `count` supported cases from `seed` on; each compiles while the one before it runs."""
    with ThreadPoolExecutor(max_workers=1) as compiler:
        ahead, unsupported = None, set()
        while count and len(unsupported) < len(FAMILIES):
            case = draw_case(seed, implementation)
            if isinstance(case, Case):
                count -= 1
                program = _compiling(compiler, case, implementation)
                if ahead:
                    yield ahead
                ahead = Prepared(seed, case, program)
            elif (operation := case.partition(":")[0]) not in unsupported:
                unsupported.add(operation)
                print(f"not called: {case}", flush=True)
            seed += 1
        if ahead:
            yield ahead


def _compiling(compiler: ThreadPoolExecutor, case: Case, implementation: str) -> Future[Any]:
    """The program of a case, lowered by this call and compiled in the background."""
    where, draw = address_map(case.layout), case.draw(np.random.default_rng(0))
    try:
        return compiler.submit(jax.jit(checker(case, implementation)).lower(where, draw).compile)
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _wrong_calls(prepared: Prepared, program, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the call, errors divided by their tolerances) of each wrong call among the first `count`."""
    where = jax.device_put(address_map(prepared.case.layout))
    for call in range(count):
        with _watched(f"seed {prepared.seed}, call {call}: {prepared.case}", CALL_SECONDS):
            draw = prepared.case.draw(np.random.default_rng([prepared.seed, call]))
            errors = np.asarray(program(where, draw))
        if not (errors <= 1).all():
            yield call, errors


@contextmanager
def _watched(what: str, seconds: float):
    """Adds `what` to an exception of the body, and ends the process if the body takes longer than `seconds`.

    A kernel that hangs cannot be stopped, so the process has to end.
    """

    def give_up():
        notice(f"HANGS, no answer in {seconds} s: {what}")
        os._exit(3)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise
    finally:
        timer.cancel()
