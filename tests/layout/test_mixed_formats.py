"""Keys in one format and values in another: byte maps, planes, fingerprints and pictures."""

import pytest

import jaxkv
from jaxkv.layout.describe import bands
from jaxkv_kernels.formats import FORMATS, Format
from jaxkv_kernels.formats.format import split_by_page, together

ENTRY = jaxkv.KVEntry("int8", 64, 32, value_format="nvfp4")
SIZES = dict(num_layers=3, num_blocks=4, block_size=5, num_heads=2)


def places(fields):
    """Name, dtype and bytes of each field."""
    return [(field.name, field.dtype, field.offset, field.offset + field.nbytes) for field in fields]


def test_the_value_follows_the_key_and_its_scale_at_a_multiple_of_16_bytes():
    assert places(ENTRY.fields()) == [
        ("K", "int8", 0, 64),
        ("K scales", "float32", 64, 68),
        ("padding", "uint8", 68, 80),
        ("V", "e2m1x2", 80, 96),
        ("V scales", "e4m3", 96, 98),
        ("padding", "uint8", 98, 112),
    ]
    keys, values = ENTRY.planes
    assert places(keys) == [("K", "int8", 0, 64), ("K scales", "float32", 64, 68)]
    assert places(values) == [("V", "e2m1x2", 0, 16), ("V scales", "e4m3", 16, 18)]
    assert (ENTRY.dtype, ENTRY.input_dtype, ENTRY.scaled) == ("uint8", "bfloat16", (False, True))


def test_the_same_format_for_both_is_one_format():
    one, same = jaxkv.KVEntry("bf16", 64), jaxkv.KVEntry("bf16", 64, value_format="bf16")
    assert (same, hash(same), str(same)) == (one, hash(one), "KVEntry(format='bf16', head_dim=64, value_dim=64)")
    assert same.description == ["KVEntry", "bf16", 64, 64]
    assert ENTRY.description == ["KVEntry", "int8", 64, 32, "nvfp4"]


def test_queries_have_the_dtype_of_what_is_not_quantised():
    found = {
        pair: jaxkv.KVEntry(pair[0], value_format=pair[1]).input_dtype
        for pair in (("f16", "fp8"), ("int8", "f32"), ("bf16", "f16"), ("fp8", "int8"))
    }
    assert [str(dtype) for dtype in found.values()] == ["float16", "float32", "float32", "bfloat16"]


def test_fingerprints_are_stable_and_name_both_formats():
    found = jaxkv.CacheLayout(**SIZES, entry=jaxkv.KVEntry("bf16", 64, value_format="fp8")).fingerprint
    assert found == "bae0e3406b0dab56f3a59afbc3a66f81"
    others = [("bf16", "fp8_e5m2"), ("f16", "fp8"), ("bf16", "bf16")]
    entries = [jaxkv.KVEntry(keys, 64, value_format=values) for keys, values in others]
    assert found not in {jaxkv.CacheLayout(**SIZES, entry=entry).fingerprint for entry in entries}


def test_values_that_directly_follow_their_keys_are_whole_entries():
    entry = jaxkv.KVEntry("bf16", 64, value_format="fp8")
    whole = jaxkv.CacheLayout(**SIZES, entry=entry)
    given = dict(strides=whole.strides, size=whole.size, value_offset=128)
    assert jaxkv.CacheLayout.from_strides(**SIZES, entry=entry, **given) == whole
    # Planes have no padding, so that these are not whole entries, but lie in the same places.
    padded = jaxkv.CacheLayout(**SIZES, entry=ENTRY)
    given = dict(strides=padded.strides, size=padded.size, value_offset=80)
    apart = jaxkv.CacheLayout.from_strides(**SIZES, entry=ENTRY, **given)
    assert [part.width for part in apart.pages.parts] == [68, 18]


def test_planes_are_aligned_as_their_own_format_requires():
    keys, values = (
        {"layer": 0, "block": 700, "head": 68, "token": 140},
        {"layer": 0, "block": 180, "head": 18, "token": 36},
    )
    sizes = {**SIZES, "num_layers": 1, "entry": ENTRY}
    given = dict(strides=keys, value_strides=values, value_offset=2802, size=2802 + 4 * 180)
    assert jaxkv.CacheLayout.from_strides(**sizes, **given).alignment == 2
    given["strides"] = {**keys, "head": 70}
    with pytest.raises(ValueError, match=r"'int8\+nvfp4' begin at multiples of 4 bytes; .* keep only 2"):
        jaxkv.CacheLayout.from_strides(**sizes, **given)


def test_tables_and_maps_show_both_formats():
    layout = jaxkv.CacheLayout(**SIZES, entry=ENTRY)
    assert "KVEntry(format='int8', head_dim=64, value_dim=32, value_format='nvfp4')" in str(layout)
    last = bands({"": layout.describe()})[-1]
    assert last.note == "one entry, KVEntry int8+nvfp4, 112 B"
    assert [piece.label for piece in last.pieces][:6] == ["K", "K scales", "padding", "V", "V scales", "padding"]


class Whole(Format):
    """A format for keys and values together."""

    kinds = (jaxkv.KVEntry,)
    name = "whole"
    dtype = "uint8"

    def __init__(self, split):
        self.split = split

    def fields(self, sizes, block_size):
        values = [(name, "int8", count) for name, count in sizes.items()]
        shared = [("scales", "uint8", 16)]
        return split_by_page(block_size, values, values) if self.split else together(*values, *shared)

    def encode(self, values, scales):
        raise NotImplementedError

    def decode(self, row, sizes, scales, dtype):
        raise NotImplementedError


@pytest.mark.parametrize("split", [False, True])
def test_formats_that_store_both_together_have_no_part(split, monkeypatch):
    monkeypatch.setitem(FORMATS, "whole", Whole(split))
    jaxkv.KVEntry("whole")
    for pair in (("whole", "bf16"), ("bf16", "whole")):
        with pytest.raises(ValueError, match="format 'whole' stores keys and values only together"):
            jaxkv.KVEntry(pair[0], value_format=pair[1])
