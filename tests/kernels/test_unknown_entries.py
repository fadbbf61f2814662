"""Entries that a kernel does not know: rejected with a reason, for it must not guess what their bytes mean."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.dispatch import BACKENDS
from jaxkv.ops import OPERATIONS
from jaxkv.support import sample_calls
from jaxkv.testing import equivalence
from jaxkv_kernels.calls import Kernels
from jaxkv_kernels.formats import FORMATS, Format
from jaxkv_kernels.formats.bits import view_as
from jaxkv_kernels.formats.entries import IndexerEntry, KVEntry, MLAEntry
from jaxkv_kernels.formats.format import together
from jaxkv_kernels.formats.states import StateEntry
from support.compare import assert_same_bits

KINDS = (MLAEntry, KVEntry, IndexerEntry)


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


SCALE = 0.5
"""Of scaled toys: a power of two changes no digit of a value or of a sum."""
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
        if not call.entries:  # any bytes are moved, or no cache is read
            assert not any("format" in reason for reason in reasons)
        elif candidate.name == "xla":  # the format itself encodes and decodes
            assert reasons == []
        elif candidate.kernels().support(operation):
            shown = [reason.split(": supports")[0] for reason in reasons]
            assert shown == [f"entries of format {toy.name!r}"], operation
    kinds = {operation.name: {*operation.entries} for operation in OPERATIONS}
    sampled = {name for name, accepted in kinds.items() if not accepted or accepted & {*toy.kinds}}
    assert kernels_of(candidate) & sampled <= seen


@each_kind
@each_implementation
def test_a_kind_of_entry_that_is_not_listed_is_rejected(candidate, kind):
    other, support, rejected = type("Other", (kind,), {}), candidate.kernels().support, set()
    listed = {name for name in kernels_of(candidate) if kind in support(name).entries}
    for operation, call in calls():
        if kind in map(type, call.entries) and support(operation):
            reasons = candidate.kernels().unsupported_reasons(replace(call, entry=other(call.entry.format)))
            shown = [reason.split(": supports")[0] for reason in reasons]
            assert shown == ["entries of kind Other"], operation
            rejected.add(operation)
    assert rejected == listed


@pytest.mark.ci
@each_implementation
def test_values_in_another_format_than_their_keys_are_rejected_unless_that_is_declared(candidate):
    """Both formats are listed: kernels that know one format for both must not be called."""
    found = {}
    for operation, call in calls():
        if call.entries and isinstance(call.entry, KVEntry) and call.entry.format == "bf16":
            entry = replace(call.entry, value_format="f16")
            found[operation] = candidate.kernels().unsupported_reasons(replace(call, entry=entry))
    same = "keys of format 'bf16' with values of format 'f16': supports the same format for both"
    expected = [same] if candidate.name == "mosaic_gpu" else []
    assert found == dict.fromkeys(
        ("write_kv", "gather_kv", "read_kv", "plan_decode", "decode_kv", "prefill_kv"), expected
    )


SIZES = {MLAEntry: (32, 16), KVEntry: (32, 16), IndexerEntry: (32,)}


def run(kind, form):
    """What every operation on a cache returns, by name, and what the write has stored: [slots x heads, width]."""
    entry, heads = kind(form, *SIZES[kind]), 2 if kind is KVEntry else 1
    layout = jaxkv.CacheLayout(
        num_layers=equivalence.LAYERS, num_blocks=equivalence.BLOCKS, block_size=equivalence.BLOCK_SIZE,
        num_heads=heads, entry=entry, order="LBNHC",
    )  # fmt: skip
    write, *reads = equivalence.calls_of(entry, heads, q_len=2).items()
    cache = write[1](jaxkv.KVCache.zeros(layout), "xla")
    written = cache.buffer.reshape(equivalence.LAYERS, -1, layout.width)[equivalence.LAYER]
    return {name: read(cache, "xla") for name, read in reads}, written


@each([TOYS[0], TOYS[3]])
@pytest.mark.usefixtures("registered")
@each_kind
def test_xla_reads_and_writes_what_the_format_encodes_and_decodes(kind, toy, monkeypatch):
    if toy.scaled and kind is IndexerEntry:
        pytest.skip("indexer keys have no scales")
    small = {"LENGTHS": (0, 1, 3), "BLOCK_SIZE": 2, "K_SCALE": SCALE, "V_SCALE": SCALE}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in small.items():
            patched.setattr(equivalence, name, value)
        found, written = run(kind, toy.name)
        monkeypatch.undo()
        expected, plain = run(kind, "f16")
    used = np.asarray(plain).any(axis=-1)
    values = jnp.split(plain[used], np.cumsum(SIZES[kind])[:-1], axis=-1)
    scales = [jnp.float32(SCALE)] * len(values) if toy.scaled else (None, None)
    assert_same_bits(written[used], toy.encode(values, scales))
    assert (view_as(written, jnp.uint8) != view_as(plain, jnp.uint8)).any()
    for name in expected:
        for a, b in zip(*map(jax.tree.leaves, (found[name], expected[name])), strict=True):
            assert_same_bits(a, b, name)
