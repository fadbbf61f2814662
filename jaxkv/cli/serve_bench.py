"""Time the serving engine under load: throughput, time to first token, and time between tokens, at several loads.

The weights are random, which does not change the times.  First, prefill and decode are timed alone, and then requests
that all arrive at once.  The output tokens per second while requests wait are the saturation; they are compared with
what the rates of prefill and decode allow.  Finally, requests arrive at random (a Poisson process), at fractions of the
rate at which saturation serves them.
"""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxkv.cli import random_models
from jaxkv.cli.options import integer, output_file, positive
from jaxkv.terminal.files import write_json
from jaxkv.terminal.formatting import counted, size
from jaxkv.terminal.memory import nbytes
from jaxkv.terminal.streams import notice

if TYPE_CHECKING:
    from jaxkv.bench.serving import Lengths, Served
    from jaxkv.models import Model

MOST_REQUESTS = 2**20
LEAST_LOAD, MOST_LOAD = 0.001, 1000
"""At less, requests would arrive once in hours."""
ROOM = 1.5
"""The default number of blocks, relative to those of as many requests of mean length as run at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the engine's sizes, and the requests."""
    random_models.add_arguments(parser)
    count = integer(1, MOST_REQUESTS)
    parser.add_argument("--max-requests", type=count, default=256, metavar="N", help="requests that run at once (256)")
    parser.add_argument("--chunk", type=positive, default=64, help="prompt tokens per chunk (64)")
    parser.add_argument("--max-chunks", type=positive, default=10, metavar="N", help="chunks per step (10)")
    blocks = "blocks in the cache, usually of 64 tokens; by default enough for the requests that run at once"
    parser.add_argument("--blocks", type=positive, metavar="N", help=blocks)
    many = "requests per load; default four times those that run at once"
    parser.add_argument("--requests", type=count, metavar="N", help=many)
    parser.add_argument("--prompt", type=positive, default=512, metavar="N", help="mean tokens of a prompt (512)")
    parser.add_argument("--output", type=positive, default=256, metavar="N", help="mean tokens of an answer (256)")
    lengths = "file with a line for each request: its prompt and output tokens; instead of drawn lengths"
    parser.add_argument("--lengths", type=Path, metavar="FILE", help=lengths)
    loads = "loads after saturation, as fractions of it (0.5 0.8)"
    parser.add_argument("--loads", type=_load, nargs="*", default=[0.5, 0.8], metavar="X", help=loads)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, versions, sizes and times")


def run(args: argparse.Namespace) -> int:
    """Prints the rates of the model, and one line per load."""
    from jaxkv.bench import serving
    from jaxkv.serving import Engine
    from jaxkv.serving.table import tables_of

    lengths, described = _lengths(args), random_models.described_model(args)
    block_size = described.usual_block_size
    tables = tables_of(described.layout(1), block_size)

    def held(tokens: float) -> int:
        """The most blocks of a request of so many tokens."""
        return sum(table.most_held(math.ceil(tokens), args.chunk * args.max_chunks) for table in tables)

    mean = float(np.mean(lengths.prompts + lengths.outputs))
    num_blocks = args.blocks or args.max_requests * held(ROOM * mean + block_size)
    num_blocks = max(num_blocks, held(lengths.longest))
    needed = random_models.Needed(
        num_blocks,
        rows=args.max_requests + args.max_chunks,
        tokens=args.max_requests + args.max_chunks * args.chunk,
        other_blocks=serving.Alone.num_blocks(described, lengths, args.max_requests),
    )
    model = random_models.random_model(args, described, needed)
    print(_about(model, lengths))
    alone = serving.Alone(model, lengths, args.max_requests)
    sizes = {"max_requests": args.max_requests, "chunk": args.chunk, "max_chunks": args.max_chunks}
    engine = Engine(model, num_blocks=num_blocks, max_len=lengths.longest, **sizes)
    notice("compiling")
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda compile: compile(), (engine.warm_up, alone.compile)))
    rates = alone.measure()
    allowed = rates.allowed(lengths)
    print(f"alone: prefill {rates.prefill:,.0f} tokens/s, decode {rates.decode:,.0f} tokens/s")
    print(f"these allow {allowed:,.0f} output tokens/s")
    count = len(lengths.prompts)
    about: dict[str, Any] = {
        **random_models.described(args, model),
        "engine": {"num_blocks": num_blocks, **sizes},
        "requests": {
            "count": count,
            "prompt_tokens": float(lengths.prompts.mean()),
            "output_tokens": float(lengths.outputs.mean()),
        },
        "alone": {"prefill": rates.prefill, "decode": rates.decode},
        "allowed": allowed,
    }
    _record(args.json, about)
    served = serving.serve(engine, lengths, np.zeros(count))
    saturation = served.throughput(*served.saturated)
    if not saturation:
        raise ValueError(
            f"no tokens were timed while some of the {count} requests waited and {args.max_requests} had ended: choose "
            "more --requests, longer outputs, or a smaller --max-requests"
        )
    about["saturation"] = {
        "output_tokens_per_s": saturation,
        "fraction": saturation / allowed,
        "between_tokens_ms": serving.percentiles(served.between),
    }
    _record(args.json, about)
    print(f"saturation: {saturation:,.0f} output tokens/s, {saturation / allowed:.0%} of what is allowed")
    print("load  requests/s  output tokens/s  first token, ms: median, p99  between tokens, ms: median, p99")
    about["loads"] = []
    for load in args.loads:
        rate = load * saturation / float(lengths.outputs.mean())
        found = serving.serve(engine, lengths, serving.poisson(count, rate))
        about["loads"].append(_summary(load, rate, found))
        _record(args.json, about)
        print(_line(about["loads"][-1]))
    return 0


def _record(file: Path | None, about: dict[str, Any]) -> None:
    """Writes what has been measured so far, because loads take minutes, and a run may be ended before the last."""
    if file:
        write_json(file, about)


def _load(text: str) -> float:
    try:
        load = float(text)
    except ValueError:
        load = math.nan
    if not LEAST_LOAD <= load <= MOST_LOAD:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {LEAST_LOAD} to {MOST_LOAD}")
    return load


def _lengths(args: argparse.Namespace) -> "Lengths":
    from jaxkv.bench.serving import Lengths

    count = args.requests or 4 * args.max_requests
    if count <= args.max_requests:
        raise ValueError(
            f"--requests is {count}: expected more than --max-requests {args.max_requests}, so that some wait"
        )
    if args.lengths:
        return Lengths.read(args.lengths, count)
    return Lengths.drawn(count, args.prompt, args.output)


def _about(model: "Model", lengths: "Lengths") -> str:
    config = model.config
    prompts, outputs = (f"{part.mean():.0f} (at most {part.max()})" for part in lengths)
    return (
        f"{config.architecture} of {counted(config.num_layers, 'layers')} on {jax.devices()[0].device_kind}, weights "
        f"{size(nbytes(model.params))}\n{counted(len(lengths.prompts), 'requests')} per load, prompts of {prompts} and "
        f"outputs of {outputs} tokens on average"
    )


def _summary(load: float, rate: float, served: "Served") -> dict[str, Any]:
    from jaxkv.bench.serving import percentiles

    end = max(times[-1] for times in served.tokens)
    return {
        "load": load,
        "requests_per_s": rate,
        "output_tokens_per_s": served.throughput(*np.quantile(served.arrivals, [0.25, 1])),
        "seconds": end,
        "first_token_ms": percentiles(served.first),
        "between_tokens_ms": percentiles(served.between),
    }


def _line(found: dict[str, Any]) -> str:
    first, between = found["first_token_ms"], found["between_tokens_ms"]
    return (
        f"{found['load']:<4g}{found['requests_per_s']:>12.1f}{found['output_tokens_per_s']:>17,.0f}"
        f"{first['median']:>23.1f}, {first['p99']:.1f}{between['median']:>26.2f}, {between['p99']:.2f}"
    )
