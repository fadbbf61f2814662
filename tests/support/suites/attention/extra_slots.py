"""Sparse MLA decode over two caches in one softmax: each with a format, a layout, block sizes and slots of its own."""

import numpy as np
import pytest

import jaxkv
from jaxkv.testing.buffers import to_cache
from support import scenes
from support.arrays import on_device
from support.cases import on_layouts
from support.compare import assert_same_bits
from support.suites.attention.decode_mla import queries
from support.suites.attention.decode_mla_sparse import DecodeMLASparseChecks
from support.suites.base import layout_of

LENGTHS, MORE_LENGTHS = (70, 64, 1), (190, 3, 20)


class ExtraSlotsChecks(DecodeMLASparseChecks):
    """Compares results for two caches with the oracle, which has one list of keys."""

    def extra(self, scene, cache, slots, layer, counts=None):
        """The argument `extra`."""
        counts = None if counts is None else on_device(counts)
        return jaxkv.ExtraCache(cache, on_device(slots), layer, counts, **scene.scale_arguments())

    def decode_two(self, q, first, second, **keywords):
        """out and lse; `first` and `second` are scenes, caches, slots, layers and counts."""
        scene, cache, slots, layer, counts = first
        counts = None if counts is None else on_device(counts)
        return self.decode(q, cache, slots, layer, scene, counts=counts, extra=self.extra(*second), **keywords)

    def check_two(self, q, first, second, **keywords):
        """Compares with float64; returns the result."""
        found = self.decode_two(q, first, second, **keywords)
        (scene, _, slots, _, counts), (other, _, others, _, more) = first, second
        right = self.truth(q, slots, scene, counts=counts, extra=(other, others, more), **keywords)
        self.compare(q, found, right)
        return found

    def pair(self, forms=None, *, tokens=2, sizes=(32, 40), block_sizes=(64, 16), layouts=("BLNHC", "LBNHC")):
        """Two scenes with caches of random slots: [scene, cache, slots, layer, counts] of each."""
        rng, found = np.random.default_rng(sum(sizes)), []
        for n, form in enumerate(forms or (self.exact, self.exact)):
            entry = form if isinstance(form, jaxkv.MLAEntry) else self.entry(form)
            lengths, blocks = (LENGTHS, MORE_LENGTHS)[n], scenes.BLOCKS if block_sizes[n] >= 16 else 128
            scene = scenes.scene(entry, lengths=lengths, block_size=block_sizes[n], num_blocks=blocks, seed=n)
            layout = layout_of(layouts[n], entry, block_size=block_sizes[n], num_blocks=blocks)
            found.append([scene, scene.cache(layout, n), self.choose(scene, tokens, sizes[n], rng), n, None])
        return found

    def in_one_buffer(self, tokens=2, sizes=(32, 40)):
        """Queries, and two groups of a packed block that share a buffer."""
        entry = self.entry()
        layouts = jaxkv.PackedLayout(
            num_blocks=scenes.BLOCKS, block_size=64,
            groups={"window": jaxkv.Group(2, entry), "compressed": jaxkv.Group(3, entry)},
        )  # fmt: skip
        buffer, rng, found = scenes.garbage(layouts["window"], None), np.random.default_rng(0), []
        for n, (name, lengths) in enumerate({"window": LENGTHS, "compressed": MORE_LENGTHS}.items()):
            scene = scenes.scene(entry, lengths=lengths, seed=n)
            scenes.place(layouts[name], buffer, n, scene.entries)
            found.append([scene, layouts[name], self.choose(scene, tokens, sizes[n], rng), n, None])
        for one in found:
            one[1] = to_cache(one[1], buffer)
        return queries(entry, 3, tokens, 2), *found


class ExtraSlots(ExtraSlotsChecks):
    """`decode_mla_sparse(..., extra=)`."""

    forms: tuple
    """Formats, or entries, of pairs of caches."""

    @on_layouts([entry for entry in scenes.MLA_ENTRIES if entry.format in ("fp8_ds_mla", "fp8_v4")])
    def test_equals_packed_caches_and_the_oracle(self, entry, name):
        entry = self.entry(entry.format)
        first, second = self.pair((entry, entry), layouts=("BLNHC", name), block_sizes=(64, 64))
        q = queries(entry, 3, 2, 3)
        found = self.check_two(q, first, second)
        for one in first, second:
            one[1], one[3] = one[0].twin(one[1].layout), 0
        for a, b in zip(found, self.decode_two(q, first, second), strict=True):
            assert_same_bits(a, b)

    def test_pairs_of_formats_and_block_sizes(self):
        for forms in self.forms:
            first, second = self.pair(forms, block_sizes=(64, 2))
            self.check_two(queries(first[0].entry, 3, 2, 3), first, second)

    def test_counts_and_sinks(self):
        first, second = self.pair(sizes=(200, 300))
        first[4] = np.asarray([[200, 5], [0, 31], [0, 0]], np.int32)
        second[4] = np.asarray([[0, 300], [129, 100], [0, 7]], np.int32)
        sinks = np.asarray([0.5, -np.inf, np.inf, 3.0], np.float32)
        out, lse = self.check_two(queries(first[0].entry, 3, 2, 4), first, second, sinks=sinks)
        assert not np.asarray(out)[2, 0].any()  # no key in either cache
        assert (np.asarray(lse)[2, 0] == -np.inf).all()

    def test_counts_outside_the_slots_are_clamped(self):
        first, second = self.pair(sizes=(200, 300))
        most, least = 2**31 - 1, -(2**31)
        first[4] = np.asarray([[201, most], [least, -1], [most, 5]], np.int32)
        second[4] = np.asarray([[most, 0], [301, 100], [least, -1]], np.int32)
        q = queries(first[0].entry, 3, 2, 4)
        found = self.decode_two(q, first, second)
        first[4], second[4] = np.clip(first[4], 0, 200), np.clip(second[4], 0, 300)
        self.compare(q, found, self.truth(q, first[2], first[0], first[4], extra=(second[0], second[2], second[4])))
        for x, expected in zip(found, self.decode_two(q, first, second), strict=True):
            assert_same_bits(x, expected)

    @pytest.mark.parametrize("empty", [(0,), (1,), (0, 1)])
    def test_masked_caches(self, empty):
        pair = self.pair()
        for n in empty:
            pair[n][2][:2] = np.asarray([-1, -(2**31)])[:, None, None]
        out, _ = self.check_two(queries(pair[0][0].entry, 3, 2, 2), *pair)
        assert np.asarray(out)[:2].any() == (len(empty) < 2)

    def test_repeated_slots_count_as_often(self):
        first, second = self.pair(sizes=(8, 130))
        first[2][0], second[2][0] = first[0].slots(0)[5], second[0].slots(0)[7]
        self.check_two(queries(first[0].entry, 3, 2, 2), first, second)

    def test_logit_cap(self):
        first, second = self.pair()
        self.check_two(queries(first[0].entry, 3, 2, 2), first, second, logit_cap=2.0)

    def test_slots_of_one_cache_in_two_lists(self):
        first, second = self.pair()
        joined = np.concatenate([first[2], second[2]], axis=-1)
        second = [first[0], first[1], second[2], first[3], None]
        q = queries(first[0].entry, 3, 2, 2)
        found = self.decode_two(q, first, second)
        self.compare(q, found, self.truth(q, joined, first[0]))

    def test_groups_of_one_buffer(self):
        q, first, second = self.in_one_buffer()
        self.check_two(q, first, second)
