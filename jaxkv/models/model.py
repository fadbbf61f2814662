"""A model: its configuration, its weights and the layout of its cache."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from jaxkv.cache import KVCache
from jaxkv.layout.layout import ORDERS, CacheLayout
from jaxkv.layout.packed import Group, PackedLayout
from jaxkv.models import cache_groups
from jaxkv.models.config import GQA, CompressedAttention, DeltaNet, Indexer, ModelConfig
from jaxkv.models.parallel.base import OneDevice, Parallel
from jaxkv.models.split_cache import SplitCache, SplitLayouts
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry

STATE = "state"
"""The name of the group and the table of states."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A pytree of weights with a static configuration; it can be passed to `jit`."""

    params: Any
    config: ModelConfig = field(metadata={"static": True})
    entry_format: str = field(metadata={"static": True})
    """Format of the cached entries."""
    implementation: Any = field(default=None, metadata={"static": True})
    """The `implementation` argument of every operation on the cache."""
    parallel: Parallel = field(default=OneDevice(), metadata={"static": True})
    """The devices that hold the model, and what is divided over them."""
    state_block_size: int | None = field(default=None, metadata={"static": True})
    """Tokens per block of states, in a model with recurrent layers; None for as many as in blocks of entries.

    Prefixes that requests share end at multiples of it.  With fewer tokens, they are longer, but more states are kept.
    """

    def __repr__(self):
        layers = f"{self.config.num_layers} layers"
        return f"Model({layers}, entries of {self.entry}, {self.parallel})"  # without all weights

    def compiler_options(self, *, prefill: bool = False) -> dict[str, str]:
        """Options of `jit` with which steps take less time on GPUs.  The engines and `jaxkv bench step` use them.

        Kernels that do not need each other's results run side by side.  XLA launches a step as a CUDA graph, which is a
        chain by default.  With several devices, it stays one: the order of collectives must be the same on all of them.
        Results do not change: `tests/serving/test_concurrent_steps.py` compares them bit for bit.

        In a step with `prefill`, XLA does not merge the products of one activation with several weights, for which it
        copies these weights in every step.  On an H100, a step of DeepSeek-V2-Lite with 512 tokens of prompts beside
        256 of other requests takes 19.29 ms instead of 20.08.  Without prompts, merged products are faster, because the
        copies run beside other kernels: 15.52 ms instead of 15.75.
        """
        if jax.default_backend() != "gpu":
            return {}
        options = {"xla_gpu_dot_merger_threshold_mb": "0"} if prefill else {}
        if isinstance(self.parallel, OneDevice):
            options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
        return options

    @property
    def dtype(self) -> Any:
        """The dtype of activations, and therefore of queries."""
        return self.params["embed"].dtype

    @property
    def num_cache_layers(self) -> int:
        """Layers of the cache: one per attention of the model, and one for the MTP layer, if that is loaded."""
        return self.config.num_attentions + ("mtp" in self.params)

    @property
    def num_heads(self) -> int:
        """Query heads of one device."""
        return self.parallel.share(self.config.num_heads)

    @property
    def num_kv_heads(self) -> int:
        """Heads of one device's cache: its share of the KV heads of GQA, or 1 for MLA."""
        attention = self.config.attention
        return self.parallel.share(attention.num_kv_heads) if isinstance(attention, GQA) else 1

    @property
    def entry(self) -> MLAEntry | KVEntry:
        """The entry that the cache stores per token and head.  With an indexer, it also stores the indexer's key."""
        return self.config.attention.entry(self.entry_format)

    def entry_scales(self, layer) -> dict[str, jax.Array]:
        """The scales of entries in a layer of the cache, as arguments of the operations; empty if the format has none.

        `layer` may be traced.
        """
        scales = self.params["entry_scales"]
        return {name: lax.dynamic_index_in_dim(of, layer, keepdims=False) for name, of in scales.items()}

    def layout(
        self, num_blocks: int, block_size: int | None = None, order: str = "BLNHC"
    ) -> CacheLayout | PackedLayout:
        """The layout of one device's cache; `block_size` is by default the model's `usual_block_size`.

        It is a PackedLayout if there are several groups: with the indexer's keys, with states, or with windows, whose
        tables have block sizes of their own (`cache_groups.py`).

        Raises:
          ValueError: an argument is invalid, or `order` is layer-major and the layout is a PackedLayout.
        """
        block_size = self.parallel.device_block_size(self.usual_block_size if block_size is None else block_size)
        if (groups := self._expiring) is not None:
            sizes = cache_groups.block_sizes(groups, block_size)
            return PackedLayout(num_blocks=num_blocks, block_size=sizes, groups=groups, order=order)  # type: ignore[arg-type]
        if self.config.indexer is not None:
            return self.packed_layout(self.config.indexer, num_blocks, block_size, order)
        if self.config.recurrent is not None:
            return self.layout_with_states(self.config.recurrent, num_blocks, block_size, order)
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "order": order, "shards": self.parallel.shards}
        return CacheLayout(num_layers=self.num_cache_layers, num_heads=self.num_kv_heads, entry=self.entry, **sizes)  # type: ignore[arg-type]

    def packed_layout(self, indexer: Indexer, num_blocks: int, block_size: int, order: str = "BLNHC") -> PackedLayout:
        """The layout of a model with an indexer: groups "latent" and "indexer" in the same blocks.

        Layers that share a selection of tokens have no indexer keys.
        """
        layers, keys = self.num_cache_layers, IndexerEntry.for_latents(self.entry_format, indexer.head_dim)
        selecting = layers if indexer.layers is None else len(indexer.layers) + layers - self.config.num_layers
        groups = {"latent": Group(layers, self.entry), "indexer": Group(selecting, keys)}
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "order": order, "shards": self.parallel.shards}
        return PackedLayout(groups=groups, **sizes)  # type: ignore[arg-type]

    def split_layouts(self, num_blocks: int, block_size: int | None = None) -> SplitLayouts:
        """The layouts of a `SplitCache`, whose latents are in host memory and the indexer's keys on the device.

        ValueError unless the model has latent
        attention with an indexer.
        """
        if self.config.indexer is None:
            raise ValueError(
                f"`model` is a {self.config.architecture}, whose attention has no indexer over latents: expected a "
                "model with sparse latent attention, such as DeepSeek V3.2 or GLM-5"
            )
        block_size = self.usual_block_size if block_size is None else block_size
        packed = self.packed_layout(self.config.indexer, num_blocks, block_size)
        latents, keys = (
            CacheLayout(num_layers=group.num_layers, num_blocks=num_blocks, block_size=block_size, entry=group.entry)
            for group in (packed.groups["latent"], packed.groups["indexer"])
        )
        return SplitLayouts(latents, keys)

    def layout_with_states(
        self, recurrent: DeltaNet, num_blocks: int, block_size: int, order: str = "BLNHC"
    ) -> PackedLayout:
        """The layout of a model with recurrent layers: groups "kv" and "state", the latter in blocks of its own.

        A block of the table "state" has the states of all recurrent layers after the last token of the block that was
        computed.  Blocks of both tables have as many bytes: with large states, large blocks waste less memory.
        """
        rate = block_size if self.state_block_size is None else self.state_block_size
        groups = {
            "kv": Group(self.num_cache_layers, self.entry, self.num_kv_heads),
            STATE: Group(len(recurrent.layers), recurrent.state, rate=rate, table=STATE, window=1),
        }
        sizes = {"num_blocks": num_blocks, "block_size": {"": block_size, STATE: rate}, "order": order}
        return PackedLayout(groups=groups, dtype=self.entry.dtype, **sizes)  # type: ignore[arg-type]

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the block tables of a request: "" for the entries that all later tokens attend to.

        Others are for states ("state"), for layers with a window ("window"), and for what compressed attention needs of
        the last tokens.  If all layers have a window, the only table is "".  On devices that divide the tokens of
        requests (`ContextParallel`), layers with a window have no table of their own.
        """
        if (groups := self._expiring) is not None:
            return tuple(dict.fromkeys(group.table for group in groups.values()))
        return ("",) if self.config.recurrent is None else ("", STATE)

    @property
    def _expiring(self) -> dict[str, Group] | None:
        """The groups of a cache with windows, by name; None for other caches."""
        attention = self.config.attention
        if isinstance(attention, CompressedAttention):
            return cache_groups.of_compressed(attention, self.entry_format)
        if isinstance(attention, GQA) and attention.windowed and not self.parallel.divides_tokens:
            entry = attention.entry(self.entry_format)
            return cache_groups.of_windows(attention, self.num_cache_layers, entry, self.num_kv_heads)
        return None

    @property
    def usual_block_size(self) -> int:
        """The default number of tokens per block: 64, or the smallest multiple of that which the model supports.

        It is a multiple of the rates of compressed attention, and of the number of tokens that devices divide evenly.
        With states, it is the first, doubled until the entries of a block take as many bytes as the states of one, or
        more: states of Qwen3-Next-80B take 79 MB, as much as 3,220 tokens of its bf16 keys and values, and those of
        Kimi-Linear-48B 45 MB, as much as 5,570 latents.
        """
        attention, recurrent = self.config.attention, self.config.recurrent
        rates = (attention.csa_rate, attention.hca_rate) if isinstance(attention, CompressedAttention) else ()
        size = math.lcm(64, *rates, self.parallel.block_unit)
        if recurrent is not None:
            states = len(recurrent.layers) * recurrent.state.nbytes
            while self.num_cache_layers * self.num_kv_heads * self.entry.page_nbytes(size) < states:
                size *= 2
        return size

    @property
    def cache_devices(self) -> int:
        """Over how many devices the blocks of a cache are divided, for pools (`jaxkv.offload`) of its blocks.

        It is 1 if every device has whole blocks, as those of tensor-parallel MLA do.
        """
        return self.parallel.cache_devices(_first_group(self.layout(1)))

    @property
    def cache_parts(self) -> tuple[int, ...]:
        """Which of the parts of a block devices of this process have, for its pools if there are several processes.

        Parts are numbered from 0 to `cache_devices` - 1, in the order of the mesh.
        """
        return self.parallel.cache_parts(_first_group(self.layout(1)))

    def cache(self, num_blocks: int, block_size: int | None = None, order: str = "BLNHC") -> KVCache:
        """A cache of zeros for `prefill` and `decode`, on the model's devices.

        `num_blocks` and `block_size` are those of block tables and slots; the default of `block_size` is
        `usual_block_size`.  On several devices, `parallel` decides which part of them each device holds.

        For a model with an indexer (V3.2, GLM-5), states (Qwen3-Next, Kimi Linear) or windows (GPT-OSS, V4), the result
        is a view of the first group of its layout.  `copy_blocks`, `read_blocks` and `write_blocks` still move whole
        blocks, with all groups.
        """
        return self.parallel.zeros(_first_group(self.layout(num_blocks, block_size, order)))

    def groups_of(self, cache: KVCache) -> PackedLayout:
        """The groups of a cache with windows, given as the view of its first group.

        ValueError if it does not have the model's groups.
        """
        groups: Any = self._expiring
        rate = next(iter(groups.values())).rate
        layouts: Any = (
            self.layout(cache.layout.num_blocks, cache.layout.block_size * rate, order)
            for order in ORDERS
            if order[0] == "B"
        )
        expected = []
        for layout in layouts:
            expected.append(next(iter(layout.values())))
            if expected[-1] == cache.layout:
                return layout
        raise ValueError(
            "`cache` does not have the model's groups where the model expects them: make it with `model.cache`\n"
            f"it has\n{cache.layout}\nexpected\n{expected[0]}"
        )

    def windowed_view(self, cache: KVCache) -> tuple[KVCache, str]:
        """The cache as the view of its layers with a window, and the name of their table.

        `cache` is the view of the first group.  The result is `cache` and "" unless the layers with a window are a
        group beside others.
        """
        if not isinstance(self.config.attention, GQA) or (groups := self._expiring) is None:
            return cache, cache_groups.MAIN
        name = cache_groups.SLIDING_WINDOW
        return cache.view(self.groups_of(cache)[name]), groups[name].table

    def check_cache(self, cache: KVCache | SplitCache) -> None:
        """ValueError unless `cache` fits this model.

        Its entries must be the model's.  Any strides are accepted, except for models with several groups, whose
        cache must have its packed layout.
        """
        if isinstance(cache, SplitCache):
            found = SplitLayouts(cache.hot.host, cache.keys.layout)
            expected = self.split_layouts(cache.layout.num_blocks, cache.layout.block_size)
            if found != expected:
                raise ValueError(
                    f"`cache` has the layouts\n{found}\nexpected those of `model.split_layouts`\n{expected}"
                )
            return
        if not isinstance(cache, KVCache):
            raise ValueError(f"`cache` is a {type(cache).__name__}: expected a KVCache, from `model.cache`")
        layout, config = cache.layout, self.config
        if self._expiring is not None:
            self.groups_of(cache)
            return
        if layout.num_layers != self.num_cache_layers:
            raise ValueError(f"`cache` has {layout.num_layers} layers: expected the model's {self.num_cache_layers}")
        if layout.shards != self.parallel.shards:
            raise ValueError(
                f"`cache` has tokens of {layout.shards}: expected {self.parallel.shards}, as the model divides them"
            )
        if layout.entry != self.entry:
            raise ValueError(f"`cache` has entries {layout.entry}: expected {self.entry}, as the model computes them")
        if config.indexer is not None:
            expected = self.packed_layout(config.indexer, layout.num_blocks, layout.block_size)["latent"]
            if layout != expected:
                raise ValueError(
                    "`cache` has no room for the indexer's keys where the model expects them: make it with "
                    f"`model.cache`\nit has\n{layout}\nexpected\n{expected}"
                )
        if config.recurrent is not None:
            sizes = config.recurrent, layout.num_blocks, layout.block_size
            if layout not in [self.layout_with_states(*sizes, order)["kv"] for order in ORDERS if order[0] == "B"]:
                raise ValueError(
                    "`cache` has no room for states where the model expects them: make it with "
                    f"`model.cache`\nit has\n{layout}\nexpected\n{self.layout_with_states(*sizes)['kv']}"
                )


def _first_group(layout: CacheLayout | PackedLayout) -> CacheLayout:
    """The layout of a cache: that of the first group, if there are several."""
    return next(iter(layout.values())) if isinstance(layout, PackedLayout) else layout
