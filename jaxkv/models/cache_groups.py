"""The groups of caches of which some layers read a window of the last tokens: block tables whose blocks expire.

If some layers attend to all tokens and others to a window (GPT-OSS), the entries of each kind are a group.  If all
layers have the window, theirs is the only group, in the table "".

group                  table      an entry per    window         what it stores
full_attention         ""         token           none           keys and values
sliding_window         window     token           the model's    keys and values

Blocks of both tables have the same number of bytes.  If as many layers have a window as have none, they also have the
same number of tokens.  If more have one, blocks of the table "window" have fewer tokens.  If fewer have one, these
blocks are padded.

DeepSeek-V4:

group                  table      an entry per    window         what it stores
csa, hca               ""         m tokens        none           compressed entries
indexer                ""         m tokens        none           compressed keys of the indexer
window                 window     token           the model's    entries of the last tokens
csa_rows, indexer_rows csa_rows   token           2 m tokens     rows of compressors, in float32
hca_rows               hca_rows   token           m tokens       the same

Rows are stored per token, so that every block boundary is a prefix, whatever the chunks of a prompt were, and a chunk
may be divided into several rows of a step.  The rows of a token of V4-Flash take 300 KB in all layers, ten times its
other entries, but are needed for 8 or 128 tokens only.  An engine offloads only what is needed at the end of a block of
the table "": of V4-Flash 26 of 105 blocks per 256 tokens, of which 17 have rows of 128 tokens.
"""

from collections.abc import Mapping

from jaxkv.layout.packed import Group
from jaxkv.models.config import GQA, CompressedAttention
from jaxkv_kernels.formats.entries import KVEntry
from jaxkv_kernels.formats.states import StateEntry

MAIN = ""
"""The first table.  Requests keep its blocks, unless all layers have a window."""
WINDOW = "window"
"""The table of the last tokens."""
SLIDING_WINDOW = "sliding_window"
"""The group of layers that attend to a window."""


def of_windows(config: GQA, num_layers: int, entry: KVEntry, num_kv_heads: int) -> dict[str, Group]:
    """The groups by name, of a cache of `num_layers` layers of which one or more have a window."""
    full, windowed = num_layers - len(config.windowed), len(config.windowed)
    if not full:
        return {SLIDING_WINDOW: Group(windowed, entry, num_kv_heads, window=config.window)}
    return {
        "full_attention": Group(full, entry, num_kv_heads),
        SLIDING_WINDOW: Group(windowed, entry, num_kv_heads, table=WINDOW, window=config.window),
    }


def of_compressed(config: CompressedAttention, entry_format: str) -> dict[str, Group]:
    """The groups by name; those of layers that the model does not have are left out."""
    entry, keys = config.entry(entry_format), config.key_entry(entry_format)
    csa, hca = (config.kinds.count(kind) for kind in ("csa", "hca"))
    csa_options = {"table": "csa_rows", "window": 2 * config.csa_rate}
    found = {
        "csa": Group(csa, entry, rate=config.csa_rate),
        "indexer": Group(csa, keys, rate=config.csa_rate),
        "hca": Group(hca, entry, rate=config.hca_rate),
        "window": Group(len(config.kinds), entry, table=WINDOW, window=config.window),
        "csa_rows": Group(csa, _rows(2 * config.head_dim), **csa_options),
        "indexer_rows": Group(csa, _rows(2 * config.indexer.head_dim), **csa_options),
        "hca_rows": Group(hca, _rows(config.head_dim), table="hca_rows", window=config.hca_rate),
    }
    return {name: group for name, group in found.items() if group.num_layers}


def _rows(width: int) -> StateEntry:
    return StateEntry({"kv": ((width,), "float32"), "gate": ((width,), "float32")})


def block_sizes(groups: Mapping[str, Group], block_size: int) -> dict[str, int]:
    """Tokens per block of each table, given that of the table "".

    Blocks of all tables have the same number of bytes.  The others have as many tokens as fit in a block of the table
    "", of the divisors of its tokens, so that prefixes of whole blocks are whole blocks in all tables.
    """

    def nbytes(table: str, tokens: int) -> int:
        held = [group for group in groups.values() if group.table == table]
        return sum(
            group.num_layers * group.num_heads * group.entry.page_nbytes(max(tokens // group.rate, 1)) for group in held
        )

    most = nbytes(MAIN, block_size)
    sizes = {MAIN: block_size}
    for group in groups.values():
        fitting = (size for size in range(block_size, 1, -1) if block_size % size == 0)
        sizes.setdefault(group.table, next((size for size in fitting if nbytes(group.table, size) <= most), 1))
    return sizes
