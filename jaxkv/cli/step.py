"""Time a decode step of a whole model on this machine, given its config.json, or a step of a prefill.

The weights are random, which does not change the time.  Every request has the same number of cached tokens.  On NVIDIA
GPUs, the time of a step is divided into kinds of kernels, and the gaps between kernels.
"""

import argparse
from typing import TYPE_CHECKING, Any

import jax

from jaxkv.bench import shares
from jaxkv.bench.kernel_times import kernels_of
from jaxkv.cli import random_models
from jaxkv.cli.options import output_file, positive
from jaxkv.terminal.files import write_json
from jaxkv.terminal.formatting import counted, size
from jaxkv.terminal.memory import nbytes

if TYPE_CHECKING:
    from jaxkv.bench.model_steps import Steps
    from jaxkv.models.parallel.base import Parallel


WAYS = {
    "tensor": "TensorParallel",
    "expert": "ExpertParallel",
    "context": "ContextParallel",
    "data": "DataParallel",
    "data-expert": "DataExpertParallel",
}
"""The choices of `--parallel`, and their classes in `jaxkv.models`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the batch, and the format and layout of the cache."""
    random_models.add_arguments(parser)
    parser.add_argument("--requests", type=positive, default=32, metavar="N", help="rows of the batch (32)")
    tokens = "cached tokens of each request, the new ones included (4096)"
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help=tokens)
    new = "new tokens of each request (1); with more, the step is that of a prefill"
    parser.add_argument("--new-tokens", type=positive, default=1, metavar="N", help=new)
    parser.add_argument("--parallel", choices=WAYS, help="how several devices divide the model; default: one device")
    parser.add_argument("--devices", type=positive, metavar="N", help="how many, with --parallel; default: all")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, versions, sizes and times")


def run(args: argparse.Namespace) -> int:
    """Prints the sizes, the time of a step and, on NVIDIA GPUs, the shares of kernels and gaps."""
    # Imported here, because the other commands do not need the models.
    from jaxkv.bench import model_steps

    if args.new_tokens > args.tokens:
        raise ValueError(f"--new-tokens is {args.new_tokens}: expected at most the {args.tokens} --tokens")
    parallel, devices = _parallel(args)
    described = random_models.described_model(args, parallel)
    num_blocks = model_steps.blocks_per_cache(described, args.requests, args.tokens, args.new_tokens)
    rows = args.requests // described.parallel.divisions_of_rows
    needed = random_models.Needed(num_blocks, rows, rows * args.new_tokens)
    model = random_models.random_model(args, described, needed)
    config, batch = model.config, f"{counted(args.requests, 'requests')} x {counted(args.tokens, 'tokens')}"
    if args.new_tokens > 1:
        batch += f", {args.new_tokens:,} of them new"
    # Raises here, before anything is printed, if the model does not fit.
    cache = jax.block_until_ready(model_steps.filled(model, num_blocks))
    kind = jax.devices()[0].device_kind
    on = kind if devices == 1 else f"{devices} x {kind}, {args.parallel} parallel"
    print(f"{config.architecture} of {counted(config.num_layers, 'layers')} on {on}")
    print(f"weights {size(nbytes(model.params))}, cache {size(cache.buffer.nbytes)} of {model.entry_format} entries")
    sizes = {"requests": args.requests, "tokens": args.tokens, "new_tokens": args.new_tokens}
    steps = model_steps.Steps(model, cache, **sizes)
    del cache  # which the steps donate
    seconds = steps.seconds()
    rate = args.requests * args.new_tokens / seconds
    print(f"a step of {batch}: {1e3 * seconds:.3f} ms, {rate:,.0f} tokens/s")
    divided = _divided(steps, seconds)
    if args.json:
        about = {
            **random_models.described(args, model),
            "bytes": {"weights": nbytes(model.params), "cache": steps.cache.buffer.nbytes},
            "fp8_weights": args.fp8_weights,
            "parallel": args.parallel,
            "devices": devices,
            **sizes,
            "ms": 1e3 * seconds,
            **divided,
        }
        write_json(args.json, about)
    return 0


def _parallel(args: argparse.Namespace) -> tuple["Parallel", int]:
    """How the model is divided, and over how many devices; ValueError if the machine has fewer."""
    from jaxkv import models

    here = jax.device_count()
    if args.parallel is None:
        if args.devices is not None:
            raise ValueError(f"--devices {args.devices}: expected --parallel with it, one of {', '.join(WAYS)}")
        return models.OneDevice(), 1
    devices = args.devices or here
    if devices > here:
        raise ValueError(f"--devices is {devices}: expected at most the {here} of this machine")
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    return getattr(models, WAYS[args.parallel])(mesh, "x"), devices


def _divided(steps: "Steps", seconds: float) -> dict[str, Any]:
    """Prints and returns how a step of `seconds` is spent, in ms; empty if kernels cannot be timed.

    - "busy_ms": the time in which at least one kernel runs.
    - "shares_ms": this time by kind of kernel, in which overlapping time counts for the earlier kernel, and the gaps.
    - "whole_ms": by kind of kernel, the sum of the times from each kernel's start to its end.
    """
    found = kernels_of(steps, repeats=3)
    if found is None:
        return {}
    divided, whole = shares.shares(found.kernels, seconds), shares.by_kind(found.whole)
    print(f"{len(found.kernels)} kernels per step: {shares.described(divided, seconds)}")
    print(f"each kernel from its start to its end: {shares.described(whole, seconds)}")
    print(f"these sum to {1e3 * sum(whole.values()):.3f} ms; at least one kernel runs for {1e3 * found.median:.3f} ms")
    return {
        "busy_ms": 1e3 * found.median,
        "shares_ms": {name: 1e3 * took for name, took in divided.items()},
        "whole_ms": {name: 1e3 * took for name, took in whole.items()},
    }
