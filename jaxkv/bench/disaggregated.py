"""Serve the same requests by two engines that prefill and decode, and by one engine that prefills for one that decodes.

Each engine has a GPU.  First, both serve half of the requests each, in a process of their own.  Then one prefills all
prompts and generates the first token of each; the blocks go to the other one, which generates the rest.  Engines in two
processes send blocks by a transport of `jaxkv.offload`, through the memory of the host.  With `--transport device`,
both engines are in one process, each driven by a thread, and blocks go from GPU to GPU (`Engine.export` and `adopt`).
All requests arrive at once.  The weights are random, and the same in both engines.

Times between tokens are those of consecutive tokens of a request.  Tokens are compared: where two differ for the first
time, both must be equally likely, up to rounding.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from multiprocessing.connection import Client, Listener
from queue import SimpleQueue
from statistics import median
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import offload
from jaxkv.bench import random_models
from jaxkv.bench.ends import TRANSPORTS
from jaxkv.bench.peers import Peer, share_memory
from jaxkv.bench.serve import TokenTimes, percentiles
from jaxkv.bench.soak import ROUNDINGS
from jaxkv.models import ModelConfig
from jaxkv.models.parallel.base import OneDevice
from jaxkv.serving import Engine, ExportedBlocks, Request
from jaxkv.serving.table import tables_of
from jaxkv.terminal.files import when_and_how, write_json
from jaxkv.terminal.formatting import counted
from jaxkv.terminal.options import Sizes, add_sizes, output_file, positive, with_defaults
from jaxkv.terminal.streams import notice

DEVICE = "device"
"""The transport from device to device."""
WAIT_SECONDS = 0.0005
"""Between two looks at what has arrived, while an engine has no requests."""
LATE_SECONDS = 30.0
"""After so long, a request whose blocks are not offered is served without them."""
OF_DUMMY = 4
"""Output tokens of the request that is served before the others."""

SIZES: Sizes = {
    "requests": ("requests, an even number (64; 4 on CPUs)", 64, 4),
    "prompt": ("tokens of each prompt (2048; 128 on CPUs)", 2048, 128),
    "output": ("tokens that each generates, at least 2 (256; 8 on CPUs)", 256, 8),
}


@dataclass
class Served:
    """How requests were served.  Times are those of `time.monotonic`, which the processes of a machine share."""

    submitted: list[float]
    """When each request was submitted."""
    times: list[list[float]]
    """When each of its tokens was there."""
    tokens: list[list[int]]
    loaded: int = 0
    """Tokens of prompts that were not computed."""
    failures: int = 0
    """Of connectors."""
    late: int = 0
    """Requests whose blocks were not offered in time."""

    @staticmethod
    def none(count: int) -> "Served":
        """Of so many requests that were not submitted."""
        return Served([0.0] * count, [[] for _ in range(count)], [[] for _ in range(count)])

    def then(self, other: "Served") -> "Served":
        """The same requests, whose further tokens another engine has generated."""
        return Served(
            self.submitted,
            [first + rest for first, rest in zip(self.times, other.times, strict=True)],
            [first + rest for first, rest in zip(self.tokens, other.tokens, strict=True)],
            self.loaded + other.loaded,
            self.failures + other.failures,
            self.late + other.late,
        )

    def beside(self, other: "Served") -> "Served":
        """These requests and others, which another engine has served at the same time."""
        return Served(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Served)))

    def summary(self) -> dict[str, Any]:
        """Numbers for a file of measurements."""
        start, end = min(self.submitted), max(times[-1] for times in self.times)
        times = TokenTimes(np.asarray(self.submitted), self.times)
        return {
            "seconds": end - start,
            "output_tokens_per_s": sum(map(len, self.tokens)) / (end - start),
            "first_token_ms": percentiles(times.first),
            "between_tokens_ms": percentiles(times.between),
            "loaded_tokens": self.loaded,
            "failures": self.failures,
            "late": self.late,
        }


@dataclass(frozen=True)
class Job:
    """What is served, and how."""

    model: argparse.Namespace
    """The options of `random_models`."""
    requests: int
    prompt: int
    output: int
    chunk: int
    """Tokens per chunk of a prompt."""
    chunks: int
    """The most chunks per step."""
    transport: str

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random prompts [1 + requests]; the first is that of a dummy."""
        rng = np.random.default_rng(0)
        return rng.integers(0, vocabulary, (1 + self.requests, self.prompt)).tolist()


class Server:
    """A model and its engines, all of the same sizes, each of which has served one request.  The object of a `Peer`.

    Args:
      job: what is served.
      device: where the model is; default the first device.
    """

    def __init__(self, job: Job, device: jax.Device | None = None):
        self._job = job
        described = random_models.described_model(job.model, OneDevice(device))
        tables, tokens = tables_of(described.layout(1), described.usual_block_size), job.prompt + job.output
        self._blocks = job.requests * sum(table.most_held(tokens, tokens) for table in tables)
        """Blocks of all requests, the cache of an engine."""
        self._offered = (1 + job.requests) * sum(table.up_to(job.prompt) for table in tables)
        """Blocks of all prompts, the dummy's included."""
        most = job.requests + job.chunks * job.chunk
        needed = random_models.Needed(
            self._blocks, job.requests + job.chunks, most, other_blocks=self._blocks, host_blocks=self._offered
        )
        self._model = random_models.random_model(job.model, described, needed)
        self._dummy, *self._prompts = job.prompts(self._model.config.vocab_size)
        self._engines: dict[str, Engine] = {}
        self._first: SimpleQueue[tuple[int, int, ExportedBlocks | None]] = SimpleQueue()
        """Numbers of requests whose prompts have been prefilled, their first tokens, and their blocks, if these are not
        pulled."""

    def described(self) -> dict[str, Any]:
        """Device, versions and model."""
        return random_models.about(self._model)

    def _engine(self, *connectors: offload.Connector) -> Engine:
        engine = Engine(
            self._model,
            num_blocks=self._blocks,
            max_requests=self._job.requests,
            max_len=self._job.prompt + self._job.output,
            chunk=self._job.chunk,
            max_num_batched_tokens=self._job.requests + self._job.chunks * self._job.chunk,
            connectors=connectors,
        )
        engine.warm_up()
        return engine

    def make_both(self) -> None:
        """Makes the engine that prefills and decodes half of the requests."""
        self._engines["both"] = self._engine()
        self._serve("both", {0: self._dummy}, OF_DUMMY)

    def serve_half(self, half: int) -> Served:
        """Serves the first or the second half of the requests."""
        count = self._job.requests // 2
        return self._serve("both", dict(enumerate(self._prompts[half * count :][:count])), self._job.output)

    def offer_blocks(self, authkey: bytes) -> tuple[str, int]:
        """Offers the blocks of a pool, which is empty; returns the address."""
        self._pool = offload.HostPool(self._model.layout(1), self._offered)
        transport = TRANSPORTS[self._job.transport]()
        self._server = offload.BlockServer(self._pool, ("127.0.0.1", 0), authkey=authkey, transport=transport)
        return self._server.address

    def make_prefiller(self) -> None:
        """Makes the engine that prefills, whose blocks are offered."""
        self._engines["prefill"] = self._engine(self._pool)

    def make_decoder(self, blocks: tuple[str, int], authkey: bytes) -> str:
        """Makes the engine that decodes; returns the address to which first tokens are sent."""
        transport = TRANSPORTS[self._job.transport]()
        self._remote = offload.RemoteBlocks(
            self._model.layout(1), [blocks], authkey=authkey, transport=transport, pull_timeout=LATE_SECONDS
        )
        self._engines["decode"] = self._engine(self._remote)
        listener = Listener(family="AF_UNIX", authkey=authkey)
        Thread(target=self._receive, args=(listener,), daemon=True).start()
        return str(listener.address)

    def _receive(self, listener: Listener) -> None:
        with listener, listener.accept() as connection:
            while True:
                try:
                    self._first.put((*connection.recv(), None))
                except EOFError:
                    return

    def connect(self, address: str, authkey: bytes) -> None:
        """Sends first tokens to this address from now on."""
        connection = Client(address, "AF_UNIX", authkey=authkey)
        self._to_decoder = lambda number, token, prompt: connection.send((number, token))

    def make_near(self, decoder: "Server") -> None:
        """Makes the engine that prefills, and the one of a server of this process that decodes."""
        self._engines["prefill"], decoder._engines["decode"] = self._engine(), decoder._engine()

        def send(number: int, token: int, prompt: list[int]) -> None:
            decoder._first.put((number, token, self._engines["prefill"].export(prompt)))

        self._to_decoder = send

    def prefill(self, dummy: bool) -> Served:
        """Prefills all prompts, or that of the dummy, and sends the first tokens to the engine that decodes."""
        prompts = [self._dummy] if dummy else self._prompts

        def send(number: int, token: int) -> None:
            self._to_decoder(number, token, prompts[number])

        return self._serve("prefill", dict(enumerate(prompts)), 1, send)

    def decode(self, dummy: bool) -> Served:
        """Generates all tokens after the first, of requests whose blocks are offered."""
        prompts = [self._dummy] if dummy else self._prompts
        engine = self._engines["decode"]
        keys = [engine.keys(prompt, block_size=engine.block_size) for prompt in prompts]
        first: dict[int, tuple[int, float]] = {}
        """First tokens of requests that wait for their blocks, and since when they wait."""
        late = 0

        def ready() -> dict[int, list[int]]:
            nonlocal late
            found = dict[int, list[int]]()
            while not self._first.empty():
                number, token, blocks = self._first.get()
                if blocks is None:
                    first[number] = token, time.monotonic()
                else:
                    engine.adopt(blocks)
                    found[number] = [*prompts[number], token]
            now = time.monotonic()
            for number, (token, since) in list(first.items()):
                is_late = now - since > LATE_SECONDS
                if is_late or all(key in self._remote for key in reversed(keys[number])):
                    found[number] = [*prompts[number], token]
                    del first[number]
                    late += is_late
            return found

        served = self._run(engine, len(prompts), ready, (OF_DUMMY if dummy else self._job.output) - 1)
        served.late = late
        return served

    def _serve(
        self,
        name: str,
        prompts: Mapping[int, list[int]],
        output: int,
        on_token: Callable[[int, int], None] = lambda number, token: None,
    ) -> Served:
        """Serves prompts that all arrive at once."""
        left = [dict(prompts)]
        return self._run(self._engines[name], len(prompts), lambda: left.pop() if left else {}, output, on_token)

    def _run(
        self,
        engine: Engine,
        count: int,
        ready: Callable[[], Mapping[int, list[int]]],
        output: int,
        on_token: Callable[[int, int], None] = lambda number, token: None,
    ) -> Served:
        """Serves `count` requests, as soon as `ready` has the prompt of each by its number."""
        served, numbers = Served.none(count), dict[Request, int]()
        found, failures = engine.prefix_stats.found, engine.tiers.failures
        while len(numbers) < count or engine.unfinished:
            for number, prompt in ready().items():
                served.submitted[number] = time.monotonic()
                numbers[engine.submit(prompt, max_tokens=output, stop=())] = number
            if not engine.unfinished:
                time.sleep(WAIT_SECONDS)
                continue
            new = engine.step()
            now = time.monotonic()
            for request, token in new:
                served.times[numbers[request]].append(now)
                served.tokens[numbers[request]].append(token)
                on_token(numbers[request], token)
        if any(request.finish_reason != "length" for request in numbers):
            raise RuntimeError("the logits of a request are NaN, so that it ended early")
        served.loaded = engine.prefix_stats.found - found
        served.failures = engine.tiers.failures - failures
        return served

    def compare(self, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> "Compared":
        """Compares the tokens of all requests; where two differ first, by the probabilities of this engine."""
        engine, found = next(iter(self._engines.values())), Compared()
        checks: dict[Request, tuple[int, set[int]]] = {}
        for number, (mine, theirs) in enumerate(zip(first, second, strict=True)):
            place = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if len({*pair}) > 1), None)
            found.agree.append(len(mine) if place is None else place)
            if place is None:
                found.equal += 1
                continue
            prompt = [*self._prompts[number], *mine[:place]]
            options: Any = {"max_tokens": 1, "stop": (), "logprobs": 20, "cache_salt": f"{number}"}
            checks[engine.submit(prompt, **options)] = number, {mine[place], theirs[place]}
        list(engine.run())
        tolerance = ROUNDINGS * float(jnp.finfo(self._model.dtype).eps)
        for request, (number, tokens) in checks.items():
            (about,) = request.logprobs
            top = dict(about.top)
            if all(max(top.values()) - top.get(token, -np.inf) <= tolerance for token in tokens):
                found.rounded += 1
            else:
                found.wrong.append(number)
        return found


class Pair:
    """Two servers of one process, on its first two devices.  The object of a `Peer`."""

    def __init__(self, job: Job):
        devices = jax.devices()
        self._prefiller, self._decoder = (Server(job, device) for device in (devices[0], devices[:2][-1]))
        self._prefiller.make_near(self._decoder)
        self._threads = ThreadPoolExecutor(2)

    def serve(self) -> Served:
        """Serves the requests, after a dummy."""
        for dummy in (True, False):
            calls = self._prefiller.prefill, self._decoder.decode
            prefilled, decoded = self._threads.map(lambda call, dummy=dummy: call(dummy), calls)
        return prefilled.then(decoded)

    def compare(self, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> "Compared":
        """`Server.compare`."""
        return self._prefiller.compare(first, second)


@dataclass
class Compared:
    """How many requests have the same tokens in both cases."""

    equal: int = 0
    rounded: int = 0
    """Requests whose tokens differ first where both are equally likely, up to rounding."""
    wrong: list[int] = field(default_factory=list)
    """The numbers of all others."""
    agree: list[int] = field(default_factory=list)
    """Of each request, how many tokens are equal up to the first that differs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the requests, and the transport of blocks."""
    random_models.add_arguments(parser)
    add_sizes(parser, SIZES)
    parser.add_argument("--chunk", type=positive, default=64, metavar="N", help="prompt tokens per chunk (64)")
    parser.add_argument("--chunks", type=positive, default=10, metavar="N", help="the most chunks per step (10)")
    transport = (
        "how blocks are sent: from device to device in one process (device), or between processes by "
        "jax.experimental.transfer (JAX), or NIXL if it is installed; default device"
    )
    parser.add_argument("--transport", choices=(DEVICE, *TRANSPORTS), default=DEVICE, help=transport)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, versions, sizes and times")


def run(args: argparse.Namespace) -> int:
    """Prints both cases and their ratios; returns 1 if tokens are wrong or blocks were not loaded."""
    share_memory()
    config = ModelConfig.read(args.config)
    with_defaults(args, SIZES, jax.devices()[0])
    if args.requests % 2 or args.output < 2:
        raise ValueError(
            f"--requests is {args.requests} and --output {args.output}: expected an even number of requests, and at "
            "least 2 tokens, of which the first is generated where the prompt is prefilled"
        )
    if args.transport != DEVICE:
        TRANSPORTS[args.transport]()  # raises here, before anything takes time, if it is not installed
    names = "config", "entry_format", "fp8_weights", "implementation"
    options = argparse.Namespace(**{name: getattr(args, name) for name in names})
    job = Job(options, args.requests, args.prompt, args.output, args.chunk, args.chunks, args.transport)
    second = min(jax.device_count(), 2) - 1
    with ExitStack() as stack:
        notice("making the models")
        first, last = (stack.enter_context(Peer(device, Server, job)) for device in (0, second))
        about = {**when_and_how(args.argv), **_results(first.begin("described"), last.begin("described"))[0]}
        print(
            f"{config.architecture} of {counted(config.num_layers, 'layers')} on two of {about['device']}, "
            f"jax {jax.__version__}: {counted(args.requests, 'requests')} of {args.prompt} and {args.output} tokens"
        )
        notice("making two engines that prefill and decode")
        _results(first.begin("make_both"), last.begin("make_both"))
        one, other = _results(first.begin("serve_half", 0), last.begin("serve_half", 1))
        whole = one.beside(other)
        print(_line("both do both", whole.summary()), flush=True)
        notice("making an engine that prefills, and one that decodes")
        if job.transport == DEVICE:
            stack.close()  # so that there is memory for the models of another process
            first = stack.enter_context(Peer(None, Pair, job))
            divided = first.call("serve")
        else:
            divided = _apart(first, last)
        print(_line("prefill, decode", divided.summary()), flush=True)
        compared = first.call("compare", whole.tokens, divided.tokens)
    before, after = whole.summary(), divided.summary()
    ratios = {
        "between_tokens_p99": after["between_tokens_ms"]["p99"] / before["between_tokens_ms"]["p99"],
        "output_tokens_per_s": after["output_tokens_per_s"] / before["output_tokens_per_s"],
    }
    share = divided.loaded / (args.requests * args.prompt)
    print(
        "p99 between tokens {between_tokens_p99:.2f}, output tokens/s {output_tokens_per_s:.2f} times".format(**ratios)
    )
    print(
        f"{share:.1%} of the tokens of prompts were loaded, with {counted(divided.failures, 'failures')}; blocks of "
        f"{counted(divided.late, 'requests')} were late"
    )
    print(
        f"of {counted(args.requests, 'requests')}, {compared.equal} have equal tokens, {compared.rounded} up to "
        f"rounding, and {len(compared.wrong)} are wrong; the first {median(compared.agree):.0f} are equal (median)"
    )
    if args.json:
        sizes = {name: getattr(args, name) for name in (*SIZES, "chunk", "chunks", "transport")}
        found = {"both": before, "prefill_then_decode": after, "ratios": ratios, "loaded_share": share}
        write_json(args.json, {**about, "sizes": sizes, **found, "tokens": asdict(compared)})
    return 1 if compared.wrong or divided.failures or divided.late else 0


def _apart(first: Peer, last: Peer) -> Served:
    """The requests, of which one process prefills the prompts and the other decodes."""
    authkey = os.urandom(16)
    blocks = first.call("offer_blocks", authkey)
    address, _ = _results(last.begin("make_decoder", blocks, authkey), first.begin("make_prefiller"))
    first.call("connect", address, authkey)
    for dummy in (True, False):
        decoded, prefilled = _results(last.begin("decode", dummy), first.begin("prefill", dummy))
    return prefilled.then(decoded)


def _results(*calls: Future[Any]) -> list[Any]:
    return [call.result() for call in calls]


def _line(name: str, found: Mapping[str, Any]) -> str:
    first, between = found["first_token_ms"], found["between_tokens_ms"]
    return (
        f"{name:16}{found['output_tokens_per_s']:9,.0f} tokens/s; between tokens {between['median']:.2f} ms, p99 "
        f"{between['p99']:.2f}; first token {first['median']:.0f} ms, p99 {first['p99']:.0f}"
    )
