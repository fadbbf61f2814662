"""Faults that tests must notice.

    python tests/mutants.py [--jobs N] [--only NAME] [--json FILE] [--baseline] [-- pytest arguments]

Each of the mutants below changes one place of the library.  For each of them, the script runs tests on a copy of the
library with that change, as CI does, and prints which test failed.  A mutant with which all of its tests pass shows a
gap in the tests, and the exit code is then 1.

`--baseline` runs the same tests without a mutant.  They must pass, as a test that fails anyway notices nothing.

`--only` may be repeated; it selects the mutants whose name or kind contains NAME.  What follows `--` is passed on to
pytest.  All tests run on the CPU, so that results are the same on every machine.
"""

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("jaxkv", "kernels", "tests", "pyproject.toml", "README.md")
"""What the tests below need of the checkout."""
LIMIT = 600
"""Seconds after which a run counts as a hang."""

_running: set[subprocess.Popen] = set()
"""Runs of pytest, to be killed if the script is interrupted."""


class Mutant(NamedTuple):
    """One wrong place in the library."""

    name: str
    file: str
    old: str
    """A text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Paths or node ids of tests, of which at least one must fail."""


ADDRESSING = "kernels/jaxkv_kernels/addressing.py"
PACKED = "jaxkv/layout/packed.py"
ATTENTION, SOFTMAX = "kernels/jaxkv_kernels/xla/attention.py", "kernels/jaxkv_kernels/xla/softmax.py"
PAGED = "kernels/jaxkv_kernels/xla/paged.py"
SPARSE = "kernels/jaxkv_kernels/xla/sparse.py"
MASKS = "kernels/jaxkv_kernels/mosaic_gpu/masks.py"
SCHEDULER = "kernels/jaxkv_kernels/mosaic_gpu/tile_scheduler.py"
COMBINE = "kernels/jaxkv_kernels/mosaic_gpu/combine.py"
BLACKWELL = "kernels/jaxkv_kernels/mosaic_gpu/mla_dense_blackwell.py"
TCGEN05 = "kernels/jaxkv_kernels/mosaic_gpu/tcgen05_attention.py"
BITS, FP4 = "kernels/jaxkv_kernels/formats/bits.py", "kernels/jaxkv_kernels/formats/fp4.py"
INT8, NVFP4 = "kernels/jaxkv_kernels/formats/int8.py", "kernels/jaxkv_kernels/formats/nvfp4.py"
FORMAT = "kernels/jaxkv_kernels/formats/format.py"
POOL, PREFIX = "jaxkv/serving/pool.py", "jaxkv/serving/prefix.py"
TABLE, BLOCK_MANAGER = "jaxkv/serving/table.py", "jaxkv/serving/block_manager.py"
ENGINE, REQUEST = "jaxkv/serving/engine.py", "jaxkv/serving/request.py"
SAMPLING, HOST = "jaxkv/models/sampling.py", "jaxkv/offload/host.py"
STEP_TIMES, DRAFTING = "jaxkv/serving/step_times.py", "jaxkv/serving/drafts.py"

SLOTS, LARGE = ("tests/ops/test_slots.py",), ("tests/ops/test_large.py",)
PACKED_TESTS = ("tests/layout", "tests/offload/test_offload.py")
WRITES, BLOCKS = ("tests/ops/test_xla.py::TestWrites",), ("tests/ops/test_xla.py::TestBlocks",)
MLA, KV = ("tests/ops/test_xla.py::TestDecodeMLA",), ("tests/ops/test_xla.py::TestDecodeKV",)
KV_WINDOWS = ("tests/ops/test_xla.py::TestKVWindowsOfBothSides",)
SPARSE_MLA, EXTRA = ("tests/ops/test_xla.py::TestDecodeMLASparse",), ("tests/ops/test_xla.py::TestExtraSlots",)
TOKEN_SCALES, INDEXER = ("tests/ops/test_xla.py::TestTokenScales",), ("tests/ops/test_xla.py::TestIndexer",)
MERGE = ("tests/ops/test_xla.py::TestMerge",)
PLAN = ("tests/kernels/mosaic_gpu/test_plan.py",)
MOSAIC_MLA, MOSAIC_KV = ("tests/kernels/mosaic_gpu/test_decode_mla.py",), ("tests/kernels/mosaic_gpu/test_kv.py",)
BLACKWELL_MLA = ("tests/kernels/mosaic_gpu/test_decode_mla_blackwell.py",)
FORMATS = ("tests/kernels/test_formats.py",)
SERVING = ("tests/serving/test_engine.py",)
DRAFTS, SAMPLING_TESTS = ("tests/serving/test_engine_drafts.py",), ("tests/models/test_sampling.py",)
REUSE, PARTIAL = ("tests/serving/test_engine_reuse.py",), ("tests/serving/test_engine_partial_blocks.py",)
STEPS, BOUND = ("tests/serving/test_engine_steps.py",), ("tests/serving/test_step_times.py",)
INTERRUPTED, LOADS = ("tests/serving/test_interrupted.py",), ("tests/serving/test_engine_loads.py",)
TABLES = ("tests/serving/test_tables.py", "tests/serving/test_engine_tables.py")
KEYS = ("tests/offload/test_offload.py",)
BLOCKS, LAYOUTS, DLPACK = "jaxkv/ops/blocks.py", "jaxkv/layout/layout.py", "jaxkv/dlpack.py"
SIZES = ("tests/ops/test_conversion.py::test_every_size_to_another_and_back",)
DIVISIONS = ("tests/parallel/test_conversion.py::test_every_division_to_another_and_back",)
OTHER_SIZES, FOREIGN = ("tests/offload/test_offload_sizes.py",), ("tests/layout/test_dlpack.py",)

MUTANTS = {
    "addressing": (
        Mutant(
            "the position after the table has a slot",
            ADDRESSING,
            "(positions < table_tokens(block_tables, block_size))",
            "(positions <= table_tokens(block_tables, block_size))",
            SLOTS,
        ),
        Mutant(
            "large block ids wrap around into slots",
            ADDRESSING,
            "inside &= (block >= 0) & (block < MAX_SLOTS // block_size)",
            "inside &= block >= 0",
            SLOTS,
        ),
        Mutant(
            "rows and columns without a carry",
            ADDRESSING,
            "row + digit * rows + column // length, column % length",
            "row + digit * rows, column % length",
            LARGE,
        ),
        Mutant(
            "entries may cross the rows of a view",
            ADDRESSING,
            "if not same or row % stride or max(inside) > stride or row // stride >= ROW_LIMIT:",
            "if not same or row % stride or row // stride >= ROW_LIMIT:",
            ("tests/layout", *WRITES),
        ),
        Mutant(
            "values that lie apart are read beside their keys",
            ADDRESSING,
            "else (replace(self, values=None), self.values)",
            "else (replace(self, values=None), replace(self, values=None, offset=self.offset + self.width))",
            WRITES,
        ),
        Mutant(
            "values that have an array of their own are read from that of the keys",
            ADDRESSING,
            "return buffer if isinstance(buffer, tuple) else (buffer,) * count",
            "return (buffer[0] if isinstance(buffer, tuple) else buffer,) * count",
            KV,
        ),
        Mutant(
            "the regions of a split page without the offset of the group",
            ADDRESSING,
            "offset=pages.offset + first.offset // itemsize",
            "offset=first.offset // itemsize",
            PACKED_TESTS,
        ),
        Mutant(
            "blocks with a gap around them count as runs",
            ADDRESSING,
            "return self.block_stride * self.num_blocks == self.size and all(",
            "return all(",
            ("tests/layout", *BLOCKS),
        ),
        Mutant(
            "groups of a packed block overlap",
            PACKED,
            "+= -(-layout.strides.block // unit) * unit",
            "+= layout.strides.block // unit * unit",
            PACKED_TESTS,
        ),
    ),
    "conversions": (
        Mutant(
            "entries after the last token are converted",
            BLOCKS,
            "keep = jnp.array(True) if count % unit == 0 else grid[0] * unit + grid[-1] < count",
            "keep = jnp.array(True)",
            SIZES,
        ),
        Mutant(
            "every run begins a block",
            BLOCKS,
            "token = token * unit + within",
            "token = within",
            SIZES,
        ),
        Mutant(
            "devices that divide heads come after those that divide tokens",
            BLOCKS,
            "block = part * (shards.num_shards * blocks) + block",
            "block = part * blocks + block",
            DIVISIONS,
        ),
        Mutant(
            "tokens are divided by 1",
            LAYOUTS,
            "return tokens // self.interleave % self.num_shards, index",
            "return tokens % self.num_shards, index",
            DIVISIONS,
        ),
        Mutant(
            "rows are as many as the average share needs",
            LAYOUTS,
            "return rounds * self.interleave + min(rest, self.interleave)",
            "return rounds * self.interleave + rest // self.num_shards",
            ("tests/parallel/test_conversion.py::test_every_device_has_the_rows_that_device_0_needs",),
        ),
        Mutant(
            "units before the first block are written",
            BLOCKS,
            "keep = (places >= 0) & (places < count * self.units_of_block)",
            "keep = places < count * self.units_of_block",
            OTHER_SIZES,
        ),
        Mutant(
            "a block of the pool is where the first unit of its block of the cache is",
            HOST,
            "units[n * self._units : (n + 1) * self._units]",
            "units[n : n + self._units]",
            OTHER_SIZES,
        ),
        Mutant(
            "transposed tensors are contiguous",
            DLPACK,
            "all(count == 1 or stride == own for count, stride, own in steps)",
            "sorted(self.strides) == sorted(_contiguous(self.shape))",
            FOREIGN,
        ),
        Mutant(
            "a tensor may lack an element",
            DLPACK,
            "if (elements := prod(facts.shape)) < size:",
            "if (elements := prod(facts.shape)) < size - 1:",
            FOREIGN,
        ),
    ),
    "masks": (
        Mutant(
            "a window without its first token",
            PAGED,
            "else jnp.maximum(ends - window, 0)",
            "else jnp.maximum(ends - window + 1, 0)",
            KV,
        ),
        Mutant(
            "a window without its last token",
            PAGED,
            "jnp.minimum(ends, lengths[:, None] - ahead) + ahead",
            "jnp.minimum(ends, lengths[:, None] - ahead) + ahead - 1",
            KV_WINDOWS,
        ),
        Mutant(
            "query tokens that are not the last ones count as the last ones",
            PAGED,
            "query_ends(lengths if trailing is None else lengths - trailing, tokens)",
            "query_ends(lengths, tokens)",
            KV_WINDOWS,
        ),
        Mutant(
            "query tokens do not see themselves",
            PAGED,
            "return lengths[:, None] - (tokens - 1) + jnp",
            "return lengths[:, None] - tokens + jnp",
            MLA,
        ),
        Mutant(
            "NaN in values that no query sees",
            SOFTMAX,
            "jnp.where(seen_at_all, k, 0), jnp.where(seen_at_all, v, 0)",
            "jnp.where(seen_at_all, k, 0), v",
            MLA,
        ),
        Mutant(
            "infinite values are lost where another query does not see them",
            SOFTMAX,
            "jnp.where(seen[:, :, None, None] & ~finite, v, 0)",
            "jnp.where(seen[:, :, None, None] & finite, v, 0)",
            KV,
        ),
        Mutant(
            "one slot more than the count",
            SPARSE,
            "< source.counts[..., None]",
            "<= source.counts[..., None]",
            SPARSE_MLA,
        ),
        Mutant(
            "a window without its last token (Mosaic GPU)",
            MASKS,
            "(token - ahead if ahead else token) <= own",
            "(token - ahead if ahead else token) <= own - bool(ahead)",
            MOSAIC_KV,
        ),
        Mutant(
            "a window of one token more (Mosaic GPU)",
            MASKS,
            "jnp.where(token > own - window, scores, MASKED)",
            "jnp.where(token >= own - window, scores, MASKED)",
            MOSAIC_KV,
        ),
        Mutant(
            "the value after the last token is not cleared (Mosaic GPU)",
            MASKS,
            "clear(length - first_token, jnp.int32(TILE))",
            "clear(length - first_token + 1, jnp.int32(TILE))",
            MOSAIC_MLA,
        ),
        Mutant(
            "values of unseen tokens are not cleared (Blackwell)",
            TCGEN05,
            "pl.when(masked)(lambda: self.clear_values(",
            "pl.when(masked & ~masked)(lambda: self.clear_values(",
            BLACKWELL_MLA,
        ),
    ),
    "queries and scales": (
        Mutant(
            "queries with scales per head without that of their head",
            "jaxkv/ops/attention.py",
            "* (factor / factor.max())[:, None]",
            "* (factor / factor)[:, None]",
            KV,
        ),
        Mutant(
            "scales per token of the slots before",
            ADDRESSING,
            '.at[slots].get(mode="clip")',
            '.at[slots - 1].get(mode="clip")',
            TOKEN_SCALES,
        ),
        Mutant(
            "the largest logits of one of two caches",
            SPARSE,
            "largest = reduce(jnp.maximum, [",
            "largest = reduce(lambda first, other: first, [",
            ("tests/ops/test_xla.py::TestMaxLogits",),
        ),
        Mutant(
            "ragged query tokens of the indexer see later tokens",
            "jaxkv/ops/indexer.py",
            "block_size)[requests] - after",
            "block_size)[requests]",
            INDEXER,
        ),
        Mutant(
            "the logit at the length of a row takes part",
            "jaxkv/ops/indexer.py",
            "dtype=jnp.int32) < lengths[..., None], logits",
            "dtype=jnp.int32) <= lengths[..., None], logits",
            INDEXER,
        ),
    ),
    "planner": (
        Mutant(
            "the last full step has no causal mask",
            SCHEDULER,
            "_div(jnp.maximum(keys - hidden, 0), self.step)",
            "_div(keys, self.step)",
            PLAN,
        ),
        Mutant(
            "steps begin at the window of the last query token",
            SCHEDULER,
            "jnp.maximum(query_end - (self.tokens - 1) - self.window, 0)",
            "jnp.maximum(query_end - self.window, 0)",
            PLAN,
        ),
        Mutant(
            "query tokens that are not the last ones count as the last ones (Mosaic GPU)",
            SCHEDULER,
            "query_end = length if beyond is None else length - beyond",
            "query_end = length",
            PLAN,
        ),
        Mutant(
            "the block after the last one counts as known",
            SCHEDULER,
            "is_seen & ((block < 0) | (block >= num_blocks))",
            "is_seen & ((block < 0) | (block > num_blocks))",
            PLAN,
        ),
        Mutant(
            "all splits of a request are stored in one place",
            SCHEDULER,
            "jnp.where(count > 1, first_split[owner] + n, -1)",
            "jnp.where(count > 1, first_split[owner], -1)",
            PLAN,
        ),
        Mutant(
            "a kernel takes the candidate division of greatest cost",
            SCHEDULER,
            "costs == jnp.min(costs)",
            "costs == jnp.max(costs)",
            PLAN,
        ),
        Mutant(
            "sums of splits are not scaled to a new maximum",
            COMBINE,
            "row_sum, acc = row_sum * factor, acc * over_columns(factor, width)",
            "row_sum = row_sum * factor",
            MOSAIC_MLA,
        ),
        Mutant(
            "sums in tensor memory are not scaled to a new maximum",
            TCGEN05,
            "pl.when(raised & has_sums)",
            "pl.when(raised & ~has_sums)",
            BLACKWELL_MLA,
        ),
        Mutant(
            "results are not multiplied by the scale of the entries (Blackwell)",
            BLACKWELL,
            "inverse *= self.value_scale",
            "inverse *= 1",
            BLACKWELL_MLA,
        ),
        Mutant(
            "latents are multiplied by the scale of another tile of values",
            "kernels/jaxkv_kernels/mosaic_gpu/ptx/conversions_to_bf16.py",
            "arith.shrui(lane.column_tile, c32(1))",
            "arith.andi(lane.column_tile, c32(1))",
            ("tests/kernels/mosaic_gpu/test_latent_pieces.py",),
        ),
        Mutant(
            "values of keys that have not landed are cleared",
            "kernels/jaxkv_kernels/mosaic_gpu/gqa_blackwell.py",
            "plgpu.barrier_wait(self.scratch.v_full.at[self.cta.stage(used)])",
            "pass",
            ("tests/kernels/mosaic_gpu/test_kv_blackwell.py",),
        ),
        Mutant(
            "the scale of a split is that of the other half",
            BLACKWELL,
            "refs.split_scale.at[tile.split, cta.half, cta.rows]",
            "refs.split_scale.at[tile.split, 1 - cta.half, cta.rows]",
            BLACKWELL_MLA,
        ),
        Mutant(
            "sums of chunks are not scaled to a new maximum",
            SOFTMAX,
            "row_sum * rescale + p.sum(axis=-1), acc * rescale[..., None] + pv",
            "row_sum * rescale + p.sum(axis=-1), acc + pv",
            MLA,
        ),
        Mutant(
            "the log-sum-exp of two caches without their maximum",
            "kernels/jaxkv_kernels/scores.py",
            "jnp.where(empty, -jnp.inf, top + jnp.log(total))",
            "jnp.where(empty, -jnp.inf, jnp.log(total))",
            EXTRA,
        ),
        Mutant(
            "a part without keys has the weight of its infinite log-sum-exp",
            ATTENTION,
            "jnp.where(call.lses < jnp.inf, call.lses.astype(jnp.float32), -jnp.inf)",
            "call.lses.astype(jnp.float32)",
            MERGE,
        ),
    ),
    "formats": (
        Mutant(
            "float8 does not saturate",
            BITS,
            "return jnp.clip(x, -largest, largest).astype(dtype)",
            "return x.astype(dtype)",
            WRITES,
        ),
        Mutant(
            "quotients are cut off instead of rounded",
            BITS,
            "quotient += (2 * remainder > d).astype(jnp.int32)",
            "quotient += (remainder > d).astype(jnp.int32)",
            FORMATS,
        ),
        Mutant(
            "the first of two e2m1 values is in the high bits",
            FP4,
            "return code[..., 0] | code[..., 1] << 4",
            "return code[..., 1] | code[..., 0] << 4",
            FORMATS,
        ),
        Mutant(
            "ties of e2m1 values go to the odd code",
            FP4,
            "up = n % 2 or not ties_to_even",
            "up = n % 2 == 0 or not ties_to_even",
            (*FORMATS, *WRITES),
        ),
        Mutant(
            "the scales of small tiles become 0",
            FP4,
            "SMALLEST_E4M3, FP8_MAX)\n    if not round_up",
            "0.0, FP8_MAX)\n    if not round_up",
            (*FORMATS, *WRITES),
        ),
        Mutant(
            "int8 values are cut off instead of rounded",
            INT8,
            "jnp.clip(jnp.round(quotient), -LARGEST, LARGEST)",
            "jnp.clip(jnp.trunc(quotient), -LARGEST, LARGEST)",
            FORMATS,
        ),
        Mutant(
            "keys have the scales of values",
            NVFP4,
            "found[len(sizes) :], scales, strict=True)",
            "found[len(sizes) :], scales[::-1], strict=True)",
            ("tests/ops/test_xla.py::TestGathers",),
        ),
        Mutant(
            "the second region of a split page begins too early",
            FORMAT,
            "offset += step * block_size",
            "offset += step * (block_size - 1)",
            FORMATS,
        ),
    ),
    "engine": (
        Mutant(
            "a block is evicted that was used last",
            POOL,
            "block = next(iter(self._kept))",
            "block = next(reversed(self._kept))",
            REUSE,
        ),
        Mutant(
            "the last token of a known prompt is not computed",
            PREFIX,
            "last = len(request.tokens) - 1\n",
            "last = len(request.tokens)\n",
            REUSE,
        ),
        Mutant(
            "copies of shared blocks are not counted",
            BLOCK_MANAGER,
            "return self.count(request, prefix, end) - kept + prefix.copied",
            "return self.count(request, prefix, end) - kept",
            REUSE,
        ),
        Mutant(
            "a block that is overwritten is still found by its old contents",
            BLOCK_MANAGER,
            "                        self.pool.overwrite(block)\n",
            "                        pass\n",
            PARTIAL,
        ),
        Mutant(
            "first tokens of a block are shared whatever is before them",
            PREFIX,
            "if known >= index and donor.predecessor(table.name, index) == predecessor:",
            "if known >= index:",
            PARTIAL,
        ),
        Mutant(
            "no state is stored where prefixes part",
            ENGINE,
            "if start < request.checkpoint < end:",
            "if False:",
            ("tests/serving/test_engine_tables.py::TestStates",),
        ),
        Mutant(
            "the first token of a window has expired",
            TABLE,
            "max(tokens - self.window, 0)",
            "max(tokens - self.window + 1, 0)",
            TABLES,
        ),
        Mutant(
            "a request of equal priority is preempted",
            ENGINE,
            "others = [other for other in self.running if other.priority >= request.priority]",
            "others = [other for other in self.running if other.priority > request.priority]",
            (*SERVING, *STEPS),
        ),
        Mutant(
            "the cache is not made again after an exception",
            ENGINE,
            "        self._allocate()\n        jax.block_until_ready((self.cache.buffer, self.last))",
            "        jax.block_until_ready((self.cache.buffer, self.last))",
            INTERRUPTED,
        ),
        Mutant(
            "a token is in the stream that its request has not got",
            ENGINE,
            "            self._new.pop()  #",
            "            break  #",
            INTERRUPTED,
        ),
        Mutant(
            "a request loads blocks that another is loading",
            BLOCK_MANAGER,
            "return replace(prefix, awaited=True)",
            "return prefix",
            LOADS,
        ),
        Mutant(
            "blocks that are being loaded count as loaded",
            ENGINE,
            "request.cached, request.filled, request.loading = 0, 0, prefix.tokens",
            "request.loading = 0",
            LOADS,
        ),
        Mutant(
            "any number of blocks is on its way to the device",
            HOST,
            "return sum(progress.in_flight(least) for progress in self._pulls) < self._chunk_blocks",
            "return True",
            LOADS,
        ),
        Mutant(
            "stores wait for the disk",
            HOST,
            "room = self._make_room(len(new), wait=wait)",
            "room = self._make_room(len(new))",
            LOADS,
        ),
        Mutant(
            "a request ends one token early",
            REQUEST,
            "elif len(self.tokens) == len(self.prompt) + self.max_tokens:",
            "elif len(self.tokens) + 1 >= len(self.prompt) + self.max_tokens:",
            SERVING,
        ),
        Mutant(
            "keys do not cover the blocks before",
            "jaxkv/offload/keys.py",
            "hashlib.sha256(key + ids[end - block_size : end].tobytes())",
            "hashlib.sha256(first + ids[end - block_size : end].tobytes())",
            KEYS,
        ),
        Mutant(
            "an accepted draft is not counted as cached",
            ENGINE,
            "request.cached -= rejected",
            "request.cached -= len(span.drafts)",
            DRAFTS,
        ),
        Mutant(
            "n-grams are found only after the end of shorter ones",
            DRAFTING,
            "max(end - count, 0))",
            "end)",
            DRAFTS,
        ),
        Mutant(
            "a step that was launched behind another one is measured from when it was scheduled",
            STEP_TIMES,
            "now - max(start, self._last_read)",
            "now - start",
            BOUND,
        ),
        Mutant(
            "a block is copied for any token",
            PREFIX,
            "if most * LEAST_PART >= table.block_size",
            "if most",
            PARTIAL,
        ),
        Mutant(
            "the token that reaches top_p is left out",
            SAMPLING,
            "before = jnp.cumsum(p) - p\n",
            "before = jnp.cumsum(p)\n",
            SAMPLING_TESTS,
        ),
    ),
}


class Job(NamedTuple):
    """Tests to run on a copy of the library, with a mutant or without."""

    name: str
    tests: tuple[str, ...]
    mutant: Mutant | None


def texts(mutant: Mutant) -> tuple[str, str]:
    """The contents of the file without the mutant and with it; SystemExit unless the place is found exactly once."""
    before = (ROOT / mutant.file).read_text()
    if (count := before.count(mutant.old)) != 1:
        sys.exit(f"mutant {mutant.name!r}: {mutant.file} has its text {count} times, expected once:\n{mutant.old}")
    after = before.replace(mutant.old, mutant.new)
    compile(after, mutant.file, "exec")
    return before, after


def place(mutant: Mutant) -> str:
    """The file and the line of a mutant."""
    before, _ = texts(mutant)
    return f"{mutant.file}:{before[: before.index(mutant.old)].count(chr(10)) + 1}"


def copied(folder: Path) -> Path:
    """A copy of the library and of its tests."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def environment(copy: Path) -> dict[str, str]:
    """Python finds the copy first, even if jaxkv is installed."""
    paths = [str(copy), str(copy / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


def check_imports(copy: Path) -> None:
    """SystemExit unless Python imports the library from the copy."""
    find = "from importlib.util import find_spec as f; print(f('jaxkv').origin, f('jaxkv_kernels').origin)"
    command = [sys.executable, "-c", find]
    found = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=True).stdout
    if not all(Path(origin).is_relative_to(copy) for origin in found.split()):
        sys.exit(f"Python imports {found.strip()} instead of the copy in {copy}")


def run(job: Job, copy: Path, options: Sequence[str]) -> dict[str, object]:
    """Runs the tests of a job in a copy: the outcome, the test that failed, and the seconds.

    A run that ends with 1 and without a failed test was ended by pytest-timeout.
    """
    start = time.monotonic()
    if job.mutant is not None:
        # Bytecode is known by the size and the time of its source: that of a mutant is not used after it is undone,
        # as the time of the original file comes back with it.
        (copy / job.mutant.file).write_text(texts(job.mutant)[1])
    try:
        code, output = pytest_in(copy, job.tests, options)
    finally:
        if job.mutant is not None:
            shutil.copy2(ROOT / job.mutant.file, copy / job.mutant.file)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE)
    outcome = {0: "passed", 1: "failed" if failed else "hang", None: "hang"}.get(code, "error")
    return {
        "name": job.name,
        "place": place(job.mutant) if job.mutant else "",
        "outcome": outcome,
        "test": failed[1] if failed else "",
        "seconds": round(time.monotonic() - start, 1),
        "output": output[-4000:],
    }


def pytest_in(copy: Path, tests: Sequence[str], options: Sequence[str]) -> tuple[int | None, str]:
    """The exit code of pytest, None if it took longer than `LIMIT`, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-m", "not slow"]  # CI runs its further cases, too
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *options, *tests],
            cwd=copy,
            env=environment(copy),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
            kill(process)
        _running.remove(process)
        output.seek(0)
        return code, output.read()


def kill(process: subprocess.Popen) -> None:
    """Ends a run, and the processes that its tests have started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def described(result: dict[str, object], baseline: bool) -> str:
    """The outcome in words."""
    if baseline:
        return f"{result['outcome']} {result['test']}".strip()
    words = {
        "passed": "NOT NOTICED",
        "failed": "noticed by",
        "hang": "noticed: it hangs",
        "error": "ERROR: no tests ran",
    }
    return f"{words[str(result['outcome'])]} {result['test']}".strip()


def show(result: dict[str, object], baseline: bool) -> None:
    """Prints a result, with what pytest printed if its tests did not do what they should."""
    where = f"\n    {result['place']}" if result["place"] else ""
    print(f"{result['name']}{where}\n    {described(result, baseline)}, {result['seconds']} s", flush=True)
    if result["outcome"] == "error" or (baseline and result["outcome"] != "passed"):
        print(result["output"], flush=True)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """The selected mutants, or the tests of these without them, each once."""
    mutants = [
        mutant
        for kind, some in MUTANTS.items()
        for mutant in some
        if not options.only or any(name in f"{kind}: {mutant.name}" for name in options.only)
    ]
    if not options.baseline:
        return [Job(mutant.name, mutant.tests, mutant) for mutant in mutants]
    return [Job(path, (path,), None) for path in dict.fromkeys(path for mutant in mutants for path in mutant.tests)]


def stop(number, frame):
    """Ends the script once: a second signal must not interrupt the removal of the copies."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def main() -> int:
    """Runs the selected mutants; 1 if one of them is not noticed, or its tests cannot run."""
    signal.signal(signal.SIGTERM, stop)
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="copies that run at once")
    parser.add_argument("--only", action="append", metavar="NAME", help="mutants whose name or kind contains NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--baseline", action="store_true", help="run the tests without mutants")
    options, pytest_options = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    for some in MUTANTS.values():
        for mutant in some:
            texts(mutant)
    jobs, results = jobs_of(options), []
    if not jobs:
        parser.error(f"no mutant has {options.only} in its name or kind")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for n in range(min(options.jobs, len(jobs))):
            copies.put(copied(Path(folder).resolve() / str(n)))

        def run_somewhere(job: Job) -> dict[str, object]:
            copy = copies.get()
            try:
                return run(job, copy, pytest_options)
            finally:
                copies.put(copy)

        first = copies.get()
        check_imports(first)
        copies.put(first)
        with ThreadPoolExecutor(min(options.jobs, len(jobs))) as executor:
            try:
                for result in executor.map(run_somewhere, jobs):
                    results.append(result)
                    show(result, options.baseline)
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                for process in list(_running):
                    kill(process)
                raise
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    good = ("passed",) if options.baseline else ("failed", "hang")
    bad = [result for result in results if result["outcome"] not in good]
    print(f"{len(results) - len(bad)} of {len(results)} {'passed' if options.baseline else 'mutants noticed'}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
