"""An engine in a process of its own: `EngineProcess` starts it, submits requests, and passes on their tokens.

The engine then does not share Python's interpreter lock with the server, which decodes tokens and writes them to many
connections.  The processes exchange a message per step for all requests together.
"""

import asyncio
import atexit
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, Unpack

from jaxkv.server.client import EngineEnded
from jaxkv.serving import Engine, EngineInfo, EngineStats, Output, Request
from jaxkv.serving.request import RequestOptions, TokenLogprobs
from jaxkv.terminal.mistakes import mistake

_log = logging.getLogger("jaxkv")

MOST_FAILURES = 3
"""After so many steps in a row that raised an exception, the process ends.  After fewer, the engine continues."""
END = "end"
"""The message after which the process ends."""
GONE = "the engine has ended: its process wrote the reason to standard error"


class ProcessOutputs:
    """The outputs of a request in the process.

    Outputs that nobody has taken yet are joined to one.  A server that is too slow for a chunk per token then writes
    fewer and longer ones, instead of falling behind the engine further and further.
    """

    def __init__(self, cancel: Callable[[str], None]):
        self._cancel = cancel
        self._left = deque[Output | EngineEnded]()
        """What nobody has taken yet."""
        self._some = asyncio.Event()
        """Whether there is anything in it."""
        self._cancelled, self._ended = False, False

    def put(self, output: Output | EngineEnded) -> None:
        """Adds what comes next."""
        self._left.append(output)
        self._some.set()

    def cancel(self, finish_reason: str = "cancelled") -> None:
        """Ends the request, unless it has ended.  The last output comes at once."""
        if not self._ended and not self._cancelled:
            self._cancelled = True
            self._cancel(finish_reason)
            self.put(Output([], [], finish_reason))

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        await self._some.wait()
        if isinstance(first := self._left[0], EngineEnded):
            self._ended = True
            raise first
        tokens, logprobs = list[int](), list[TokenLogprobs]()
        reason: str | None = None
        while reason is None and self._left and isinstance(output := self._left[0], Output):
            self._left.popleft()
            tokens += output.tokens
            logprobs += output.logprobs
            reason = output.finish_reason
        if not self._left:
            self._some.clear()
        self._ended = reason is not None
        return Output(tokens, logprobs, reason)


class EngineProcess:
    """Starts an engine in another process, which ends with this object or with this process.

    All methods belong to one event loop.

    Args:
      make_engine: makes an engine that is ready to serve.  It is pickled.
    """

    def __init__(self, make_engine: Callable[[], Engine]):
        context = multiprocessing.get_context("spawn")  # threads of JAX do not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make_engine, theirs), name="jaxkv-engine")
        self._process.start()
        theirs.close()
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        """What has been asked, and not answered yet."""
        self._outputs: dict[int, ProcessOutputs] = {}
        self._info: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._messages = SimpleQueue[Any]()
        # Threads, because both may wait: the engine receives nothing while it is in a step.
        for work in (self._send, self._receive):
            Thread(target=work, name="jaxkv-engine-messages", daemon=True).start()
        atexit.register(self._messages.put, END)

    async def started(self) -> EngineInfo:
        """Waits for the engine; ValueError if it cannot be made, or EngineEnded if its process ends before."""
        return await asyncio.shield(self._info)

    async def ended(self) -> None:
        """Waits for the end of the process."""
        await asyncio.shield(self._ended)

    async def submit(self, prompt: Sequence[int], **options: Unpack[RequestOptions]) -> ProcessOutputs:
        """Queues a request, and returns its outputs.

        The options and errors are those of `Engine.new_request`, and EngineEnded.
        """
        number = next(self._numbers)
        outputs = self._outputs[number] = ProcessOutputs(lambda reason: self._cancel(number, reason))
        try:
            await self._ask(number, "submit", prompt, options)
        except asyncio.CancelledError:
            outputs.cancel()
            raise
        except Exception:
            self._outputs.pop(number, None)
            raise
        return outputs

    async def stats(self) -> EngineStats:
        """Numbers of the engine, between two of its steps; EngineEnded if it has ended."""
        return await self._ask(next(self._numbers), "stats")

    async def close(self) -> None:
        """Ends the process, after the step that it is in."""
        self._messages.put(END)
        await self.ended()
        await asyncio.to_thread(self._process.join)
        atexit.unregister(self._messages.put)

    async def _ask(self, number: int, what: str, *arguments: Any) -> Any:
        if self._ended.done():
            raise EngineEnded(GONE)
        answer = self._answers[number] = self._loop.create_future()
        self._messages.put((number, what, *arguments))
        try:
            return await answer
        finally:
            del self._answers[number]

    def _cancel(self, number: int, reason: str) -> None:
        if self._outputs.pop(number, None):
            self._messages.put((number, "cancel", reason))

    def _take(self, message: tuple[str, Any]) -> None:
        what, found = message
        if what == "info":
            self._info.set_result(found)
        elif what == "failed":
            self._info.set_exception(ValueError(found))
        elif what == "answer":
            number, answer = found
            future = self._answers.get(number)
            if future is None or future.done():
                return  # nobody waits for it any more
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        else:
            for number, output in found:
                if outputs := self._outputs.get(number):
                    outputs.put(output)
                    if output.finish_reason is not None:
                        del self._outputs[number]

    def _end(self) -> None:
        self._ended.set_result(None)
        for future in (self._info, *self._answers.values()):
            if not future.done():
                future.set_exception(EngineEnded(GONE))
        for outputs in self._outputs.values():
            outputs.put(EngineEnded(GONE))
        self._outputs.clear()

    # Threads run the methods below.

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended, which `_receive` notices
            while True:
                message = self._messages.get()
                self._connection.send(message)
                if message == END:
                    return

    def _receive(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._take, self._connection.recv())
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._end)


class _Served:
    """The engine's side of the connection."""

    def __init__(self, engine: Engine, connection: Connection):
        self._engine, self._connection = engine, connection
        self._requests: dict[int, Request] = {}
        """Requests that have not ended, by the numbers that the server gave them."""
        self._sent: dict[Request, int] = {}
        """How many tokens of each have been sent."""

    def run(self) -> None:
        """Serves until the server closes the connection or ends."""
        failures = 0
        while True:
            while self._connection.poll(0 if self._requests else None):
                try:
                    message = self._connection.recv()
                except EOFError:
                    return
                if message == END:
                    return
                self._take(*message)
            try:
                new = self._engine.step()
                failures = 0
            except Exception:
                failures += 1
                if failures == MOST_FAILURES:
                    raise
                _log.exception("a step raised an exception, after which the engine continues")
            else:
                self._send(new)

    def _take(self, number: int, what: str, *arguments: Any) -> None:
        if what == "cancel":
            if request := self._requests.pop(number, None):
                del self._sent[request]
                if request.finish_reason is None:
                    self._engine.cancel(request, finish_reason=arguments[0])
            return
        answer = None
        if what == "stats":
            answer = self._engine.stats
        else:
            prompt, options = arguments
            try:
                request = self._engine.submit(prompt, **options)
            except (ValueError, TypeError, OverflowError) as error:
                answer = ValueError(str(error))
            else:
                self._requests[number], self._sent[request] = request, 0
        self._connection.send(("answer", (number, answer)))

    def _send(self, new: list[tuple[Request, int]]) -> None:
        tokens = defaultdict[Request, list[int]](list)
        for request, token in new:
            tokens[request].append(token)
        found = []
        for number, request in list(self._requests.items()):
            start, reason = self._sent[request], request.finish_reason
            self._sent[request] += len(tokens[request])
            if tokens[request] or reason is not None:
                logprobs = request.logprobs[start : self._sent[request]]
                found.append((number, Output(tokens[request], logprobs, reason)))
            if reason is not None:
                del self._requests[number], self._sent[request]
        if found:
            self._connection.send(("outputs", found))


def _serve(make_engine: Callable[[], Engine], connection: Connection) -> None:
    # Signals to the group of processes are for the server, which closes the connection when it has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        engine = make_engine()
    except Exception as error:
        if not (message := mistake(error)):
            raise
        connection.send(("failed", message))
        return
    connection.send(("info", engine.info))
    with contextlib.suppress(BrokenPipeError):  # the server has been killed
        _Served(engine, connection).run()
    sys.stderr.flush()
    os._exit(0)  # else Python would wait for programs that are still being compiled
