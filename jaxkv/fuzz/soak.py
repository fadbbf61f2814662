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

from jaxkv.fuzz.case import Case
from jaxkv.fuzz.cases import CASES, draw_case
from jaxkv.fuzz.trial import address_map, trial
from jaxkv.terminal.streams import notice

CALLS_A_CASE = 250
"""Calls of one compiled program: compiling takes seconds, a call milliseconds."""

CALL_SECONDS, COMPILE_SECONDS = 60, 600
"""What takes longer than this hangs."""

SHOWN = 3
"""Wrong calls of a case that are reported one by one."""


@dataclass(frozen=True)
class Prepared:
    """A case whose program is being compiled."""

    seed: int
    case: Case
    program: Future[Any]


def soak(*, calls: int, seed: int, implementation: str) -> int:
    """Makes that many calls, `CALLS_A_CASE` each of the cases of successive seeds; a line a case; how many were wrong.

    The case of a seed, and its calls, depend on nothing else: `calls=j + 1, seed=s` repeats call j of seed s.  A case
    that the implementation takes and then cannot compile is wrong as well.

    Raises:
      ValueError: the implementation takes no call, so that nothing was checked.
    """
    begin, made, wrong, running = time.perf_counter(), 0, 0, 0.0
    for prepared in _prepared(-(-calls // CALLS_A_CASE), seed, implementation):
        try:
            with _watched(f"compiling seed {prepared.seed}: {prepared.case}", COMPILE_SECONDS):
                program = prepared.program.result()
        except Exception as error:
            wrong += 1
            told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"seed {prepared.seed}: DOES NOT COMPILE, {told}: {prepared.case}", flush=True)
            continue
        count = min(CALLS_A_CASE, calls - made)
        start = time.perf_counter()
        bad = list(_wrong_calls(prepared, program, count))
        seconds = time.perf_counter() - start
        made, wrong, running = made + count, wrong + len(bad), running + seconds
        verdict = f"{len(bad)} WRONG" if bad else "ok"
        print(
            f"seed {prepared.seed}: {count} calls {verdict}, {count / seconds:.0f} a second: {prepared.case}",
            flush=True,
        )
        for call, errors in bad[:SHOWN]:
            told = ", ".join(f"{error:.2f}" for error in errors)
            print(f"  call {call}: errors {told} x tolerance; again: --seed {prepared.seed} --calls {call + 1}")
    if not made and not wrong:
        raise ValueError(f"nothing was checked, {implementation} takes no call here: the reasons are above")
    rate = f"{made / running:.0f} a second, {time.perf_counter() - begin:.0f} s in all" if made else "none compiled"
    print(f"{made} calls of {implementation} on {jax.devices()[0].device_kind}: {wrong} wrong; {rate}")
    return wrong


def _prepared(count: int, seed: int, implementation: str) -> Iterator[Prepared]:
    """That many cases, of this seed and the next ones; each compiles while the one before it runs."""
    with ThreadPoolExecutor(max_workers=1) as compiler:
        ahead, refused = None, set()
        while count and len(refused) < len(CASES):
            case = draw_case(seed, implementation)
            if isinstance(case, Case):
                count -= 1
                program = _compiling(compiler, case, implementation)
                if ahead:
                    yield ahead
                ahead = Prepared(seed, case, program)
            elif (operation := case.partition(":")[0]) not in refused:
                refused.add(operation)
                print(f"not called: {case}", flush=True)
            seed += 1
        if ahead:
            yield ahead


def _compiling(compiler: ThreadPoolExecutor, case: Case, implementation: str) -> Future[Any]:
    """The case's program, lowered now and compiled in turn."""
    where, draw = address_map(case.layout), case.draw(np.random.default_rng(0))
    try:
        return compiler.submit(jax.jit(trial(case, implementation)).lower(where, draw).compile)
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _wrong_calls(prepared: Prepared, program, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """(call, errors over their tolerances) of the wrong ones of the first `count` calls."""
    where = jax.device_put(address_map(prepared.case.layout))
    for call in range(count):
        with _watched(f"seed {prepared.seed}, call {call}: {prepared.case}", CALL_SECONDS):
            draw = prepared.case.draw(np.random.default_rng([prepared.seed, call]))
            errors = np.asarray(program(where, draw))
        if not (errors <= 1).all():
            yield call, errors


@contextmanager
def _watched(told: str, seconds: float):
    """Says where an error happened, and ends the process where the body takes longer: kernels that hang go on."""

    def give_up():
        notice(f"HANGS, no answer in {seconds} s: {told}")
        os._exit(3)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        error.add_note(told)
        raise
    finally:
        timer.cancel()
