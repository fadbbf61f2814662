"""The text of tokens, streamed one by one, and the errors of the tokenizers library."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders return for bytes that are not UTF-8, such as the first bytes of a character."""


@contextmanager
def reported(problem: str) -> Iterator[None]:
    """Raises ValueError, with `problem` and the cause, if the tokenizers library fails in the body.

    The library raises `Exception` itself.  If its Rust code panics, it raises a class that cannot be imported and that
    is not an `Exception`; a message of Rust is then already on standard error.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{problem}: {error}") from None


class IdStream:
    """The text of tokens without a tokenizer: their ids in decimal, separated by spaces."""

    def __init__(self):
        self._separator = ""

    def push(self, token: int) -> str:
        """The text of the next token."""
        text = f"{self._separator}{token}"
        self._separator = " "
        return text

    def end(self) -> str:
        """The rest of the text: nothing."""
        return ""


class StopStrings:
    """Passes on a text that comes in pieces, up to the first of several strings.

    The first is the one that is complete first.  How the text is divided into pieces makes no difference: text that may
    be the beginning of a stop string is held until more of it has come.

    Args:
      stops: the strings, none of which is empty.

    Attributes:
      found: whether one of them has come.  Nothing is passed on any more.
    """

    def __init__(self, stops: Sequence[str]):
        self.found = False
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is known to be before any stop string, given the next piece."""
        if self.found:
            return ""
        held = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return held[: min(ends)[1]]
        begun = max((n for stop in self._stops for n in range(len(stop)) if held.endswith(stop[:n])), default=0)
        self._held = held[len(held) - begun :]
        return held[: len(held) - begun]

    def end(self) -> str:
        """The rest of the text, after which nothing comes."""
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """The decoded text without special tokens.  Every character is returned once, as soon as it is complete.

    The text is what the tokens add to the text of the prompt.  In particular, it begins with a space if the first token
    does, which SentencePiece's decoders drop at the beginning of a text.  A character that the prompt left incomplete
    is returned as a whole.

    Bytes that are not UTF-8 become U+FFFD.  Only in that case can the text differ from that of all tokens decoded at
    once: byte-fallback decoders then also replace characters before such bytes, which this class has already returned.

    Args:
      tokenizer: the tokenizer.
      prompt: the tokens before the first one that is pushed.

    `push` and `end` raise ValueError if the tokenizers library cannot decode the tokens.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._before = list(prompt)
        """The tokens before `_held`: at least as many as have an influence on its text."""
        self._text_before: str | None = None
        """Their text, once it has been needed."""
        self._held: list[int] = []
        """The last tokens, whose text has not been returned yet."""

    def push(self, token: int) -> str:
        """The text that the next token completes; may be empty."""
        self._held.append(token)
        text = self.end()
        if not text or text.endswith(INCOMPLETE):
            return ""
        # A character may have begun before: its last bytes alone are not text.
        begun = self._known().endswith(INCOMPLETE)
        self._before, self._held = [*self._before, *self._held] if begun else self._held, []
        self._text_before = None
        return text

    def end(self) -> str:
        """The rest of the text: U+FFFD for a character that the last tokens left incomplete."""
        before, both = self._known(), self._decoded(self._before + self._held)
        for known in (before, before.rstrip(INCOMPLETE)):
            if both.startswith(known):
                return both[len(known) :]
        return self._decoded(self._held)  # because text that was already returned would change

    def _known(self) -> str:
        """The text of the tokens before those that are held."""
        if self._text_before is None:
            self._text_before = self._decoded(self._before)
        return self._text_before

    def _decoded(self, tokens: list[int]) -> str:
        with reported(f"the tokenizer cannot decode tokens {' '.join(map(str, tokens))}"):
            return self._tokenizer.decode(tokens)
