"""The outputs of an engine in another process: none is lost, and those that nobody has taken yet are joined."""

import asyncio

import pytest

from jaxkv.server.client import EngineEnded
from jaxkv.server.engine_process import ProcessOutputs
from jaxkv.serving import Output
from jaxkv.serving.request import TokenLogprobs


def _outputs():
    cancelled = []
    return ProcessOutputs(cancelled.append), cancelled


def _taken(*puts):
    """What a consumer takes that comes after all of them, and how it ends."""

    async def consume():
        outputs, _ = _outputs()
        for put in puts:
            outputs.put(put)
        return [found async for found in outputs]

    return asyncio.run(consume())


def test_outputs_that_nobody_has_taken_are_joined():
    first, second = TokenLogprobs(-0.1, []), TokenLogprobs(-0.2, [])
    found = _taken(Output([1], [first], None), Output([2, 3], [second], None), Output([4], [], "length"))
    assert found == [Output([1, 2, 3, 4], [first, second], "length")]


def test_a_consumer_that_keeps_up_takes_one_at_a_time():
    async def consume():
        outputs, _ = _outputs()
        found = []
        for output in (Output([1], [], None), Output([2], [], None), Output([], [], "stop")):
            waiting = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
            assert not waiting.done()
            outputs.put(output)
            found.append(await waiting)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
        return found

    assert [found.tokens for found in asyncio.run(consume())] == [[1], [2], []]


def test_tokens_come_before_the_end_of_the_engine():
    async def consume():
        outputs, _ = _outputs()
        outputs.put(Output([1], [], None))
        outputs.put(Output([2], [], None))
        outputs.put(EngineEnded("gone"))
        assert (await anext(outputs)).tokens == [1, 2]
        with pytest.raises(EngineEnded):
            await anext(outputs)

    asyncio.run(consume())


def test_the_first_reason_counts():
    async def consume():
        outputs, cancelled = _outputs()
        outputs.put(Output([1], [], "length"))
        outputs.cancel("stop")
        return [found async for found in outputs], cancelled

    found, cancelled = asyncio.run(consume())
    assert found == [Output([1], [], "length")]
    assert cancelled == ["stop"]
