"""Serve requests in a closed loop: each of some clients sends its next request when its last one has ended.

`load` does so with a server that runs.  `compare` serves the same requests by an engine alone, and then by the HTTP
server in front of such an engine: the ratio of their tokens per second is what HTTP and text cost.
"""

import argparse
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from jaxkv.bench import random_models
from jaxkv.bench.clients import Answered, Clients, completion, get, model_name
from jaxkv.bench.peers import Peer
from jaxkv.bench.requests import Lengths, TokenTimes, lengths_of, percentiles, random_prompts
from jaxkv.models import ModelConfig
from jaxkv.serving import Engine, Request
from jaxkv.terminal.files import when_and_how, write_json
from jaxkv.terminal.options import integer
from jaxkv.terminal.streams import notice
from jaxkv.text.tokenizer import FILE

CLIENTS, MOST_CLIENTS = (64, 256), 4096
PER_CLIENT = 4
"""Requests of each client, on average."""
FIRST_OUTPUT = 8
"""The most tokens that requests generate before those that count."""
HEALTH_SECONDS = 0.2
"""Between two looks at whether a server is ready."""
MODEL = "random"
"""The name of the model that is served."""
HEAD = (
    "clients  served by   output tokens/s: all, saturated   first token, ms: median, p99   between tokens, ms: median, "
    "p99   errors"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, of which at most one of `--url` and `--http` may be given."""
    either = parser.add_mutually_exclusive_group()
    text = "instead, load the server at http://HOST:PORT, which has the model; JAXKV_API_KEY is its key, if it has one"
    either.add_argument("--url", type=_url, help=text)
    text = "instead, compare an engine with the HTTP server in front of it; the folder of CONFIG must have a " + FILE
    either.add_argument("--http", action="store_true", help=text)
    text = "clients of --url and --http, each of which sends its next request when its last one has ended (64 256)"
    parser.add_argument(
        "--clients", type=integer(1, MOST_CLIENTS), nargs="+", default=list(CLIENTS), metavar="N", help=text
    )


def load(args: argparse.Namespace) -> int:
    """Loads a server; returns 1 if a request has failed."""
    loads, vocabulary = loads_of(args), ModelConfig.read(args.config).vocab_size
    model = model_name(args.url)
    about: dict[str, Any] = {**when_and_how(args.argv), "server": {"url": args.url, "model": model}, "loads": []}
    seed = secrets.randbits(32)  # the server may still have the prefixes of an earlier run
    served = _through_http(args.url, model, max(loads), _batches(loads, vocabulary, seed))
    return _record(args.json, about, "server", served)


def compare(
    args: argparse.Namespace, loads: Mapping[int, Lengths], make_engine: Callable[[], Engine], sizes: dict[str, Any]
) -> int:
    """Serves by an engine alone, and by a server; returns 1 if a request has failed.

    Args:
      args: the options.
      loads: the lengths of the requests, by the number of clients.
      make_engine: makes an engine and warms it up; it is pickled.
      sizes: of the engine, to be recorded.
    """
    folder = args.config if args.config.is_dir() else args.config.parent
    if not (folder / FILE).is_file():
        raise ValueError(f"--http: {folder} has no {FILE}, which the server needs")
    vocabulary = ModelConfig.read(args.config).vocab_size
    about: dict[str, Any] = {**when_and_how(args.argv), "engine": sizes, "loads": []}
    notice("making the engine")
    with Peer(None, _Alone, make_engine) as peer:
        about |= peer.call("about")
        calls = (peer.call("serve", batch) for batch in _batches(loads, vocabulary))
        failed = _record(args.json, about, "engine", calls)
    # That process has ended, and the memory of its GPU is free again.
    with _server(make_engine, folder, max(loads)) as url:
        served = _through_http(url, MODEL, max(loads), _batches(loads, vocabulary))
        failed |= _record(args.json, about, "http", served)
    about["ratio"] = {}
    for alone, server in zip(about["loads"][: len(loads)], about["loads"][len(loads) :], strict=True):
        names = ("output_tokens_per_s", "saturated")
        ratio = {name: server[name] / alone[name] if alone[name] else 0.0 for name in names}
        about["ratio"][alone["clients"]] = ratio
        print(
            f"with {alone['clients']} clients, the server has {ratio['output_tokens_per_s']:.1%} of the tokens/s of "
            f"the engine alone, and {ratio['saturated']:.1%} while all are busy"
        )
    if args.json:
        write_json(args.json, about)
    return failed


def loads_of(args: argparse.Namespace) -> dict[int, Lengths]:
    """The lengths of the requests, by the number of clients; ValueError if they are too few for one of these."""
    found = {}
    for clients in args.clients:
        count = args.requests or PER_CLIENT * clients
        if count <= 2 * clients:
            raise ValueError(
                f"--requests is {count}: expected more than {2 * clients}, twice the {clients} clients, because tokens "
                "are counted from the time at which so many have ended until the last one is sent"
            )
        found[clients] = lengths_of(args, count)
    return found


class Batch(NamedTuple):
    """The requests of a load."""

    clients: int
    prompts: list[list[int]]
    outputs: list[int]
    """The tokens that each generates."""


def _batches(loads: Mapping[int, Lengths], vocabulary: int, seed: int = 0) -> Iterator[Batch]:
    """The requests of each load, and before them a short one of each client, which is not counted."""
    clients, lengths = next(iter(loads.items()))
    first = Lengths(lengths.prompts[:clients], np.minimum(lengths.outputs[:clients], FIRST_OUTPUT))
    for number, (count, each) in enumerate([(clients, first), *loads.items()]):
        yield Batch(count, random_prompts(each, vocabulary, seed=(seed, number)), each.outputs.tolist())


@dataclass(frozen=True)
class Served:
    """The requests of a load, and how they were served."""

    clients: int
    answered: list[Answered]

    def summary(self) -> dict[str, Any]:
        """Numbers for a file of measurements; ValueError if all requests have failed."""
        good = [answered for answered in self.answered if not answered.error]
        errors = [answered.error for answered in self.answered if answered.error]
        if not good:
            raise ValueError(f"all {len(errors)} requests failed: {errors[0]}")
        times = TokenTimes(np.asarray([each.sent for each in good]), [each.times for each in good])
        # Of all chunks of a request, each counts for equally many of its tokens.
        counts = np.concatenate([np.full(len(each.times), each.tokens / len(each.times)) for each in good])
        arrived = np.concatenate(times.tokens)

        def rate(start: float, end: float) -> float:
            return float(counts[(start < arrived) & (arrived <= end)].sum() / (end - start)) if end > start else 0.0

        ends = sorted(each.times[-1] for each in good)
        begun = ends[min(self.clients, len(ends)) - 1]
        return {
            "clients": self.clients,
            "requests": len(self.answered),
            "errors": len(errors),
            "error": errors[0] if errors else None,
            "output_tokens": sum(each.tokens for each in good),
            "chunks": len(arrived),
            "output_tokens_per_s": rate(times.arrivals.min(), ends[-1]),
            "saturated": rate(begun, times.arrivals.max()),
            "first_token_ms": percentiles(times.first),
            "between_tokens_ms": percentiles(times.between),
        }


def closed_loop(engine: Engine, batch: Batch) -> Served:
    """Serves requests by an engine, of which as many as there are clients wait or run until none is left."""
    left, answered = iter(zip(batch.prompts, batch.outputs, strict=True)), dict[Request, Answered]()

    def send() -> None:
        if pair := next(left, None):
            sent = Answered(time.monotonic())
            answered[engine.submit(pair[0], max_tokens=pair[1], stop=())] = sent

    for _ in range(batch.clients):
        send()
    while engine.unfinished:
        new = engine.step()
        now = time.monotonic()
        for request, _ in new:
            answered[request].times.append(now)
            answered[request].tokens += 1
        for request in {request for request, _ in new}:
            if request.finish_reason is not None:
                send()
    for request, found in answered.items():
        if request.finish_reason != "length":
            found.error = f"the request ended with {request.finish_reason}"
    return Served(batch.clients, [*answered.values()])


class _Alone:
    """An engine without a server.  The object of a `Peer`."""

    def __init__(self, make_engine: Callable[[], Engine]):
        self._engine = make_engine()

    def about(self) -> dict[str, Any]:
        return random_models.about(self._engine.model)

    def serve(self, batch: Batch) -> Served:
        return closed_loop(self._engine, batch)


class _Server:
    """The server, which `jaxkv serve` runs.  The object of a `Peer`."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, make_engine: Callable[[], Engine], folder: Path, port: int, queued: int) -> int:
        try:
            from jaxkv.server.app import Limits
            from jaxkv.server.run import run
        except ImportError as error:
            raise ImportError(f"--http needs the package {error.name}: pip install 'jaxkv[serve]'") from None
        limits = Limits(queued=queued)
        return run(make_engine, folder, name=MODEL, host="127.0.0.1", port=port, limits=limits, drain=0)


@contextmanager
def _server(make_engine: Callable[[], Engine], folder: Path, queued: int) -> Iterator[str]:
    """A server in a process of its own, and its engine in another one; yields its URL when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Peer(None, _Server) as server:
        pid = server.call("pid")
        running = server.begin("run", make_engine, folder, port, queued)
        try:
            url = f"http://127.0.0.1:{port}"
            while not _is_ready(url):
                if running.done():
                    raise OSError(f"the server ended with status {running.result()} before it was ready")
                time.sleep(HEALTH_SECONDS)
            yield url
        finally:
            if not running.done():
                os.kill(pid, signal.SIGTERM)
            wait([running])


def _is_ready(url: str) -> bool:
    try:
        get(f"{url}/health")
    except OSError:
        return False
    return True


def _through_http(url: str, model: str, most: int, batches: Iterable[Batch]) -> Iterator[Served]:
    """Serves batches by a server, with at most so many clients."""
    with Clients(url, most) as clients:
        for count, prompts, outputs in batches:
            bodies = [completion(model, *pair) for pair in zip(prompts, outputs, strict=True)]
            yield Served(count, clients.closed_loop(bodies, count))


def _record(file: Path | None, about: dict[str, Any], served_by: str, served: Iterator[Served]) -> int:
    """Prints and records each load but the first; returns 1 if a request has failed."""
    failed = 0
    next(served).summary()  # raises an error if there are errors alone
    for each in served:
        if not about["loads"]:
            print(HEAD)
        found = {"served_by": served_by, **each.summary()}
        about["loads"].append(found)
        print(_line(found))
        if found["errors"]:
            notice(f"{found['errors']} of {found['requests']} requests failed, the first because {found['error']}")
            failed = 1
        if file:
            write_json(file, about)
    return failed


def _line(found: dict[str, Any]) -> str:
    first, between = found["first_token_ms"], found["between_tokens_ms"]
    rates = f"{found['output_tokens_per_s']:,.0f}, {found['saturated']:,.0f}"
    return (
        f"{found['clients']:<9}{found['served_by']:<12}{rates:<34}{first['median']:>12.1f}, {first['p99']:<17.1f}"
        f"{between['median']:>18.2f}, {between['p99']:<15.2f}{found['errors']}"
    )


def _url(text: str) -> str:
    """Parses the URL of a server."""
    try:
        parts = urlsplit(text)
        known = parts.scheme == "http" and parts.hostname and parts.port != 0 and parts.path in ("", "/")
    except ValueError:
        known = False
    if not known or "?" in text or "#" in text or "@" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT, without a path")
    return text.rstrip("/")
