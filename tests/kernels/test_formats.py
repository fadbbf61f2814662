"""Byte maps of the entry formats: consistent, complete, and shown in the README as they are."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.support import format_table
from jaxkv_kernels.formats import FORMATS, Format, register
from jaxkv_kernels.formats.bits import corrected_quotient
from support import oracle

ROOT = Path(__file__).parents[2]
ENTRIES = [kind(name) for kind in (jaxkv.MLAEntry, jaxkv.KVEntry, jaxkv.IndexerEntry) for name in kind.formats]
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=str)


@every_entry
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_parts_fill_a_page_without_overlap(entry, block_size):
    tokens = block_size if entry.split else 1
    end = 0
    for part in entry.parts(block_size):
        assert part.offset == end
        assert part.offset % part.itemsize == 0
        end += part.nbytes * tokens
    assert end == entry.nbytes * tokens


@every_entry
def test_encoded_entries_have_the_parts_of_a_page_of_one_token(entry):
    values = [jnp.zeros((2, size)) for size in entry.sizes]
    scales = [jnp.float32(1) if entry.codec.scaled else None] * len(values)
    row = jax.eval_shape(lambda: entry.encode(values, scales))
    assert row.dtype == entry.dtype
    assert row.shape == (2, entry.nbytes // entry.dtype.itemsize)
    for part in entry.parts():
        assert jax.eval_shape(part.read, row).shape == (2, part.count)


def test_the_oracle_knows_every_format():
    assert oracle.FORMATS.keys() == FORMATS.keys()


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'fp8' is already registered"):
        register(FORMATS["fp8"])
    with pytest.raises(ValueError, match="expected a Format"):
        register("fp8")  # type: ignore[arg-type]
    assert all(isinstance(form, Format) for form in FORMATS.values())


def test_the_table_in_the_readme_is_that_of_the_code():
    readme = (ROOT / "kernels" / "jaxkv_kernels" / "formats" / "README.md").read_text()
    shown = re.search(r"<!-- formats -->\n(.*?)\n<!-- /formats -->", readme, re.DOTALL)
    assert shown
    assert shown[1] == format_table(), "paste what jaxkv.support.format_table() returns between the marks"


def of_every_kind(rng, count):
    """Float32 numbers: any bits, denormal ones, normally distributed ones, zeros, infinities and NaN, shuffled."""
    bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    found = bits.view(np.float32).copy()
    found[0::5] = (bits[0::5] & 0x807FFFFF).view(np.float32)
    found[1::5] = rng.standard_normal(len(found[1::5]))
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 1e-45, 2.0**-126, 3.4028235e38], np.float32)
    found[2::25] = rng.choice(ends, len(found[2::25]))
    return rng.permutation(found)


@pytest.mark.parametrize("divisors", ["one for each value", "one for all values"])
def test_quotients_have_the_bits_of_a_correctly_rounded_division(divisors):
    rng = np.random.default_rng(0)
    values, divisor = of_every_kind(rng, 2**18).reshape(64, -1), of_every_kind(rng, 2**18).reshape(64, -1)
    if divisors == "one for all values":
        divisor = divisor[:, :1]
    found = np.asarray(jax.jit(corrected_quotient)(values, divisor))
    with np.errstate(all="ignore"):
        right = values / divisor
    small = np.abs(right) <= 2.0**-126
    assert (np.abs(found[small]) <= 2.0**-126).all()
    assert (np.signbit(found) == np.signbit(right))[~np.isnan(right)].all()
    np.testing.assert_array_equal(found[~small], right[~small])
