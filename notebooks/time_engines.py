"""Times the serving engines of jaxkv and of vLLM on the same work: a model of random weights, given its config.json.

    python notebooks/time_engines.py vllm config.json vllm.json
    python notebooks/time_engines.py jaxkv config.json jaxkv.json --beside vllm.json --cache DIR

Both run on one GPU, in the same hour and on the same machine.  The rows:

- `start`: seconds until the engine has generated its first token, and until all its programs are compiled.  For jaxkv,
  these do not include the drawing of random weights, which is recorded apart; run it twice with the same `--cache` to
  time a start whose programs are in the cache.
- `decode`: ms per token of 1, 8 and 32 requests, beside the step of jaxkv's model alone, at the same context.
- `first_token`: ms from the submission of a prompt of 512 tokens to an idle engine until its first token.
- `at_once`: 640 requests of 512 prompt and 256 output tokens on average, all submitted at once; output tokens per
  second from the submission to the last token, and while requests wait.
- `arrivals`: requests of such lengths that arrive at random, at half the rate at which vLLM serves them while requests
  wait, which jaxkv reads from `--beside`; ms to the first token and between tokens.
- `loads` (jaxkv): the longest step of 31 decoding requests while the blocks of a prefix of 32,768 tokens are loaded
  from host memory.

Prompts are random, and no request ends early.  For vLLM, set VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random: with
random weights all its tokens choose the same experts, whose steps would be twice as fast as real ones.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import jax
import numpy as np

from jaxkv.bench import random_models, step
from jaxkv.bench.requests import Lengths, TokenTimes, percentiles, poisson
from jaxkv.offload import HostPool
from jaxkv.serving import Engine, HostTime

MAX_REQUESTS, REQUESTS, ARRIVALS = 256, 640, 320
PROMPT, OUTPUT = 512, 256
"""Mean tokens of a prompt and of an answer."""
DECODED, TOKENS, SKIPPED = (1, 8, 32), 160, 10
"""Requests that decode, tokens of each, and steps at either end that do not count."""
FIRST_TOKENS = 7
"""How often the first token is timed."""
CHUNK, CHUNKS = 64, 64
"""jaxkv: tokens of a chunk, and chunks of a step beside `MAX_REQUESTS` requests."""
PREFIX, BESIDE = 32768, 31
"""Tokens of the prefix that is loaded, and requests that decode meanwhile."""
ROUNDS = 3
"""How often the prefix is loaded."""


class Timed(Protocol):
    """An engine."""

    about: Mapping[str, Any]
    """Versions and settings, to be recorded."""

    def submit(self, prompt: list[int], tokens: int) -> Hashable:
        """Submits a request for so many tokens, which end only there."""
        ...

    def step(self) -> Sequence[tuple[Hashable, int]]:
        """Waits for some requests' next tokens, and returns how many each has got."""
        ...


class JaxkvEngine:
    """jaxkv's engine.

    Args:
      args: the command line.
      max_len: the most tokens of a request.
    """

    def __init__(self, args: argparse.Namespace, max_len: int):
        described = random_models.described_model(args)
        block_size = described.usual_block_size
        num_blocks = MAX_REQUESTS * -(-max_len // block_size) // 2
        budget = MAX_REQUESTS + CHUNKS * CHUNK
        needed = random_models.Needed(2 * num_blocks, MAX_REQUESTS + budget // CHUNK, budget)
        start = time.perf_counter()
        self.model = jax.block_until_ready(random_models.random_model(args, described, needed))
        self.weights_seconds = time.perf_counter() - start
        sizes = {"max_requests": MAX_REQUESTS, "chunk": CHUNK, "max_num_batched_tokens": budget, "max_len": max_len}
        self.start = time.perf_counter()
        self.engine = Engine(self.model, num_blocks=num_blocks, **sizes)
        self.engine.warm_up(wait=False)
        self.about = {**random_models.about(self.model), "engine": {"num_blocks": num_blocks, **sizes}}

    def submit(self, prompt, tokens):
        return self.engine.submit(prompt, max_tokens=tokens, stop=())

    def step(self):
        return [(request, 1) for request, _ in self.engine.step()]

    def wait_for_programs(self) -> float:
        """Waits until all programs are compiled; returns the seconds since the engine was made."""
        while len(self.engine.buckets.ready) < len(self.engine.buckets.shapes):
            time.sleep(0.1)
        return time.perf_counter() - self.start


class VllmEngine:
    """vLLM's engine, with the steps of up to 8,192 tokens and the settings with which it is fastest here."""

    def __init__(self, args: argparse.Namespace):
        jax.config.update("jax_platforms", "cpu")  # jaxkv is imported for its lengths only
        offline = "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS"
        os.environ.update(dict.fromkeys(offline, "1"), VLLM_USE_FLASHINFER_SAMPLER="0")
        import torch
        import vllm
        from vllm.sampling_params import RequestOutputKind

        settings = {
            "max_model_len": 40000,
            "max_num_seqs": MAX_REQUESTS,
            "gpu_memory_utilization": 0.92,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 8192,
        }
        folder = args.config if args.config.is_dir() else args.config.parent
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "seed": 0}
        self.start = time.perf_counter()
        self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(model=str(folder), **options, **settings))
        self.about = {
            "device": torch.cuda.get_device_name(),
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "routing": os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY"),
            "engine": settings,
        }
        sampling = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        self._sampling = lambda tokens: vllm.SamplingParams(
            **sampling, max_tokens=tokens, output_kind=RequestOutputKind.DELTA
        )
        self._submitted = 0

    def submit(self, prompt, tokens):
        self._submitted += 1
        name = str(self._submitted)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(tokens))
        return name

    def step(self):
        return [(found.request_id, len(found.outputs[0].token_ids)) for found in self._engine.step()]


@dataclass(frozen=True)
class Served(TokenTimes):
    """How an engine has served requests."""

    steps: list[tuple[float, int]]
    """The time of each step, and how many requests got tokens."""
    ended: list[float]
    """When each request ended, in the order of these times."""

    @property
    def saturated(self) -> float:
        """Tokens per second from when as many requests have ended as run at once, until no request waits."""
        return self.throughput(self.ended[MAX_REQUESTS - 1], self.ended[-MAX_REQUESTS - 1])


def serve(engine: Timed, lengths: Lengths, vocabulary: int, arrivals: np.ndarray | None = None) -> Served:
    """Serves random requests.

    Args:
      engine: an idle engine.
      lengths: those of the requests.
      vocabulary: the number of token ids.
      arrivals: when each is submitted, in seconds; default all at once.
    """
    count, rng = len(lengths.prompts), np.random.default_rng()
    prompts = [rng.integers(0, vocabulary, length).tolist() for length in lengths.prompts]
    served = Served(np.zeros(count) if arrivals is None else arrivals, [[] for _ in prompts], [], [])
    numbers: dict[Hashable, int] = {}
    start, left = time.perf_counter(), int(lengths.outputs.sum())
    while left:
        now = time.perf_counter() - start
        while len(numbers) < count and served.arrivals[len(numbers)] <= now:
            number = len(numbers)
            numbers[engine.submit(prompts[number], int(lengths.outputs[number]))] = number
        if len(served.ended) == len(numbers):
            time.sleep(max(served.arrivals[len(numbers)] - now, 0))
            continue
        new = engine.step()
        now = time.perf_counter() - start
        for request, tokens in new:
            number = numbers[request]
            served.tokens[number].extend([now] * tokens)
            left -= tokens
            if len(served.tokens[number]) == lengths.outputs[number]:
                served.ended.append(now)
        served.steps.append((now, len(new)))
    return served


def same(requests: int, prompt: int, output: int) -> Lengths:
    """Requests of equal lengths."""
    return Lengths(np.full(requests, prompt), np.full(requests, output))


class Rows:
    """The rows of an engine, which are written whenever one is measured."""

    def __init__(self, args: argparse.Namespace, about: Mapping[str, Any]):
        self._file, self._vocabulary = args.file, json.loads(_config(args.config).read_text())["vocab_size"]
        command = shlex.join(["python", "notebooks/time_engines.py", *sys.argv[1:]])
        self.found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "command": command, **about}

    def add(self, name: str, **row: Any) -> None:
        """Prints and records a row."""
        print(name, json.dumps(row), flush=True)
        self.found.setdefault(name, []).append(row)
        self._file.write_text(json.dumps(self.found, indent=1) + "\n")

    def served(self, engine: Timed, lengths: Lengths, arrivals: np.ndarray | None = None) -> Served:
        """Serves requests."""
        return serve(engine, lengths, self._vocabulary, arrivals)

    def decode(self, engine: Timed) -> None:
        """The row `decode`."""
        for requests in DECODED:
            steps = self.served(engine, same(requests, PROMPT, TOKENS)).steps
            times = [time for time, count in steps if count == requests][SKIPPED:-2]
            ms = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
            self.add("decode", requests=requests, tokens=PROMPT + TOKENS // 2, ms=ms)

    def first_token(self, engine: Timed) -> None:
        """The row `first_token`."""
        times = [1e3 * self.served(engine, same(1, PROMPT, 1)).first[0] for _ in range(FIRST_TOKENS)]
        self.add("first_token", prompt=PROMPT, ms=median(times), least=min(times), most=max(times))

    def at_once(self, engine: Timed) -> None:
        """The row `at_once`."""
        lengths = Lengths.drawn(REQUESTS, PROMPT, OUTPUT)
        served, tokens = self.served(engine, lengths), int(lengths.outputs.sum())
        seconds = served.ended[-1]
        rates = {"tokens_per_s": tokens / seconds, "saturated_tokens_per_s": served.saturated}
        self.add("at_once", requests=REQUESTS, tokens=tokens, seconds=seconds, **rates)

    def arrivals(self, engine: Timed, rate: float) -> None:
        """The row `arrivals`, at so many requests per second."""
        served = self.served(engine, Lengths.drawn(ARRIVALS, PROMPT, OUTPUT), poisson(ARRIVALS, rate))
        between = {"between_tokens_ms": percentiles(served.between), "first_token_ms": percentiles(served.first)}
        self.add("arrivals", requests=ARRIVALS, requests_per_s=rate, seconds=served.ended[-1], **between)


def half_rate(found: Mapping[str, Any]) -> float:
    """Half of the requests per second that an engine serves while requests wait."""
    return max(row["saturated_tokens_per_s"] for row in found["at_once"]) / OUTPUT / 2


def _config(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def time_vllm(args: argparse.Namespace) -> None:
    """All rows of vLLM."""
    engine = VllmEngine(args)
    rows = Rows(args, engine.about)
    rows.served(engine, same(1, 100, 1))
    rows.add("start", first_token_s=time.perf_counter() - engine.start)
    rows.served(engine, same(2, 100, 8))
    for _ in range(2):
        rows.at_once(engine)
    rows.arrivals(engine, half_rate(rows.found))
    rows.first_token(engine)
    rows.decode(engine)


def time_jaxkv(args: argparse.Namespace) -> None:
    """The rows of jaxkv that the command line names."""
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache))
    engine = JaxkvEngine(args, Lengths.drawn(REQUESTS, PROMPT, OUTPUT).longest)
    rows = Rows(args, engine.about)
    rows.served(engine, same(1, 100, 1))
    first = time.perf_counter() - engine.start
    ready = engine.wait_for_programs()
    rows.add("start", weights_s=engine.weights_seconds, first_token_s=first, ready_s=ready)
    rows.served(engine, same(2, 100, 8))
    if "decode" in args.rows:
        for requests in DECODED:
            tokens = PROMPT + TOKENS // 2
            cache = step.filled(engine.model, step.blocks_per_cache(engine.model, requests, tokens))
            seconds = step.Steps(engine.model, cache, requests=requests, tokens=tokens).seconds()
            rows.add("step", requests=requests, tokens=tokens, ms=1e3 * seconds)
        rows.decode(engine)
    if "first_token" in args.rows:
        rows.first_token(engine)
    if "at_once" in args.rows:
        for _ in range(2):
            engine.engine.host_time = HostTime()
            rows.at_once(engine)
            host = engine.engine.host_time
            rows.add("host", steps=host.steps, step_ms=host.step_ms, busy_ms=host.busy_ms)
    if "arrivals" in args.rows:
        rows.arrivals(engine, half_rate(json.loads(args.beside.read_text())))
    if "loads" in args.rows:
        model = engine.model
        del engine  # whose cache takes memory
        time_loads(model, rows)


def time_loads(model, rows: Rows) -> None:
    """The row `loads`."""
    block_size = model.usual_block_size
    blocks = -(-PREFIX // block_size)
    beside = BESIDE * -(-2 * PROMPT // block_size)  # as many tokens are generated as a prompt has
    num_blocks = blocks + 2 + beside
    pool = HostPool(model.layout(num_blocks), blocks + ROUNDS * beside)  # so that the prefix is never evicted
    engine = Engine(
        model,
        num_blocks=num_blocks,
        max_requests=BESIDE + 1,
        max_len=PREFIX + block_size,
        chunk=CHUNK,
        max_num_batched_tokens=BESIDE + 1 + CHUNKS * CHUNK,
        connectors=[pool],
    )
    engine.warm_up()
    rng, vocabulary = np.random.default_rng(), model.config.vocab_size
    prefix = rng.integers(0, vocabulary, PREFIX + 1).tolist()
    engine.submit(prefix, max_tokens=1, stop=())
    list(engine.run())
    for _ in range(ROUNDS):
        pool.flush()
        engine.pool.clear()
        others = [
            engine.submit(rng.integers(0, vocabulary, PROMPT).tolist(), max_tokens=PROMPT, stop=())
            for _ in range(BESIDE)
        ]
        while not all(other.generated for other in others):
            engine.step()
        before = _steps(engine, lambda taken: len(taken) == TOKENS // 2)
        loaded = engine.prefix_stats.loaded
        request = engine.submit(prefix, max_tokens=1, stop=())
        during = _steps(engine, lambda _, request=request: request.generated)
        loaded = engine.prefix_stats.loaded - loaded
        list(engine.run())
        usual = 1e3 * median(before)
        rows.add(
            "loads",
            loaded=loaded,
            steps=len(during),
            seconds=sum(during),
            median_ms=usual,
            longest_before_ms=1e3 * max(before),
            longest_ms=1e3 * max(during),
            ratio=1e3 * max(during) / usual,
        )


def _steps(engine: Engine, ended) -> Sequence[float]:
    """The seconds of steps, until `ended` of them."""
    taken: list[float] = []
    last = time.perf_counter()
    while not ended(taken):
        engine.step()
        now = time.perf_counter()
        taken.append(now - last)
        last = now
    return taken


def main() -> int:
    """Measures and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("jaxkv", "vllm"))
    random_models.add_arguments(parser)
    parser.add_argument("file", type=Path, help="written: JSON")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="what the run of vLLM has written")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="folder for jaxkv's compiled programs; default none")
    every = "decode", "first_token", "at_once", "arrivals", "loads"
    parser.add_argument("--rows", nargs="*", choices=every, default=every, help="jaxkv's rows; default all")
    args = parser.parse_args()
    if args.engine == "vllm":
        time_vllm(args)
        return 0
    if "arrivals" in args.rows and args.beside is None:
        parser.error("expected --beside with the row `arrivals`, whose rate it has")
    time_jaxkv(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
