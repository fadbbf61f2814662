"""Two engines as two processes: one prefills, the other decodes, and either may be killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.cases import further, slow
from support.recorded import recorded

TESTS = Path(__file__).parents[1]
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
"""All programs are kept on disk, so that processes start again quickly."""


class Process:
    """An engine in a process of its own."""

    def __init__(self, role, port, folder):
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "serving" / "two_engines.py"), role, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **CACHE, "JAX_COMPILATION_CACHE_DIR": str(folder)},
            text=True,
        )

    def ask(self, prompt, count):
        self.process.stdin.write(json.dumps([prompt, count]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, self.process.wait()
        return json.loads(line)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    with ExitStack() as stack:

        def started(role, port=0):
            engine = Process(role, port, tmp_path)
            stack.enter_context(engine.process)  # closes its streams
            stack.callback(engine.process.kill)
            return engine

        yield started


def ask_both(prefill, decode):
    """Has one prefill the longest recorded prompt, and the other generate 15 tokens, which are returned, after that."""
    prompt, tokens = recorded("deepseek_v3")[-1]
    prefill.ask(prompt, 1)
    found = prefill.answer()
    assert (found["tokens"], found["failures"], found["free"]) == (tokens[:1], 0, 64)
    decode.ask(prompt + tokens[:1], 15)
    assert decode.answer() == {"offered": True}
    return tokens[1:16]


@pytest.mark.timeout(3600)  # of 20, which start 42 processes
@pytest.mark.parametrize("kills", [further(1), slow(20)])
def test_either_may_be_killed_while_blocks_are_on_their_way(kills, start):
    prefill = start("prefill")
    _, port = prefill.answer()["address"]
    decode, rng, interrupted = start("decode", port), random.Random(0), 0
    decode.answer()
    right = ask_both(prefill, decode)
    assert decode.answer() == {"tokens": right, "loaded": 200, "failures": 0, "free": 64}
    for number in range(kills):
        ask_both(prefill, decode)
        time.sleep(rng.random() * 0.1)
        prefill.kill()
        found = decode.answer()
        assert (found["tokens"], found["free"]) == (right, 64)
        interrupted += found["failures"]
        prefill = start("prefill", port)
        prefill.answer()
        ask_both(prefill, decode)
        time.sleep(rng.random() * 0.1)
        decode.kill()
        decode = start("decode", port)
        decode.answer()
        print(f"{interrupted} of {number + 1} pulls were interrupted")
    ask_both(prefill, decode)
    assert decode.answer() == {"tokens": right, "loaded": 200, "failures": 0, "free": 64}
