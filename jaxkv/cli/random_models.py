"""Models with random weights, from a config.json and options, for commands that time them."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib

import jaxkv
from jaxkv.cli.options import add_entry_format
from jaxkv.terminal.memory import nbytes, require_memory

if TYPE_CHECKING:
    from jaxkv.models import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the model and the format of its cache."""
    parser.add_argument("config", type=Path, help="config.json of a model, or its folder")
    add_entry_format(parser)
    parser.add_argument("--implementation", choices=jaxkv.implementations(), help="default: the first that supports it")


def described_model(args: argparse.Namespace) -> "Model":
    """The model with descriptions of its weights; ValueError if the configuration is invalid."""
    return jax.eval_shape(_maker(args))


def random_model(args: argparse.Namespace, num_blocks: int, block_size: int, order: str = "BLNHC") -> "Model":
    """The model with random weights, after a check that it fits beside a cache of `num_blocks` blocks.

    ValueError if the configuration is invalid, or if model and cache together exceed the device's memory.  It is raised
    before any weights are drawn.
    """
    model = described_model(args)
    cache = jax.eval_shape(lambda: model.cache(num_blocks, block_size, order))
    needed = nbytes((model.params, cache))
    require_memory(f"{args.config}, with a cache of {num_blocks} blocks of {block_size} tokens", needed)
    return _maker(args)()  # weight by weight: XLA would compile a program that makes them all for minutes


def _maker(args: argparse.Namespace) -> Callable[[], "Model"]:
    from jaxkv import models

    options = {"entry_format": args.entry_format, "implementation": args.implementation}
    return partial(models.random_model, models.ModelConfig.read(args.config), **options)


def described(model: "Model") -> dict[str, Any]:
    """Device, versions and model, for a file of measurements."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxkv": jaxkv.__version__},
        "model": {
            "architecture": model.config.architecture,
            "layers": model.config.num_layers,
            "entries": model.entry_format,
        },
    }
