"""Every kind of layout, by name: those on which an operation must return the same bits."""

import jaxkv
from jaxkv_kernels.formats.entries import Entry

APART = {
    "keys and values in planes": ("L", "BNH", "BNH"),
    "keys and values in halves of blocks": ("BL", "HN", "HN"),
    "values before keys": ("", "LBNH", "LBNH"),
    "values with strides of their own": ("B", "LNH", "HLN"),
    "two arrays": ("L", "BNH", "BNH"),
    "two arrays with strides of their own": ("", "LBNH", "BHLN"),
}
"""The axes of layouts whose keys and values lie apart, outermost first, by name: those of both, then those of keys and
those of values, whose planes lie one after the other, or in an array each."""
ONE_ARRAY = [name for name in APART if not name.startswith("two arrays")]
"""Those with one buffer."""


def every_layout(
    entry: Entry, *, num_heads: int = 2, num_layers: int = 3, num_blocks: int = 16, block_size: int = 64
) -> dict[str, jaxkv.CacheLayout]:
    """Small layouts of every kind, by name, without those that are equal to one before.

    The six orders; padded blocks; explicit strides with gaps and an offset; a group of a packed block, whose buffer has
    another dtype; and, if the entry allows it, keys and values that lie apart, in one array or in two.

    Args:
      entry: what one token stores for one head.
      num_heads: heads of the cache; 1 for entries that have one head, whatever is passed.
      num_layers: layers.
      num_blocks: blocks.
      block_size: tokens per block.
    """
    sizes = {"num_layers": num_layers, "num_blocks": num_blocks, "block_size": block_size}
    sizes |= {"num_heads": 1 if entry.one_head else num_heads}
    names: dict[jaxkv.CacheLayout, str] = {}
    for name, layout in whole_entries(entry, **sizes).items():
        names.setdefault(layout, name)
    for name in APART if keys_may_lie_apart(entry) else ():
        names[keys_apart(entry, name, **sizes)] = name
    return {name: layout for layout, name in names.items()}


def large_layout(entry: Entry, *, num_heads: int = 2, block_size: int = 64) -> jaxkv.CacheLayout:
    """A layout of about 2.9 * 2**30 elements, a quarter of whose blocks begin beyond 2**31.

    An offset that is computed in int32 is wrong there.  The 3 layers and 16 blocks have few entries; the rest of the
    buffer are gaps.  On CPUs, a check of reads on this layout takes little memory: pages of the buffer that hold no
    entries are not allocated.  A write copies the buffer unless it is donated, and GPUs need memory for all of it.
    """
    sizes = {"num_heads": 1 if entry.one_head else num_heads, "block_size": block_size}
    dense = jaxkv.CacheLayout(num_layers=3, num_blocks=16, entry=entry, **sizes)
    unit = 1024
    block = -(-(2**31) // (12 * unit)) * unit
    return jaxkv.CacheLayout(
        num_layers=3, num_blocks=16, entry=entry, **sizes, block_padding=block - dense.strides.block
    )


def keys_may_lie_apart(entry: Entry) -> bool:
    """Whether the keys and values of an entry may have planes of their own, without gaps between them."""
    try:
        return not any(sum(field.nbytes for field in plane) % entry.alignment for plane in entry.planes)
    except ValueError:
        return False


def whole_entries(
    entry: Entry, *, num_heads: int = 1, num_layers: int = 3, num_blocks: int = 16, block_size: int = 64
) -> dict[str, jaxkv.CacheLayout]:
    """Every kind of layout of entries that lie together: the six orders, padded, explicit strides, in packed blocks.

    With one head, some are equal.
    """
    sizes = {"num_layers": num_layers, "num_blocks": num_blocks, "block_size": block_size, "num_heads": num_heads}
    pad = 16 // entry.dtype.itemsize
    found: dict[str, jaxkv.CacheLayout] = {}
    for order in jaxkv.ORDERS:
        found[order] = jaxkv.CacheLayout(**sizes, entry=entry, order=order)
    found["BLNHC padded"] = jaxkv.CacheLayout(**sizes, entry=entry, order="BLNHC", block_padding=3 * pad)
    found["LBHNC padded"] = jaxkv.CacheLayout(**sizes, entry=entry, order="LBHNC", block_padding=pad)
    groups = {
        "before": jaxkv.Group(2, jaxkv.IndexerEntry()),
        "self": jaxkv.Group(num_layers, entry, num_heads),
        "after": jaxkv.Group(1, jaxkv.MLAEntry("bf16", latent=24, rope=8)),
    }
    for dtype in ("uint8", "bfloat16"):
        packed = jaxkv.PackedLayout(num_blocks=num_blocks, block_size=block_size, groups=groups, dtype=dtype)
        found[f"packed, {dtype}"] = packed["self"]
    if not entry.split:  # the tokens of a split page must be adjacent
        dense = found["BLNHC"]
        token = dense.strides.head * num_heads + pad
        block = token * block_size * num_layers + 5 * pad
        found["gaps, offset"] = jaxkv.CacheLayout.from_strides(
            **sizes,
            entry=entry,
            strides={"layer": token * block_size, "block": block, "head": dense.strides.head, "token": token},
            offset=2 * pad,
            size=num_blocks * block,
        )
    return found


def keys_apart(
    entry: Entry,
    name: str,
    *,
    num_heads: int = 1,
    num_layers: int = 3,
    num_blocks: int = 16,
    block_size: int = 64,
    alignment: int = 1,
) -> jaxkv.CacheLayout:
    """A layout of `APART`, with a gap before each pair of planes, or in each array.

    Keys, and values, begin at multiples of `alignment` bytes from each other.
    """
    sizes = {"num_layers": num_layers, "num_blocks": num_blocks, "block_size": block_size, "num_heads": num_heads}
    counts = {"L": num_layers, "B": num_blocks, "N": block_size, "H": num_heads}
    names = {"L": "layer", "B": "block", "N": "token", "H": "head"}
    item = entry.dtype.itemsize
    outer, *inner = APART[name]
    planes, extents = [], []
    for axes, fields in zip(inner, entry.planes, strict=True):
        nbytes = sum(field.nbytes for field in fields)
        steps, step = {}, -(-nbytes // alignment) * alignment // item
        for axis in reversed(axes):
            steps[names[axis]] = step
            step *= counts[axis]
        planes.append(steps)
        extents.append(step)
    gap, (key, value), (strides, value_strides) = 16 // item, extents, planes

    def with_outer_axes(planes, step):
        """Adds the strides of the outer axes to those of planes that take `step` elements; returns those of all."""
        for axis in reversed(outer):
            for steps in planes:
                steps[names[axis]] = step
            step *= counts[axis]
        return step

    if name in ONE_ARRAY:
        offset, value_offset = (gap + value, gap) if name == "values before keys" else (gap, gap + key)
        arrays = {"size": with_outer_axes(planes, gap + key + value)}
    else:
        offset = value_offset = gap
        arrays = {"size": with_outer_axes([strides], gap + key)}
        arrays["value_size"] = with_outer_axes([value_strides], gap + value)
    return jaxkv.CacheLayout.from_strides(
        **sizes, entry=entry, strides=strides, offset=offset, value_strides=value_strides, value_offset=value_offset,
        **arrays,
    )  # fmt: skip
