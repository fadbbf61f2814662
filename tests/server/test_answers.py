"""Answers end at their stop strings, however many tokens have come at once."""

import asyncio
from itertools import batched

import pytest

from jaxkv.server.answers import Answer
from jaxkv.serving import Output
from jaxkv.serving.request import TokenLogprobs
from jaxkv.text.streams import IdStream

TOKENS = [5, 6, 7, 8, 9]


class Outputs:
    """The outputs of a request with `TOKENS`, so many at a time."""

    def __init__(self, at_once):
        self.cancelled = None
        self._groups = list(batched(TOKENS, at_once))

    def cancel(self, reason):
        self.cancelled = reason

    async def __aiter__(self):
        for number, group in enumerate(self._groups, 1):
            if self.cancelled:
                return
            logprobs = [TokenLogprobs(-float(token), []) for token in group]
            yield Output([*group], logprobs, "length" if number == len(self._groups) else None)


def _answered(at_once, stops):
    answer, outputs = Answer(IdStream(), stops), Outputs(at_once)
    answer.accept(outputs)

    async def pieces():
        return [piece async for piece in answer]

    return asyncio.run(pieces()), outputs.cancelled


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 5])
def test_tokens_after_a_stop_string_are_not_part_of_the_answer(at_once):
    pieces, cancelled = _answered(at_once, ["7"])
    assert "".join(piece.text for piece in pieces) == "5 6 "
    assert [token for piece in pieces for token in piece.tokens] == [5, 6, 7]
    assert [found.logprob for piece in pieces for found in piece.logprobs] == [-5, -6, -7]
    assert (pieces[-1].finish_reason, cancelled) == ("stop", "stop")


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_an_answer_without_its_stop_string_is_whole(at_once):
    pieces, cancelled = _answered(at_once, ["10", "9 "])
    assert "".join(piece.text for piece in pieces) == "5 6 7 8 9"
    assert [token for piece in pieces for token in piece.tokens] == TOKENS
    assert (pieces[-1].finish_reason, cancelled) == ("length", None)
