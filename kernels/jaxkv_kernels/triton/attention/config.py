"""The tunable numbers of the attention kernels: a validated `Config` per kernel, with the reasons for its defaults."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxkv_kernels.triton.runtime.launch import capability
from jaxkv_kernels.tuning import configuration


@dataclass(frozen=True, kw_only=True)
class Config:
    """The tile sizes and resources of a program, and when requests are split.

    Raises:
      ValueError: Triton cannot compile a kernel with one of the numbers.
    """

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {
        "rows": (16, 32, 64),
        "keys": (16, 32, 64, 128),
        "warps": (4, 8),
        "stages": (1, 2, 3, 4),
        "programs_per_sm": (1, 2, 3, 4),
    }

    rows: int
    """Rows of queries (query tokens x query heads of a KV head) per program: a power of two, at least 16."""
    keys: int
    """Tokens of the cache per tile of the loop: a power of two, at least 16."""
    warps: int
    """Warps per program: a power of two, at most 16."""
    stages: int
    """Stages of Triton's software pipeline over the tiles of keys; 1 is no pipeline."""
    programs_per_sm: int
    """Programs that run on a multiprocessor at the same time, as plans assume."""
    split_multiple: int = 64
    """The length of a split is a multiple of this many tokens.  64 is the usual tile of keys and the usual block
    size, so no tile is loaded for only a few of its keys.
    """
    split_cost: int = 64
    """The fixed cost of a split, in units of the time to process one token.  On an H200, a program that starts, loads
    its queries and stores its split takes about as long as one tile of keys.
    """
    max_waves: int = 4
    """Plans try split sizes for one wave of programs, two waves, and so on up to this many.  With more than 4 waves,
    the fixed costs of the splits exceed the gain from better balance.
    """

    def __post_init__(self):
        for name in ("rows", "keys"):
            self._check_power_of_two(name, least=16)
        self._check_power_of_two("warps", most=16)
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{field.name}` is {value!r}: expected a positive integer")

    def _check_power_of_two(self, name: str, least: int = 1, most: int = 1024):
        value = getattr(self, name)
        if not isinstance(value, int) or not least <= value <= most or value & (value - 1):
            raise ValueError(f"`{name}` is {value!r}: expected a power of two from {least} to {most}")

    def row_tiles(self, rows: int) -> int:
        """The number of programs that share `rows` rows of queries."""
        return -(-rows // self.rows)


@dataclass(frozen=True, kw_only=True)
class LatentConfig(Config):
    """The configuration of the kernel of `decode_mla` and `decode_mla_sparse`."""

    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {**Config.SEARCH, "columns": (64, 128, 256)}

    columns: int
    """Values of a latent per product: a power of two, at least 32.  Several smaller products are independent of each
    other and take fewer registers than one product with all 512 values.
    """

    def __post_init__(self):
        super().__post_init__()
        self._check_power_of_two("columns", least=32)


@dataclass(frozen=True, kw_only=True)
class KVConfig(Config):
    """The configuration of the kernel of `decode_kv`."""


def latent_config(entry, rows: int, dtype) -> LatentConfig:
    """The configuration in use for latents of `entry` and `rows` rows of queries of `dtype` per request."""
    return configuration(_default_latent_config(entry, rows, dtype))


def kv_config(entry, rows: int, dtype) -> KVConfig:
    """The configuration in use for keys and values of `entry` and `rows` rows of queries of `dtype` per KV head."""
    return configuration(_default_kv_config(entry, rows, dtype))


def _default_latent_config(entry, rows: int, dtype) -> LatentConfig:
    """The default for latents of `entry` and `rows` rows of queries of `dtype` per request.

    A program may have 227 KiB of shared memory on sm_90, 163 on sm_80, 99 on sm_86 and sm_89.  The sizes for sm_90 are
    the fastest measured on an H200.  Those for other GPUs are the largest that fit their shared memory and registers.

    - float32: products keep all operands of a thread in registers, which limits tiles to 16 x 16.  A tile of keys takes
      36 KiB, so a second stage would not fit on sm_86.
    - Up to 16 rows: memory bandwidth is the limit, so two programs share a multiprocessor, and one loads while the
      other computes.  On sm_90, bf16 takes 91 KiB of shared memory and 168 to 189 registers per thread (Triton 3.6 to
      3.9).  fp8 takes 92 KiB and 192 to 196 registers with tiles of 64 keys, each of half as many bytes.
    - More rows on sm_90: tiles of 64 rows and 64 keys.  The queries (72 KiB) and two tiles of keys (72 KiB each) take
      216 KiB, and the results 128 registers per thread of 8 warps.  fp8_ds_mla has a third stage of raw bytes: 226 KiB.
    - More rows on other GPUs: tiles of 32 keys fit.  64 rows fit on sm_80 only, and only for entries that are not
      decoded, because decoded values need more memory.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return LatentConfig(rows=16, keys=16, columns=128, warps=4, stages=1, programs_per_sm=1)
    arch = capability()
    large_shared_memory = arch in (80, 90)
    if rows <= 16:
        if entry.codec.scaled and arch == 90:
            return LatentConfig(rows=16, keys=64, columns=64, warps=4, stages=3, programs_per_sm=2)
        columns = 64 if entry.codec.scaled else 128
        stages, programs = (3, 2) if large_shared_memory else (2, 1)
        return LatentConfig(rows=16, keys=32, columns=columns, warps=4, stages=stages, programs_per_sm=programs)
    quantized = entry.dtype.itemsize == 1
    columns = 256 if entry.codec.scaled else 128
    if arch == 90:
        stages = 3 if quantized else 2
        return LatentConfig(rows=_padded(rows, 64), keys=64, columns=columns, warps=8, stages=stages, programs_per_sm=1)
    most = 64 if large_shared_memory and not quantized else 32
    return LatentConfig(rows=_padded(rows, most), keys=32, columns=columns, warps=8, stages=2, programs_per_sm=1)


def _default_kv_config(entry, rows: int, dtype) -> KVConfig:
    """The default for keys and values of `entry` and `rows` rows of queries of `dtype` per KV head.

    Memory bandwidth is the limit, and several small programs per multiprocessor keep more loads in flight than one
    large program.  For 128 + 128 bf16 values, a program with 16 rows, 64 keys and 4 warps takes 38 KiB of shared
    memory.  With Triton 3.6, it takes 118 registers per thread, so that four programs fit on sm_90; with Triton 3.9, it
    takes 140, and three fit.  With heads wider than 128, tiles have half as many keys, so that their size in bytes is
    the same.  float32 products keep all operands in registers, which limits tiles to 16 x 16.

    With up to 16 rows, tiles of `int8` and `nvfp4` entries have 128 keys, which are 34 and 18 KiB.  On an H200, 64
    requests of 8,192 tokens with 64 heads and 8 KV heads take 0.382 and 0.410 ms, instead of 0.620 and 0.439 with 64
    keys.  Two stages take 0.360 and 0.408 ms, but spill 8 to 16 bytes per thread on some GPUs; three do on sm_89.

    With heads wider than 256, a program with 32 rows and 16 keys takes 96 KiB of shared memory, and its results 64
    registers per thread of 8 warps.
    """
    widest = max(entry.sizes)
    if jnp.dtype(dtype) == jnp.float32:
        return KVConfig(rows=16, keys=16, warps=8 if widest > 256 else 4, stages=1, programs_per_sm=2)
    if widest > 256:
        return KVConfig(rows=_padded(rows, 32), keys=16, warps=8, stages=2, programs_per_sm=2)
    if entry.format in ("int8", "nvfp4") and rows <= 16 and widest <= 128:
        stages = 1 if capability() == 89 else 3
        return KVConfig(rows=16, keys=128, warps=4, stages=stages, programs_per_sm=2, split_multiple=128)
    keys = 32 if widest > 128 else 64
    return KVConfig(rows=_padded(rows, 64), keys=keys, warps=8 if rows > 32 else 4, stages=2, programs_per_sm=4)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def _padded(rows: int, most: int) -> int:
    """Rows of a tile: a power of two, at least 16 as tensor cores need, at most `most`."""
    return min(max(16, next_power_of_two(rows)), most)
