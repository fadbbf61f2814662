"""Layouts that cannot work are rejected with the numbers."""

import re

import pytest

import jaxkv
from layout.small import BYTE, GROUPS, INDEXER, KV, MLA, SIZES, same_but

REFUSED = {
    "overlapping tokens": (
        lambda: same_but(LAYOUT, token=7, offset=8),
        ["overlap", "(layer 0, block 0, head 0, token 1) begins at element 15", "token 0) has elements [8, 16)", "n=7"],
    ),
    "overlapping layers": (lambda: same_but(LAYOUT, layer=39), ["overlap", "layer 1, block 0, head 0, token 0", "=39"]),
    "overlapping blocks": (lambda: same_but(LAYOUT, block=119), ["overlap", "block=119", "'block': 4"]),
    "overlapping heads": (
        lambda: same_but(jaxkv.CacheLayout(**SIZES, num_heads=2, entry=KV), head=4),
        ["overlap", "head 1, token 0) begins at element 4", "head 0, token 0) has elements [0, 5)"],
    ),
    "stride of 0": (lambda: same_but(LAYOUT, layer=0), ["`strides.layer` is 0", "at least 1", "3 steps"]),
    "negative stride": (lambda: same_but(LAYOUT, block=-120), ["`strides.block` is -120", "at least 1", "4 steps"]),
    "past the buffer": (lambda: same_but(LAYOUT, size=479), ["leave the buffer", "[0, 480)", "`size` 479"]),
    "offset past the buffer": (lambda: same_but(LAYOUT, offset=8), ["leave the buffer", "[8, 488)", "`size` 480"]),
    "stride past the buffer": (lambda: same_but(LAYOUT, block=1000), ["leave the buffer", "3120)", "`size` 480"]),
    "negative offset": (lambda: same_but(LAYOUT, offset=-8), ["leave the buffer", "[-8, 472)"]),
    "content stride": (lambda: same_but(LAYOUT, content=2), ["`strides.content` is 2", "1"]),
    "bf16 at an odd byte": (
        lambda: same_but(IN_BYTES, offset=1, size=IN_BYTES.size + 1),
        ["'bf16'", "multiples of 2 bytes", "offset 1", "keep only 1"],
    ),
    "bf16 at an odd stride": (
        lambda: same_but(IN_BYTES, block=241, size=4 * 241),
        ["'bf16'", "multiples of 2 bytes", "block=241", "keep only 1"],
    ),
    "fp8_ds_mla at offset 2": (
        lambda: same_but(jaxkv.CacheLayout(**SIZES, entry=DEEPSEEK), offset=2, size=10**6),
        ["'fp8_ds_mla'", "multiples of 4 bytes", "offset 2", "keep only 2"],
    ),
    "dtype that does not divide": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=BYTE, dtype="bfloat16"),
        ["`dtype` is bfloat16", "2 bytes", "3 bytes"],
    ),
    "dtype that is none": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, dtype="brain"), ["`dtype` is 'brain'"]),
    "unknown order": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, order="NHD"), ["`order` is 'NHD'", *jaxkv.ORDERS]),
    "content not innermost": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, order="BLNCH"),
        ["`order` is 'BLNCH'", "; did you mean 'BLNHC'?"],
    ),
    "empty order": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, order=""), ["`order` is ''", *jaxkv.ORDERS]),
    "order beside strides": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, order="LBNHC", strides=LAYOUT.strides, size=480),
        ["`order` is 'LBNHC'", "beside `strides`"],
    ),
    "padding beside strides": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=8, strides=LAYOUT.strides, size=480),
        ["`block_padding` is 8", "beside `strides`"],
    ),
    "strides without a size": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, strides=LAYOUT.strides),
        ["`size` is None", "an int"],
    ),
    "offset without strides": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, offset=8),
        ["`offset` is 8", "without `strides`"],
    ),
    "negative padding": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=-1),
        ["`block_padding` is -1", "0 or more"],
    ),
    "padding of a half": (lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, block_padding=0.5), ["`block_padding` is 0.5"]),
    "heads of latents": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=MLA, num_heads=8),
        ["`num_heads` is 8", "MLAEntry", "one head"],
    ),
    "heads of indexer keys": (
        lambda: jaxkv.CacheLayout(**SIZES, entry=INDEXER, num_heads=2),
        ["`num_heads` is 2", "IndexerEntry", "one head"],
    ),
    "too many slots": (
        lambda: jaxkv.CacheLayout(num_layers=1, num_blocks=2**25, block_size=64, entry=MLA),
        ["33554432 blocks", "64 tokens", "2147483648 slots", "2147483647"],
    ),
    "apart indexer tokens": (
        lambda: same_but(jaxkv.CacheLayout(**SIZES, entry=INDEXER), token=12, layer=60, block=180, size=720),
        ["`strides.token` is 12", "5 * 8"],
    ),
    "no entry": (lambda: jaxkv.CacheLayout(**SIZES, entry="bf16"), ["`entry` is 'bf16'", "MLAEntry"]),
    "strides of a float": (lambda: same_but(LAYOUT, layer=40.0), ["`strides.layer` is 40.0", "an int"]),
    "strides missing": (
        lambda: jaxkv.CacheLayout.from_strides(**SIZES, entry=MLA, size=480, strides={"layer": 40}),
        ["`strides` is {'layer': 40}", "layer, block, head, token"],
    ),
    "strides of an unknown axis": (lambda: same_but(LAYOUT, width=3), ["`strides` is", "'width': 3"]),
    "no strides": (
        lambda: jaxkv.CacheLayout.from_strides(**SIZES, entry=MLA, size=480, strides=None),
        ["`strides` is None"],
    ),
    "size of a float": (lambda: same_but(LAYOUT, size=480.0), ["`size` is 480.0", "an int"]),
    "offset of a bool": (lambda: same_but(LAYOUT, offset=True), ["`offset` is True", "an int"]),
    "packed in a layer-major order": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups=GROUPS, order="LBNHC"),
        ["`order` is 'LBNHC'", "expected one of BLNHC, BLHNC, BHLNC"],
    ),
    "packed to parts of elements": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={"a": jaxkv.Group(1, MLA)}, alignment=3),
        "`alignment` is 3 bytes: expected a multiple of the 2 of bfloat16",
    ),
    "packed of nothing": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={}),
        ["`groups` is {}", "at least one"],
    ),
    "packed of entries": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={"a": MLA}),
        ["`groups` is {'a'", "Group"],
    ),
    "packed in a dtype that does not divide": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={"a": jaxkv.Group(1, BYTE)}, dtype="bfloat16"),
        ["`dtype` is bfloat16", "3 bytes"],
    ),
    "packed with no layers": (
        lambda: jaxkv.PackedLayout(num_blocks=2, block_size=2, groups={"a": jaxkv.Group(0, MLA)}),
        ["`num_layers` is 0", "positive int"],
    ),
    "packed with no blocks": (
        lambda: jaxkv.PackedLayout(num_blocks=0, block_size=2, groups={"a": jaxkv.Group(1, MLA)}),
        ["`num_blocks` is 0", "positive int"],
    ),
}

LAYOUT = jaxkv.CacheLayout(**SIZES, entry=MLA)
IN_BYTES = jaxkv.CacheLayout(**SIZES, entry=MLA, dtype="uint8")
DEEPSEEK = jaxkv.MLAEntry("fp8_ds_mla", latent=128, rope=2)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_numbers(case):
    build, fragments = REFUSED[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the fragments are the match)
        build()
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3", None])
@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "num_heads"])
def test_sizes_are_positive_ints(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {re.escape(repr(value))}: expected a positive int"):
        jaxkv.CacheLayout(**{**SIZES, "entry": KV, "num_heads": 2, name: value})


def test_as_many_slots_as_int32_holds_are_taken():
    layout = jaxkv.CacheLayout(num_layers=61, num_blocks=2**25 - 1, block_size=64, entry=MLA)
    assert layout.num_slots == 2**31 - 64
    assert layout.size == 61 * 8 * (2**31 - 64)
    assert jaxkv.CacheLayout(num_layers=1, num_blocks=2**31 - 1, block_size=1, entry=MLA).num_slots == 2**31 - 1
