"""Converting block payloads between caches that divide heads or tokens over devices in different ways."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv.checks import Dims
from jaxkv.layout.layout import CacheLayout, TokenShards
from jaxkv.layout.packed import PackedLayout
from jaxkv.ops.blocks import Conversion


def convert_blocks(
    data: ArrayLike | Sequence[ArrayLike],
    src: CacheLayout | PackedLayout,
    dst: CacheLayout | PackedLayout,
    *,
    table: str | None = None,
    num_tokens: int | None = None,
) -> jax.Array:
    """`jaxkv.convert_blocks` between caches that divide the heads or the tokens of a prompt over devices.

    Layouts are those of one device's cache.  How many devices there are follows from `data` for the source and from the
    number of heads and `shards` for the target.  Heads are divided into consecutive parts, as tensor parallelism
    divides them: if H heads are divided over n devices, device i has heads [i * H / n, (i + 1) * H / n).  Tokens are
    divided as `layout.shards` says (context parallelism).  If both are divided, the tokens are divided over the last
    axis of the mesh, as in `zeros`: device i * num_shards + j has part i of the heads and shard j of the tokens.

    Caches of one head (MLA, indexer keys) are not divided by tensor parallelism but replicated: they count as one
    device, so pass the payloads of one of the replicas, and write the result to each replica.

    To read the payloads of a divided cache, call `jaxkv.read_blocks` on every device:

        read = jax.shard_map(jaxkv.read_blocks, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
        rows = read(cache, blocks).reshape(mesh.size, len(blocks), -1)

    Args:
      data: [devices, n, src.block_nbytes / itemsize] of the dtype of src's buffer, or a sequence of an array [n, E] per
        device, in the order of the devices: payloads that hold consecutive tokens of one prompt, from its start on.
      src: the layout of one device's cache of the source.
      dst: the layout of one device's cache to convert to.  It must have the same entries and layers, all devices
        together the same heads, and the same groups if it is a PackedLayout.
      table: as in `jaxkv.convert_blocks`.
      num_tokens: how many tokens of the prompt to convert, on all devices together, a static int.  By default, as many
        as a prompt may have whose blocks these are.

    Returns:
      [devices of the target, m, dst.block_nbytes / itemsize] of the dtype of dst's buffer, for `jaxkv.write_blocks` on
      each of these devices.  Every device has as many rows as device 0, which has the most tokens.  They are 0 where a
      device has no token, and in padding and gaps.

    Raises:
      ValueError: the layouts differ in what they store, heads cannot be divided in this way, `data` does not fit `src`
        or its shards, or `table` or `num_tokens` is as in `jaxkv.convert_blocks`; the message shows the difference.
    """
    conversion = Conversion.of(src, dst, table, free=("block_size", "num_heads", "shards"))
    first, target = conversion.pairs[0]
    conversion = replace(conversion, src_shards=first.shards, dst_shards=target.shards)
    dims = Dims(E=(conversion.row_elements, "the elements of a block of `src`"))
    dtypes = (str(conversion.dtype),)
    if isinstance(data, list | tuple):
        parts = [dims.check(f"data[{i}]", array, "n E", dtypes) for i, array in enumerate(data)]
        if not parts:
            raise ValueError("`data` is empty: expected an array [n, E] for each device of the source")
        rows = jnp.stack([conversion.bits_of(part) for part in parts])
    else:
        rows = conversion.bits_of(dims.check("data", data, "devices n E", dtypes))
    divided = _source_parts(conversion, rows.shape[0])
    targets = _target_parts(conversion, divided) * conversion.dst_shards.num_shards
    return conversion.run(rows, conversion.count(rows.shape[1], num_tokens), targets)


def _source_parts(conversion: Conversion, devices: int) -> int:
    """Over how many devices the source divides heads; ValueError if `devices` cannot be so many."""
    shards = conversion.src_shards
    parts, rest = divmod(devices, shards.num_shards)
    if rest:
        raise ValueError(
            f"`data` is of {devices} devices, and `src` is the layout of one of {shards}: expected a multiple of "
            f"{shards.num_shards} devices"
        )
    one_head = next((layout.entry for layout, _ in conversion.pairs if layout.entry.one_head), None)
    if parts > 1 and one_head is not None:
        raise ValueError(
            f"`data` is of {devices} devices, and the {type(one_head).__name__} has one head, which is replicated "
            f"rather than divided: expected the payloads of one replica, which are those of {_devices(shards)}"
        )
    return parts


def _target_parts(conversion: Conversion, parts: int) -> int:
    """Over how many devices the target divides heads; ValueError if the groups do not agree."""
    found: dict[int, tuple[int, int]] = {}
    for old, new in conversion.pairs:
        heads = old.num_heads * parts
        count, rest = divmod(heads, new.num_heads)
        if rest:
            raise ValueError(
                f"`dst` has {new.num_heads} heads per device, and the source has {heads} on all devices together "
                f"({old.num_heads} on each of {parts}): expected a divisor of {heads}"
            )
        found.setdefault(count, (heads, new.num_heads))
    if len(found) > 1:
        groups = " and ".join(f"{heads} heads into parts of {own}" for heads, own in found.values())
        raise ValueError(f"`dst` divides {groups}: expected as many parts in every group, one per device")
    (count,) = found
    return count


def _devices(shards: TokenShards) -> str:
    return "one device" if shards.num_shards == 1 else f"{shards.num_shards} devices"
