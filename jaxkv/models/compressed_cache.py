"""The groups of DeepSeek-V4's cache.

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
from jaxkv.models.config import CompressedAttention
from jaxkv_kernels.formats.states import StateEntry

MAIN = ""
"""The table of compressed entries, whose blocks requests keep."""


def groups(config: CompressedAttention, entry_format: str) -> dict[str, Group]:
    """The groups by name; those of layers that the model does not have are left out."""
    entry, keys = config.entry(entry_format), config.key_entry(entry_format)
    csa, hca = (config.kinds.count(kind) for kind in ("csa", "hca"))
    csa_options = {"table": "csa_rows", "window": 2 * config.csa_rate}
    found = {
        "csa": Group(csa, entry, rate=config.csa_rate),
        "indexer": Group(csa, keys, rate=config.csa_rate),
        "hca": Group(hca, entry, rate=config.hca_rate),
        "window": Group(len(config.kinds), entry, table="window", window=config.window),
        "csa_rows": Group(csa, _rows(2 * config.head_dim), **csa_options),
        "indexer_rows": Group(csa, _rows(2 * config.indexer.head_dim), **csa_options),
        "hca_rows": Group(hca, _rows(config.head_dim), table="hca_rows", window=config.hca_rate),
    }
    return {name: group for name, group in found.items() if group.num_layers}


def _rows(width: int) -> StateEntry:
    return StateEntry({"kv": ((width,), "float32"), "gate": ((width,), "float32")})


def block_sizes(groups: Mapping[str, Group], block_size: int) -> dict[str, int]:
    """Tokens per block of each table, given that of the table of compressed entries.

    Blocks of all tables have the same number of bytes.  The others have as many tokens as fit in a block of compressed
    entries, of the divisors of its tokens, so that prefixes of whole blocks are whole blocks in all tables.
    """

    def nbytes(table: str, tokens: int) -> int:
        held = [group for group in groups.values() if group.table == table]
        return sum(group.num_layers * group.entry.page_nbytes(max(tokens // group.rate, 1)) for group in held)

    most = nbytes(MAIN, block_size)
    sizes = {MAIN: block_size}
    for group in groups.values():
        fitting = (size for size in range(block_size, 1, -1) if block_size % size == 0)
        sizes.setdefault(group.table, next((size for size in fitting if nbytes(group.table, size) <= most), 1))
    return sizes
