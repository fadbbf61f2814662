"""Time the serving engine under load: throughput, time to first token, and time between tokens, at several loads.

The weights are random, which does not change the times.  First, prefill and decode are timed alone, and then requests
that all arrive at once.  The output tokens per second while requests wait are the saturation; they are compared with
what the rates of prefill and decode allow.  Finally, requests arrive at random (a Poisson process), at fractions of the
rate at which saturation serves them.  Of the mean step at each load, the part is shown in which the host is busy.  If
that is nearly all of it, the device waits for the host.

With --soak, nothing is timed: requests come and are cancelled at random, and their tokens are compared.  With --url and
--http, clients send requests in a closed loop, to a server that runs, or to one that is compared with its engine.
"""

import argparse
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv.bench import closed_loop, random_models, requests, step
from jaxkv.bench.peers import share_memory
from jaxkv.bench.requests import Lengths, TokenTimes, lengths_of, percentiles, poisson, random_prompts
from jaxkv.bench.soak import compare, soak
from jaxkv.models import Model
from jaxkv.serving import Engine, HostTime, Request
from jaxkv.serving.table import tables_of
from jaxkv.terminal.files import write_json
from jaxkv.terminal.formatting import counted, size
from jaxkv.terminal.memory import nbytes
from jaxkv.terminal.options import integer, output_file, positive
from jaxkv.terminal.streams import notice

MOST_REQUESTS = 2**20
LEAST_LOAD, MOST_LOAD = 0.001, 1000
"""At less, requests would arrive once in hours."""
LEAST_SECONDS, MOST_SECONDS = 1e-6, 86400
"""Of options in seconds."""
ROOM, SOAK_ROOM = 1.5, 0.6
"""The default number of blocks, relative to those of as many requests of mean length as run at once.  For `--soak` they
are too few, so that requests are preempted."""

OF_URL = ("config", "url", "clients", "requests", "prompt", "output", "lengths", "json")
"""The options that have an effect with --url."""
PREFILL_TOKENS = 8192
"""Tokens of the prefill that is timed, which are enough for its best rate."""


@dataclass(frozen=True)
class Rates:
    """What a model does per second if it does nothing else."""

    prefill: float
    """Prompt tokens per second."""
    decode: float
    """Output tokens per second."""

    def allowed(self, lengths: Lengths) -> float:
        """Output tokens per second of requests of these lengths, if prefills and decode steps alternate."""
        per_output = lengths.prompts.mean() / lengths.outputs.mean()
        return 1 / (per_output / self.prefill + 1 / self.decode)


class Alone:
    """A prefill of prompts of mean length, and a decode step of `max_requests` requests in the middle of their outputs.

    Args:
      model: the model.
      lengths: those of the requests.
      max_requests: requests that run at once.
    """

    def __init__(self, model: Model, lengths: Lengths, max_requests: int):
        prompts, prompt = self._prefilled(lengths, max_requests)
        cache = step.filled(model, self.num_blocks(model, lengths, max_requests))
        self._decode = step.Steps(model, cache, requests=max_requests, tokens=lengths.running)
        self._prefill = step.Steps(model, cache, requests=prompts, tokens=prompt, new_tokens=prompt)

    @classmethod
    def num_blocks(cls, model: Model, lengths: Lengths, max_requests: int) -> int:
        """Blocks of the cache that both use."""
        prompts, prompt = cls._prefilled(lengths, max_requests)
        decoded = max_requests * step.blocks_for(model, lengths.running)
        return max(decoded, prompts * step.blocks_for(model, prompt, prompt))

    @staticmethod
    def _prefilled(lengths: Lengths, max_requests: int) -> tuple[int, int]:
        """The number of prompts of the prefill, and the tokens of each."""
        prompt = max(round(lengths.prompts.mean()), 1)
        return max(min(PREFILL_TOKENS // prompt, max_requests), 1), prompt

    def compile(self) -> None:
        """Compiles both, which may be done in a thread."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(step.Steps.compile, (self._decode, self._prefill)))

    def measure(self) -> Rates:
        """Times consecutive steps of each."""
        decode = self._decode.new_tokens / self._decode.seconds()
        self._prefill.cache = self._decode.cache  # which the steps have donated
        return Rates(prefill=self._prefill.new_tokens / self._prefill.seconds(), decode=decode)


@dataclass(frozen=True)
class Served(TokenTimes):
    """How requests were served."""

    saturated: tuple[float, float]
    """From when as many requests had ended as may run at once, until none waited any more."""
    host: HostTime
    """The time of the engine's steps."""


def serve(engine: Engine, lengths: Lengths, arrivals: np.ndarray, *, seed: int = 0) -> Served:
    """Submits a request at each of the arrival times, and steps the engine until all have ended.

    Prompts are random, so that they share no prefixes, and no token ends a request early.
    """
    prompts = random_prompts(lengths, engine.model.config.vocab_size, seed=seed)
    numbers: dict[Request, int] = {}
    tokens: list[list[float]] = [[] for _ in prompts]
    engine.host_time = HostTime()
    first, last, start = math.inf, 0.0, time.perf_counter()
    while len(numbers) < len(prompts) or engine.waiting or engine.running:
        now = time.perf_counter() - start
        while (number := len(numbers)) < len(prompts) and arrivals[number] <= now:
            numbers[engine.submit(prompts[number], max_tokens=int(lengths.outputs[number]), stop=())] = number
        if not engine.waiting and not engine.running:
            time.sleep(max(arrivals[number] - now, 0))
            continue
        new = engine.step()
        now = time.perf_counter() - start
        for request, _ in new:
            tokens[numbers[request]].append(now)
        if engine.waiting:
            last = now
        if len(numbers) - len(engine.waiting) - len(engine.running) >= engine.max_requests:
            first = min(first, now)
    if any(request.finish_reason != "length" for request in numbers):
        raise RuntimeError("the logits of a request are NaN, so that it ended early")
    return Served(arrivals, tokens, (first, last), engine.host_time)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the engine's sizes, and the requests."""
    random_models.add_arguments(parser)
    count = integer(1, MOST_REQUESTS)
    parser.add_argument("--max-requests", type=count, default=256, metavar="N", help="requests that run at once (256)")
    parser.add_argument("--chunk", type=positive, default=64, help="prompt tokens per chunk (64)")
    budget = "tokens per step, at least one chunk more than --max-requests; default ten chunks more"
    parser.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help=budget)
    bound = "seconds that a step with chunks should take at most while requests decode; default no bound"
    parser.add_argument(
        "--max-time-between-tokens", type=_between(LEAST_SECONDS, MOST_SECONDS), metavar="SECONDS", help=bound
    )
    blocks = "blocks in the cache, usually of 64 tokens; by default enough for the requests that run at once"
    parser.add_argument("--blocks", type=positive, metavar="N", help=blocks)
    many = "requests per load; default four times those that run at once, or four times the clients"
    parser.add_argument("--requests", type=count, metavar="N", help=many)
    requests.add_arguments(parser)
    loads = "loads after saturation, as fractions of it (0.5 0.8)"
    parser.add_argument(
        "--loads", type=_between(LEAST_LOAD, MOST_LOAD), nargs="*", default=[0.5, 0.8], metavar="X", help=loads
    )
    soaked = "instead, submit and cancel requests for so long, at several times saturation, and compare their tokens"
    parser.add_argument("--soak", type=_between(LEAST_SECONDS, MOST_SECONDS), metavar="SECONDS", help=soaked)
    closed_loop.add_arguments(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, versions, sizes and times")


def run(args: argparse.Namespace) -> int:
    """Prints the rates of the model, and one line per load."""
    _reject_unused(args)
    if args.url:
        return closed_loop.load(args)
    if args.http:
        return _http(args)
    lengths = _lengths(args)
    described, sizes, needed = _sized(args, lengths)
    if not args.soak:
        needed = replace(needed, other_blocks=Alone.num_blocks(described, lengths, args.max_requests))
    model = random_models.random_model(args, described, needed)
    print(_about(model, lengths))
    if args.soak:
        return _soak(args, model, lengths, sizes)
    alone = Alone(model, lengths, args.max_requests)
    engine = Engine(model, **sizes)
    notice("compiling")
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda compile: compile(), (engine.warm_up, alone.compile)))
    temporaries = engine.buckets.temporaries
    print(f"steps take up to {size(max(temporaries.values(), default=0))} of temporary memory")
    rates = alone.measure()
    allowed = rates.allowed(lengths)
    print(f"alone: prefill {rates.prefill:,.0f} tokens/s, decode {rates.decode:,.0f} tokens/s")
    print(f"these allow {allowed:,.0f} output tokens/s")
    count = len(lengths.prompts)
    about: dict[str, Any] = {
        **random_models.described(args, model),
        "engine": sizes,
        "programs": [{**shape._asdict(), "temporary_bytes": nbytes} for shape, nbytes in sorted(temporaries.items())],
        "requests": {
            "count": count,
            "prompt_tokens": float(lengths.prompts.mean()),
            "output_tokens": float(lengths.outputs.mean()),
        },
        "alone": {"prefill": rates.prefill, "decode": rates.decode},
        "allowed": allowed,
    }
    _record(args.json, about)
    served = serve(engine, lengths, np.zeros(count))
    saturation = served.throughput(*served.saturated)
    if not saturation:
        raise ValueError(
            f"no tokens were timed while some of the {count} requests waited and {args.max_requests} had ended: choose "
            "more --requests, longer outputs, or a smaller --max-requests"
        )
    about["saturation"] = {
        "output_tokens_per_s": saturation,
        "fraction": saturation / allowed,
        "between_tokens_ms": percentiles(served.between),
        **_times(served.host),
    }
    _record(args.json, about)
    print(f"saturation: {saturation:,.0f} output tokens/s, {saturation / allowed:.0%} of what is allowed")
    print(
        f"steps take {served.host.step_ms:.2f} ms on average; the host is busy for {served.host.busy_ms:.2f} ms of it"
    )
    print(
        "load  requests/s  output tokens/s  first token, ms: median, p99  between tokens, ms: median, p99  "
        "step, ms: all, host"
    )
    about["loads"] = []
    for load in args.loads:
        rate = load * saturation / float(lengths.outputs.mean())
        found = serve(engine, lengths, poisson(count, rate))
        about["loads"].append(_summary(load, rate, found))
        _record(args.json, about)
        print(_line(about["loads"][-1]))
    return 0


def _reject_unused(args: argparse.Namespace) -> None:
    """Raises a ValueError if an option is given that has no effect beside --url, --http, or without both."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args(["config"]))
    if args.url:
        beside, unused = "with --url", defaults.keys() - OF_URL
    elif args.http:
        beside, unused = "with --http", {"loads", "soak"}
    else:
        beside, unused = "without --url or --http", {"clients"}
    for name in sorted(unused):
        if getattr(args, name) != defaults[name]:
            raise ValueError(f"--{name.replace('_', '-')} has no effect {beside}: leave it out")


def _http(args: argparse.Namespace) -> int:
    """Compares an engine with a server, whose engine has the same sizes."""
    share_memory()  # with the processes that have the engines
    loads = closed_loop.loads_of(args)
    _, sizes, needed = _sized(args, Lengths(*map(np.concatenate, zip(*loads.values(), strict=True))))
    return closed_loop.compare(args, loads, partial(_make_engine, args, sizes, needed), sizes)


def _make_engine(args: argparse.Namespace, sizes: dict[str, Any], needed: random_models.Needed) -> Engine:
    """An engine that is ready to serve."""
    engine = Engine(random_models.random_model(args, random_models.described_model(args), needed), **sizes)
    engine.warm_up()
    return engine


def _sized(args: argparse.Namespace, lengths: Lengths) -> tuple[Model, dict[str, Any], random_models.Needed]:
    """The described model, the sizes of its engine, and what that needs beside the weights."""
    described = random_models.described_model(args)
    block_size = described.usual_block_size
    budget = args.max_num_batched_tokens or args.max_requests + 10 * args.chunk
    if budget < args.max_requests + args.chunk:
        raise ValueError(
            f"--max-num-batched-tokens is {budget}: expected at least {args.max_requests + args.chunk}, for "
            f"--max-requests {args.max_requests} and a --chunk of {args.chunk}"
        )
    tables = tables_of(described.layout(1), block_size)

    def held(tokens: float) -> int:
        """The most blocks of a request of `tokens` tokens."""
        return sum(table.most_held(math.ceil(tokens), budget) for table in tables)

    mean = float(np.mean(lengths.prompts + lengths.outputs))
    sizes: dict[str, Any] = {
        "max_requests": args.max_requests,
        "chunk": args.chunk,
        "max_num_batched_tokens": budget,
        "max_time_between_tokens": args.max_time_between_tokens,
    }
    room = ROOM if args.soak is None else SOAK_ROOM
    num_blocks = args.blocks or args.max_requests * held(room * mean + block_size)
    num_blocks = max(num_blocks, held(lengths.longest))
    needed = random_models.Needed(num_blocks, rows=args.max_requests + budget // args.chunk, tokens=budget)
    return described, {"num_blocks": num_blocks, "max_len": lengths.longest, **sizes}, needed


def _soak(args: argparse.Namespace, model: Model, lengths: Lengths, sizes: dict[str, Any]) -> int:
    """Prints and records how the requests of `--soak` ended; returns 1 if something is wrong."""

    def engine() -> Engine:
        notice("compiling")
        made = Engine(model, **sizes)
        made.warm_up()
        return made

    served = engine()
    soaked = soak(served, lengths.prompts.tolist(), lengths.outputs.tolist(), args.soak)
    stats = served.stats
    held = stats.num_blocks - stats.free_blocks
    summary = {**soaked.summary(), "held_blocks": held, "found_tokens": stats.prefix.found, **_times(stats.host_time)}
    about = {
        **random_models.described(args, model),
        "engine": sizes,
        "soak": summary,
    }
    _record(args.json, about)
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(soaked.ended.items()))
    print(
        f"{counted(len(soaked.tokens), 'requests')} in {soaked.seconds:.1f} s: {ended}; {len(soaked.preempted)} were "
        f"preempted, {len(soaked.lost)} are lost\n{stats.prefix.found} of {stats.prefix.tokens} tokens were found; "
        f"{held} of {counted(stats.num_blocks, 'blocks')} are still held"
    )
    del served  # there may be memory for one cache only
    notice(f"comparing {counted(len(soaked.greedy), 'requests')} with a second engine")
    compared = compare(engine(), soaked.greedy)
    summary |= {"equal": compared.equal, "equal_up_to_rounding": compared.rounded, "wrong": compared.wrong}
    _record(args.json, about)
    print(
        f"of {counted(len(soaked.greedy), 'greedy requests')}, {compared.equal} are equal, {compared.rounded} up to "
        f"rounding, and {len(compared.wrong)} are wrong"
    )
    return 1 if held or soaked.lost or compared.wrong else 0


def _record(file: Path | None, about: dict[str, Any]) -> None:
    """Writes what has been measured so far, because loads take minutes, and a run may be ended before the last."""
    if file:
        write_json(file, about)


def _between(least: float, most: float) -> Callable[[str], float]:
    """Parses a number of this range."""

    def parsed(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return number

    return parsed


def _lengths(args: argparse.Namespace) -> Lengths:
    count = args.requests or 4 * args.max_requests
    if count <= args.max_requests:
        raise ValueError(
            f"--requests is {count}: expected more than --max-requests {args.max_requests}, so that some wait"
        )
    return lengths_of(args, count)


def _about(model: Model, lengths: Lengths) -> str:
    config = model.config
    prompts, outputs = (f"{part.mean():.0f} (at most {part.max()})" for part in lengths)
    return (
        f"{config.architecture} of {counted(config.num_layers, 'layers')} on {jax.devices()[0].device_kind}, weights "
        f"{size(nbytes(model.params))}\n{counted(len(lengths.prompts), 'requests')} per load, prompts of {prompts} and "
        f"outputs of {outputs} tokens on average"
    )


def _summary(load: float, rate: float, served: Served) -> dict[str, Any]:
    end = max(times[-1] for times in served.tokens)
    return {
        "load": load,
        "requests_per_s": rate,
        "output_tokens_per_s": served.throughput(*np.quantile(served.arrivals, [0.25, 1])),
        "seconds": end,
        "first_token_ms": percentiles(served.first),
        "between_tokens_ms": percentiles(served.between),
        **_times(served.host),
    }


def _times(host: HostTime) -> dict[str, float]:
    return {"step_ms": host.step_ms, "host_busy_ms": host.busy_ms}


def _line(found: dict[str, Any]) -> str:
    first, between = found["first_token_ms"], found["between_tokens_ms"]
    return (
        f"{found['load']:<4g}{found['requests_per_s']:>12.1f}{found['output_tokens_per_s']:>17,.0f}"
        f"{first['median']:>23.1f}, {first['p99']:.1f}{between['median']:>26.2f}, {between['p99']:<8.2f}"
        f"{found['step_ms']:>14.2f}, {found['host_busy_ms']:.2f}"
    )
