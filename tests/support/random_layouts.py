"""Entries and layouts drawn at random: explicit strides of every kind, and groups of packed blocks."""

import jaxkv

BLOCK_SIZES = (1, 3, 16, 61, 64)
AXES = {"layer": "num_layers", "block": "num_blocks", "token": "block_size", "head": "num_heads"}


def mla_entry(random):
    name = random.choice(jaxkv.MLAEntry.formats)
    plain = name in ("bf16", "f16", "f32", "fp8", "fp8_e5m2")
    latent = random.choice([8, 20, 64] if plain else [128, 256])
    return jaxkv.MLAEntry(name, latent=latent, rope=random.choice([2, 8, 16] if plain else [32, 64]))


def kv_entry(random):
    name = random.choice(jaxkv.KVEntry.formats)
    sizes = {"nvfp4": ([16, 32], [16, 48]), "int8": ([4, 12], [4, 16])}.get(name, ([4, 10], [2, 4, 16]))
    return jaxkv.KVEntry(name, *map(random.choice, sizes))


def indexer_entry(random):
    name = random.choice(["indexer_fp8", "indexer_mxfp4"])
    return jaxkv.IndexerEntry(name, head_dim=random.choice([8, 128] if name == "indexer_fp8" else [32, 128]))


def state_entry(random):
    dtypes = random.choices(["float32", "bfloat16", "float16"], k=random.randint(1, 3))
    shapes = [tuple(random.randint(1, 5) for _ in range(random.randint(0, 3))) for _ in dtypes]
    return jaxkv.StateEntry({f"a{n}": case for n, case in enumerate(zip(shapes, dtypes, strict=True))})


def sizes_of(random, entry):
    """Small sizes of a cache of that entry."""
    return dict(
        num_layers=random.randint(1, 4),
        num_blocks=random.randint(2, 6),
        block_size=random.choice(BLOCK_SIZES),
        num_heads=1 if entry.one_head else random.randint(1, 3),
        entry=entry,
    )


def strided_layout(random, entry, sizes=None):
    """A layout of explicit strides."""
    sizes = sizes or sizes_of(random, entry)
    dtype = random.choice([None, "uint8"])
    itemsize = entry.dtype.itemsize if dtype is None else 1
    unit = max(entry.alignment // itemsize, 1)
    return random.choice([nested, interleaved])(random, sizes, dtype, entry.nbytes // itemsize, unit)


def packed(random, sizes):
    """A group between, before or after others."""
    own = jaxkv.Group(sizes["num_layers"], sizes["entry"], sizes["num_heads"])
    others = [
        ("other", jaxkv.Group(random.randint(1, 2), jaxkv.IndexerEntry(head_dim=4))),
        ("another", jaxkv.Group(1, jaxkv.KVEntry("bf16", head_dim=3), num_heads=2)),
    ]
    groups = [("self", own), *others[: random.randint(0, 2)]]
    random.shuffle(groups)
    return jaxkv.PackedLayout(
        num_blocks=sizes["num_blocks"],
        block_size=sizes["block_size"],
        groups=dict(groups),
        order=random.choice(["BLNHC", "BLHNC", "BHLNC"]),
    )["self"]


def nested(random, sizes, dtype, width, unit):
    """Explicit strides: the axes in any order, with gaps, behind an offset, nonsense where an axis has length 1."""
    counts = {axis: sizes[name] for axis, name in AXES.items()}
    axes = random.sample(list(AXES), 4)
    if sizes["entry"].split:  # a page is one run
        axes = ["token", *(axis for axis in axes if axis != "token")]
    extent, strides = width, {}
    for axis in axes:
        if counts[axis] == 1:
            strides[axis] = random.choice([0, -5, 1, 10**9])
            continue
        gap = random.choice([0, 0, 1, 5])
        if axis == "token" and sizes["entry"].split:
            gap = 0
        strides[axis] = extent + gap * unit
        extent += (counts[axis] - 1) * strides[axis]
        extent = -(-extent // unit) * unit
    offset = unit * random.randint(0, 9)
    size = offset + extent + random.randint(0, 3)
    return jaxkv.CacheLayout.from_strides(**sizes, strides=strides, offset=offset, size=size, dtype=dtype)


def interleaved(random, sizes, dtype, width, unit):
    """Explicit strides: of two axes that are not one of tokens, the steps lie between each other's; the rest nests."""
    counts = {axis: sizes[name] for axis, name in AXES.items()}
    extent = counts["token"] * (-(-width // unit) * unit)
    inner, outer, *rest = random.sample(["layer", "block", "head"], 3)
    # Step (i, j) is at extent * (i * n + j * (n + 1)) = extent * ((i + j) * n + j), and j is less than n.
    n = max(counts[outer], 2)
    strides = {"token": extent // counts["token"], inner: n * extent, outer: (n + 1) * extent}
    extent += (counts[inner] - 1) * strides[inner] + (counts[outer] - 1) * strides[outer]
    for axis in rest:
        strides[axis] = extent
        extent *= counts[axis]
    offset = unit * random.randint(0, 9)
    return jaxkv.CacheLayout.from_strides(**sizes, strides=strides, offset=offset, size=offset + extent, dtype=dtype)
