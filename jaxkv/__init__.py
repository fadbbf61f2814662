"""Paged KV caches for JAX, with explicit strides.

A cache (`KVCache`) is one flat buffer and a static layout (`CacheLayout`) that defines where each entry lies in it.
Operations are pure functions: they take the cache and the layer as arguments, and those that write return a new cache.

    layout = CacheLayout(num_layers=27, num_blocks=64, block_size=64, entry=MLAEntry("bf16"))
    cache = KVCache.zeros(layout)
    slots = slots_for(block_tables, positions, cache)
    cache = write_mla(cache, kv_c, k_pe, slots, layer=5)
    out = decode_mla(q_latent, q_pe, cache, block_tables, seq_lens, layer=5, scale=192**-0.5)

- **New tokens**: `write_mla`, `write_kv`, `write_indexer_k` store them; `gather_mla`, `gather_kv`, `gather_indexer_k`
  read them back; `write_entries` and `gather_entries` do so with the bytes of entries; `read_mla`, `read_kv`,
  `read_indexer_k` read them by slot.
- **Attention**: `decode_mla`, `decode_kv`, and `plan_decode`, which schedules a step once for all layers;
  `prefill_mla`, `prefill_kv`, for many new tokens; `decode_mla_sparse`, to slots of one cache or, with `ExtraCache`, of
  two; the V3.2 indexer (`indexer_logits`, `select_topk`, `positions_to_slots`, and `select_slots`, which runs them on
  prompts of any length); `merge_states`; `mla_ragged_paged_attention` and `ragged_paged_attention`, which write and
  attend with the arguments of tpu-inference's kernels.
- **States**: `write_state`, `read_state` store and read those of recurrent layers and compressors;
  `decode_delta_rule` updates those of Gated DeltaNet and Kimi Delta Attention by a token, in place.
- **Whole blocks**: `copy_blocks`, `read_blocks`, `write_blocks`, `convert_blocks`.
- **Weights**: `grouped_swiglu`, feed-forwards of which each token passes through a few, chosen by `select_experts`;
  `TileScaled`, a weight in float8, and `scaled_linear`, tokens times such a weight.
- **Slots**: `slots_for`, `ragged_slots`, and `ragged_positions`.  A slot is `block * block_size + offset`; negative
  slots are skipped.
- **Pages of other libraries**: `block_tables_from_csr` makes block tables from FlashInfer's `paged_kv_indptr` and
  `paged_kv_indices`; `swizzle_scales` permutes the NVFP4 scales of vLLM's pages.
- **Caches**: `KVCache`, `CacheLayout`, `PackedLayout`, and the kinds of entries `MLAEntry`, `KVEntry`, `IndexerEntry`,
  `StateEntry`.  `TokenShards` defines which tokens of a request each of several devices' caches has.
- **Diagnosis**: `explain` reports which implementations support a call, and why others do not; `checked` raises
  ValueError for invalid data (slots, block ids, lengths) at run time.

`jaxkv.blocks` allocates blocks inside `jit`, with sharing and copy on write: for beam search and best-of-n.
`jaxkv.masks` has masks of attention by position that all implementations support.
`jaxkv.formats` registers entry formats of your own.
`jaxkv.models` has language models built on these operations, and `jaxkv.serving` the engine that serves them.
`jaxkv.offload` stores blocks in host memory and on disk.  `jaxkv.parallel` has recipes for several devices.
`jaxkv.testing` checks kernels of your own on every layout.  These modules are loaded on first use: `import jaxkv`
suffices.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING

__version__ = version("jaxkv")

if TYPE_CHECKING:
    from jaxkv import blocks as blocks
    from jaxkv import formats as formats
    from jaxkv import masks as masks
    from jaxkv import models as models
    from jaxkv import offload as offload
    from jaxkv import parallel as parallel
    from jaxkv import serving as serving
    from jaxkv import testing as testing
    from jaxkv.api import *  # noqa: F403 (its names are listed there)
else:  # Type checkers would accept any attribute of a module with `__getattr__`.

    def __getattr__(name):
        """Loads a module, or all other names, on first use: `jaxkv --help` does not import JAX."""
        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        if "__all__" not in globals():
            api = import_module(f"{__name__}.api")
            globals().update({each: getattr(api, each) for each in ("__all__", *api.__all__)})
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        modules = {module.name for module in iter_modules(__path__)} - {"__main__"}  # noqa: F405
        return sorted({*globals(), *modules, *__getattr__("__all__")})
