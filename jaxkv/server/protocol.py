"""OpenAI's requests, checked, and the parts of its responses.

What is not supported is refused by name, unless the request asks for what happens anyway, such as `n` of 1.
"""

import random
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from jaxkv.models.sampling import Sampling
from jaxkv.serving.request import RequestOptions

MOST_STOPS = 16
MOST_PROMPTS = 64
"""Of one request."""
DEFAULT_MAX_TOKENS = 16
"""Of completions, as OpenAI's."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "verbosity": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
}
"""Fields of OpenAI's requests that are not supported, and the values of each that change nothing.  null is one, too."""
IGNORED = ("user", "safety_identifier", "prompt_cache_key")
"""Fields that identify the user."""


class Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, as OpenAI's clients expect it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of requests have.  null stands for the default."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """vLLM's extension, like `min_p`, `ignore_eos`, `stop_token_ids`, `priority` and `cache_salt`."""
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or "" in stops:
            raise Refused(f"`stop`: expected at most {MOST_STOPS} strings, none of them empty", param="stop")
        return stops

    @property
    def logprobs_count(self) -> int | None:
        """How many of the most likely tokens have log probabilities in the answer; None for no log probabilities."""
        raise NotImplementedError

    def options(self, max_tokens: int, stop_tokens: frozenset[int]) -> RequestOptions:
        """The options of the engine's request; Refused if one is out of range.

        Args:
          max_tokens: if the request has none.
          stop_tokens: those of the checkpoint.
        """
        seed = random.getrandbits(32) if self.seed is None else self.seed % 2**32
        given: dict[str, Any] = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0  # vLLM's way to say all
        try:
            sampling = Sampling(1.0 if self.temperature is None else self.temperature, seed=seed, **given)
        except ValueError as error:
            raise Refused(str(error), param=str(error).split("`")[1]) from None
        return {
            "max_tokens": self.max_tokens or max_tokens,
            "sampling": sampling,
            "stop": (frozenset() if self.ignore_eos else stop_tokens) | {*(self.stop_token_ids or ())},
            "priority": self.priority or 0,
            "logprobs": self.logprobs_count,
            "cache_salt": self.cache_salt,
        }


class Completion(Common, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def logprobs_count(self):  # noqa: D102
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts, or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and all(type(token) is int for token in prompt):
            return [prompt]
        texts = all(isinstance(each, str) for each in prompt)
        ids = all(isinstance(each, list) and all(type(token) is int for token in each) for each in prompt)
        if not 1 <= len(prompt) <= MOST_PROMPTS or not (texts or ids):
            raise Refused(
                f"`prompt`: expected a text, a list of token ids, or 1 to {MOST_PROMPTS} of either kind", param="prompt"
            )
        return prompt


class Message(Struct, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None

    @property
    def rendered(self) -> dict[str, str]:
        """What a chat template gets."""
        content = self.content or ""
        if not isinstance(content, str):
            if any(part.keys() != {"type", "text"} or part["type"] != "text" for part in content):
                raise Refused("`messages`: expected a text, or parts of type 'text'", param="messages")
            if not all(isinstance(part["text"], str) for part in content):
                raise Refused("`messages`: a part of type 'text' has no text", param="messages")
            content = "\n".join(part["text"] for part in content)
        return {"role": self.role, "content": content, **({"name": self.name} if self.name else {})}


class Chat(Common, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def __post_init__(self):
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`")

    @property
    def logprobs_count(self):  # noqa: D102
        return (self.top_logprobs or 0) if self.logprobs else None


def parsed[T: Common](kind: type[T], body: bytes) -> T:
    """The request of a body; Refused, with the name of the field, if it is not one that is supported."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused(f"the body is a JSON {type(fields).__name__}: expected an object")
    for name, neutral in NEUTRAL.items():
        value = fields.pop(name, None)
        if value is not None and value not in neutral:
            raise Refused(f"`{name}` is not supported", param=name)
    for name in IGNORED:
        fields.pop(name, None)
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise Refused(f"the request is not valid: {error}") from None
