"""Models with random weights, from a config.json and options, for commands that time them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Sharding

import jaxkv
from jaxkv import models
from jaxkv.models import Model, ModelConfig
from jaxkv.models.parallel.base import Parallel
from jaxkv.models.weights import fp8
from jaxkv.terminal.files import when_and_how
from jaxkv.terminal.formatting import counted
from jaxkv.terminal.memory import nbytes, require_memory
from jaxkv.terminal.options import add_entry_format


def add_arguments(parser: argparse.ArgumentParser, *, weights: bool = True) -> None:
    """Adds the options that choose the model and the format of its cache; without `weights`, none about these."""
    parser.add_argument("config", type=Path, help="config.json of a model, or its folder")
    add_entry_format(parser)
    parser.set_defaults(fp8_weights="expand")
    if weights:
        uses = "weights that DeepSeek publishes in float8: dequantise keeps them in float8, e4m3 also rounds "
        uses += "activations to float8 in their products, and expand, the default, has all in the dtype of the model"
        parser.add_argument("--fp8-weights", choices=fp8.USES, help=uses)
    parser.add_argument("--implementation", choices=jaxkv.implementations(), help="default: the first that supports it")


def described_model(args: argparse.Namespace, parallel: Parallel | None = None) -> Model:
    """The model with descriptions of its weights.

    ValueError if the configuration is invalid, or cannot be divided as `parallel` requires.
    """
    return jax.eval_shape(_maker(args, ModelConfig.read(args.config), parallel))


@dataclass(frozen=True)
class Needed:
    """What a command needs beside the weights, of one device."""

    blocks: int
    """Of a cache."""
    rows: int
    """Rows of a step, which have logits each."""
    tokens: int
    """New tokens of a step, of all rows."""
    other_blocks: int = 0
    """Of further caches at the same time."""
    host_blocks: int = 0
    """In host memory."""


def random_model(args: argparse.Namespace, described: Model, needed: Needed, order: str = "BLNHC") -> Model:
    """The model that `described_model` describes, after a check that what is needed fits beside it.

    ValueError if a device's parts exceed its memory.  It is raised before any weights are drawn.
    """
    layout = jax.eval_shape(lambda: described.cache(needed.blocks, order=order)).layout  # of one device's cache
    block, config = layout.nbytes // needed.blocks, described.config
    # Of a step, the least that any model needs: the logits, and the hidden states of one layer.
    step = 4 * needed.rows * config.vocab_size + 2 * needed.tokens * config.hidden_size
    total = nbytes(_on_one_device(described)) + layout.nbytes + needed.other_blocks * block + step
    what = f"{args.config}, with a cache of {needed.blocks} blocks of {described.usual_block_size} tokens and steps of "
    what += f"{counted(needed.tokens, 'tokens')} in {counted(needed.rows, 'rows')}"
    require_memory(what, total, on_host=needed.host_blocks * block)
    # Weight by weight: XLA would compile a program that makes them all for minutes.
    return _maker(args, described.config, described.parallel)()


def _maker(args: argparse.Namespace, config: ModelConfig, parallel: Parallel | None) -> Callable[[], Model]:
    options = {
        "entry_format": args.entry_format,
        "implementation": args.implementation,
        "parallel": parallel,
        "fp8_weights": args.fp8_weights,
    }
    return partial(models.random_model, config, **options)


def _on_one_device(model: Model) -> Any:
    """The shapes of one device's parts of the weights."""

    def part(path, array):
        sharding = model.parallel.sharding(path, array.ndim)
        shape = sharding.shard_shape(array.shape) if isinstance(sharding, Sharding) else array.shape
        return jax.ShapeDtypeStruct(shape, array.dtype)

    return jax.tree.map_with_path(part, model.params)


def described(args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Date, command, device, versions and model, for a file of measurements."""
    return {**when_and_how(args.argv), **about(model)}


def about(model: Model) -> dict[str, Any]:
    """Device, versions and model."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "model": {
            "architecture": model.config.architecture,
            "layers": model.config.num_layers,
            "entries": model.entry_format,
        },
    }
