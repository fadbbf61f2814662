"""Clients of a server with OpenAI's interface: streams of completions over HTTP/1.1, and when their chunks arrive.

Each client has a connection of its own, and costs little: nothing of a stream is parsed but its frames and its last
event.  Several processes share the clients, because one takes in some ten thousand chunks per second.
"""

import asyncio
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from jaxkv.bench.peers import Peer

PER_PROCESS = 64
"""Clients of a process."""
TIMEOUT = 10.0
"""Seconds to wait for an answer that is no completion."""


@dataclass
class Answered:
    """How a request was answered.  Times are those of `time.monotonic`, which the processes of a machine share."""

    sent: float
    """When it was sent."""
    times: list[float] = field(default_factory=list)
    """When each part of the answer arrived: a chunk, or a token."""
    tokens: int = 0
    """Tokens of all parts."""
    error: str = ""
    """Why there is no complete answer; empty if there is one."""


def get(url: str) -> dict[str, Any]:
    """The JSON object at a URL; OSError if the server cannot be reached, or does not answer with an object."""
    try:
        with urlopen(Request(url, headers=_key()), timeout=TIMEOUT) as answer:
            found = json.loads(answer.read())
    except HTTPError as error:
        raise OSError(f"{url} answers with the status {error.code}{_reason(error.read())}") from None
    except (URLError, HTTPException, TimeoutError) as error:
        raise OSError(f"{url} cannot be reached: {getattr(error, 'reason', None) or repr(error)}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OSError(f"{url} does not answer with a JSON object: expected a server with OpenAI's interface")
    return found


def model_name(url: str) -> str:
    """The first model that a server has; OSError if there is none."""
    try:
        return get(f"{url}/v1/models")["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise OSError(f"{url}/v1/models names no model: expected a server with OpenAI's interface") from None


def completion(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """The body of a request for exactly `max_tokens` tokens after a prompt."""
    options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({"model": model, "prompt": prompt, "max_tokens": max_tokens, **options}).encode()


class Clients:
    """Processes with the clients of a server.  Use it in a `with` statement, which ends them.

    Args:
      url: http://HOST:PORT of the server.
      most: the most clients.
    """

    def __init__(self, url: str, most: int):
        self._stack = ExitStack()
        self._peers = [self._stack.enter_context(Peer(None, _Share, url)) for _ in range(math.ceil(most / PER_PROCESS))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def closed_loop(self, bodies: Sequence[bytes], count: int) -> list[Answered]:
        """Sends completions by `count` clients, each of which sends the next one when its last one has ended."""
        peers = self._peers[:count]
        for peer in self._peers:
            peer.call("ready")  # so that all begin at the same time
        shares = [
            peer.begin("closed_loop", bodies[number :: len(peers)], len(range(number, count, len(peers))))
            for number, peer in enumerate(peers)
        ]
        return [answered for share in shares for answered in share.result()]


class _Share:
    """The clients of one process."""

    def __init__(self, url: str):
        self._url = url

    def ready(self) -> None:
        """Returns when the process has started."""

    def closed_loop(self, bodies: Sequence[bytes], count: int) -> list[Answered]:
        return asyncio.run(self._closed_loop(iter(bodies), count))

    async def _closed_loop(self, left: Iterable[bytes], count: int) -> list[Answered]:
        answered = list[Answered]()

        async def client() -> None:
            connection = _Connection(self._url)
            for body in left:  # which all clients share
                answered.append(await connection.ask(body))
            connection.close()

        await asyncio.gather(*(client() for _ in range(count)))
        return answered


class _Connection:
    """A connection, which is opened when it is needed, and again after an error."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port or 80
        lines = ["POST /v1/completions HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in _key().items()]
        self._head = "\r\n".join(lines)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def ask(self, body: bytes) -> Answered:
        """Sends a completion, and returns when its stream has ended, or has failed."""
        answered, headers = Answered(time.monotonic()), dict[str, str]()
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._streams
            writer.write(f"{self._head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            status, headers = await _head(reader)
            if status != 200:
                answer = await reader.readexactly(int(headers.get("content-length", 0)))
                answered.error = f"the server answers with the status {status}{_reason(answer)}"
            elif headers.get("transfer-encoding") != "chunked":
                answered.error = "the server answers without a stream of chunks"
            else:
                last = await _events(reader, answered.times)
                self._count(answered, json.loads(last))
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            answered.error = f"the stream broke off: {error!r}"
        if answered.error or headers.get("connection") == "close":
            self.close()
        return answered

    @staticmethod
    def _count(answered: Answered, last: dict[str, Any]) -> None:
        """Reads how many tokens there were from the last event of a stream, which comes after those with text."""
        if usage := last.get("usage"):
            answered.tokens = usage["completion_tokens"]
            if not last["choices"]:
                answered.times.pop()
        if not answered.tokens or not answered.times:
            answered.error = f"the stream ends without usage{_reason(json.dumps(last).encode())}"


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().splitlines()
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name: value.strip() for name, _, value in pairs}


async def _events(reader: asyncio.StreamReader, times: list[float]) -> bytes:
    """Appends when each event of a stream arrived, but for the `[DONE]` at its end; returns the last of these."""
    rest = last = b""
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + 2)
        now = time.monotonic()
        *lines, rest = (rest + chunk[:-2]).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                times.append(now)
                last = line
    await reader.readline()  # after the last chunk, which is empty
    return last.removeprefix(b"data:")


def _key() -> dict[str, str]:
    """The header with the API key, if there is one."""
    key = os.environ.get("JAXKV_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _reason(body: bytes) -> str:
    """The message of an error in OpenAI's form, to be appended; empty if there is none."""
    try:
        return f": {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return ""
