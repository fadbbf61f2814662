"""The answer to one prompt: its tokens become text, as they come, up to a stop string."""

from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any, NamedTuple

from jaxkv.server.client import Outputs
from jaxkv.serving.request import TokenLogprobs
from jaxkv.text.streams import StopStrings, TextStream
from jaxkv.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What came since the last piece."""

    text: str
    """May be empty, for example while a character is incomplete."""
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """One per token if the request has log probabilities; otherwise empty."""
    finish_reason: str | None
    """With the last piece."""


class Answer:
    """Iterates over the pieces of an answer.  A consumer that goes away must call `cancel`.

    Args:
      text: the stream of the text that follows the prompt.
      stops: the stop strings, before which the text ends.
    """

    def __init__(self, text: TextStream, stops: list[str]):
        self._text, self._stops = text, StopStrings(stops)
        self._outputs: Outputs | None = None
        self._cancelled_by: str | None = None

    def accept(self, outputs: Outputs) -> None:
        """Takes the outputs of the request, which the engine has accepted."""
        self._outputs = outputs
        if self._cancelled_by is not None:
            outputs.cancel(self._cancelled_by)

    def cancel(self, reason: str = "cancelled") -> None:
        """Ends the request, unless it has ended; as soon as it is accepted, if it is not yet."""
        self._cancelled_by = reason
        if self._outputs is not None:
            self._outputs.cancel(reason)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        assert self._outputs is not None
        async for tokens, logprobs, reason in self._outputs:
            # The text of a stop token is not part of the answer.
            seen, text = tokens[:-1] if reason == "stop" else tokens, ""
            for count, token in enumerate(seen, 1):
                text += self._stops.push(self._text.push(token))
                if self._stops.found:  # the tokens after it, which came meanwhile, are not part of the answer either
                    tokens, logprobs, reason = tokens[:count], logprobs[:count], "stop"
                    self.cancel(reason)
                    break
            if reason is not None and not self._stops.found:
                text += self._stops.push(self._text.end())
                text += self._stops.end()
            yield Piece(text, tokens, logprobs, reason)


class Logprobs:
    """Log probabilities in the forms of OpenAI's responses."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def of_chat(self, piece: Piece) -> dict[str, Any]:
        """Of a chat completion."""

        def one(token: int, logprob: float) -> dict[str, Any]:
            text = self._tokenizer.token(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        return {
            "content": [
                one(token, found.logprob) | {"top_logprobs": [one(*pair) for pair in found.top]}
                for token, found in pairs
            ],
            "refusal": None,
        }

    def of_completion(self, piece: Piece, offset: int) -> dict[str, Any]:
        """Of a completion, whose text has `offset` characters before this piece."""
        tokens = [self._tokenizer.token(token) for token in piece.tokens]
        *offsets, _ = accumulate(map(len, tokens), initial=offset)
        top = [{self._tokenizer.token(token): value for token, value in found.top} for found in piece.logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [found.logprob for found in piece.logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }
