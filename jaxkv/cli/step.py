"""Time a decode step of a whole model on this machine, given its config.json.

The weights are random, which does not change the time.  Every request has the same number of cached tokens.
"""

import argparse
import re
from typing import TYPE_CHECKING

import jax

from jaxkv.bench.kernel_times import kernels_of
from jaxkv.cli import random_models
from jaxkv.cli.options import positive
from jaxkv.terminal.formatting import counted, size
from jaxkv.terminal.memory import nbytes

if TYPE_CHECKING:
    from jaxkv.bench.model_steps import Steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the batch, and the format and layout of the cache."""
    random_models.add_arguments(parser)
    parser.add_argument("--requests", type=positive, default=32, metavar="N", help="rows of the batch (32)")
    tokens = "cached tokens of each request, the new one included (4096)"
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help=tokens)


def run(args: argparse.Namespace) -> int:
    """Prints the sizes, the time of a step and, on NVIDIA GPUs, the time of its kernels."""
    from jaxkv.bench import model_steps

    num_blocks = args.requests * model_steps.blocks_for(args.tokens)
    model = random_models.random_model(args, num_blocks, model_steps.BLOCK_SIZE)
    config, batch = model.config, f"{counted(args.requests, 'requests')} x {counted(args.tokens, 'tokens')}"
    # Raises here, before anything is printed, if the model does not fit.
    cache = jax.block_until_ready(model_steps.filled(model, num_blocks))
    print(f"{config.architecture} of {counted(config.num_layers, 'layers')} on {jax.devices()[0].device_kind}")
    print(f"weights {size(nbytes(model.params))}, cache {size(cache.buffer.nbytes)} of {model.entry_format} entries")
    steps = model_steps.Steps(model, cache, requests=args.requests, tokens=args.tokens)
    del cache  # which the steps donate
    seconds = steps.seconds()
    rate = args.requests / seconds
    print(f"a step of {batch}: {1e3 * seconds:.3f} ms, {rate:,.0f} tokens/s")
    _print_kernels(steps, seconds)
    return 0


def _print_kernels(steps: "Steps", seconds: float) -> None:
    """Prints the fraction of a step in which the GPU runs kernels, and the fraction of this library's kernels."""
    found = kernels_of(steps, repeats=3)
    if found is None:
        return
    own = [(name, took) for name, took in found.kernels if _is_own(name)]
    busy, ours = sum(took for _, took in found.kernels), sum(took for _, took in own)
    print(
        f"kernels: {len(found.kernels)} per step, {1e3 * busy:.3f} ms ({busy / seconds:.0%} of the step); "
        f"those of jaxkv: {len(own)}, {1e3 * ours:.3f} ms ({ours / seconds:.0%})"
    )


def _is_own(kernel: str) -> bool:
    """Whether the kernel of that name belongs to this library.  Those of `xla` cannot be recognised."""
    # The names of this library's Triton kernels begin with an underscore.
    return kernel.endswith("mosaic_gpu_kernel") or re.match("_[a-z]", kernel) is not None
