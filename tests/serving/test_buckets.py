"""Which programs the engine compiles, and which of them a step runs."""

import os
import threading
from types import SimpleNamespace

import pytest

from jaxkv.serving.buckets import Buckets, Shape
from jaxkv.serving.step_inputs import Schedule
from serving.toy_engines import engine, join_compilers, right, serve
from support.toy_model import prompt


def buckets_of(max_requests, max_chunks):
    return Buckets(max_requests, budget=max_requests + 8 * max_chunks, columns=1, chunk=8)


def shapes(chunks, requests):
    return {Shape(m, n) for m in chunks for n in requests}


def test_there_are_few_sizes_up_to_the_largest():
    buckets = Buckets(48, budget=48 * 3 + 80, columns=3, chunk=8)
    first, *others = buckets.shapes
    assert first == (10, 48)
    assert others[0] == (0, 48)
    with_chunks = shapes([10, 4, 1], [48]) | shapes([26], [4]) | shapes([28, 4, 1], [0])
    assert {*buckets.shapes} == shapes([0], [1, 2, 4, 8, 16, 32, 48]) | with_chunks
    assert others[1:] == sorted(others[1:], key=lambda shape: shape[::-1])
    for shape in buckets.shapes:
        assert 8 * shape.chunks + 3 * shape.requests <= 48 * 3 + 80
    assert buckets_of(1, 1).shapes == [(1, 1), (0, 1), (1, 0)]
    assert {shape.chunks for shape in buckets_of(32, 64).shapes if shape.requests == 32} == {64, 32, 16, 8, 2, 0}
    assert Buckets(2, budget=99, columns=1, chunk=8, max_chunks=2).largest[0] == (2, 2)


def needs(chunks, requests):
    return Schedule([None] * chunks, [None] * requests)


def test_the_next_larger_program_serves_while_one_is_missing():
    buckets = buckets_of(8, 4)
    assert (buckets.fit(needs(0, 3)), buckets.fit(needs(1, 3))) == ((0, 8), (4, 8))
    buckets.ready |= {Shape(0, 2), Shape(1, 8)}
    assert [buckets.fit(needs(0, n)) for n in (1, 2, 3)] == [(0, 2), (0, 2), (0, 8)]
    assert [buckets.fit(needs(m, 3)) for m in (1, 2)] == [(1, 8), (4, 8)]


def test_one_program_holds_the_steps_of_several_engines():
    """A budget of 24 tokens allows three chunks alone, two beside 1 request, and one beside 2 to 16."""
    buckets = Buckets(16, budget=24, columns=1, chunk=8)
    assert [buckets.most_chunks(n) for n in (0, 1, 2, 16)] == [1, 1, 1, 1]  # the largest is ready, and no other
    buckets.ready.update(buckets.shapes)
    assert [buckets.most_chunks(n) for n in (0, 1, 2, 16)] == [3, 2, 1, 1]
    few, many = needs(2, 1), needs(1, 3)
    assert buckets.fit(few) == (2, 1)
    assert buckets.fit(needs(2, 0)) == (2, 1)
    assert len(few.prefill) == 2
    assert buckets.fit(few, many) == (1, 16)
    assert (len(few.prefill), len(many.prefill)) == (1, 1)  # the other chunk is left to the next step


def program(compile):
    return [lambda: SimpleNamespace(compile=compile)]


def test_the_largest_are_compiled_first_and_the_others_in_the_background(caplog):
    """A program that cannot be compiled is reported, and a larger one serves."""
    buckets, go = buckets_of(2, 1), threading.Event()
    compiled = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=7))
    programs = {shape: program(lambda: compiled) for shape in buckets.shapes}

    def failing():
        assert go.wait(20)
        raise RuntimeError("out of memory")

    assert buckets.shapes == [Shape(1, 2), Shape(0, 2), Shape(1, 0), Shape(0, 1)]
    programs[Shape(0, 1)] = program(failing)
    buckets.compile(programs, wait=False)
    assert {shape: buckets.temporaries[shape] for shape in buckets.largest} == dict.fromkeys(buckets.largest, 7)
    go.set()
    join_compilers()
    assert "a program was not compiled, so that steps run a larger one: out of memory" in caplog.text
    assert buckets.fit(needs(0, 1)) == (0, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        buckets.compile(programs, wait=True)


def test_nothing_is_compiled_for_buckets_that_have_been_dropped():
    buckets, begun, go, compiled = buckets_of(8, 1), threading.Event(), threading.Event(), []
    largest = buckets.largest

    def compiler(shape):
        compiled.append(shape)
        if shape not in largest:
            begun.set()
            assert go.wait(20)
        return SimpleNamespace(memory_analysis=lambda: None)

    shapes = buckets.shapes
    buckets.compile({shape: program(lambda shape=shape: compiler(shape)) for shape in shapes}, wait=False)
    assert begun.wait(20)
    del buckets
    go.set()
    join_compilers()
    assert len(shapes) == 7
    threads = max((os.cpu_count() or 1) // 4, 1)
    assert {*largest} < {*compiled}
    assert len(compiled) <= len(largest) + threads


@pytest.mark.usefixtures("toy")
def test_a_step_runs_the_smallest_program(monkeypatch):
    served, rows = engine(max_requests=3, max_num_batched_tokens=3 + 4 * 7), []
    launched = served.launched
    monkeypatch.setattr(served, "launched", lambda *args: rows.append(args[1]) or launched(*args))
    served.buckets.ready.update(served.buckets.shapes)
    counts = 9, 2, 5
    requests = [served.submit(prompt(5, seed=n), max_tokens=count) for n, count in enumerate(counts)]
    list(served.run())
    assert [request.generated for request in requests] == [right(prompt(5, seed=n), m) for n, m in enumerate(counts)]
    assert rows[0].chunks == 4
    assert [shape for shape in rows[1:] if shape.chunks] == []
    sizes = [shape.requests for shape in rows[1:]]
    assert sizes == sorted(sizes, reverse=True)
    assert {1, 2} <= set(sizes)
    serve(served, prompt(5, seed=9))
    assert rows[len(sizes) + 1].chunks == 2


@pytest.mark.usefixtures("toy")
def test_a_prompt_alone_runs_a_program_without_rows_of_other_requests(monkeypatch):
    served, steps = engine(max_requests=3, max_num_batched_tokens=3 + 4 * 7), []
    batches = served.batches
    monkeypatch.setattr(served, "batches", lambda *args: steps.append(batches(*args)) or steps[-1])
    served.warm_up()
    steps.clear()
    serve(served, prompt(5))
    assert steps[0].decode is None
    assert len(steps[0].prefill.tokens) == 2
    assert all(step.prefill is None for step in steps[1:])
