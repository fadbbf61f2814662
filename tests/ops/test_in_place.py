"""Compiled programs update the cache in place: it is aliased, nothing of its size is copied.  And one trace does."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.ops import OPERATIONS
from support.cases import further
from support.compare import assert_same_bits

LAYERS, BATCH, HEADS = 61, 4, 16
MLA = jaxkv.MLAEntry("bf16")
GROUPS = {
    "latent": jaxkv.Group(LAYERS, jaxkv.MLAEntry("fp8_ds_mla")),
    "indexer": jaxkv.Group(LAYERS, jaxkv.IndexerEntry()),
}

MOVES_NOTHING = {
    "parameter",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "while",
    "call",
    "conditional",
    "fusion",
    "scatter",
    "custom-call",
}
"""HLO operations that may have a result as large as the cache.  A fusion's own operations are looked at as well; a
custom call is a kernel, whose operand `kernels/mosaic_gpu/test_copies.py` finds aliased.
"""


def described(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def large(layout):
    """A cache of about 2 GB, described and never made."""
    assert 1.5e9 < layout.nbytes < 2.5e9
    return jaxkv.KVCache(described((layout.size,), layout.dtype), layout)


def mla(order, entry=MLA):
    return jaxkv.CacheLayout(num_layers=LAYERS, num_blocks=480, block_size=64, entry=entry, order=order)


def kv(order):
    entry = jaxkv.KVEntry("bf16", head_dim=128)
    return jaxkv.CacheLayout(num_layers=32, num_blocks=256, block_size=64, num_heads=8, entry=entry, order=order)


def indexer(order):
    entry = jaxkv.IndexerEntry()
    return jaxkv.CacheLayout(num_layers=LAYERS, num_blocks=4096, block_size=64, entry=entry, order=order)


STATE = jaxkv.StateEntry({"conv": ((3, 2048), "bfloat16"), "delta": ((16, 64, 64), "float32")})


def states(order):
    return jaxkv.CacheLayout(num_layers=LAYERS, num_blocks=120, block_size=1, entry=STATE, order=order)


SLOTS, IDS, LENGTHS = described((BATCH,), "int32"), described((BATCH,), "int32"), described((BATCH,), "int32")
TABLES = described((BATCH, 8), "int32")
NEW = described((BATCH, 512)), described((BATCH, 64))
QUERIES = described((BATCH, HEADS, 512)), described((BATCH, HEADS, 64))
LAYER = described((), "int32")
NEW_STATES = {name: described((BATCH, *shape), dtype) for name, shape, dtype in STATE.arrays}


def write_mla(cache, kv_c, k_pe, slots, layer):
    return jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer)


def all_layers(cache, kv_c, k_pe, q_latent, q_pe, slots, tables, lengths):
    """A model's decode step, but for all that is not attention: one layer body for all layers."""

    def body(cache, layer):
        cache = jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer)
        return cache, jaxkv.decode_mla(q_latent, q_pe, cache, tables, lengths, layer=layer, scale=0.1)

    return jax.lax.scan(body, cache, jnp.arange(cache.layout.num_layers, dtype=jnp.int32))


def all_layers_of_two_groups(cache, kv_c, k_pe, key, q_latent, q_pe, q, weights, slots, tables, lengths):
    """The same for two groups in one buffer: indexer keys chosen by score, then sparse attention to their latents."""
    packed = jaxkv.PackedLayout(num_blocks=cache.layout.num_blocks, block_size=64, groups=GROUPS)

    def body(cache, layer):
        cache = jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer)
        keys = jaxkv.write_indexer_k(cache.view(packed["indexer"]), key, slots, layer=layer)
        logits = jaxkv.indexer_logits(q, weights, keys, tables, lengths, layer=layer, max_len=512)
        chosen = jaxkv.positions_to_slots(jaxkv.select_topk(logits, 128), tables, keys)
        cache = keys.view(packed["latent"])
        out = jaxkv.decode_mla_sparse(q_latent[:, None], q_pe[:, None], cache, chosen, layer=layer, scale=0.1)
        return cache, out

    return jax.lax.scan(body, cache, jnp.arange(LAYERS, dtype=jnp.int32))


def step_of_all_layers(layout):
    return all_layers, [large(layout), *NEW, *QUERIES, SLOTS, TABLES, LENGTHS]


def step_of_two_groups():
    packed = jaxkv.PackedLayout(num_blocks=640, block_size=64, groups=GROUPS)
    q, weights = described((BATCH, 1, 64, 128)), described((BATCH, 1, 64), "float32")
    arguments = [large(packed["latent"]), *NEW, described((BATCH, 128)), *QUERIES, q, weights, SLOTS, TABLES, LENGTHS]
    return all_layers_of_two_groups, arguments


PROGRAMS = {
    **{
        f"{name}, {order}": program
        for order in ("BLNHC", "LBNHC")
        for name, program in {
            "write_mla of 656 bytes": lambda o=order: (
                write_mla,
                [large(mla(o, jaxkv.MLAEntry("fp8_ds_mla", 896))), described((BATCH, 896)), NEW[1], SLOTS, LAYER],
            ),
            "61 layers": lambda o=order: step_of_all_layers(mla(o)),
        }.items()
    },
    "write_kv, BHLNC": lambda: of_sample(OF_CACHES["write_kv"], kv("BHLNC")),
    "61 layers of two packed groups": step_of_two_groups,
}

FP8 = jaxkv.MLAEntry("fp8", latent=1088)
"""Twice as wide as the others: as many bytes in as many slots."""


def fp8():
    return jaxkv.CacheLayout(num_layers=LAYERS, num_blocks=480, block_size=64, entry=FP8)


def fp8_in_a_foreign_buffer():
    """The same in a buffer of more than 2**31 elements that no stride divides."""
    layout = fp8()
    return jaxkv.CacheLayout.from_strides(
        num_layers=LAYERS, num_blocks=480, block_size=64, entry=FP8, strides=layout.strides, size=layout.size + 128
    )


def write_fp8(cache, kv_c, k_pe, slots, layer):
    return jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer, kv_scale=0.1)


def decode_fp8(cache, q_latent, q_pe, tables, lengths, layer):
    return jaxkv.decode_mla(q_latent, q_pe, cache, tables, lengths, layer=layer, scale=0.1, kv_scale=0.1)


def programs_of_fp8(layout):
    """(function, arguments, whether it writes) of caches with e4m3 values."""
    cache, latents = large(layout), (described((BATCH, FP8.latent)), described((BATCH, HEADS, FP8.latent)))
    return {
        "write_mla": (write_fp8, [cache, latents[0], NEW[1], SLOTS, LAYER], True),
        "copy_blocks": (jaxkv.copy_blocks, [cache, IDS, IDS], True),
        "decode_mla": (decode_fp8, [cache, latents[1], QUERIES[1], TABLES, LENGTHS, LAYER], False),
    }


LARGE = {jaxkv.MLAEntry: mla, jaxkv.KVEntry: kv, jaxkv.IndexerEntry: indexer, jaxkv.StateEntry: states}
OF_CACHES = {operation.name: operation for operation in OPERATIONS if operation.entries}
del OF_CACHES["plan_decode"]  # which reads no entries


def of_sample(operation, layout):
    """(function, arguments) of the sample call of an operation on a large cache, with a traced layer."""
    cache = large(layout)
    args, options = operation.sample(cache)
    options |= {"layer": LAYER} if "layer" in options else {}
    leaves, tree = jax.tree.flatten((args, options))
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    (buffer,) = (i for i in arrays if leaves[i] is cache.buffer)
    arrays.remove(buffer)

    def function(cache, *values):
        given = leaves.copy()
        for i, value in zip((buffer, *arrays), (cache.buffer, *values), strict=True):
            given[i] = value
        args, options = tree.unflatten(given)
        return operation.function(*args, **options)

    return function, [cache, *(leaves[i] for i in arrays)]


def instructions(text):
    """(operation, elements of its result) of every HLO instruction with an array for a result."""
    for shape, operation in re.findall(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(", text):
        yield operation, math.prod(int(n) for n in shape.split(",") if n)


def assert_nothing_of_its_size(compiled, cache):
    """The compiled program moves the cache nowhere."""
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < cache.layout.nbytes / 100
    found = {operation for operation, count in instructions(compiled.as_text()) if count >= cache.layout.size}
    assert "parameter" in found, "the cache itself is not seen: the text of compiled programs has changed"
    assert found <= MOVES_NOTHING, found - MOVES_NOTHING


def assert_in_place(function, arguments, **options):
    """The compiled program aliases its first argument and makes nothing of its size."""
    compiled = jax.jit(function, **options).lower(*arguments).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= arguments[0].layout.nbytes
    assert_nothing_of_its_size(compiled, arguments[0])


def assert_reads_in_place(function, arguments):
    """The compiled program makes nothing of the size of its first argument."""
    assert_nothing_of_its_size(jax.jit(function).lower(*arguments).compile(), arguments[0])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_donated_cache_is_updated_in_place(program):
    function, arguments = PROGRAMS[program]()
    assert_in_place(function, arguments, donate_argnums=0)


def in_turn(first, second):
    """Each operation with one order, the operations in turn with the one or the other; the others are `further`."""
    for i, name in enumerate(OF_CACHES):
        yield name, (first, second)[i % 2]
        yield further(name, (second, first)[i % 2])


@pytest.mark.parametrize(("name", "order"), [*in_turn("BLNHC", "LBNHC")])
def test_every_operation_leaves_the_cache_where_it_is(name, order):
    operation = OF_CACHES[name]
    function, arguments = of_sample(operation, LARGE[operation.entries[0]](order))
    results = jax.tree.leaves(jax.eval_shape(function, *arguments), is_leaf=lambda x: isinstance(x, jaxkv.KVCache))
    if isinstance(results[-1], jaxkv.KVCache):
        assert_in_place(function, arguments, donate_argnums=0)
    else:
        assert_reads_in_place(function, arguments)


@pytest.mark.parametrize("layout", [fp8, fp8_in_a_foreign_buffer])
@pytest.mark.parametrize("program", ["write_mla", "copy_blocks", "decode_mla"])
def test_a_cache_of_float8_values_is_neither_copied_nor_widened(program, layout):
    function, arguments, writes = programs_of_fp8(layout())[program]
    if writes:
        assert_in_place(function, arguments, donate_argnums=0)
    else:
        assert_reads_in_place(function, arguments)


def test_the_test_finds_copies():
    function, arguments = of_sample(OF_CACHES["write_mla"], mla("BLNHC"))
    with pytest.raises(AssertionError):
        assert_in_place(function, arguments)

    def with_a_copy(cache, *rest):
        doubled = jaxkv.KVCache(jnp.flip(cache.buffer), cache.layout)
        return function(doubled, *rest)

    with pytest.raises(AssertionError):
        assert_in_place(with_a_copy, arguments, donate_argnums=0)
    copied = "%copy.1 = bf16[4,512,1,576]{3,2,1,0} copy(%bitcast.37), metadata={}\n ROOT %x = (s32[]) tuple(%y)"
    assert list(instructions(copied)) == [("copy", 4 * 512 * 576)]


class TestRealRuns:
    layout = jaxkv.CacheLayout(num_layers=3, num_blocks=8, block_size=16, entry=jaxkv.MLAEntry("bf16", 128, 16))

    def arguments(self):
        rng = np.random.default_rng(0)
        before = rng.standard_normal(self.layout.size).astype(jnp.bfloat16)
        new = [jnp.asarray(rng.standard_normal((4, n)), jnp.bfloat16) for n in self.layout.entry.sizes]
        return before, (*new, jnp.asarray([5, 77, 127, -1]), 1)

    def test_a_donated_buffer_is_gone(self):
        before, rest = self.arguments()
        cache = jaxkv.KVCache(jnp.asarray(before), self.layout)
        expected = write_mla(cache, *rest)
        assert not cache.buffer.is_deleted()
        after = jax.jit(write_mla, donate_argnums=0)(cache, *rest)
        assert cache.buffer.is_deleted()
        assert_same_bits(after.buffer, expected.buffer)
        assert (np.asarray(after.buffer) != before).any()

    @pytest.mark.parametrize("compiled", [False, True])
    def test_without_donation_the_callers_cache_is_unchanged(self, compiled):
        before, rest = self.arguments()
        cache = jaxkv.KVCache(jnp.asarray(before), self.layout)
        ids = jnp.asarray([1, 2]), jnp.asarray([3, 4])
        for function, arguments in (
            (write_mla, rest),
            (jaxkv.copy_blocks, ids),
            (jaxkv.write_blocks, (ids[1], jaxkv.read_blocks(cache, ids[0]))),
        ):
            after = (jax.jit(function) if compiled else function)(cache, *arguments)
            assert (np.asarray(after.buffer) != before).any()
            assert not cache.buffer.is_deleted()
            assert_same_bits(cache.buffer, before)


class TestTraces:
    layout = jaxkv.CacheLayout(num_layers=3, num_blocks=24, block_size=16, entry=jaxkv.MLAEntry("bf16", 32, 16))

    def arguments(self, rng, step):
        """New tokens, queries, tables, lengths and a layer: different at every step."""
        new = [jnp.asarray(rng.standard_normal((4, n)), jnp.bfloat16) for n in self.layout.entry.sizes]
        queries = [jnp.asarray(rng.standard_normal((4, 2, n)), jnp.bfloat16) for n in self.layout.entry.sizes]
        tables = jnp.asarray(rng.permutation(24).reshape(4, 6), jnp.int32)
        lengths = jnp.asarray(rng.integers(0, 97, 4), jnp.int32)
        return *new, *queries, tables, lengths, jnp.int32(step % 3)

    def test_a_decode_step_is_traced_once(self):
        chex.clear_trace_counter()

        @chex.assert_max_traces(n=1)
        def step(cache, kv_c, k_pe, q_latent, q_pe, tables, lengths, layer):
            slots = jaxkv.slots_for(tables, lengths - 1, cache)
            cache = jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=layer)
            return cache, jaxkv.decode_mla(q_latent, q_pe, cache, tables, lengths, layer=layer, scale=0.1)

        jitted = jax.jit(step, donate_argnums=0)
        rng = np.random.default_rng(0)
        cache = jaxkv.KVCache.zeros(self.layout)
        outs = []
        for i in range(20):
            cache, out = jitted(cache, *self.arguments(rng, i))
            outs.append(np.asarray(out.astype(jnp.float32)).tobytes())
        assert jitted._cache_size() == 1
        assert len(set(outs)) == 20

    def test_the_operations_themselves_are_traced_once_for_all_layers_and_data(self):
        # Called without a jit round them, with layers that are Python ints.
        from jaxkv_kernels.xla import attention, entries

        kernels = (entries.write_mla, attention.decode_mla)
        rng = np.random.default_rng(0)
        cache = jaxkv.KVCache.zeros(self.layout)
        before = None
        for i in range(6):
            kv_c, k_pe, q_latent, q_pe, tables, lengths, _ = self.arguments(rng, i)
            slots = jaxkv.slots_for(tables, lengths - 1, cache)
            cache = jaxkv.write_mla(cache, kv_c, k_pe, slots, layer=i % 3, implementation="xla")
            jaxkv.decode_mla(q_latent, q_pe, cache, tables, lengths, layer=i % 3, scale=0.1 + i, implementation="xla")
            sizes = [kernel._cache_size() for kernel in kernels]
            assert before in (None, sizes)
            before = sizes
