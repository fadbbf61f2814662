"""`jaxkv verify`: what it accepts, and the faults that it finds.  CI runs the whole command."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.cli import main
from jaxkv.ops import OPERATIONS
from jaxkv.testing import equivalence
from jaxkv.testing.equivalence import BLOCKS, LAYERS, verify_blocks

OTHERS = {"copy_blocks", "read_blocks", "write_blocks", "plan_decode", "prefill_mla", "prefill_kv"}
OTHERS |= {"write_entries", "gather_entries"}
"""Operations that have cases of their own, and those whose results follow from the others'."""


@pytest.fixture
def small(monkeypatch):
    """Caches of so few tokens that an operation takes milliseconds, once it is compiled."""
    monkeypatch.setattr(equivalence, "LENGTHS", (0, 1, 3))
    monkeypatch.setattr(equivalence, "BLOCK_SIZE", 3)


def verified(entry):
    """The cases of an entry that are wrong."""
    return [case for case in equivalence.verify(entry, "xla") if case.wrong]


def blocks_verified(entry):
    """The same, of whole blocks alone; pages of three tokens are padded in formats that pad them."""
    sizes = dict(num_layers=LAYERS, num_blocks=BLOCKS, block_size=equivalence.BLOCK_SIZE, entry=entry)
    layouts = [jaxkv.CacheLayout(**sizes, order=order) for order in ("LBNHC", "BLNHC")]
    noise = [np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8) for layout in layouts]
    cases = [verify_blocks(layout.order, layout, bits, "xla") for layout, bits in zip(layouts, noise, strict=True)]
    return [case for order in cases for case in order if case.wrong]


@pytest.mark.parametrize("form", ["fp8_v4", "fp8_v41", "fp8_v41_split", "fp4_v41_split"])
def test_a_copy_carries_the_padding_of_pages_where_blocks_are_runs(small, form):
    assert blocks_verified(jaxkv.MLAEntry.typical(form)) == []


@pytest.mark.ci
def test_the_command_checks_every_operation_in_every_order(small, monkeypatch, capsys):
    entries = [jaxkv.MLAEntry.typical("fp8_v41_split"), jaxkv.KVEntry("fp8", 16), jaxkv.IndexerEntry("f16", 16)]
    monkeypatch.setattr(equivalence, "ENTRIES", (*entries, jaxkv.StateEntry.typical("state")))
    assert main(["verify"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = [tuple(line.split()[:2]) for line in lines]
    assert len(found) == len(set(found))
    declared = [operation for operation in OPERATIONS if operation.name not in OTHERS]
    right = set()
    for entry in equivalence.ENTRIES:
        names = [operation.name for operation in declared if type(entry) in operation.entries]
        right |= {(name, entry.format) for name in (*names, "copy_blocks", "read/write_blocks")}
    assert set(found) == right
    assert all(line.endswith("ok on 6 orders") for line in lines)
    assert last.startswith(f"all of {6 * len(lines)} cases on cpu in ")


class TestFaults:
    """Operations with faults, which it finds."""

    entry = jaxkv.MLAEntry("fp8_v41", latent=64, rope=64)

    @pytest.mark.parametrize("at", [0, -1])
    def test_of_copies_that_change_another_byte(self, small, monkeypatch, at):
        right = jaxkv.copy_blocks

        def wrong(cache, *ids, **options):
            buffer = right(cache, *ids, **options).buffer
            return jaxkv.KVCache(buffer.at[at].add(jnp.asarray(1, buffer.dtype)), cache.layout)

        monkeypatch.setattr(jaxkv, "copy_blocks", wrong)
        assert [case.operation for case in blocks_verified(self.entry)] == ["copy_blocks"] * 2

    def test_of_copies_that_lose_padding(self, small, monkeypatch):
        right = jaxkv.read_blocks

        def wrong(cache, ids, **options):
            return right(cache, ids, **options).at[:, -1].set(0)  # the padding of the last page, where blocks are runs

        monkeypatch.setattr(jaxkv, "read_blocks", wrong)
        cases = blocks_verified(jaxkv.MLAEntry.typical("fp8_v4"))
        assert "BLNHC" in {case.order for case in cases}
        assert {case.operation for case in cases} == {"read/write_blocks"}

    def test_of_reads_that_take_another_layer_or_of_writes_that_bleed(self, small, monkeypatch):
        gather, write = jaxkv.gather_mla, jaxkv.write_mla
        monkeypatch.setattr(jaxkv, "gather_mla", lambda *args, layer, **options: gather(*args, layer=0, **options))

        def bleeding(cache, *args, **options):
            return jaxkv.KVCache(write(cache, *args, **options).buffer.at[0].set(77), cache.layout)

        monkeypatch.setattr(jaxkv, "write_mla", bleeding)
        found = {(case.operation, case.order) for case in verified(self.entry)}
        assert found == {(operation, order) for operation in ("write_mla", "gather_mla") for order in jaxkv.ORDERS}


def test_what_an_implementation_cannot_write_is_stored_for_it(small, monkeypatch):
    """Otherwise it would read random bytes, which differ from layout to layout."""
    write = jaxkv.write_mla

    def unsupported(*args, implementation, **options):
        if implementation == "mosaic_gpu":
            raise NotImplementedError("no kernel")
        return write(*args, implementation=implementation, **options)

    def on_xla(operation):
        return lambda *args, implementation, **options: operation(*args, implementation="xla", **options)

    monkeypatch.setattr(jaxkv, "write_mla", unsupported)
    _, *reads = equivalence.calls_of(TestFaults.entry, 1, q_len=1)
    for name in (*reads, "copy_blocks", "read_blocks", "write_blocks"):
        monkeypatch.setattr(jaxkv, name, on_xla(getattr(jaxkv, name)))
    cases = list(equivalence.verify(TestFaults.entry, "mosaic_gpu"))
    assert not [case for case in cases if case.wrong]
    assert {case.operation for case in cases if case.rejected} == {"write_mla"}
