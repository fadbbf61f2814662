"""The ASGI application: OpenAI's routes, health and metrics."""

import asyncio
import contextlib
import hmac
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import jaxkv
from jaxkv.server.answers import Answer, Logprobs, Piece
from jaxkv.server.client import EngineClient, EngineEnded
from jaxkv.server.metrics import Metrics
from jaxkv.server.protocol import DEFAULT_MAX_TOKENS, Chat, Common, Completion, Refused, parsed
from jaxkv.serving import EngineInfo
from jaxkv.serving.request import RequestOptions
from jaxkv.text.chat import ChatTemplate
from jaxkv.text.tokenizer import Tokenizer

_log = logging.getLogger("jaxkv")


@dataclass(frozen=True)
class Limits:
    """What a server accepts.

    Args:
      body_bytes: the most bytes of a body; more are answered by 413.
      queued: the most prompts that wait while the engine runs as many as it can; more are answered by 429.
      api_key: what clients send as `Authorization: Bearer KEY`; None if they need no key.
    """

    body_bytes: int = 2**22
    queued: int = 1024
    api_key: str | None = None


class Server:
    """The state of the application, and its routes.

    Args:
      engine: the engine.
      name: the name of the model, as clients have it.
      tokenizer: that of the model.
      chat: its chat template; None if it has none, whereupon /v1/chat/completions refuses.
      limits: what is accepted.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        name: str,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        limits: Limits,
    ):
        self._engine, self._name, self._limits = engine, name, limits
        self._tokenizer, self._chat = tokenizer, chat
        self._logprobs, self._metrics = Logprobs(tokenizer), Metrics()
        self._created = int(time.time())
        self._info: EngineInfo | None = None
        self._answers: set[Answer] = set()
        """Those that have not ended, including those that wait."""
        self._draining = False
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._handled(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._handled(self._chats), methods=["POST"]),
                Route("/v1/models", self._handled(self._models)),
                Route("/v1/models/{name:path}", self._handled(self._models)),
                Route("/health", self._handled(self._health)),
                Route("/metrics", self._handled(self._exposition)),
                Route("/version", self._handled(self._version)),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Answers while the engine starts."""
        starting = asyncio.create_task(self._start())
        yield
        starting.cancel()

    async def _start(self) -> None:
        with contextlib.suppress(EngineEnded, ValueError):  # whoever has started the engine reports it
            self._info = await self._engine.started()

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits for the others, and cancels those that have not ended after some seconds."""
        self._draining = True
        end = time.monotonic() + seconds
        while self._answers and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for answer in list(self._answers):
            answer.cancel()

    # Every route is one of the methods below.

    def _handled(self, route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The route with errors as responses, and the API key checked."""

        async def handle(request: Request) -> Response:
            try:
                if request.url.path.startswith("/v1/"):
                    self._check_key(request)
                return await route(request)
            except Refused as refused:
                error = refused
            except EngineEnded as ended:
                error = Refused(str(ended), status=503)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception:
                _log.exception("%s failed", request.url.path)
                error = Refused("an unexpected error, which the server has logged", status=500)
            self._metrics.refused.labels(error.status).inc()
            headers = {"Retry-After": "1"} if error.status in (429, 503) else None
            return _json(error.body, error.status, headers)

        return handle

    async def _completions(self, request: Request) -> Response:
        body = parsed(Completion, await self._body(request))
        prompts = [await self._encoded(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
        return await self._answered(request, body, prompts, DEFAULT_MAX_TOKENS, _CompletionForm)

    async def _chats(self, request: Request) -> Response:
        body = parsed(Chat, await self._body(request))
        if self._chat is None:
            raise Refused("the model has no chat template: use /v1/completions", status=400)
        try:
            text = self._chat.render([message.rendered for message in body.messages])
        except ValueError as error:
            raise Refused(str(error), param="messages") from None
        prompt = await self._encoded(text, special_tokens=False)
        return await self._answered(request, body, [prompt], None, _ChatForm)

    async def _models(self, request: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "jaxkv"}
        if (name := request.path_params.get("name")) is None:
            return _json({"object": "list", "data": [model]})
        self._check_model(name)
        return _json(model)

    async def _health(self, request: Request) -> Response:
        info = self._ready()
        return _json({"status": "ready", "max_len": info.max_len, "max_requests": info.max_requests})

    async def _exposition(self, request: Request) -> Response:
        self._ready()
        return Response(self._metrics.exposition(await self._engine.stats()), media_type="text/plain; version=0.0.4")

    async def _version(self, request: Request) -> Response:
        return _json({"version": jaxkv.__version__})

    # What they need.

    def _ready(self) -> EngineInfo:
        if self._draining:
            raise Refused("the server is shutting down", status=503)
        if self._info is None:
            raise Refused("the engine is starting", status=503)
        return self._info

    def _check_key(self, request: Request) -> None:
        key = self._limits.api_key
        given = request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise Refused("expected the API key of the server as `Authorization: Bearer KEY`", status=401)

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise Refused(f"`model` is {name!r}: expected {self._name!r}", status=404, param="model")

    async def _encoded(self, text: str, **options: bool) -> list[int]:
        """The tokens of a text, by a thread: a long one takes time, and the library releases Python's lock."""
        try:
            return await asyncio.to_thread(self._tokenizer.encode, text, **options)
        except ValueError as error:
            raise Refused(str(error)) from None

    async def _body(self, request: Request) -> bytes:
        """The body of a request that may be served now."""
        self._ready()
        most, body = self._limits.body_bytes, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise Refused(f"the body has more than {most} bytes", status=413)
        return bytes(body)

    async def _answered(
        self, request: Request, body: Common, prompts: list[list[int]], max_tokens: int | None, form: type["_Form"]
    ) -> Response:
        """Submits the prompts of a request, and returns the response, which may be a stream."""
        arrival, info = time.perf_counter(), self._ready()
        if body.model is not None:
            self._check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise Refused("`stream_options` needs `stream`", param="stream_options")
        if len(self._answers) + len(prompts) > info.max_requests + self._limits.queued:
            raise Refused(f"{len(self._answers)} prompts are being served or wait: try again later", status=429)
        room = max_tokens or info.max_len + 1 - max(map(len, prompts))
        options = [body.options(max(room, 1), info.stop_tokens) for _ in prompts]
        answers = [Answer(self._tokenizer.stream(prompt), body.stops) for prompt in prompts]
        self._answers.update(answers)
        usage, response = (
            _Usage(sum(map(len, prompts))),
            form(self._name, self._logprobs, body.logprobs_count is not None),
        )
        try:
            await self._submit(answers, prompts, options)
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            pieces = _merged([self._timed(answer, arrival) for answer in answers])
            if not body.stream:
                return _json(await _unless_disconnected(request, response.whole(pieces, len(prompts), usage)))
        except BaseException:
            self._dropped(answers)
            raise
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        events = self._events(answers, response.stream(pieces, usage, with_usage))
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _submit(self, answers: list[Answer], prompts: list[list[int]], options: Sequence[RequestOptions]) -> None:
        """Has the engine accept the prompts; Refused if it rejects one."""
        submits = (self._engine.submit(prompt, **own) for prompt, own in zip(prompts, options, strict=True))
        found = await asyncio.gather(*submits, return_exceptions=True)
        for answer, outputs in zip(answers, found, strict=True):
            if not isinstance(outputs, BaseException):
                answer.accept(outputs)  # all of them, so that they can be cancelled if one is rejected
        for error in found:
            if isinstance(error, ValueError):
                raise Refused(str(error)) from None
            if isinstance(error, BaseException):
                raise error

    def _dropped(self, answers: list[Answer]) -> None:
        for answer in answers:
            answer.cancel()
        self._answers.difference_update(answers)

    async def _timed(self, answer: Answer, arrival: float) -> AsyncIterator[Piece]:
        """The pieces of an answer, counted."""
        metrics, last = self._metrics, None
        try:
            async for piece in answer:
                now, count = time.perf_counter(), len(piece.tokens)
                if count:
                    if last is None:
                        metrics.first_token.observe(now - arrival)
                    else:
                        for _ in range(count):
                            metrics.between_tokens.observe((now - last) / count)
                    metrics.generated_tokens.inc(count)
                    last = now
                if piece.finish_reason not in (None, "stop", "length"):
                    raise Refused(_UNEXPECTED.get(piece.finish_reason, piece.finish_reason), status=503)
                yield piece
                if piece.finish_reason is not None:
                    metrics.duration.observe(now - arrival)
                    metrics.requests.labels(piece.finish_reason).inc()
                    return
        finally:
            self._answers.discard(answer)

    async def _events(self, answers: list[Answer], chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """Server-sent events of a stream.  The client has its status already, so that errors are events, too."""
        try:
            async for chunk in chunks:
                yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"
        except (Refused, EngineEnded) as error:
            refused = error if isinstance(error, Refused) else Refused(str(error), status=503)
            yield b"data: " + msgspec.json.encode(refused.body) + b"\n\n"
        finally:
            self._dropped(answers)


_UNEXPECTED = {
    "cancelled": "the server is shutting down",
    "nan": "the logits of the model are NaN",
}


class _Usage:
    """Counts the tokens of a request."""

    def __init__(self, prompt_tokens: int):
        self.prompt_tokens, self.completion_tokens = prompt_tokens, 0

    @property
    def body(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


class _Form:
    """The form of a response: that of completions, or that of chats."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, logprobs: Logprobs, with_logprobs: bool):
        self._logprobs, self._with_logprobs = logprobs, with_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, pieces: AsyncIterator[tuple[int, Piece]], count: int, usage: _Usage) -> dict[str, Any]:
        """The body of a response that is not a stream."""
        found: list[list[Piece]] = [[] for _ in range(count)]
        async for index, piece in pieces:
            found[index].append(piece)
            usage.completion_tokens += len(piece.tokens)
        joined = [
            Piece(
                "".join(piece.text for piece in each),
                [token for piece in each for token in piece.tokens],
                [logprobs for piece in each for logprobs in piece.logprobs],
                each[-1].finish_reason,
            )
            for each in found
        ]
        choices = [self.choice(index, piece) for index, piece in enumerate(joined)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage.body}

    async def stream(
        self, pieces: AsyncIterator[tuple[int, Piece]], usage: _Usage, with_usage: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        head = {**self._head, "object": self.chunk_object}
        extra = {"usage": None} if with_usage else {}
        async for index, piece in pieces:
            usage.completion_tokens += len(piece.tokens)
            if piece.text or piece.finish_reason or self._with_logprobs:
                yield {**head, "choices": [self.delta(index, piece)], **extra}
        if with_usage:
            yield {**head, "choices": [], "usage": usage.body}

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A choice of a whole response."""
        raise NotImplementedError

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """A choice of a chunk."""
        raise NotImplementedError


class _CompletionForm(_Form):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args):
        super().__init__(*args)
        self._offsets = defaultdict[int, int](int)
        """The characters of all tokens so far, by the index of the choice."""

    def choice(self, index, piece):
        logprobs = None
        if self._with_logprobs:
            logprobs = self._logprobs.of_completion(piece, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    delta = choice


class _ChatForm(_Form):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args):
        super().__init__(*args)
        self._begun = False

    def choice(self, index, piece):
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(piece)}

    def delta(self, index, piece):
        role, self._begun = ({} if self._begun else {"role": "assistant"}), True
        return {"index": index, "delta": {**role, "content": piece.text}, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs.of_chat(piece) if self._with_logprobs else None
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}


async def _merged(streams: list[AsyncIterator[Piece]]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several answers as they come, with the index of each."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield 0, piece
        return
    queue = asyncio.Queue[tuple[int, Piece | Exception | None]]()

    async def forward(index: int, stream: AsyncIterator[Piece]) -> None:
        try:
            async for piece in stream:
                queue.put_nowait((index, piece))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield index, piece
    finally:
        for task in tasks:
            task.cancel()


async def _unless_disconnected[T](request: Request, result: Awaitable[T]) -> T:
    """The result; ClientDisconnect if the client goes away before."""
    wanted, gone = asyncio.ensure_future(result), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((wanted, gone), return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise ClientDisconnect
        return wanted.result()
    finally:
        for task in (wanted, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
