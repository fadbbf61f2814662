"""Entries that a kernel does not know: rejected with a reason, for it must not guess what their bytes mean."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.dispatch import BACKENDS
from jaxkv.support import sample_calls
from jaxkv_kernels.calls import Kernels
from jaxkv_kernels.formats import FORMATS, Format
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.format import together
from jaxkv_kernels.formats.states import StateEntry
from support.compare import assert_same_bits

KINDS = (MLAEntry, KVEntry, IndexerEntry)
WITHOUT_ENTRIES = {"copy_blocks", "read_blocks", "write_blocks", "select_topk", "merge_states"}
WITHOUT_ENTRIES |= {"write_entries", "gather_entries", "select_experts", "grouped_swiglu", "scaled_linear"}
"""Operations that move any bytes, or read no cache."""


class Toy(Format):
    """float16 values, last first, their bits flipped: as wide as `f16`, so that nothing but the bytes differs."""

    dtype = "float16"

    def __init__(self, name, *, scaled=False):
        self.name, self.scaled = name, scaled
        self.kinds = (MLAEntry, KVEntry) if scaled else KINDS  # indexer keys have no scales

    def fields(self, sizes, block_size):
        return together(*((name, "float16", count) for name, count in sizes.items()))

    def encode(self, values, scales):
        if self.scaled:
            values = [value / scale[..., None] for value, scale in zip(values, scales, strict=True)]
        row = jnp.concatenate([value.astype(jnp.float16) for value in values], axis=-1)
        return view_as(self._flipped(row[..., ::-1]), jnp.dtype(self.dtype))

    def decode(self, row, sizes, scales, dtype):
        row = self._flipped(view_as(row, jnp.float16))[..., ::-1]
        values = jnp.split(row, np.cumsum([*sizes.values()])[:-1], axis=-1)
        scales = [None if scale is None else scale[..., None] for scale in scales]
        return [
            (value if scale is None else value * scale).astype(dtype)
            for value, scale in zip(values, scales[: len(values)], strict=True)
        ]

    def _flipped(self, row):
        return view_as(view_as(row, jnp.uint16) ^ 0x5555, jnp.float16)


class ToyBytes(Toy):
    """The same as bytes, as quantised formats are."""

    dtype = "uint8"


TOYS = [Toy("toy"), ToyBytes("bytes"), Toy("scaled toy", scaled=True), ToyBytes("scaled bytes", scaled=True)]


def each(toys):
    """Parametrises `toy`."""
    return pytest.mark.parametrize("toy", toys, ids=lambda toy: toy.name)


each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
each_implementation = pytest.mark.parametrize("candidate", BACKENDS, ids=lambda candidate: candidate.name)


@pytest.fixture
def registered(monkeypatch, toy):
    """For the test, `toy` is the only format."""
    for name in [*FORMATS]:
        monkeypatch.delitem(FORMATS, name)
    monkeypatch.setitem(FORMATS, toy.name, toy)


def kernels_of(backend):
    """The names of the operations that an implementation has kernels for."""
    return {name for name in vars(Kernels) if backend.kernels().support(name)} - {"stamp"}


def calls():
    """(operation, call) of the samples whose entries are of the formats that are registered: all but states."""
    for operation, (_, args, kwargs) in sample_calls():
        call = operation.call(*args, **kwargs)
        if not isinstance(getattr(call, "entry", None), StateEntry):
            yield operation.name, call


@each(TOYS)
@pytest.mark.usefixtures("registered")
@each_implementation
def test_a_format_that_is_not_listed_is_rejected(candidate, toy):
    seen = set()
    for operation, call in calls():
        seen.add(operation)
        reasons = candidate.kernels().unsupported_reasons(call)
        if operation in WITHOUT_ENTRIES:
            assert not any("format" in reason for reason in reasons)
        elif candidate.name == "xla":  # the format itself encodes and decodes
            assert reasons == []
        elif candidate.kernels().support(operation):
            shown = [reason.split(": supports")[0] for reason in reasons]
            assert shown == [f"entries of format {toy.name!r}"], operation
    unseen = {"fetch_rows", "store_rows"}  # called by `jaxkv.offload`, without samples
    unseen |= {"write_indexer_k", "gather_indexer_k", "read_indexer_k", "indexer_logits"} if toy.scaled else set()
    unseen |= {"write_state", "read_state"}
    assert kernels_of(candidate) - unseen <= seen


@each_kind
@each_implementation
def test_a_kind_of_entry_that_is_not_listed_is_rejected(candidate, kind):
    other, support, rejected = type("Other", (kind,), {}), candidate.kernels().support, set()
    listed = {name for name in kernels_of(candidate) - WITHOUT_ENTRIES if kind in support(name).entries}
    for operation, call in calls():
        if type(getattr(call, "entry", None)) is kind and operation in kernels_of(candidate) - WITHOUT_ENTRIES:
            reasons = candidate.kernels().unsupported_reasons(replace(call, entry=other(call.entry.format)))
            shown = [reason.split(": supports")[0] for reason in reasons]
            assert shown == ["entries of kind Other"], operation
            rejected.add(operation)
    assert rejected == listed


TABLES, LENGTHS, SUMS = [[3, 1], [0, 2]], [13, 16], [0, 13, 29]
SCALE = 0.5
"""Of scaled toys: a power of two changes no digit of a value or of a sum."""


def latents(cache, new, q, **scale):
    """The cache after `write_mla`, and what the operations that read it return."""
    options = {"layer": 1, "implementation": "xla", **{f"kv_{name}": value for name, value in scale.items()}}
    tables, lengths = jnp.asarray(TABLES), jnp.asarray(LENGTHS)
    cache = jaxkv.write_mla(cache, *(part[:, 0] for part in new), jnp.arange(32), **options)
    sizes = {"num_heads": 4, "q_len": 3, "dtype": q[0].dtype}
    plan = jaxkv.plan_decode(cache, tables, lengths, **sizes, implementation="xla")
    slots = jnp.asarray([[[5, -1, 31], [0, 1, 2], [-1, -1, 9]]] * 2)
    return cache, (
        *jaxkv.gather_mla(cache, tables, jnp.asarray(SUMS), total=29, dtype=jnp.float16, **options),
        *jaxkv.read_mla(cache, slots[0, 0], dtype=jnp.float16, **options),
        jaxkv.decode_mla(*q, cache, tables, lengths, scale=0.1, plan=plan, **options),
        jaxkv.decode_mla_sparse(*q, cache, slots, scale=0.1, **options),
    )


def pairs(cache, new, q, **scale):
    """Likewise after `write_kv`."""
    both = {f"{part}_{name}": value for name, value in scale.items() for part in "kv"}
    options, tables = {"layer": 1, "implementation": "xla", **both}, jnp.asarray(TABLES)
    cache = jaxkv.write_kv(cache, *new, jnp.arange(32), **options)
    return cache, (
        *jaxkv.gather_kv(cache, tables, jnp.asarray(SUMS), total=29, dtype=jnp.float16, **options),
        *jaxkv.read_kv(cache, jnp.asarray([5, -1, 31]), dtype=jnp.float16, **options),
        jaxkv.decode_kv(q[0], cache, tables, jnp.asarray(LENGTHS), scale=0.1, **options),
    )


def keys(cache, new, q):
    """Likewise after `write_indexer_k`."""
    options, tables, weights = {"layer": 1, "implementation": "xla"}, jnp.asarray(TABLES), jnp.ones((2, 3, 4))
    cache = jaxkv.write_indexer_k(cache, new[0][:, 0], jnp.arange(32), **options)
    return cache, (
        jaxkv.gather_indexer_k(cache, tables, jnp.asarray(SUMS), total=29, dtype=jnp.float16, **options),
        jaxkv.read_indexer_k(cache, jnp.asarray([5, -1, 31]), dtype=jnp.float16, **options),
        jaxkv.indexer_logits(q[0], weights, cache, tables, jnp.asarray(LENGTHS), max_len=16, **options),
    )


STEPS = {MLAEntry: (latents, (32, 16), 1), KVEntry: (pairs, (32, 16), 2), IndexerEntry: (keys, (32,), 1)}
"""What is done with a kind of entry, its sizes and its heads."""


def run(kind, form, **scale):
    """What operations return; entries as the format encodes them, and as they lie in the buffer."""
    step, sizes, heads = STEPS[kind]
    rng, entry = np.random.default_rng(0), kind(form, *sizes)
    layout = jaxkv.CacheLayout(num_layers=2, num_blocks=4, block_size=8, num_heads=heads, entry=entry)
    new = [jnp.asarray(rng.standard_normal((32, heads, n)), jnp.float16) for n in sizes]
    q = [jnp.asarray(rng.standard_normal((2, 3, 4, n)), jnp.float16) for n in sizes]
    cache, found = step(jaxkv.KVCache.zeros(layout), new, q, **scale)
    encoded = entry.encode(new, [jnp.float32(value) for value in scale.values()] * 2 or (None, None))
    return found, encoded, cache.buffer.reshape(4, 2, 8, heads, -1)[:, 1].reshape(encoded.shape)


@each([TOYS[0], TOYS[3]])
@pytest.mark.usefixtures("registered")
@each_kind
def test_xla_reads_and_writes_what_the_format_encodes_and_decodes(kind, toy, monkeypatch):
    if toy.scaled and kind is IndexerEntry:
        pytest.skip("indexer keys have no scales")
    found, encoded, written = run(kind, toy.name, **({"scale": SCALE} if toy.scaled else {}))
    assert_same_bits(written, encoded)
    monkeypatch.undo()
    expected, plain, _ = run(kind, "f16")
    assert (view_as(encoded, jnp.uint8) != view_as(plain, jnp.uint8)).any()
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)
