"""Which blocks of a table requests need, and the tables that engines support."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.serving import MTP, Engine
from jaxkv.serving.table import TableKind, capacity, tables_of
from models.checkpoints.published import PUBLISHED
from models.compressed.test_deepseek_v4 import FLASH
from support import toy_hybrid
from support.recorded import FOLDER, model

ENTRY = jaxkv.MLAEntry("bf16", latent=16, rope=8)
STATE = jaxkv.StateEntry({"sum": ((4,), "float32")})


def made(groups, block_size=8, **options):
    return tables_of(jaxkv.PackedLayout(num_blocks=4, block_size=block_size, groups=groups), 8, **options)


def test_blocks_that_are_needed_and_written():
    plain, window, states = TableKind("", 8), TableKind("w", 4, window=9), TableKind("s", 4, window=1, states=True)
    assert [plain.needed(n) for n in (0, 1, 8, 9)] == [range(0), range(1), range(1), range(2)]
    assert [window.needed(n) for n in (0, 9, 12, 13, 14)] == [range(0), range(3), range(3), range(1, 4), range(1, 4)]
    assert [states.needed(n) for n in (0, 1, 4, 5)] == [range(0), range(1), range(1), range(1, 2)]
    assert [plain.written(7, 17), window.written(7, 17)] == [range(3), range(1, 5)]
    assert [states.written(0, 4), states.written(4, 13)] == [range(1), range(3, 4)]
    assert [plain.filled(0, 17), plain.filled(7, 8), plain.filled(8, 15)] == [range(2), range(1), range(1, 1)]
    assert [states.filled(0, 12), states.filled(0, 13), states.filled(11, 12)] == [
        range(2, 3),
        range(3, 3),
        range(2, 3),
    ]
    # After 8 or 7 tokens, and after 16 or 15, of which those from 6 on are needed.
    assert [window.is_needed_after(8, block) for block in range(4)] == [True] * 4
    window = TableKind("w", 2, window=3)  # after 7 tokens those from 4 on are needed, after 15 those from 12 on
    assert [window.is_needed_after(8, block) for block in range(8)] == [False, False, True, True] * 2
    assert [states.is_needed_after(8, block) for block in range(4)] == [False, True] * 2
    assert plain.is_needed_after(8, 0)
    assert [plain.plain, window.plain, states.plain] == [True, False, False]


@pytest.mark.parametrize("seed", range(3))
def test_a_request_never_holds_more_blocks_than_capacity_reckons(seed):
    """Steps of random lengths, each of which is launched before the one before it is read."""
    rng = np.random.default_rng(seed)
    tables = [
        TableKind("", int(rng.integers(1, 9))),
        TableKind("w", int(rng.integers(1, 9)), int(rng.integers(1, 20))),
        TableKind("s", int(rng.integers(1, 9)), 1, states=True),
    ]
    step, total = 7, 90
    most = dict.fromkeys(tables, 0)
    read = launched = 0
    while read < total:
        end = min(launched + int(rng.integers(1, step + 1)), total)
        for table in tables:
            first = table.needed(read).start if table.window else 0
            held = {*table.needed(launched), *table.written(launched, end)}
            held |= {*range(first, table.up_to(end))} if not table.states else {*table.needed(read)}
            most[table] = max(most[table], len(held))
        read, launched = launched, end
    for table, count in most.items():
        assert count <= table.most_held(total, step), table
    blocks = sum(table.most_held(total, step) for table in tables)
    assert capacity(tables, blocks, step) >= total > capacity(tables, blocks - 1, step) - step * 9


def test_tables_of_layouts():
    plain = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=4, entry=ENTRY)
    assert tables_of(plain, 8) == (TableKind("", 8),)  # on devices that divide the tokens of a block
    groups = {
        "state": jaxkv.Group(1, STATE, rate=16, table="state", window=1),
        "rows": jaxkv.Group(1, STATE, table="rows", window=5),
        "latent": jaxkv.Group(1, ENTRY, rate=4),
    }
    assert made(groups, {"": 8, "state": 16, "rows": 4}) == (
        TableKind("", 8),
        TableKind("state", 16, 1, states=True),
        TableKind("rows", 4, 5),
    )


ERRORS = {
    "states beside entries": (
        {"a": jaxkv.Group(1, ENTRY), "s": jaxkv.Group(1, STATE, rate=8)},
        {},
        "table '' has states of {'s': 8} tokens, blocks of 8 tokens and the groups a, s: expected a state per token",
    ),
    "several states per block": (
        {"a": jaxkv.Group(1, ENTRY), "s": jaxkv.Group(1, STATE, rate=4, table="s")},
        {},
        "table 's' has states of {'s': 4} tokens, blocks of 8 tokens",
    ),
    "nothing but states": (
        {"s": jaxkv.Group(1, STATE, rate=8)},
        {},
        "table '' has states: expected a first table",
    ),
    "divided tokens": (
        {"a": jaxkv.Group(1, ENTRY, window=4)},
        {"divided": True},
        "the cache has the tables '', with windows or states: on devices that divide the tokens of blocks, only one",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_tables_that_are_rejected(case):
    groups, options, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        made(groups, **options)


def test_drafts_do_not_support_several_tables():
    model = toy_hybrid.HybridModel({**toy_hybrid.random_params(), "mtp": {}})
    with pytest.raises(ValueError, match=r"`drafts` is MTP.*, with windows or states: expected one table that keeps"):
        Engine(model, num_blocks=8, block_size=8, drafts=MTP())


@pytest.mark.parametrize("values", [*PUBLISHED.values(), FLASH], ids=[*PUBLISHED, "DeepSeek-V4-Flash"])
def test_the_default_block_size_suits_published_models(values):
    described = models.Model({}, models.ModelConfig.from_json(values), "bf16")
    size = described.usual_block_size
    assert size % 64 == 0
    first, *_ = tables_of(described.layout(4), size)
    assert first.block_size == size
    assert described.layout(4) == described.layout(4, size)


def test_the_default_block_size_of_engines():
    config = models.ModelConfig.read(FOLDER / "deepseek_v4")
    described = jax.eval_shape(partial(models.random_model, config))
    assert Engine(described, num_blocks=8).block_size == 64
    config = replace(config, attention=replace(config.attention, hca_rate=128))  # that of published models
    described = jax.eval_shape(partial(models.random_model, config))
    with pytest.raises(ValueError, match="64"):
        Engine(described, num_blocks=8, block_size=64)
    assert Engine(described, num_blocks=8).block_size == 128


def test_too_few_blocks_are_rejected_by_name():
    """A request has a block of every table at least; the argument to change is the one that is too small."""
    with pytest.raises(ValueError, match=r"`num_blocks` is 3: expected at least 4, .* '', 'window', 'csa_rows', 'hca_"):
        Engine(model("deepseek_v4"), num_blocks=3)
    with pytest.raises(ValueError, match=r"`num_blocks` is 1: expected at least 2, .* '', 'state'"):
        Engine(model("kimi_linear"), num_blocks=1)
    fewest = Engine(model("deepseek_v4"), num_blocks=4)
    assert fewest.submit([1], max_tokens=1) in fewest.waiting
    many = {"num_blocks": 8, "block_size": 16}
    with pytest.raises(ValueError, match=r"table holds 128 and the cache 128; .* a larger `num_blocks`"):
        Engine(model("llama"), **many).submit([1], max_tokens=129)
    with pytest.raises(ValueError, match=r"table holds 32 and the cache 128; .* a larger `max_len`"):
        Engine(model("llama"), **many, max_len=20).submit([1], max_tokens=33)
