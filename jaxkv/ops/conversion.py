"""Converting block payloads between layouts that store the same entries."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.dispatch.validate import Dims
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.addressing.rows import read_entries, write_entries
from jaxkv_kernels.formats.bits import view_as


def convert_blocks(data, src: CacheLayout | PackedLayout, dst: CacheLayout | PackedLayout) -> jax.Array:
    """Converts block payloads for a cache with another order, padding, strides or buffer dtype.

    Entries are moved bit for bit.  To copy blocks of one cache to another:

        rows = read_blocks(source, blocks)
        target = write_blocks(target, other_blocks, convert_blocks(rows, source.layout, target.layout))

    Args:
      data: [n, src.block_nbytes / itemsize] of the dtype of src's buffer, as `read_blocks` returns it for `src`.
      src: the layout of the payloads.  For packed blocks, pass the layout of a group to convert only that group, or the
        PackedLayout to convert all groups.
      dst: the layout to convert to: it must have the same entries, layers, heads and block size, and the same groups if
        it is a PackedLayout.

    Returns:
      [n, dst.block_nbytes / itemsize] of the dtype of dst's buffer, for `write_blocks` to a cache of `dst`; 0 in
      padding and gaps.

    Raises:
      ValueError: the layouts differ in what they store, or `data` does not fit `src`; the message shows the difference.
    """
    pairs = pairs_of_groups(src=src, dst=dst)
    (first, target), *_ = pairs
    dims = Dims(E=(first.pages.block_elements, "the elements of a block of `src`"))
    dims.check("data", data, "n E", (str(first.dtype),))
    rows = view_as(jnp.asarray(data), _bits(first))
    out = jnp.zeros((rows.shape[0], target.pages.block_elements), _bits(target))
    for old, new in pairs if rows.size else ():
        parts = max(old.pages.num_parts, new.pages.num_parts)
        inside, place = _in_rows(rows, old.pages, parts)
        entries = view_as(read_entries(rows.reshape(-1), inside, **place), _bits(new))
        inside, place = _in_rows(out, new.pages, parts)
        out = write_entries(out.reshape(-1), inside, entries, jnp.array(True), **place).reshape(out.shape)
    return view_as(lax.optimization_barrier(out), target.dtype)


def _bits(layout: CacheLayout):
    """The unsigned dtype as wide as the buffer's elements: on CPUs, moving floats can change the bits of NaNs."""
    return jnp.dtype(f"uint{8 * layout.itemsize}")


def pairs_of_groups(**layouts: CacheLayout | PackedLayout) -> list[tuple[CacheLayout, CacheLayout]]:
    """The groups of two layouts, paired by name; ValueError with the difference if they do not store the same."""
    groups, (src, dst) = [], layouts
    for name, layout in layouts.items():
        if not isinstance(layout, CacheLayout | PackedLayout):
            raise ValueError(f"`{name}` is {layout!r}: expected a CacheLayout or a PackedLayout")
        groups.append(layout if isinstance(layout, Mapping) else {"": layout})
    if set(groups[0]) != set(groups[1]):
        names = ["one group" if list(group) == [""] else f"groups {', '.join(sorted(group))}" for group in groups]
        raise ValueError(f"`{src}` has {names[0]} and `{dst}` {names[1]}: expected the same groups in both")
    for name, old in groups[0].items():
        for what in ("entry", "num_layers", "num_heads", "block_size"):
            one, other = getattr(old, what), getattr(groups[1][name], what)
            if one != other:
                where = f" of group {name!r}" * bool(name)
                raise ValueError(
                    f"`{what}`{where} is {one} in `{src}` and {other} in `{dst}`: only order, strides, padding, dtype "
                    "and number of blocks may differ"
                )
    return [(old, groups[1][name]) for name, old in groups[0].items()]


def _in_rows(rows: jax.Array, pages: Pages, parts: int) -> tuple[Pages, dict[str, jax.Array]]:
    """The addresses of the entries in `rows` [n, E], concatenated as a buffer of n blocks, and all entries' indices.

    Entries consist of `parts` parts.  The indices are one array [n, L, H, N, parts] per axis.
    """
    strides = {f"{axis}_stride": stride for axis, _, stride in pages.row_axes}
    count, length = rows.shape
    inside = replace(pages, num_blocks=count, block_stride=length, offset=pages.row_offset, size=rows.size, **strides)
    inside = inside.divided(parts)
    counts = {
        "block": count,
        "layer": pages.num_layers,
        "head": pages.num_heads,
        "token": pages.block_size,
        "part": parts,
    }
    grid = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in counts.values()), indexing="ij")
    return inside, dict(zip(counts, grid, strict=True))
