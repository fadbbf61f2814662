"""Converting block payloads between layouts that store the same entries."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.dispatch.validate import Dims
from jaxkv.layout.layout import CacheLayout
from jaxkv.layout.packed import PackedLayout
from jaxkv_kernels.addressing.pages import Pages
from jaxkv_kernels.formats.bits import view_as


def convert_blocks(data, src: CacheLayout | PackedLayout, dst: CacheLayout | PackedLayout) -> jax.Array:
    """Converts block payloads for a cache with another order, padding, strides or buffer dtype.

    Entries are moved bit for bit.  To copy blocks of one cache to another:

        rows = read_blocks(source, blocks)
        target = write_blocks(target, other_blocks, convert_blocks(rows, source.layout, target.layout))

    Args:
      data: [n, src.block_nbytes / itemsize] of its buffer's dtype, as `read_blocks` returns them for `src`.
      src: the layout of the payloads.  Of a packed block, the layout of a group converts that group alone, and the
        PackedLayout converts all groups.
      dst: a layout with the same entries, layers, heads and block size; of a PackedLayout, with the same groups.

    Returns:
      [n, dst.block_nbytes / itemsize] of its buffer's dtype, for `write_blocks` to a cache of `dst`; 0 in padding and
      gaps.

    Raises:
      ValueError: the layouts differ in what they store, or `data` does not fit `src`; the message shows the difference.
    """
    pairs = pairs_of_groups(src=src, dst=dst)
    (first, target), *_ = pairs
    dims = Dims(E=(first.pages.block_elements, "the elements of a block of `src`"))
    dims.check("data", data, "n E", (str(first.dtype),))
    rows = view_as(jnp.asarray(data), _bits(first))
    out = jnp.zeros((rows.shape[0], target.pages.block_elements), _bits(target))
    for old, new in pairs:
        entries = view_as(_unpacked(rows, old.pages), _bits(new))
        out = lax.dynamic_update_slice(out, _packed(entries, new.pages), (0, new.pages.row_offset))
    return view_as(lax.optimization_barrier(out), target.dtype)


def _bits(layout: CacheLayout):
    """Unsigned integers as wide as the buffer's elements: on CPUs, moving floats can change the bits of NaNs."""
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


def _unpacked(rows: jax.Array, pages: Pages) -> jax.Array:
    """Rows [n, E] as entries [n, L, H, N, width]."""
    axes = [axis for axis in pages.row_axes if axis[1] > 1]
    x = rows[:, pages.row_offset :]
    for _, count, stride in axes:
        x = _fitted(x, count * stride)
        x = x.reshape(*x.shape[:-1], count, stride)
    x = jnp.transpose(x[..., : pages.width], (0, *_places(axes), len(axes) + 1))
    return x.reshape(-1, pages.num_layers, pages.num_heads, pages.block_size, pages.width)


def _packed(entries: jax.Array, pages: Pages) -> jax.Array:
    """Entries [n, L, H, N, width] as runs [n, extent], from `row_offset` on, with zeros in the gaps."""
    axes = [axis for axis in pages.row_axes if axis[1] > 1]
    order = sorted(range(len(axes)), key=_places(axes).__getitem__)
    x = entries.reshape(entries.shape[0], *(n for n in entries.shape[1:4] if n > 1), pages.width)
    x = jnp.transpose(x, (0, *(1 + place for place in order), len(axes) + 1))
    for _, count, stride in reversed(axes):
        x = _fitted(x, stride)
        x = x.reshape(*x.shape[:-2], count * stride)
    return x[:, : sum((count - 1) * stride for _, count, stride in axes) + pages.width]


def _places(axes) -> list[int]:
    """The places of layer, head and token, as far as they are there, among axes that follow a first one."""
    names = [name for name, _, _ in axes]
    return [1 + names.index(name) for name in ("layer", "head", "token") if name in names]


def _fitted(x: jax.Array, length: int) -> jax.Array:
    """The last axis, truncated or padded with zeros to `length`."""
    missing = max(length - x.shape[-1], 0)
    return jnp.pad(x[..., :length], [(0, 0)] * (x.ndim - 1) + [(0, missing)])
