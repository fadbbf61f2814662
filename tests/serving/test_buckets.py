"""Which programs the engine compiles, and which of them a step runs."""

import threading
from types import SimpleNamespace

import pytest

from jaxkv.serving.buckets import Buckets, Shape
from serving.toy_engines import engine, right
from support.toy_model import prompt


def test_there_are_few_sizes_up_to_the_largest():
    buckets = Buckets(max_requests=48, max_chunks=10)
    decoding = [1, 2, 4, 8, 16, 32]
    beside_chunks = [Shape(m, n) for n in (4, 48) for m in (1, 4, 10)]
    assert buckets.shapes[:2] == [Shape(10, 48), Shape(0, 48)]
    assert sorted(buckets.shapes[2:]) == sorted([*[Shape(0, n) for n in decoding], *beside_chunks[:-1]])
    assert [shape.requests for shape in buckets.shapes[2:]] == sorted(shape.requests for shape in buckets.shapes[2:])
    assert Buckets(1, 1).shapes == [Shape(1, 1), Shape(0, 1)]


def test_the_next_larger_program_serves_while_one_is_missing():
    buckets = Buckets(8, 4)
    assert (buckets.smallest(0, 3), buckets.smallest(1, 3)) == (Shape(0, 8), Shape(4, 8))
    buckets.ready |= {Shape(0, 2), Shape(1, 8)}
    assert [buckets.smallest(0, n) for n in (1, 2, 3)] == [Shape(0, 2), Shape(0, 2), Shape(0, 8)]
    assert [buckets.smallest(m, 3) for m in (1, 2)] == [Shape(1, 8), Shape(4, 8)]


def program(compile):
    return [lambda: SimpleNamespace(compile=compile)]


def test_the_largest_are_compiled_first_and_the_others_in_the_background(caplog):
    """A program that cannot be compiled is reported, and a larger one serves."""
    buckets, go = Buckets(2, 1), threading.Event()
    compiled = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=7))
    programs = {shape: program(lambda: compiled) for shape in buckets.shapes}

    def failing():
        assert go.wait(20)
        raise RuntimeError("out of memory")

    assert buckets.shapes == [Shape(1, 2), Shape(0, 2), Shape(0, 1)]
    programs[Shape(0, 1)] = program(failing)
    buckets.compile(programs, wait=False)
    assert buckets.temporaries == dict.fromkeys(buckets.largest, 7)
    go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("jaxkv-compile"):
            thread.join(20)
    assert "a program was not compiled, so that steps run a larger one: out of memory" in caplog.text
    assert buckets.smallest(0, 1) == Shape(0, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        buckets.compile(programs, wait=True)


@pytest.mark.usefixtures("toy")
def test_a_step_runs_the_smallest_program(monkeypatch):
    served, rows = engine(max_requests=3, max_num_batched_tokens=17), []
    launched = served.launched
    monkeypatch.setattr(served, "launched", lambda *args: rows.append(args[1]) or launched(*args))
    served.buckets.ready.update(served.buckets.shapes)
    counts = 9, 2, 5
    requests = [served.submit(prompt(5, seed=n), max_tokens=count) for n, count in enumerate(counts)]
    list(served.run())
    assert [request.generated for request in requests] == [right(prompt(5, seed=n), m) for n, m in enumerate(counts)]
    assert {shape.chunks for shape in rows[:2]} == {2}
    assert [shape for shape in rows[2:] if shape.chunks] == []
    sizes = [shape.requests for shape in rows[2:]]
    assert sizes == sorted(sizes, reverse=True)
    assert {1, 2} <= set(sizes)
