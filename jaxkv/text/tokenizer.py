"""The tokenizer of a checkpoint: tokenizer.json, read by the tokenizers library."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.text.streams import TextStream, reported

if TYPE_CHECKING:
    from collections.abc import Sequence


FILE = "tokenizer.json"


class Tokenizer:
    """Converts text to token ids, and back.

    A text gets the special tokens that the post-processor of tokenizer.json adds, such as one for the beginning.  As in
    transformers 5, `add_bos_token` and `add_eos_token` of tokenizer_config.json have no effect.  Texts are neither
    truncated nor padded.

    Args:
      folder: of a checkpoint, with a tokenizer.json.

    Raises:
      ImportError: the tokenizers library is not installed.
      ValueError: the file cannot be read by the installed library.
    """

    def __init__(self, folder: Path):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise ImportError(f"reading {FILE} needs tokenizers: pip install 'jaxkv[models]'") from None
        self._file = folder / FILE
        with reported(f"{self._file} cannot be read by the installed tokenizers library"):
            self._library: Library = Library.from_file(str(self._file))
            # Stored by whoever encoded batches of texts with it last; `transformers` does not apply them to prompts.
            self._library.no_truncation()
            self._library.no_padding()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The token ids of a text; ValueError if the library cannot encode it.

        Without `special_tokens`, the post-processor adds none, as for the text of a chat template, which has them.
        Special tokens that are part of the text are recognised in any case.
        """
        with reported(f"{self._file} cannot encode {text[:200]!r}"):
            return self._library.encode(text, add_special_tokens=special_tokens).ids

    def token(self, token: int) -> str:
        """The text of one token alone, U+FFFD for a part of a character; special tokens by name."""
        with reported(f"{self._file} cannot decode token {token}"):
            return self._library.decode([token], skip_special_tokens=False)

    def stream(self, prompt: "Sequence[int]") -> TextStream:
        """The text of the tokens that follow a prompt."""
        return TextStream(self._library, prompt)
