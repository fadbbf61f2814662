"""The text of tokens, streamed one by one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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


class TextStream:
    """The decoded text without special tokens.  Every character is returned once, as soon as it is complete.

    Bytes that are not UTF-8 become U+FFFD.  Only in that case can the text differ from that of all tokens decoded at
    once: byte-fallback decoders then also replace characters before such bytes, which this class has already returned.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        self._stream = _stream()
        self._held: list[int] = []
        """The last tokens, whose text has not been returned yet."""

    def push(self, token: int) -> str:
        """The text that the next token completes; may be empty."""
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # tokenizers raises this if text that was already returned would change
            self._stream = _stream()
            text = "".join(self._stream.step(self._tokenizer, held) or "" for held in self._held)
        if text:
            self._held.clear()
        return text or ""

    def end(self) -> str:
        """The rest of the text: U+FFFD for a character that the last tokens left incomplete."""
        return self._tokenizer.decode(self._held)


def _stream():
    from tokenizers.decoders import DecodeStream

    return DecodeStream(skip_special_tokens=True)
