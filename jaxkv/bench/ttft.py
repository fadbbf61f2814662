"""Time to first token of a prompt whose prefix is computed, or found on the device, in host memory or on disk.

The weights are random, which does not change the time.  The prompt is a prefix that fills whole blocks and chunks, plus
one token.  All cases therefore compute their first token with the same program from the same entries, and their tokens
must be equal.  All cases run once untimed first.  The files on disk have just been written, so the operating system may
still have them in memory.
"""

import argparse
import math
import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

import jaxkv
from jaxkv.bench import random_models
from jaxkv.bench.kernel_times import KernelTimes, describe_shares, kernels_of, shares
from jaxkv.models import Model, fingerprint
from jaxkv.offload import DiskPool, HostPool
from jaxkv.serving import Engine
from jaxkv.serving.table import TableKind, tables_of
from jaxkv.terminal.files import write_json
from jaxkv.terminal.formatting import size
from jaxkv.terminal.options import output_file, output_folder, positive

PREFIX = 1024
"""The default length of the prefix, rounded up to whole chunks and blocks."""
NEW_TOKENS = 16
"""Tokens generated in each case, and compared."""


class Case(NamedTuple):
    """Measurements of one case: how a prompt was served."""

    seconds: float
    """Time to its first token."""
    found: int
    """Tokens of the prompt that were found, not computed."""
    tokens: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the model, the prompt, and the folder for blocks on disk."""
    random_models.add_arguments(parser)
    prefix = f"tokens that are found again, a multiple of --chunk and of the block size (at least {PREFIX})"
    parser.add_argument("--prefix", type=positive, metavar="N", help=prefix)
    parser.add_argument("--chunk", type=positive, default=512, help="tokens of a prefill step (512)")
    parser.add_argument("--rounds", type=positive, default=3, help="timed rounds, whose median is printed (3)")
    parser.add_argument("--order", choices=jaxkv.ORDERS, default="BLNHC", help="order of the cache's axes (BLNHC)")
    disk = "where blocks go on disk; default a temporary folder"
    parser.add_argument("--disk", type=output_folder, metavar="DIR", help=disk)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write device, versions, sizes and times")


def run(args: argparse.Namespace) -> int:
    """Prints one line per case; returns 1 if their tokens differ or the prefix was not found."""
    described = random_models.described_model(args)
    prefix = _prefix(args, described)
    blocks = _num_blocks(described, prefix)
    # Two engines at once, with a pool each, of twice as many blocks.
    needed = random_models.Needed(blocks, rows=2, tokens=1 + args.chunk, other_blocks=blocks, host_blocks=4 * blocks)
    model = random_models.random_model(args, described, needed, args.order)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(model, prefix, args.chunk, args.order, args.disk or Path(scratch))
        print(bench)
        rounds = [bench.round() for _ in range(1 + args.rounds)][1:]
        kernels = bench.cold_kernels()
    ms = {name: [1e3 * cases[name].seconds for cases in rounds] for name in rounds[0]}
    for name, times in ms.items():
        print(f"{name:7}{median(times):10.2f} ms ({min(times):.2f} to {max(times):.2f})")
    cold = median(ms["cold"]) / 1e3
    divided = shares(kernels.kernels, cold) if kernels else {}
    if divided:
        print(f"cold: {describe_shares(divided, cold)}")
    wrong = [
        f"{name}, round {number}: {case.found} tokens found, then {case.tokens} drawn; cold {cases['cold'].tokens}"
        for number, cases in enumerate(rounds, 1)
        for name, case in cases.items()
        if case.tokens != cases["cold"].tokens or case.found != (0 if name == "cold" else prefix)
    ]
    print("\n".join(wrong) or f"every case found the expected prefix and generated the same {NEW_TOKENS} tokens")
    if args.json:
        about = {
            **random_models.described(args, model),
            "prefix": {"tokens": prefix, "bytes": bench.nbytes, "order": args.order, "chunk": args.chunk},
            "ms": ms,
            "cold_shares_ms": {name: 1e3 * took for name, took in divided.items()},
            "wrong": wrong,
        }
        write_json(args.json, about)
    return 1 if wrong else 0


def _prefix(args: argparse.Namespace, model: Model) -> int:
    """Tokens of the prefix.  ValueError if they are not whole chunks and blocks, or if `--disk` cannot be made."""
    unit = math.lcm(model.usual_block_size, args.chunk)
    prefix = args.prefix or -(-PREFIX // unit) * unit
    if prefix % unit:
        raise ValueError(
            f"--prefix is {prefix}: expected a multiple of {unit}, the least common multiple of --chunk and "
            f"blocks of {model.usual_block_size} (or choose a smaller --chunk)"
        )
    if args.disk:
        try:
            args.disk.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--disk is {str(args.disk)!r}: expected a folder that exists or can be made ({error})"
            ) from None
    return prefix


def _tables(model: Model) -> tuple[TableKind, ...]:
    """The block tables of a request."""
    return tables_of(model.layout(1), model.usual_block_size)


def _num_blocks(model: Model, prefix: int) -> int:
    """Blocks of a request in all its tables, those that expire included: none is evicted before it is found again."""
    return sum(table.up_to(prefix + NEW_TOKENS) for table in _tables(model))


class Bench:
    """A model, with host and disk pools that outlive its engines."""

    def __init__(self, model: Model, prefix: int, chunk: int, order: str, folder: Path):
        self._model, self._prefix, self._chunk, self._order = model, prefix, chunk, order
        self._num_blocks = _num_blocks(model, prefix)
        self._layout = model.layout(self._num_blocks, order=order)
        self._disk = DiskPool(folder, self._layout, model=fingerprint(model))
        self._host = self._pool()
        self.nbytes = sum(len(table.needed(prefix)) for table in _tables(model)) * self._host.block_nbytes
        """Bytes of the blocks of the prefix that a request needs to go on."""

    def __str__(self):
        config = self._model.config
        return (
            f"{config.architecture} of {config.num_layers} layers on {jax.devices()[0].device_kind}; a prefix of "
            f"{self._prefix} tokens is {size(self.nbytes)} of {self._model.entry_format} entries\n"
            "time to first token:"
        )

    def round(self) -> dict[str, Case]:
        """Serves one new prompt in every case (computed, found on the device, in host memory, on disk)."""
        prompt = self._new_prompt()
        engine = self._engine(self._host)
        cases = {"cold": _served(engine, prompt), "device": _served(engine, prompt)}
        cases["host"] = _served(self._engine(self._host), prompt)
        self._host.flush()
        pool = self._pool()
        cases["disk"] = _served(self._engine(pool), prompt)
        pool.flush()  # otherwise it would still write when the folder is removed
        return cases

    def cold_kernels(self) -> KernelTimes | None:
        """The kernels that compute a new prompt, up to its first token; None if they cannot be timed."""
        engine = cache(lambda: self._engine(self._host))  # made by the first call, and not at all without a GPU

        def serve():
            engine().submit(self._new_prompt(), max_tokens=1, stop=())
            for _ in engine().run():
                pass

        found = kernels_of(serve, repeats=1)
        self._host.flush()
        return found

    def _new_prompt(self) -> list[int]:
        # Without a seed, because the folder may hold blocks of the same prompt from an earlier run.
        return np.random.default_rng().integers(0, self._model.config.vocab_size, self._prefix + 1).tolist()

    def _pool(self) -> HostPool:
        return HostPool(self._layout, 2 * self._num_blocks, disk=self._disk)

    def _engine(self, host: HostPool) -> Engine:
        """A new engine with an empty cache."""
        sizes = {
            "num_blocks": self._num_blocks,
            "chunk": self._chunk,
            "max_num_batched_tokens": 1 + self._chunk,
            "max_requests": 1,
        }
        max_len = self._prefix + NEW_TOKENS
        engine = Engine(self._model, **sizes, order=self._order, max_len=max_len, connectors=[host])
        engine.warm_up()
        return engine


def _served(engine: Engine, prompt: list[int]) -> Case:
    before, start = engine.prefix_stats.found, time.perf_counter()
    request = engine.submit(prompt, max_tokens=NEW_TOKENS, stop=())
    while not request.generated:
        engine.step()
    seconds = time.perf_counter() - start
    for _ in engine.run():
        pass
    return Case(seconds, engine.prefix_stats.found - before, request.generated)
