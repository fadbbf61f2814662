"""The text of tokens as they come, one by one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class IdStream:
    """Where there is no tokenizer: the token ids in decimals, with spaces between them."""

    def __init__(self):
        self._separator = ""

    def push(self, token: int) -> str:
        """The text of the next token."""
        text = f"{self._separator}{token}"
        self._separator = " "
        return text

    def end(self) -> str:
        """What is left: nothing."""
        return ""


class TextStream:
    """What a tokenizer decodes the tokens to, without special ones: every character once, as soon as it is whole.

    Bytes that are not UTF-8 become U+FFFD.  Only then can the text differ from that of all tokens decoded at once:
    byte-fallback decoders replace the characters before such bytes as well, which are out already.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        self._stream = _stream()
        self._held: list[int] = []
        """The last tokens, whose text is not out yet."""

    def push(self, token: int) -> str:
        """The text that the next token completes; empty where it completes none."""
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # no narrower type: what is out already would be replaced
            self._stream = _stream()
            text = "".join(self._stream.step(self._tokenizer, held) or "" for held in self._held)
        if text:
            self._held.clear()
        return text or ""

    def end(self) -> str:
        """What is left: a character that the last tokens began, as U+FFFD."""
        return self._tokenizer.decode(self._held)


def _stream():
    from tokenizers.decoders import DecodeStream

    return DecodeStream(skip_special_tokens=True)
