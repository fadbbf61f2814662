"""Chat templates: the text of a conversation, in the form that the model was trained with."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jaxkv.models.json_object import JsonObject

CONFIG, FILE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""The special tokens that templates may use, by their names in tokenizer_config.json."""


class ChatTemplate:
    """The chat template of a checkpoint: chat_template.jinja, or `chat_template` of tokenizer_config.json.

    Templates are programs.  They run in jinja2's sandbox, with the functions and options that transformers gives them.

    Args:
      folder: of the checkpoint.

    Raises:
      ImportError: jinja2 is not installed.
      ValueError: there is no template, or it cannot be read.
    """

    def __init__(self, folder: Path):
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ImportError("chat templates need jinja2: pip install 'jaxkv[serve]'") from None
        self._failure = TemplateError
        config = _config(folder)
        self._tokens = {name: _text(config.value(name, None)) for name in SPECIAL_TOKENS}
        source = _source(folder, config)
        if source is None:
            raise ValueError(f"{folder} has no chat template: expected {FILE}, or `chat_template` in {CONFIG}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        functions: dict[str, Any] = environment.globals  # type: ignore[bad-assignment]
        functions.update(raise_exception=self._raise, strftime_now=_now)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template of {folder} cannot be read: {error}") from None

    @classmethod
    def find(cls, folder: Path) -> "ChatTemplate | None":
        """The chat template of a checkpoint, or None if it has none; the errors are those of the class."""
        return None if _source(folder, _config(folder)) is None else cls(folder)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation up to the beginning of the model's answer, special tokens included.

        Args:
          messages: dicts with a `role` and a `content`, as templates expect them.

        Raises:
          ValueError: the template rejects the messages, or fails.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except Exception as error:  # templates may raise anything
            raise ValueError(f"the chat template rejects `messages`: {error}") from None

    def _raise(self, message: str) -> NoReturn:
        raise self._failure(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _config(folder: Path) -> JsonObject:
    return JsonObject.read(folder / CONFIG) if (folder / CONFIG).is_file() else JsonObject({}, CONFIG)


def _source(folder: Path, config: JsonObject) -> str | None:
    """The template; None if there is none."""
    file = folder / FILE
    try:
        return file.read_text("utf-8") if file.is_file() else _default(config.value("chat_template", None))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _text(token: Any) -> str:
    """The text of a special token, which is a string, an object with its `content`, or absent."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _default(template: Any) -> str | None:
    """The template itself, or of several that have names the one called "default"."""
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = template.get("default")
    return template if isinstance(template, str) else None
