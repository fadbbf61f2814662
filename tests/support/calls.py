"""Calls of every public function, whose arrays have axes of chosen lengths.

Each function has one or several calls, by name: the name of the function and, after a comma, what is special.  The
arguments of a call are made by a function of lengths and of a random generator.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import masks

LENGTHS = {"B": 2, "M": 2, "Q": 2, "T": 3, "H": 4, "K": 3, "N": 7, "n": 2, "E": 4, "D": 8, "I": 6, "S": 2}
"""The length of each axis, by the letter that documentation uses; "S" are parts of a merge."""
EXCLUDED = {"checked", "explain", "implementations"}
"""Public functions that are not operations."""
PUBLIC = {name for name in jaxkv.__all__ if inspect.isfunction(getattr(jaxkv, name))} - EXCLUDED
SIZES = dict(num_layers=2, num_blocks=6, block_size=4)
MLA = jaxkv.CacheLayout(**SIZES, entry=jaxkv.MLAEntry("f32", latent=8, rope=4))
KV = jaxkv.CacheLayout(**SIZES, entry=jaxkv.KVEntry("f32", head_dim=8, value_dim=4), num_heads=2)
INDEXER = jaxkv.CacheLayout(**SIZES, entry=jaxkv.IndexerEntry("f32", head_dim=8))
STATES = jaxkv.CacheLayout(**SIZES, entry=jaxkv.StateEntry({"conv": ((2, 3), "float32"), "ssm": ((4,), "float32")}))
DELTA = {"conv": ((2, 10), "float32"), "delta": ((2, 2, 3), "float32")}
DELTA_STATES = jaxkv.CacheLayout(**SIZES, entry=jaxkv.StateEntry(DELTA))
OTHER = jaxkv.CacheLayout(**SIZES, entry=MLA.entry, order="LBNHC", dtype="uint8")
LARGER = jaxkv.CacheLayout(num_layers=2, num_blocks=6, block_size=6, entry=MLA.entry, order="LBNHC", dtype="uint8")


class Lengths:
    """The lengths of axes as attributes; `read` are the letters of those that were used."""

    def __init__(self, **changes: int):
        self._lengths, self.read = {**LENGTHS, **changes}, set()

    def __getattr__(self, letter: str) -> int:
        self.read.add(letter)
        return self._lengths[letter]


class Draw:
    """Random arguments, as NumPy arrays, which are made without compiling."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def floats(self, *shape):
        return np.asarray(self._rng.standard_normal(shape), np.float32)

    def ints(self, first: int, end: int, *shape):
        return np.asarray(self._rng.integers(first, end, shape), np.int32)

    def distinct(self, count: int, *shape):
        """Distinct ints below `count`."""
        return self._rng.permutation(count)[: int(np.prod(shape))].reshape(shape).astype(np.int32)

    def running_sum(self, steps: int, total: int):
        """int32 [steps + 1], from 0 to `total`, by steps of at least 1 if `total` is large enough."""
        inner = np.sort(self._rng.permutation(max(total - 1, 0))[: max(steps - 1, 0)] + 1)
        return np.asarray([0, *inner, *[total] * (steps > 0)], np.int32)

    def cache(self, layout):
        """A cache of random float32 values."""
        return jaxkv.KVCache(self.floats(layout.size).view(layout.dtype), layout)

    def layer(self):
        return self.ints(0, SIZES["num_layers"])

    def tables(self, n):
        """Block tables and the lengths of requests."""
        return {"block_tables": self.distinct(6, n.B, n.M), "seq_lens": self.ints(2, 9, n.B)}


def _write_mla(n, d):
    new = {"kv_c": d.floats(n.T, 8), "k_pe": d.floats(n.T, 4)}
    return dict(cache=d.cache(MLA), **new, slot_mapping=d.distinct(24, n.T), layer=d.layer())


def _write_kv(n, d):
    new = {"k": d.floats(n.T, 2, 8), "v": d.floats(n.T, 2, 4)}
    return dict(cache=d.cache(KV), **new, slot_mapping=d.distinct(24, n.T), layer=d.layer())


def _write_indexer_k(n, d):
    return dict(cache=d.cache(INDEXER), k=d.floats(n.T, 8), slot_mapping=d.distinct(24, n.T), layer=d.layer())


def _write_entries(n, d):
    rows = d.floats(n.T, sum(MLA.entry.sizes)).view(np.uint8)
    return dict(cache=d.cache(MLA), entries=rows, slot_mapping=d.distinct(24, n.T), layer=d.layer())


def _write_state(n, d):
    states = {"conv": d.floats(n.T, 2, 3), "ssm": d.floats(n.T, 4)}
    return dict(cache=d.cache(STATES), states=states, slots=d.distinct(24, n.T), layer=d.layer())


def _decode_delta_rule(n, d):
    read, written = np.split(d.distinct(24, 2 * n.T), 2)
    gates = {"decay": -abs(d.floats(n.T, 2, 1)), "rate": d.floats(n.T, 2)}
    slots = {"read_slots": read, "write_slots": written}
    return dict(
        x=d.floats(n.T, 10), **gates, conv_weight=d.floats(10, 3), cache=d.cache(DELTA_STATES), **slots, layer=d.layer()
    )


def _gather(layout, **options):
    def arguments(n, d):
        tables, sums = d.distinct(6, n.B, n.M), d.running_sum(n.B, 5)
        starts = d.ints(0, 4, n.B)
        return dict(
            cache=d.cache(layout), block_tables=tables, cu_seq_lens=sums, layer=d.layer(), total=6, seq_starts=starts,
            **options,
        )  # fmt: skip

    return arguments


def _read(layout, **options):
    return lambda n, d: dict(cache=d.cache(layout), slots=d.ints(-1, 24, n.T), layer=d.layer(), **options)


def _mla_queries(n, d, *axes):
    return {"q_latent": d.floats(*axes, n.H, 8), "q_pe": d.floats(*axes, n.H, 4)}


def _decode_mla(n, d):
    queries = _mla_queries(n, d, n.B)
    return dict(**queries, cache=d.cache(MLA), **d.tables(n), layer=d.layer(), scale=d.floats())


def _decode_mla_of_several(n, d):
    queries = _mla_queries(n, d, n.B, n.Q)
    options = dict(layer=d.layer(), scale=0.3, sinks=d.floats(n.H), logit_cap=5.0, window=3, return_lse=True)
    return dict(**queries, cache=d.cache(MLA), **d.tables(n), **options)


def _decode_mla_planned(n, d):
    arguments = _decode_mla(n, d)
    paged = (arguments[name] for name in ("cache", "block_tables", "seq_lens"))
    return {**arguments, "plan": jaxkv.plan_decode(*paged, num_heads=n.H, dtype=jnp.float32)}


def _decode_kv(n, d):
    return dict(q=d.floats(n.B, n.Q, n.H, 8), cache=d.cache(KV), **d.tables(n), layer=d.layer(), scale=0.3)


def _decode_kv_ragged(n, d):
    options = dict(layer=d.layer(), scale=0.3, cu_q_lens=d.running_sum(n.B, n.T), return_lse=True, causal=False)
    options["q_scale"] = 0.5 + abs(d.floats(n.H))
    return dict(q=d.floats(n.T, n.H, 8).astype(jnp.float8_e4m3fn), cache=d.cache(KV), **d.tables(n), **options)


def _decode_kv_windowed(n, d):
    return {**_decode_kv_ragged(n, d), "window": (2, 1)}


def _decode_kv_of_prefixes(n, d):
    """Every request has one of several prefixes, or none."""
    prefixes = {"prefix_tables": d.distinct(6, n.S, n.M), "prefix_lens": d.ints(1, 9, n.S)}
    options = dict(prefix_of=d.ints(-1, 2, n.B), layer=d.layer(), scale=0.3, return_lse=True)
    return dict(q=d.floats(n.B, n.Q, n.H, 8), cache=d.cache(KV), **d.tables(n), **prefixes, **options)


def _decode_mla_of_a_prefix(n, d):
    prefix = {"prefix_tables": d.distinct(6, n.M), "prefix_lens": d.ints(1, 9)}
    return {**_decode_mla(n, d), **prefix}


def _decode_kv_masked(n, d):
    mask = masks.Prefix(1) | masks.Sliding(3, 1)
    return {**_decode_kv(n, d), "tree_mask": d.ints(0, 2, n.B, n.Q, n.Q) > 0, "mask": mask}


def _plan_decode(n, d):
    return dict(cache=d.cache(MLA), **d.tables(n), num_heads=n.H, q_len=n.Q)


def _plan_decode_ragged(n, d):
    ragged = {"cu_q_lens": d.running_sum(n.B, n.T), "total": n.T}
    return dict(cache=d.cache(KV), **d.tables(n), num_heads=n.H, **ragged)


def _decode_mla_sparse(n, d):
    chosen = {"slots": d.ints(-1, 24, n.B, n.Q, n.K), "counts": d.ints(1, 4, n.B, n.Q)}
    options = dict(layer=d.layer(), scale=d.floats(), sinks=d.floats(n.H), return_lse=True, return_max_logits=True)
    return dict(**_mla_queries(n, d, n.B, n.Q), cache=d.cache(MLA), **chosen, **options)


def _decode_mla_sparse_of_two(n, d):
    extra = jaxkv.ExtraCache(d.cache(MLA), d.ints(-1, 24, n.B, n.Q, n.K), d.layer())
    return {**_decode_mla_sparse(n, d), "extra": extra}


def _indexer(n, d):
    queries = {"q": d.floats(n.B, n.Q, n.H, 8), "weights": d.floats(n.B, n.Q, n.H)}
    return dict(**queries, cache=d.cache(INDEXER), **d.tables(n), layer=d.layer(), max_len=7)


def _indexer_ragged(n, d):
    queries = {"cu_q_lens": d.running_sum(n.B, n.T), "q": d.floats(n.T, n.H, 8), "weights": d.floats(n.T, n.H)}
    return dict(**queries, **d.tables(n), cache=d.cache(INDEXER), layer=d.layer(), max_len=7)


def _merge_states(n, d):
    return dict(outs=d.floats(n.S, n.B, n.H, 8), lses=d.floats(n.S, n.B, n.H))


def _merge_states_of_a_list(n, d):
    found = _merge_states(n, d)
    return {name: list(x) for name, x in found.items()}


def _convert_blocks(n, d):
    rows = d.floats(n.n, MLA.pages.block_elements)
    return dict(data=rows, src=MLA, dst=OTHER)


def _select_experts_in_groups(n, d):
    groups = dict(scoring="sigmoid", groups=2, groups_per_token=1, normalize=True)
    return dict(logits=d.floats(n.T, n.E), per_token=2, bias=d.floats(n.E), **groups)


def _grouped_swiglu(n, d):
    weights = d.floats(n.E, n.I, n.D), d.floats(n.E, n.I, n.D), d.floats(n.E, n.D, n.I)
    chosen = dict(experts=d.ints(-1, 5, n.T, n.K), weights=d.floats(n.T, n.K))
    return dict(x=d.floats(n.T, n.D), **chosen, **dict(zip(("gate", "up", "down"), weights, strict=True)))


def _grouped_swiglu_with_all(n, d):
    shared = d.floats(n.I, n.D), d.floats(n.I, n.D), d.floats(n.D, n.I)
    biases = d.floats(n.E, n.I), d.floats(n.E, n.I), d.floats(n.E, n.D)
    return {**_grouped_swiglu(n, d), "shared": shared, "biases": biases, "alpha": 1.7, "limit": 2.0}


def _scaled(weight, e4m3_products=False):
    """A `TileScaled`; `TileScaled.of` is not defined for axes of length 0."""
    tiles = [-(-size // 128) for size in weight.shape[-2:]]
    scales = np.full((*weight.shape[:-2], *tiles), 0.5, np.float32)
    return jaxkv.TileScaled(weight.astype(jnp.float8_e4m3fn), scales, e4m3_products)


def _grouped_swiglu_in_float8(n, d):
    found = _grouped_swiglu(n, d)
    return {name: _scaled(x, True) if name in ("gate", "up", "down") else x for name, x in found.items()}


def _scaled_linear(e4m3_products):
    return lambda n, d: dict(x=d.floats(n.T, n.D), weight=_scaled(d.floats(n.I, n.D), e4m3_products))


def _prefill_mla(n, d):
    queries = {"q_nope": d.floats(n.B, n.Q, n.H, 6), "q_pe": d.floats(n.B, n.Q, n.H, 4)}
    weights = {"w_uk": d.floats(n.H, 6, 8), "w_uv": d.floats(n.H, 5, 8)}
    options = dict(layer=d.layer(), scale=0.3, expanded_bytes=1, return_lse=True)
    return dict(**queries, **weights, cache=d.cache(MLA), **d.tables(n), **options)


def _prefill_mla_ragged(n, d):
    queries = {"q_nope": d.floats(n.T, n.H, 6), "q_pe": d.floats(n.T, n.H, 4)}
    weights = {"w_uk": d.floats(n.H, 6, 8), "w_uv": d.floats(n.H, 5, 8)}
    sums = np.asarray([0, 1, n.T][: n.B + 1], np.int32)
    options = dict(layer=d.layer(), scale=0.3, expanded_bytes=1, cu_q_lens=sums, num_decodes=1)
    return dict(**queries, **weights, cache=d.cache(MLA), **d.tables(n), **options)


def _prefill_kv(n, d):
    options = dict(layer=d.layer(), scale=0.3, sinks=d.floats(n.H), gathered_bytes=1)
    return dict(q=d.floats(n.B, n.Q, n.H, 8), cache=d.cache(KV), **d.tables(n), **options)


def _prefill_kv_ragged(n, d):
    options = dict(layer=d.layer(), scale=0.3, gathered_bytes=1, cu_q_lens=d.running_sum(n.B, n.T))
    return dict(q=d.floats(n.T, n.H, 8), cache=d.cache(KV), **d.tables(n), **options, logit_cap=5.0)


def _ragged(n, d):
    """The last arguments of tpu-inference's kernels."""
    paged = {"kv_lens": d.ints(3, 9, n.B), "page_indices": d.distinct(6, n.B * n.M)}
    counts = {"cu_q_lens": d.running_sum(n.B, n.T), "distribution": np.asarray([0, 0, n.B], np.int32)}
    return {**paged, **counts, "layer": d.layer(), "sm_scale": 0.3}


def _mla_ragged(n, d):
    queries = {"ql_nope": d.floats(n.T, n.H, 8), "q_pe": d.floats(n.T, n.H, 4)}
    new = {"new_kv_c": d.floats(n.T, 8), "new_k_pe": d.floats(n.T, 4)}
    return dict(**queries, **new, cache_kv=d.cache(MLA), **_ragged(n, d))


def _kv_ragged(n, d):
    new = {"queries": d.floats(n.T, n.H, 8), "keys": d.floats(n.T, 2, 8), "values": d.floats(n.T, 2, 4)}
    return dict(**new, kv_cache=d.cache(KV), **_ragged(n, d))


def _ragged_slots(n, d):
    sums, starts = d.running_sum(n.B, 5), d.ints(0, 4, n.B)
    return dict(block_tables=d.distinct(6, n.B, n.M), cu_seq_lens=sums, cache=d.cache(MLA), total=6, seq_starts=starts)


def _block_tables_from_csr(n, d):
    pages = {"indptr": np.sort(d.ints(0, n.n + 1, n.B + 1)), "indices": d.distinct(6, n.n)}
    return dict(**pages, last_page_len=d.ints(1, 5, n.B), block_size=4, max_blocks=3)


def _swizzle_scales(n, d):
    return dict(scales=d.ints(0, 256, n.B, n.H, 8, 12).astype(np.uint8), inverse=True)


def _write_blocks(n, d):
    rows = d.floats(n.n, MLA.pages.block_elements)
    return dict(cache=d.cache(MLA), blocks=d.distinct(6, n.n), data=rows)


ARGUMENTS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "write_mla": _write_mla,
    "write_mla, rotated": lambda n, d: {**_write_mla(n, d), "cos_sin": d.floats(n.T, 4)},
    "write_kv": _write_kv,
    "write_kv, rotated": lambda n, d: {**_write_kv(n, d), "cos_sin": d.floats(n.T, 8), "interleaved": True},
    "write_indexer_k": _write_indexer_k,
    "write_entries": _write_entries,
    "write_state": _write_state,
    "read_state": _read(STATES),
    "decode_delta_rule": _decode_delta_rule,
    "gather_mla": _gather(MLA, dtype=jnp.float32),
    "gather_kv": _gather(KV, dtype=jnp.float32),
    "gather_indexer_k": _gather(INDEXER, dtype=jnp.float32),
    "gather_entries": _gather(MLA),
    "read_mla": _read(MLA, dtype=jnp.float32),
    "read_kv": _read(KV, dtype=jnp.float32),
    "read_indexer_k": _read(INDEXER, dtype=jnp.float32),
    "plan_decode": _plan_decode,
    "plan_decode, ragged": _plan_decode_ragged,
    "decode_mla": _decode_mla,
    "decode_mla, several query tokens": _decode_mla_of_several,
    "decode_mla, with a plan": _decode_mla_planned,
    "decode_kv": _decode_kv,
    "decode_kv, ragged": _decode_kv_ragged,
    "decode_kv, ragged with a window": _decode_kv_windowed,
    "decode_mla, with a prefix": _decode_mla_of_a_prefix,
    "decode_kv, with prefixes": _decode_kv_of_prefixes,
    "decode_kv, with masks": _decode_kv_masked,
    "decode_mla_sparse": _decode_mla_sparse,
    "decode_mla_sparse, of two caches": _decode_mla_sparse_of_two,
    "indexer_logits": _indexer,
    "indexer_logits, ragged": _indexer_ragged,
    "select_topk": lambda n, d: dict(logits=d.floats(n.B, n.N), k=3, lengths=d.ints(0, 9, n.B)),
    "positions_to_slots": lambda n, d: dict(
        positions=d.ints(-1, 9, n.B, n.Q, n.K), block_tables=d.distinct(6, n.B, n.M), cache=d.cache(MLA)
    ),
    "select_slots": lambda n, d: {**_indexer(n, d), "k": 3},
    "select_slots, in chunks": lambda n, d: {**_indexer(n, d), "k": 3, "logits_bytes": 1},
    "merge_states": _merge_states,
    "merge_states, of a list": _merge_states_of_a_list,
    "copy_blocks": lambda n, d: dict(cache=d.cache(MLA), src=d.ints(-1, 6, n.n), dst=d.distinct(6, n.n)),
    "read_blocks": lambda n, d: dict(cache=d.cache(MLA), blocks=d.ints(-1, 7, n.n)),
    "write_blocks": _write_blocks,
    "convert_blocks": _convert_blocks,
    "convert_blocks, to another size": lambda n, d: {**_convert_blocks(n, d), "dst": LARGER, "num_tokens": 4 * n.n},
    "select_experts": lambda n, d: dict(logits=d.floats(n.T, n.E), per_token=2),
    "select_experts, in groups": _select_experts_in_groups,
    "grouped_swiglu": _grouped_swiglu,
    "grouped_swiglu, with all arguments": _grouped_swiglu_with_all,
    "grouped_swiglu, in float8": _grouped_swiglu_in_float8,
    "scaled_linear": _scaled_linear(False),
    "scaled_linear, products of e4m3": _scaled_linear(True),
    "slots_for": lambda n, d: dict(
        block_tables=d.distinct(6, n.B, n.M), positions=d.ints(-1, 9, n.B, n.T), cache=d.cache(MLA)
    ),
    "ragged_slots": _ragged_slots,
    "ragged_positions": lambda n, d: dict(cu_seq_lens=d.running_sum(n.B, 5), total=6, seq_starts=d.ints(0, 4, n.B)),
    "block_tables_from_csr": _block_tables_from_csr,
    "swizzle_scales": _swizzle_scales,
    "prefill_mla": _prefill_mla,
    "prefill_mla, ragged": _prefill_mla_ragged,
    "prefill_kv": _prefill_kv,
    "prefill_kv, with a window": lambda n, d: {**_prefill_kv(n, d), "window": 3},
    "prefill_kv, ragged": _prefill_kv_ragged,
    "prefill_kv, ragged with a window": lambda n, d: {**_prefill_kv_ragged(n, d), "window": (2, 1), "causal": False},
    "prefill_mla, with a window": lambda n, d: {**_prefill_mla(n, d), "window": (2, 1), "causal": False},
    "mla_ragged_paged_attention": _mla_ragged,
    "ragged_paged_attention": _kv_ragged,
}


class Called(NamedTuple):
    """A call, whose arrays can be replaced by others, such as traced ones."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def arrays(self) -> list[np.ndarray]:
        """The arrays among the arguments, without those of caches."""
        return [x for x in self._leaves if isinstance(x, np.ndarray | jax.Array)]

    @property
    def buffers(self) -> list[np.ndarray]:
        """The buffers of the caches among the arguments."""
        return [x.buffer for x in self._leaves if _is_cache(x)]

    def __call__(self, arrays, buffers):
        """The result with other arrays and buffers."""
        arrays, buffers = iter(arrays), iter(buffers)

        def other(x):
            if _is_cache(x):
                return jaxkv.KVCache(next(buffers), x.layout)
            return next(arrays) if isinstance(x, np.ndarray | jax.Array) else x

        return self.function(**jax.tree.map(other, self.arguments, is_leaf=_is_cache))

    @property
    def _leaves(self):
        return jax.tree.leaves(self.arguments, is_leaf=_is_cache)


def _is_cache(x) -> bool:
    return isinstance(x, jaxkv.KVCache)


def called(name: str, seed: int = 0, **changes: int) -> Called:
    """The call of that name, with random arguments, some axes of which have other lengths."""
    return Called(getattr(jaxkv, name.split(",")[0]), ARGUMENTS[name](Lengths(**changes), Draw(seed)))


def letters(name: str) -> list[str]:
    """The letters of the axes of a call's arrays."""
    lengths = Lengths()
    ARGUMENTS[name](lengths, Draw(0))
    return sorted(lengths.read)
