"""Serve the same requests by engines that prefill and decode, and by engines that prefill for others that decode.

Each engine has a GPU.  First, each serves an equal share of the requests, in a process of its own.  Then some
(--prefillers) prefill all prompts and generate the first token of each; the blocks go to the others (--decoders), which
generate the rest.  With `--transport device`, all engines are then in one process, each driven by a thread, and blocks
go from GPU to GPU (`Engine.export` and `adopt`).  One engine that prefills and one that decodes can also be in two
processes, which send blocks by a transport of `jaxkv.offload`, through the memory of the host.  All requests arrive at
once.  The weights are random, and the same in all engines.

Times between tokens are those of consecutive tokens of a request.  Tokens are compared: where two differ for the first
time, both must be equally likely, up to rounding.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import reduce
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
from jaxkv.bench.requests import TokenTimes, percentiles
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
    "requests": ("requests, the same number for each engine (64; 4 on CPUs)", 64, 4),
    "prompt": ("tokens of each prompt (2048; 128 on CPUs)", 2048, 128),
    "output": ("tokens that each generates, at least 2 (256; 8 on CPUs)", 256, 8),
}


@dataclass
class Served:
    """How requests were served.  Times are those of `time.monotonic`, which the processes of a machine share."""

    submitted: list[float]
    """When each request was submitted; 0 if it was not."""
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
        """The same requests.  Another engine has served some of them, or has generated their further tokens."""
        return Served(
            [first or later for first, later in zip(self.submitted, other.submitted, strict=True)],
            [first + rest for first, rest in zip(self.times, other.times, strict=True)],
            [first + rest for first, rest in zip(self.tokens, other.tokens, strict=True)],
            self.loaded + other.loaded,
            self.failures + other.failures,
            self.late + other.late,
        )

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
    prefillers: int
    """Engines that only prefill."""
    decoders: int
    """Engines that only decode."""

    @property
    def dummies(self) -> int:
        """Requests that are served before the others: one for each pair of a prefiller and a decoder."""
        return self.prefillers * self.decoders

    def prompts(self, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
        """Random prompts of the dummies, and of all requests."""
        count = self.dummies
        prompts = np.random.default_rng(0).integers(0, vocabulary, (count + self.requests, self.prompt)).tolist()
        return prompts[:count], prompts[count:]

    def prefiller(self, number: int) -> int:
        """Which engine prefills a dummy or a request."""
        return number % self.prefillers

    def decoder(self, number: int) -> int:
        """Which engine decodes it."""
        return number // self.prefillers % self.decoders


class Server:
    """A model and its engines, all of the same sizes, each of which has served dummies.  The object of a `Peer`.

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
        self._offered = (job.dummies + job.requests) * sum(table.up_to(job.prompt) for table in tables)
        """Blocks of all prompts, those of dummies included."""
        most = job.requests + job.chunks * job.chunk
        needed = random_models.Needed(
            self._blocks, job.requests + job.chunks, most, other_blocks=self._blocks, host_blocks=self._offered
        )
        self._model = random_models.random_model(job.model, described, needed)
        self._dummies, self._prompts = job.prompts(self._model.config.vocab_size)
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
        """Makes the engine that prefills and decodes a share of the requests."""
        self._engines["both"] = self._engine()
        self._serve("both", self._dummies, range(len(self._dummies)), OF_DUMMY)

    def serve_share(self, share: int, shares: int) -> Served:
        """Serves one of so many equal shares of the requests."""
        return self._serve("both", self._prompts, range(share, self._job.requests, shares), self._job.output)

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

    def make_near_prefiller(self, decoders: Sequence["Server"]) -> None:
        """Makes the engine that prefills, for decoders of this process."""
        engine = self._engines["prefill"] = self._engine()

        def send(number: int, token: int, prompt: list[int]) -> None:
            decoders[self._job.decoder(number)]._first.put((number, token, engine.export(prompt)))

        self._to_decoder = send

    def make_near_decoder(self) -> None:
        """Makes the engine that decodes what prefillers of this process send."""
        self._engines["decode"] = self._engine()

    def prefill(self, dummies: bool, prefiller: int = 0) -> Served:
        """Prefills the prompts of requests or dummies that this prefiller has, and sends the first tokens on."""
        prompts = self._dummies if dummies else self._prompts
        mine = [number for number in range(len(prompts)) if self._job.prefiller(number) == prefiller]

        def send(number: int, token: int) -> None:
            self._to_decoder(number, token, prompts[number])

        return self._serve("prefill", prompts, mine, 1, send)

    def decode(self, dummies: bool, decoder: int = 0) -> Served:
        """Generates all tokens after the first, of requests or dummies that this decoder has."""
        prompts = self._dummies if dummies else self._prompts
        mine = [number for number in range(len(prompts)) if self._job.decoder(number) == decoder]
        engine = self._engines["decode"]
        keys = {number: engine.keys(prompts[number], block_size=engine.block_size) for number in mine}
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

        output = (OF_DUMMY if dummies else self._job.output) - 1
        served = self._run(engine, len(mine), len(prompts), ready, output)
        served.late = late
        return served

    def _serve(
        self,
        name: str,
        prompts: Sequence[list[int]],
        numbers: Sequence[int],
        output: int,
        on_token: Callable[[int, int], None] = lambda number, token: None,
    ) -> Served:
        """Serves those of the prompts that have these numbers, and that all arrive at once."""
        left = [{number: prompts[number] for number in numbers}]

        def ready() -> Mapping[int, list[int]]:
            return left.pop() if left else {}

        return self._run(self._engines[name], len(numbers), len(prompts), ready, output, on_token)

    def _run(
        self,
        engine: Engine,
        count: int,
        of: int,
        ready: Callable[[], Mapping[int, list[int]]],
        output: int,
        on_token: Callable[[int, int], None] = lambda number, token: None,
    ) -> Served:
        """Serves `count` of so many requests, as soon as `ready` has the prompt of each by its number."""
        served, numbers = Served.none(of), dict[Request, int]()
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


class Group:
    """The servers of one process, each on a device of its own.  The object of a `Peer`."""

    def __init__(self, job: Job):
        devices, count = jax.devices(), job.prefillers + job.decoders
        self._threads = ThreadPoolExecutor(count)
        servers = [*self._threads.map(lambda i: Server(job, devices[i % len(devices)]), range(count))]
        self._prefillers, self._decoders = servers[: job.prefillers], servers[job.prefillers :]
        made = [self._threads.submit(server.make_near_prefiller, self._decoders) for server in self._prefillers]
        made += [self._threads.submit(server.make_near_decoder) for server in self._decoders]
        _results(*made)

    def serve(self) -> Served:
        """Serves the requests, after dummies."""
        for dummies in (True, False):
            prefilled = [self._threads.submit(one.prefill, dummies, i) for i, one in enumerate(self._prefillers)]
            decoded = [self._threads.submit(one.decode, dummies, i) for i, one in enumerate(self._decoders)]
            served = _results(*prefilled, *decoded)
        return reduce(Served.then, served)

    def compare(self, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> "Compared":
        """`Server.compare`."""
        return self._prefillers[0].compare(first, second)


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
    """Adds the options: the model, the requests, the engines, and the transport of blocks."""
    random_models.add_arguments(parser)
    add_sizes(parser, SIZES)
    count = "engines that only {} in the second case (1)"
    parser.add_argument("--prefillers", type=positive, default=1, metavar="N", help=count.format("prefill"))
    parser.add_argument("--decoders", type=positive, default=1, metavar="N", help=count.format("decode"))
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
    engines = args.prefillers + args.decoders
    if args.requests % engines or args.output < 2:
        raise ValueError(
            f"--requests is {args.requests} and --output {args.output}: expected a multiple of the {engines} engines, "
            "and at least 2 tokens, of which the first is generated where the prompt is prefilled"
        )
    if args.transport != DEVICE:
        TRANSPORTS[args.transport]()  # raises here, before anything takes time, if it is not installed
        if engines > 2:
            raise ValueError(
                f"--prefillers is {args.prefillers}, --decoders {args.decoders} and --transport {args.transport}: "
                f"expected 1 and 1, or --transport {DEVICE}"
            )
    names = "config", "entry_format", "fp8_weights", "implementation"
    options = argparse.Namespace(**{name: getattr(args, name) for name in names})
    sizes = {name: getattr(args, name) for name in (*SIZES, "chunk", "chunks", "transport", "prefillers", "decoders")}
    job, devices = Job(options, **sizes), jax.device_count()
    with ExitStack() as stack:
        notice("making the models")
        peers = [stack.enter_context(Peer(i % devices, Server, job)) for i in range(engines)]
        about = {**when_and_how(args.argv), **_results(*(peer.begin("described") for peer in peers))[0]}
        print(
            f"{config.architecture} of {counted(config.num_layers, 'layers')} on {engines} of {about['device']}, "
            f"jax {jax.__version__}: {counted(args.requests, 'requests')} of {args.prompt} and {args.output} tokens"
        )
        notice(f"making {engines} engines that prefill and decode")
        _results(*(peer.begin("make_both") for peer in peers))
        shares = _results(*(peer.begin("serve_share", i, engines) for i, peer in enumerate(peers)))
        whole = reduce(Served.then, shares)
        print(_line("each does both", whole.summary()), flush=True)
        notice(f"making {counted(args.prefillers, 'engines')} that prefill, and {args.decoders} that decode")
        if job.transport == DEVICE:
            stack.close()  # so that there is memory for the models of another process
            first = stack.enter_context(Peer(None, Group, job))
            divided = first.call("serve")
        else:
            first, last = peers
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
        found = {"both": before, "prefill_then_decode": after, "ratios": ratios, "loaded_share": share}
        write_json(args.json, {**about, "sizes": sizes, **found, "tokens": asdict(compared)})
    return 1 if compared.wrong or divided.failures or divided.late else 0


def _apart(first: Peer, last: Peer) -> Served:
    """The requests, of which one process prefills the prompts and the other decodes."""
    authkey = os.urandom(16)
    blocks = first.call("offer_blocks", authkey)
    address, _ = _results(last.begin("make_decoder", blocks, authkey), first.begin("make_prefiller"))
    first.call("connect", address, authkey)
    for dummies in (True, False):
        decoded, prefilled = _results(last.begin("decode", dummies), first.begin("prefill", dummies))
    return prefilled.then(decoded)


def _results(*calls: Future[Any]) -> list[Any]:
    return [call.result() for call in calls]


def _line(name: str, found: Mapping[str, Any]) -> str:
    first, between = found["first_token_ms"], found["between_tokens_ms"]
    return (
        f"{name:16}{found['output_tokens_per_s']:9,.0f} tokens/s; between tokens {between['median']:.2f} ms, p99 "
        f"{between['p99']:.2f}; first token {first['median']:.0f} ms, p99 {first['p99']:.0f}"
    )
