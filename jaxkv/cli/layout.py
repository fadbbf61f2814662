"""Print the layout of a cache, or draw which bytes belong to which block, layer, head and token."""

import argparse

import jaxkv
from jaxkv.terminal.files import named
from jaxkv.terminal.options import ENTRY_FORMATS, output_file, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: the layout, and where to save its picture."""
    parser.add_argument("--layers", type=positive, default=27, metavar="N", help="layers (27)")
    parser.add_argument("--blocks", type=positive, default=1024, metavar="N", help="blocks (1024)")
    parser.add_argument("--block-size", type=positive, default=64, metavar="N", help="tokens per block (64)")
    order = "physical order (BLNHC); MLA entries have one head, so orders that differ in H only are one layout"
    parser.add_argument("--order", choices=jaxkv.ORDERS, default="BLNHC", help=order)
    parser.add_argument("--format", choices=ENTRY_FORMATS, default="bf16", help="format of the entries (bf16)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--kv", action="store_true", help="keys and values instead of MLA entries")
    kinds.add_argument("--indexer", action="store_true", help="pack indexer keys into the same blocks as MLA entries")
    parser.add_argument("--heads", type=positive, metavar="N", help="KV heads, with --kv (8)")
    parser.add_argument("--head-dim", type=positive, metavar="N", help="values per key, with --kv (128)")
    picture = "save the memory map (.svg or .png; needs matplotlib)"
    parser.add_argument("--save", type=output_file, metavar="FILE", help=picture)


def run(args: argparse.Namespace) -> int:
    """Prints the table, and saves the picture if requested."""
    if (args.heads or args.head_dim) and not args.kv:
        raise ValueError("--heads and --head-dim are sizes of keys and values: expected --kv with them")
    sizes = {"num_blocks": args.blocks, "block_size": args.block_size, "order": args.order}
    if args.kv:
        entry = jaxkv.KVEntry(args.format, args.head_dim or 128)
        layout = jaxkv.CacheLayout(num_layers=args.layers, num_heads=args.heads or 8, entry=entry, **sizes)
    elif args.indexer:
        entries = {"latent": jaxkv.MLAEntry(args.format), "indexer": jaxkv.IndexerEntry()}
        groups = {name: jaxkv.Group(args.layers, entry) for name, entry in entries.items()}
        layout = jaxkv.PackedLayout(groups=groups, **sizes)
    else:
        layout = jaxkv.CacheLayout(num_layers=args.layers, entry=jaxkv.MLAEntry(args.format), **sizes)
    print(layout)
    if args.save:
        with named(args.save):
            layout.draw(args.save)
        print(f"saved {args.save}")
    return 0
