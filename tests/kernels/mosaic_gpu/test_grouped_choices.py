"""Choices grouped by expert in one kernel, beside XLA's `expert_groups`: its PTX on the host, the kernel on a GPU."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv_kernels.experts import expert_groups, groups_shape
from jaxkv_kernels.mosaic_gpu import grouped_choices
from jaxkv_kernels.mosaic_gpu.grouped_choices import THREADS, group_choices
from support.cases import further
from support.hopper import on_hopper
from support.ptx import execute

UNDEFINED = 777777


def emulated(experts, *, count: int, tile: int):
    """The results of the kernel's code, from memory that is undefined."""
    rows, tiles = groups_shape(experts.size, count, tile=tile, align=8)
    sizes = experts.size, rows, tiles, tiles, tiles, 1
    memory = [experts.reshape(-1).astype(np.int64) & (2**32 - 1), *(np.full(size, UNDEFINED) for size in sizes)]
    execute("".join(grouped_choices.code(experts.shape, rows, tiles, count, tile)), memory, 3 * count, threads=THREADS)
    _, places, tokens, *listed = memory
    return places.reshape(experts.shape), tokens, tuple(listed)


class Grouping:
    """All results, up to the order of the rows of an expert."""

    @pytest.mark.parametrize(
        ("tokens", "chosen", "count", "tile", "kind"),
        [
            (5, 2, 3, 8, "any"),
            (528, 6, 64, 64, "random"),
            (70, 6, 64, 16, "none"),
            (200, 8, 256, 16, "one"),
            further(896, 6, 64, 104, "any"),
            further(128, 8, 1000, 8, "random"),
            further(1000, 8, 160, 64, "one"),
            further(9, 1, 1, 128, "any"),
        ],
    )
    def test_beside_xla(self, tokens, chosen, count, tile, kind):
        rng = np.random.default_rng(0)
        experts = {
            "any": lambda: rng.integers(-2, count + 3, (tokens, chosen)),
            "random": lambda: rng.integers(0, count, (tokens, chosen)),
            "one": lambda: np.full((tokens, chosen), count - 1),
            "none": lambda: np.full((tokens, chosen), -1),
        }[kind]().astype(np.int32)
        rows, of_rows, (ids, starts, sizes, (listed,)) = self.group(experts, count=count, tile=tile)
        right = expert_groups(jnp.asarray(experts), count, tile=tile, align=8)
        assert listed == right.count
        np.testing.assert_array_equal(ids[:listed], right.experts[:listed])
        np.testing.assert_array_equal(8 * starts[:listed], right.starts[:listed])
        np.testing.assert_array_equal(8 * sizes[:listed], right.sizes[:listed])
        known, expected = (experts >= 0) & (experts < count), np.asarray(right.rows)
        assert (rows[~known] == len(of_rows)).all()
        for expert in np.unique(experts[known]):
            np.testing.assert_array_equal(np.sort(rows[experts == expert]), np.sort(expected[experts == expert]))
        tokens_of_rows = np.zeros(len(right.tokens), np.int64)
        tokens_of_rows[rows[known]] = np.nonzero(known)[0]
        np.testing.assert_array_equal(of_rows, tokens_of_rows)


class TestGrouping(Grouping):
    """The PTX, executed on the host."""

    group = staticmethod(emulated)


def _on_device(experts, **options):
    rows, tokens, tiles = group_choices(jnp.asarray(experts), **options)
    return np.asarray(rows), np.asarray(tokens), tuple(map(np.asarray, tiles))


@on_hopper
class TestGroupingOnHopper(Grouping):
    """The kernel."""

    group = staticmethod(_on_device)


@pytest.mark.usefixtures("interpreted")
class TestInterpretedGrouping(Grouping):
    """The stand-in of the interpreter."""

    group = staticmethod(_on_device)


def test_what_does_not_fit():
    fits = partial(grouped_choices.fits, count=64)
    assert fits(grouped_choices.MOST_CHOICES)
    assert not fits(grouped_choices.MOST_CHOICES + 1)
    assert not grouped_choices.fits(6, 1025)
