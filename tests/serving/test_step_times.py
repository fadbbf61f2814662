"""A bound on the time between tokens: how many chunks a step has then, on a device whose times are given."""

from collections import deque

import pytest

from jaxkv.serving import step_times
from jaxkv.serving.buckets import Shape
from jaxkv.serving.step_times import LATEST, LEAST, StepTimes
from serving.toy_engines import engine, right
from support.toy_model import prompt

CHUNK = 7
SIZES = {"max_requests": 3, "chunk": CHUNK, "max_num_batched_tokens": 3 + 16 * CHUNK}
"""Programs for 16, 4, 1 and 0 chunks."""


class Device:
    """Has steps take the seconds that `seconds(shape)` gives, and the host no time at all."""

    def __init__(self, times, seconds, monkeypatch):
        self.seconds, self.now, self.free, self.ends = seconds, 0.0, 0.0, deque()
        self.launched, self.read = times.launched, times.read
        monkeypatch.setattr(step_times, "perf_counter", lambda: self.now)
        monkeypatch.setattr(times, "launched", self.launch)
        monkeypatch.setattr(times, "read", self.wait)

    def launch(self, shape):
        self.free = max(self.free, self.now) + self.seconds(shape)
        self.ends.append(self.free)
        self.launched(shape)

    def wait(self):
        self.now = self.ends.popleft()
        self.read()


def tokens(shape):
    return shape.chunks * CHUNK + shape.requests


def linear(shape):
    return 1.0 + 0.25 * tokens(shape)


def times_of(bound, *measured):
    times = StepTimes(bound, tokens)
    times.measured.extend((Shape(*shape), seconds) for *shape, seconds in measured)
    return times


SHAPES = [Shape(chunks, 3) for chunks in (1, 4, 16)]


def test_a_step_takes_the_time_between_reads_or_since_it_was_scheduled(monkeypatch):
    times, now = StepTimes(1.0, tokens), [0.0]
    monkeypatch.setattr(step_times, "perf_counter", lambda: now[0])
    first, second, third = SHAPES

    def at(seconds, method, *args):
        now[0] = seconds
        method(*args)

    at(10, times.scheduled)
    at(11, times.launched, first)
    at(12, times.scheduled)
    at(13, times.launched, second)
    at(15, times.read)  # 5 after it was scheduled
    at(16, times.read)  # the device began with it when the first had ended
    at(20, times.scheduled)
    at(21, times.launched, third)
    times.clear()  # an exception
    at(30, times.scheduled)
    at(31, times.launched, first)
    at(34, times.read)  # the device was idle
    assert [*times.measured] == [(first, 5), (second, 1), (first, 4)]


def test_unknown_shapes_are_on_the_line_through_the_known_ones():
    decode = [(0, 3, linear(Shape(0, 3)))] * LEAST
    small = [(1, 3, linear(Shape(1, 3)))] * LEAST
    limits = {shape: linear(shape) for shape in SHAPES}
    for most, bound in limits.items():
        times = times_of(bound + 1e-6, *decode, *small)
        assert times.within(SHAPES) == [shape for shape in SHAPES if shape <= most]
    assert times_of(limits[SHAPES[0]] - 1e-6, *decode, *small).within(SHAPES) == SHAPES[:1]
    # A line needs two points, and a point three measurements.
    assert times_of(100.0).within(SHAPES) == SHAPES[:1]
    assert times_of(100.0, *decode, *small[1:]).within(SHAPES) == SHAPES[:1]
    assert times_of(100.0, *decode, *small[1:]).within(SHAPES[1:]) == SHAPES[1:2]


def test_steps_without_chunks_say_nothing_of_chunks():
    decode = [(0, requests, 1.0) for requests in (1, 2, 3)] * LEAST
    assert times_of(2.0, *decode).within(SHAPES) == SHAPES[:1]


def test_what_was_measured_counts_more_than_the_line_until_it_is_old():
    decode, small, large = ([(chunks, 3, seconds)] * LEAST for chunks, seconds in ((0, 1.0), (1, 2.0), (16, 50.0)))
    times = times_of(20.0, *large, *decode, *small)
    assert times.within(SHAPES) == SHAPES[:2]
    times.measured.extend((Shape(*shape), seconds) for *shape, seconds in (decode + small) * LATEST)
    assert times.within(SHAPES) == SHAPES
    # One step of three, in which a program was compiled, does not count.
    times = times_of(20.0, (16, 3, 90.0), (16, 3, 19.0), *decode, *small, (16, 3, 19.0))
    assert times.within(SHAPES) == SHAPES


def serving(bound, seconds, monkeypatch):
    """An engine on a device of given times, with a request that decodes, and the shapes of its steps from now on."""
    served, shapes = engine(num_blocks=40, max_len=128, max_time_between_tokens=bound, **SIZES), []
    served.buckets.ready = {Shape(chunks, 3) for chunks in (0, 1, 4, 16)}
    device = Device(served.step_times, seconds, monkeypatch)
    launched = served.launched
    monkeypatch.setattr(served, "launched", lambda *args: shapes.append(args[1]) or launched(*args))
    requests = [served.submit(prompt(9), max_tokens=90)]
    while len(requests[0].generated) < 5:
        served.step()
    return served, device, requests, shapes


def add(served, requests, length):
    """Serves another prompt until it is complete, beside the request that decodes."""
    requests.append(served.submit(prompt(length, seed=len(requests)), max_tokens=2))
    while requests[-1].finish_reason is None:
        served.step()


def check(served, requests):
    for _ in served.run():
        pass
    for request in requests:
        assert request.generated == right(request.prompt, request.max_tokens)
    assert served.pool.num_free == served.pool.num_blocks


@pytest.mark.usefixtures("toy")
def test_chunks_beside_requests_that_decode_adapt_to_the_bound(monkeypatch):
    """First the fewest, then as many as the line allows, and fewer when steps take longer."""
    served, device, requests, shapes = serving(linear(Shape(4, 3)) + 0.5, linear, monkeypatch)
    assert shapes[0].chunks == 4  # no request decoded: as many as the prompt needs
    assert {shape.chunks for shape in shapes[1:]} == {0}
    del shapes[:]
    add(served, requests, 100)
    chunks = [shape.chunks for shape in shapes if shape.chunks]
    assert chunks == [1] * (LEAST + 1) + [4, 4, 4]  # the next step is launched before the third is read
    device.seconds = lambda shape: 2 * linear(shape)
    del shapes[:]
    for _ in range(3):
        add(served, requests, 100)
    chunks = [shape.chunks for shape in shapes if shape.chunks]
    assert chunks[-15:] == [1] * 15
    assert 3 <= chunks.count(4) < 8  # until they are measured
    check(served, requests)


@pytest.mark.usefixtures("toy")
def test_prompts_continue_if_even_one_chunk_takes_longer(monkeypatch):
    served, _, requests, shapes = serving(1e-3, linear, monkeypatch)
    del shapes[:]
    add(served, requests, 51)
    assert [shape.chunks for shape in shapes if shape.chunks] == [1] * 8
    check(served, requests)


@pytest.mark.usefixtures("toy")
def test_steps_are_not_measured_without_a_bound():
    served = engine(**SIZES)
    assert served.step_times is None
    for wrong in (0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match=f"`max_time_between_tokens` is {wrong!r}: expected None, or a positive"):
            engine(max_time_between_tokens=wrong)
