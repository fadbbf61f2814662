"""Groups with rates, windows and tables of their own: where their entries are, and what tables and pictures show."""

import itertools
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.layout.describe import bands
from jaxkv.layout.packed import Table
from jaxkv.testing.buffers import to_bytes, to_cache
from support import scenes
from support.compare import assert_same_bits

LATENT = jaxkv.MLAEntry("bf16", latent=24, rope=8)
STATE = jaxkv.StateEntry({"conv": ((3, 5), "bfloat16"), "ssm": ((2, 4), "float32")})
GROUPS = {
    "latent": jaxkv.Group(3, LATENT, rate=4),
    "keys": jaxkv.Group(2, jaxkv.IndexerEntry(head_dim=8), rate=2),
    "local": jaxkv.Group(3, LATENT, table="window", window=10),
    "state": jaxkv.Group(4, STATE, rate=16, table="state", window=1),
}
PLAIN = {"latent": jaxkv.Group(3, LATENT), "kv": jaxkv.Group(2, jaxkv.KVEntry("int8", head_dim=8), num_heads=2)}
SIZES = {"": 32, "window": 8, "state": 16}


def packed(groups=GROUPS, **changes):
    return jaxkv.PackedLayout(**{"num_blocks": 7, "block_size": SIZES, "groups": groups} | changes)


def owners(layout, name):
    """Of each byte of the buffer, whether it is of an entry of the group: by its shape alone, from inside out."""
    one = np.arange(layout[name].nbytes).reshape(layout[name].num_blocks, -1)
    group = layout.groups[name]
    entries = layout.tables[group.table].block_size // group.rate
    nbytes = group.num_layers * entries * group.entry.nbytes
    inside = layout.tables[group.table].groups
    before = inside[: inside.index(name)]
    start = sum(
        -(-layout.groups[other].num_layers * layout[other].block_size * layout.groups[other].entry.nbytes // 128) * 128
        for other in before
    )
    return one[:, start : start + nbytes].reshape(-1)


def test_tables():
    layout = packed()
    assert layout.tables == {
        "": Table(32, None, ("latent", "keys")),
        "window": Table(8, 10, ("local",)),
        "state": Table(16, 1, ("state",)),
    }
    assert [group.block_size for group in layout.values()] == [8, 16, 8, 1]
    assert layout.groups == GROUPS
    # The largest blocks are those of "": 3 x 8 x 64 and 2 x 16 x 12 bytes, each rounded up to 128.
    assert {group.block_nbytes for group in layout.values()} == {1536 + 384}
    assert {group.offset for group in layout.values()} == {0, 1536}
    assert all(group.blocks_are_runs for group in layout.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"groups": {"keys": GROUPS["keys"]}, "block_size": 4},
        *({"groups": PLAIN, "block_size": 4, "order": order} for order in ("BLNHC", "BLHNC", "BHLNC")),
        {"dtype": "uint8"},
        {"groups": {"latent": GROUPS["latent"]}, "block_size": 4, "dtype": jnp.uint16},
        {"groups": {"latent": GROUPS["latent"]}, "block_size": 4, "dtype": jnp.bfloat16},
        {"alignment": 512},
        {"num_blocks": np.int64(7), "alignment": np.int32(512)},
        {"groups": PLAIN, "block_size": 4, "shards": jaxkv.TokenShards(2, interleave=4)},
        {"groups": PLAIN, "block_size": 4, "shards": jaxkv.TokenShards(2), "order": "BHLNC", "dtype": "uint8"},
    ],
)
def test_the_representation_is_one_line_that_makes_an_equal_layout(changes):
    layout = packed(**changes)
    assert "\n" not in repr(layout)
    again = eval(repr(layout), {name: getattr(jaxkv, name) for name in jaxkv.__all__})
    assert again == layout
    assert again.groups == layout.groups
    assert repr(again) == repr(layout)


def test_the_representation_has_what_is_not_default():
    groups = {"latent": jaxkv.Group(np.int64(3), LATENT)}
    shown = f"num_blocks=7, block_size=4, groups={{'latent': Group(num_layers=3, entry={LATENT!r})}}"
    options = {"order": "BLNHC", "dtype": "bfloat16", "alignment": 128, "shards": jaxkv.TokenShards()}
    assert repr(packed(groups, block_size=4, **options)) == f"PackedLayout({shown})"
    options = {"order": "BHLNC", "dtype": "uint8", "alignment": 64, "shards": jaxkv.TokenShards(2)}
    shown += ", order='BHLNC', dtype='uint8', alignment=64, shards=TokenShards(num_shards=2, interleave=1)"
    assert repr(packed(groups, block_size=4, **options)) == f"PackedLayout({shown})"


def test_the_representation_of_a_group_has_what_was_given():
    assert repr(GROUPS["local"]) == (
        "Group(num_layers=3, entry=MLAEntry(format='bf16', latent=24, rope=8), table='window', window=10)"
    )


def test_every_table_has_one_size():
    groups = {"latent": jaxkv.Group(1, LATENT), "local": jaxkv.Group(1, LATENT, table="window", window=9)}
    assert {table.block_size for table in packed(groups, block_size=16).tables.values()} == {16}
    windows = [jaxkv.Group(1, LATENT, window=9), jaxkv.Group(1, LATENT, window=30), jaxkv.Group(1, LATENT)]
    assert packed(dict(zip("ab", windows, strict=False)), block_size=4).tables[""].window == 30
    assert packed(dict(zip("abc", windows, strict=True)), block_size=4).tables[""].window is None


@pytest.mark.parametrize("order", ["BLNHC", "BHLNC"])
@pytest.mark.parametrize("name", GROUPS)
def test_a_write_reaches_the_bytes_of_its_group_alone(name, order):
    layout = packed(order=order)
    group, slots = layout[name], jnp.arange(layout[name].num_slots)
    before = scenes.garbage(group, np.random.default_rng(0), "random")
    cache = to_cache(group, before)
    for layer in range(group.num_layers):
        if name == "state":
            values = {part: jnp.ones((slots.size, *shape)) for part, shape in STATE.shapes.items()}
            cache = jaxkv.write_state(cache, values, slots, layer=layer)
        elif name == "keys":
            cache = jaxkv.write_indexer_k(cache, jnp.ones((slots.size, 8)), slots, layer=layer)
        else:
            cache = jaxkv.write_mla(
                cache, jnp.ones((slots.size, 24)), jnp.ones((slots.size, 8)), slots, layer=layer
            )  # fmt: skip
    after, mine = to_bytes(cache), owners(layout, name)
    others = np.setdiff1d(np.arange(group.nbytes), mine)
    assert_same_bits(after[others], before[others])
    assert len(np.unique(after[mine])) < 8 < len(np.unique(before[mine]))


def test_entries_of_compressed_groups_have_slots_by_their_own_block_size():
    layout, tables = packed(), jnp.asarray([[4, 1], [2, 5]])
    tokens = jnp.asarray([[0, 3, 4, 31, 32, 63, 64]] * 2)
    slots = jaxkv.slots_for(tables, tokens // 4, layout["latent"])
    assert slots.tolist() == [[32, 32, 33, 39, 8, 15, -1], [16, 16, 17, 23, 40, 47, -1]]
    # Tokens 5 to 12 of the first request and 0 to 2 of the second complete entries 1 and 2, and none.
    starts, ends = jnp.asarray([5, 0]), jnp.asarray([13, 3])
    sums = jnp.cumsum(jnp.concatenate([jnp.zeros(1, int), ends // 4 - starts // 4]))
    found = jaxkv.ragged_slots(tables, sums, layout["latent"], total=4, seq_starts=starts // 4)
    assert found.tolist() == [33, 34, -1, -1]


def test_fingerprints_cover_rates_tables_and_windows():
    one = {"latent": jaxkv.Group(3, LATENT)}
    plain = jaxkv.PackedLayout(num_blocks=2, block_size=8, groups=one)
    variants = [
        plain,
        packed({"latent": jaxkv.Group(3, LATENT, rate=2)}, block_size=16),
        packed({"latent": jaxkv.Group(3, LATENT, rate=4)}, block_size=32),
        packed({"latent": jaxkv.Group(3, LATENT, window=9)}, block_size=8),
        packed({"latent": jaxkv.Group(3, LATENT, table="a")}, block_size=8),
    ]
    assert len({layout["latent"].block_nbytes for layout in variants}) == 1
    assert len({layout.fingerprint for layout in variants}) == len(variants)
    assert plain["latent"] != variants[1]["latent"]
    assert packed()["state"] == packed()["state"]
    assert packed().fingerprint == packed(num_blocks=20).fingerprint
    # Those of blocks without rates, windows and names of tables are what they were before there were any.
    groups = {"latent": jaxkv.Group(3, jaxkv.MLAEntry("bf16")), "indexer": jaxkv.Group(2, jaxkv.IndexerEntry())}
    known = jaxkv.PackedLayout(num_blocks=4, block_size=64, groups=groups)
    assert known.fingerprint == "1ce0c0ada7ac408cfc2fe88bb22b0421"


def test_the_table_names_rates_windows_and_tables():
    text = str(packed())
    assert "latent: one entry per 4 tokens, table ''\n" in text
    assert "local: table 'window', window of 10 tokens\n" in text
    assert "state: one entry per 16 tokens, table 'state', window of 1 token\n" in text
    assert "block of any table: 1,920 bytes (1.9 KiB)" in text
    assert f"entry        {STATE}" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "keys:\n" in str(packed({"keys": jaxkv.Group(1, LATENT)}, block_size=4))


def test_the_memory_map_shows_a_block_of_each_table(tmp_path):
    layout = packed()
    found = bands(layout.describe())
    rows = [band for band in found if band.group is None]
    titles = ["buffer", "block 0 of table ''", "block 0 of table 'window'", "block 0 of table 'state'"]
    assert [band.title for band in rows] == titles
    for band in rows[1:]:
        assert [band.pieces[0].start, band.pieces[-1].stop] == [0, 1920]
        assert all(a.stop == b.start for a, b in itertools.pairwise(band.pieces))
    assert [{piece.group for piece in band.pieces if piece.group} for band in rows[1:]] == [
        {"latent", "keys"}, {"local"}, {"state"},
    ]  # fmt: skip
    places = {(band.row, band.group) for band in found}
    assert len(places) == len(found)
    assert all(band.above in places for band in found[1:])
    first = {band.group: band.above for band in reversed(found) if band.group}
    assert first == {"latent": (1, None), "keys": (1, None), "local": (2, None), "state": (3, None)}
    assert [piece.label for piece in found[-1].pieces] == ["conv", "padding", "ssm"]
    layout.draw(tmp_path / "map.svg")
    assert "conv" in (tmp_path / "map.svg").read_text()


def test_the_example_of_the_readme():
    text = (Path(jaxkv.__file__).parent / "layout" / "README.md").read_text()
    code = next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if code.startswith("packed"))
    names = {"jaxkv": jaxkv}
    exec(code, names)
    assert {name: group.block_size for name, group in names["packed"].items()} == {
        "latent": 64, "keys": 64, "local": 64, "state": 1,
    }  # fmt: skip


ERRORS = {
    "rate of 0": (lambda: jaxkv.Group(1, LATENT, rate=0), "`rate` is 0: expected a positive int, tokens per entry"),
    "rate of a float": (lambda: jaxkv.Group(1, LATENT, rate=2.0), "`rate` is 2.0"),
    "no layers": (lambda: jaxkv.Group(0, LATENT), "`num_layers` is 0: expected a positive int"),
    "heads of a float": (lambda: jaxkv.Group(1, LATENT, num_heads=1.0), "`num_heads` is 1.0: expected a positive int"),
    "window of 0": (lambda: jaxkv.Group(1, LATENT, window=0), "`window` is 0: expected None, or a positive int"),
    "table of a number": (lambda: jaxkv.Group(1, LATENT, table=1), "`table` is 1: expected a string"),
    "block size and rate": (
        lambda: packed(block_size=SIZES | {"": 30}),
        r"`block_size\[''\]` is 30 tokens: expected a multiple of the 4 tokens per entry of group 'latent'",
    ),
    "one block size and rate": (
        lambda: packed({"a": jaxkv.Group(1, LATENT, rate=3)}, block_size=8),
        "`block_size` is 8 tokens: expected a multiple of the 3 tokens per entry of group 'a'",
    ),
    "block size missing": (
        lambda: packed(block_size={"": 32, "state": 16}),
        "`block_size` is {'': 32, 'state': 16}: expected an int, or one for each table of the groups",
    ),
    "block size too many": (lambda: packed(block_size=SIZES | {"x": 1}), "'x': 1}: expected an int, or one for each"),
    "block size of a float": (lambda: packed(block_size=SIZES | {"": 32.0}), r"`block_size\[''\]` is 32.0"),
    "no block size": (lambda: packed(block_size=None), "`block_size` is None"),
    "no arrays": (lambda: jaxkv.StateEntry({}), "`arrays` is {}: expected one or more names"),
    "arrays of a list": (lambda: jaxkv.StateEntry([((2,), "float32")]), "`arrays` is .*: expected one or more names"),
    "array without a dtype": (
        lambda: jaxkv.StateEntry({"a": (4,)}),
        r"`arrays\['a'\]` is \(4,\): expected a shape and",
    ),
    "array of ints": (
        lambda: jaxkv.StateEntry({"a": ((4,), "int32")}),
        r"`arrays\['a'\]` has dtype int32: expected one of",
    ),
    "array of no dtype": (lambda: jaxkv.StateEntry({"a": ((4,), "brain")}), r"`arrays\['a'\]` has dtype 'brain'"),
    "array of length 0": (
        lambda: jaxkv.StateEntry({"a": ((4, 0), "float32")}),
        r"has shape \(4, 0\): expected positive",
    ),
    "name of padding": (lambda: jaxkv.StateEntry({"padding": ((4,), "float32")}), "has the name 'padding'"),
    "name of a number": (lambda: jaxkv.StateEntry({1: ((4,), "float32")}), "has the name 1: expected a string"),
    "heads of states": (
        lambda: jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=1, num_heads=2, entry=STATE),
        "`num_heads` is 2: a StateEntry has one head",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    make, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_states_are_16_bytes_apart():
    assert STATE.nbytes == 32 + 32
    assert [(part.name, part.offset) for part in STATE.fields() if part.name != "padding"] == [("conv", 0), ("ssm", 32)]
    assert jaxkv.StateEntry({"a": ((3,), "float32"), "b": ((), "float16")}).nbytes == 32
    assert jaxkv.StateEntry({"conv": ([3, 5], jnp.bfloat16), "ssm": ((2, np.int64(4)), np.float32)}) == STATE
    assert hash(STATE) == hash(jaxkv.StateEntry({"conv": ((3, 5), "bfloat16"), "ssm": ((2, 4), "float32")}))
    assert jaxkv.StateEntry({"conv": ((5, 3), "bfloat16"), "ssm": ((2, 4), "float32")}) != STATE
