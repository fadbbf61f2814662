"""The checks for kernels of others find each of many faults, name its place, and accept kernels that are right."""

import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxkv
from jaxkv import testing
from jaxkv.testing.buffers import to_bytes, to_cache
from support.cases import further
from testing import numpy_kernels as kernels

F32, INT8 = jaxkv.KVEntry("f32", 4, 2), jaxkv.KVEntry("int8", 8, 4)
WHOLE, APART = "packed cache of one layer", "keys and values in planes"
CHECKS = {
    "write": testing.assert_write_correct,
    "gather": testing.assert_gather_correct,
    "attend": testing.assert_attention_correct,
}

# The fault, the function that has it, the entry, the layout on which it is found, and what the message says.
FOUND = [
    (kernels.PackedPages, "write", F32, "LHBNC", r"layer 1, block 1, head 0, token 0 \(slot 4, row 13 of"),
    (kernels.PackedPages, "gather", F32, "LHBNC", r"It reads K\[\d\] of layer 1, block 0, head 1, token 0"),
    (kernels.PackedPages, "attend", F32, "LHBNC", r"It reads K\[\d\] of layer 1, block 0, head 1, token 0"),
    (kernels.BlockStrideOfTokens, "write", F32, "LBHNC", r"layer 1, block 0, head 1, token \d \(slot \d, not"),
    (kernels.BlockStrideOfTokens, "gather", F32, "LBHNC", r"It reads K\[\d\] of layer 1, block \d, head 0, token 0"),
    (kernels.TokensOfOneHead, "write", F32, "LBNHC", r"layer 1, block 0, head 0, token 1 \(slot 1, row 0 of"),
    (kernels.TokensOfOneHead, "gather", F32, WHOLE, r"It reads K\[\d\] of layer 0, block \d+, head 1, token 0"),
    (kernels.TokensOfOneHead, "attend", F32, WHOLE, r"It reads K\[\d\] of layer 0, block \d+, head 1, token 0"),
    (kernels.HeadsOfOneToken, "gather", F32, "LBHNC", r"K\[0, 1, 0\].* It reads K\[\d\] .* head 0, token 1,"),
    (kernels.HeadsOfOneToken, "attend", F32, "LBHNC", r"query head 4\).* It reads K.* head 0, token 1,"),
    (kernels.FirstLayer, "write", F32, "LBNHC", r"layer 0, block 0, head 0, token \d .* not to be written"),
    (kernels.FirstLayer, "gather", F32, "LBNHC", r"It reads K\[\d\] of layer 0"),
    (kernels.FirstLayer, "attend", F32, "LBNHC", r"It reads K\[\d\] of layer 0"),
    (kernels.OffsetIgnored, "write", F32, "packed, uint8", r"bytes that belong to no entry .* first byte"),
    (kernels.OffsetIgnored, "gather", F32, "packed, uint8", r"It reads byte [\d,]+ of the buffer"),
    (kernels.ValuesLikeKeys, "write", F32, APART, r"layer 1, block 0, head 0, token 1 \(slot 1, row 0 of the call\)"),
    (kernels.ValuesLikeKeys, "gather", F32, APART, r"V\[0, 0, 0\] .* It reads (byte|V)"),
    (kernels.ValuesLikeKeys, "attend", F32, APART, r"It reads (byte|V)"),
    (kernels.WritesPadding, "write", F32, "LBNHC", r"token \d+ \(slot \d+, not to be written\): K\[0\] is 0 "),
    (kernels.WritesSlotMinusOne, "write", F32, "LBNHC", r"layer 0, block 15, head 0, token 3 \(slot 63, not"),
    (kernels.NextTableEntry, "attend", F32, WHOLE, r"request 3 of 4 tokens.* It reads K\[\d\] of layer 0, .* token 0,"),
    (kernels.OneTokenMore, "attend", F32, WHOLE, r"request 1 of 1 tokens.* It reads K\[\d\] of layer 0, .* token 1,"),
    (kernels.OneTokenFewer, "attend", F32, WHOLE, r"It does not read K of layer 0, .*, which is token 2 of request 2"),
    (kernels.WholeBlocks, "attend", F32, WHOLE, r"It does not read K of .*, which is token 4 of request 4"),
    (kernels.ScaleOfNextToken, "gather", INT8, WHOLE, r"V\[0, 0, 0\].* It reads V scales\[0\] .* token 1,"),
    (kernels.ScaleOfNextToken, "attend", INT8, WHOLE, r"request 1 of 1 .* It reads V scales\[0\] of .* token 1,"),
    (kernels.ScaleOfFirstHead, "attend", INT8, WHOLE, r"query head 4\).* It reads K scales\[0\] .* head 0, token 0,"),
    (kernels.LogarithmOfTwo, "attend", F32, WHOLE, r"lse\[1, 0\] .* It is the logarithm with base 2"),
    (kernels.NoTokens, "attend", F32, WHOLE, r"out\[0, 0, 0\] is nan, expected 0 \(request 0 of 0 tokens"),
    (kernels.OwnScale, "attend", F32, WHOLE, r"It reads the memory that it must, and no other"),
]  # fmt: skip


def message_of(check, function, layouts, **options):
    with pytest.raises(AssertionError) as caught:
        check(function, layouts, **options)
    return re.sub(r"\s+", " ", str(caught.value))


@pytest.mark.parametrize(
    ("fault", "function", "entry", "name", "says"), FOUND, ids=[f"{row[0].__name__}, {row[1]}" for row in FOUND]
)
def test_faults_are_found_where_they_are(fault, function, entry, name, says):
    layouts = testing.every_layout(entry, block_size=4)
    message = message_of(CHECKS[function], getattr(fault(), function), layouts)
    assert message.startswith(f"layout {name!r} "), message
    assert re.search(says, message), message


@pytest.mark.parametrize(("function", "entry"), [("write", F32), ("gather", F32), ("attend", F32), ("attend", INT8)])
def test_kernels_that_are_right_pass(function, entry):
    CHECKS[function](getattr(kernels.Kernels(), function), testing.every_layout(entry, block_size=4))


@pytest.mark.parametrize("function", CHECKS)
def test_offsets_of_16_bits_are_found(function):
    layout = testing.every_layout(F32)["packed, uint8"]
    message = message_of(CHECKS[function], getattr(kernels.In16Bits(), function), layout)
    assert re.search("It reads (byte|[KV])|not to be written", message)


@pytest.mark.parametrize("function", ["gather", "attend"])
def test_offsets_of_32_bits_are_found(function):
    """The buffer has 2.7 GB, of which the host allocates the pages that hold entries."""
    layout = testing.large_layout(INT8)
    assert layout.size > 2**31
    CHECKS[function](getattr(kernels.Kernels(), function), layout)
    message = message_of(CHECKS[function], getattr(kernels.InInt32(), function), layout)
    assert "too large to find out" in message


@pytest.mark.slow
def test_writes_at_offsets_of_32_bits_are_found():
    """The functions copy the whole buffer."""
    layout = testing.large_layout(jaxkv.MLAEntry("fp8", 64, 16))
    testing.assert_write_correct(jitted(jaxkv.write_mla, "layer"), layout)

    def wrong(cache, kv_c, k_pe, slot_mapping, *, layer, kv_scale):
        buffer, step = to_bytes(cache).copy(), kernels.InInt32().step
        rows = np.asarray(layout.entry.encode([kv_c, k_pe], (jnp.float32(kv_scale),) * 2)).view(np.uint8)
        for row, slot in zip(rows, np.asarray(slot_mapping).tolist(), strict=True):
            if 0 <= slot < layout.num_slots:
                block, token = divmod(slot, layout.block_size)
                begin = step(layout.strides, layout, layer, block, 0, token)
                buffer[begin : begin + row.size] = row
        return to_cache(layout, buffer)

    message = message_of(testing.assert_write_correct, wrong, layout)
    assert re.search(r"layer 1, block 12, head 0, token \d+ \(slot \d+, row \d+ of the call\): latent", message)
    assert "bytes that belong to no entry" in message


def jitted(operation, *static):
    """An operation of jaxkv on `xla`, compiled as a whole."""
    return jax.jit(partial(operation, implementation="xla"), static_argnames=static)


def some_layouts(entry, **sizes):
    """Another order, another dtype, and values that lie apart: the suites run operations on every layout."""
    layouts, chosen = testing.every_layout(entry, block_size=4, **sizes), ("BLHNC", "packed, uint8", "two arrays")
    return {"LBNHC": layouts["LBNHC"]} | {name: layout for name, layout in layouts.items() if name in chosen}


OTHERS = [
    jaxkv.KVEntry("int8", 16, 8),
    *(jaxkv.MLAEntry.typical(name) for name in jaxkv.MLAEntry.formats),
    *(jaxkv.KVEntry.typical(name) for name in jaxkv.KVEntry.formats),
    jaxkv.KVEntry("bf16", 32, 16, value_format="fp8"),
    *(jaxkv.IndexerEntry.typical(name) for name in jaxkv.IndexerEntry.formats),
]


@pytest.mark.parametrize("entry", [jaxkv.MLAEntry("bf16", 64, 16), *map(further, OTHERS)], ids=repr)
def test_operations_of_every_format_pass(entry):
    operations = {
        jaxkv.MLAEntry: (jaxkv.write_mla, jaxkv.gather_mla, jaxkv.decode_mla),
        jaxkv.KVEntry: (jaxkv.write_kv, jaxkv.gather_kv, jaxkv.decode_kv),
        jaxkv.IndexerEntry: (jaxkv.write_indexer_k, jaxkv.gather_indexer_k),
    }
    layouts = some_layouts(entry)
    write, gather, *attend = operations[type(entry)]
    testing.assert_write_correct(jitted(write, "layer"), layouts)
    testing.assert_gather_correct(jitted(gather, "layer", "total", "dtype"), layouts)
    for operation in attend:
        compiled = jitted(operation, "layer", "return_lse")
        testing.assert_attention_correct(compiled, layouts)
        more = {"q_len": 2, "num_query_heads": 2, "return_lse": False}
        testing.assert_attention_correct(compiled, layouts["LBNHC"], **more)


@settings(max_examples=settings.default.max_examples // 8)
@given(testing.layouts(F32))
def test_kernels_pass_on_any_layout(layout):
    for function, check in CHECKS.items():
        check(getattr(kernels.Kernels(), function), layout)


@settings(max_examples=settings.default.max_examples)
@given(testing.layouts())
def test_drawn_layouts_hold_entries(layout):
    cache = testing.poisoned(layout)
    assert (to_bytes(cache) == 0xFF).all()
    assert layout.num_blocks > 1
    testing.assert_caches_equal(cache, cache, padding=True)


def test_layouts_of_any_entry_are_drawn():
    found = set()

    @settings(max_examples=100)
    @given(testing.layouts())
    def collect(layout):
        found.add(type(layout.entry))
        found.add(layout.value_strides is None and layout.blocks_are_runs)

    collect()
    assert found == {jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry, True, False}
    with pytest.raises(ValueError, match="`entry` is 'bf16': expected an entry"):
        testing.layouts("bf16")


def test_layouts_need_hypothesis(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"jaxkv\.testing\.layouts needs hypothesis: pip install hypothesis"):
        testing.layouts()


def test_importing_the_checks_imports_no_test_packages():
    code = "import jaxkv.testing, sys; print(*{'pytest', 'hypothesis', 'chex'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


@pytest.mark.parametrize("entry", [jaxkv.MLAEntry("fp8_v41_split", 64, 64), jaxkv.KVEntry("int8", 16, 8)], ids=str)
def test_caches_of_any_layouts_are_compared(entry):
    layouts = some_layouts(entry, num_blocks=3)
    first = layouts["LBNHC"]
    heads = () if entry.one_head else (2,)
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 256, (12, *heads, entry.nbytes), np.uint8))

    def written(cache, rows):
        for layer in range(3):
            cache = jaxkv.write_entries(cache, rows, jnp.arange(12), layer=layer)
        return cache

    expected = written(testing.poisoned(first), rows)
    for layout in layouts.values():
        cache = written(testing.poisoned(layout), rows)
        testing.assert_caches_equal(cache, expected)
        changed = jaxkv.write_entries(cache, rows[:1] ^ 1, jnp.asarray([6]), layer=2)
        says = (
            rf"{layout.num_heads} of \d+ entries differ\n.*layer 2, block 1, head 0, token 2: \w+\[0\] is .*, expected "
        )
        with pytest.raises(AssertionError, match=says):
            testing.assert_caches_equal(changed, cache)


def test_bytes_between_entries_are_compared_if_asked():
    layout = testing.every_layout(F32, block_size=4)["BLNHC padded"]
    cache = testing.poisoned(layout)
    changed = to_bytes(cache).copy()
    changed[layout.strides.block * layout.itemsize - 3] = 7  # the last element of the padding of the first block
    changed = to_cache(layout, changed)
    testing.assert_caches_equal(changed, cache)
    with pytest.raises(AssertionError, match=r"differ: 1, first byte [\d,]+ of the buffer.*: 0x07, expected 0xff"):
        testing.assert_caches_equal(changed, cache, padding=True)


def test_mistakes():
    layouts = testing.every_layout(F32, block_size=4)
    cache, other = testing.poisoned(layouts["LBNHC"]), testing.poisoned(layouts["BLNHC"])
    with pytest.raises(ValueError, match="`padding` is True, and the layouts differ"):
        testing.assert_caches_equal(cache, other, padding=True)
    with pytest.raises(ValueError, match="`block_size` of the layouts is 4 and 64"):
        testing.assert_caches_equal(cache, testing.poisoned(testing.every_layout(F32)["LBNHC"]))
    with pytest.raises(ValueError, match="`expected` is a ArrayImpl: expected a KVCache"):
        testing.assert_caches_equal(cache, cache.buffer)
    with pytest.raises(ValueError, match="`layout` is a KVCache: expected a CacheLayout"):
        testing.poisoned(cache)
    with pytest.raises(ValueError, match=r"`layouts` is \{\}: expected a CacheLayout, or some by name"):
        testing.assert_write_correct(jaxkv.write_kv, {})
    with pytest.raises(ValueError, match="`layouts` is a list: expected a CacheLayout, or some by name"):
        testing.assert_write_correct(jaxkv.write_kv, [*layouts.values()])
    with pytest.raises(ValueError, match=r"`layouts\['x'\]` is a KVCache: expected a CacheLayout"):
        testing.assert_write_correct(jaxkv.write_kv, {"x": cache})
    with pytest.raises(ValueError, match="expected an MLAEntry or a KVEntry"):
        testing.assert_attention_correct(jaxkv.decode_kv, testing.every_layout(jaxkv.IndexerEntry()))
    with pytest.raises(ValueError, match="`num_query_heads` is 3: expected a multiple of the cache's 2"):
        testing.assert_attention_correct(jaxkv.decode_kv, layouts, num_query_heads=3)
    state = jaxkv.CacheLayout(num_layers=1, num_blocks=1, block_size=1, entry=jaxkv.StateEntry.typical("state"))
    with pytest.raises(ValueError, match="expected an MLAEntry, a KVEntry or an IndexerEntry"):
        testing.assert_write_correct(jaxkv.write_state, state)


def test_exceptions_name_the_layout():
    def unsupported(cache, *args, **keywords):
        if cache.layout.dtype == "uint8":
            raise NotImplementedError("buffers of bytes")
        return jaxkv.write_kv(cache, *args, **keywords)

    with pytest.raises(NotImplementedError) as caught:
        testing.assert_write_correct(unsupported, testing.every_layout(F32, block_size=4))
    assert caught.value.__notes__[0].startswith("layout 'packed, uint8' ")


def test_results_of_other_shapes_and_dtypes_are_rejected():
    layout = testing.every_layout(F32, block_size=4)["LBNHC"]
    right = kernels.Kernels()
    message = message_of(testing.assert_write_correct, lambda cache, *args, layer: cache.buffer, layout)
    assert "expected a KVCache of the same layout" in message

    def gather(*args, **keywords):
        return [*right.gather(*args, **keywords), 0]

    def attend(*args, **keywords):
        return (right.attend(*args, **keywords)[0],) * 2

    assert "3 results, expected K, V" in message_of(testing.assert_gather_correct, gather, layout)

    def attend_alone(*args, **keywords):
        return right.attend(*args, **keywords)[0]

    check = testing.assert_attention_correct
    assert ": 1 result, expected out, lse" in message_of(check, attend_alone, layout)
    both = partial(right.attend, return_lse=True)
    assert ": 2 results, expected out" in message_of(check, both, layout, return_lse=False)
    message = message_of(check, attend, layout)
    assert "lse is float32[6, 8, 2], expected floats [6, 8]" in message
