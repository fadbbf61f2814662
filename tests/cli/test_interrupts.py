"""Ctrl-C ends a command soon with one line, whatever it is doing."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxkv.cli import layout, main
from jaxkv.serving.buckets import Buckets

MODEL = Path(__file__).parents[1] / "data" / "models" / "llama"

# A call of C that neither holds Python's lock nor ends at a signal, as the compiler.
COMPILER = """
import hashlib, sys
import jax
from jaxkv import cli
from jaxkv.cli import layout
def compiler(*args, **kwargs):
    print("a compiler runs", file=sys.stderr, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
IN_THREADS = f"""{COMPILER}
jax.stages.Lowered.compile = compiler
sys.exit(cli.main(["generate", "--model", "{MODEL}", "--ids", "1", "--max-tokens", "1", "--blocks", "1"]))
"""
IN_THE_MAIN_THREAD = f"""{COMPILER}
layout.run = compiler
sys.exit(cli.main(["layout"]))
"""


@pytest.mark.ci
@pytest.mark.parametrize("script", [IN_THREADS, IN_THE_MAIN_THREAD], ids=["in threads", "in the main thread"])
def test_a_compiler_does_not_delay_the_end(script):
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while process.stderr.readline() not in ("a compiler runs\n", ""):
                pass
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                time.sleep(0.2)
            lines = process.communicate(timeout=30)[1].splitlines()
        finally:
            process.kill()
    assert process.returncode == 130
    assert [line for line in lines if line != "a compiler runs"] == ["jaxkv: interrupted"]


def press_ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def compile_two(compiler):
    buckets = Buckets(1, budget=2, columns=1, chunk=1)
    lowered = SimpleNamespace(compile=compiler)
    buckets.compile({shape: [lambda: lowered] for shape in buckets.shapes}, wait=True)


def test_compilations_that_have_begun_are_not_awaited():
    begun, end = threading.Event(), threading.Event()
    ended = []

    def compiler():
        begun.set()
        ended.append(end.wait(60))

    def interrupt():
        begun.wait(60)
        press_ctrl_c()

    presses = threading.Thread(target=interrupt)
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_two(compiler)
        assert not ended
    finally:
        end.set()
        presses.join()


def test_an_error_of_the_compiler_is_raised():
    def compiler():
        raise ValueError("the program is too large")

    with pytest.raises(ValueError, match="the program is too large"):
        compile_two(compiler)


def signals():
    """How signals are handled: the handler of Ctrl-C, and the file that signals are written to."""
    written_to = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(written_to)
    return signal.getsignal(signal.SIGINT), written_to


def test_ctrl_c_is_handled_as_before_once_a_command_has_ended(monkeypatch):
    def ended(args):
        assert signals() != before
        return 0

    before, files = signals(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(layout, "run", ended)
    assert main(["layout"]) == 0
    assert signals() == before
    for _ in range(100):  # the thread that reads signals closes its end a moment later
        if len(os.listdir("/proc/self/fd")) == files:
            return
        time.sleep(0.05)
    pytest.fail("files were left open")


def test_ctrl_c_does_not_end_an_interactive_session(monkeypatch, capsys):
    def interrupted(args):
        press_ctrl_c()
        time.sleep(60)

    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(layout, "run", interrupted)
    assert main(["layout"]) == 130
    assert capsys.readouterr().err == "jaxkv: interrupted\n"


def test_a_thread_can_run_a_command(monkeypatch):
    monkeypatch.setattr(layout, "run", lambda args: 7)
    found = []
    thread = threading.Thread(target=lambda: found.append(main(["layout"])))
    thread.start()
    thread.join()
    assert found == [7]
