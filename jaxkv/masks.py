"""Masks for `mask=` of `decode_mla` and `decode_kv` by which query tokens see intervals of the tokens of their request.

All implementations support these masks; other functions of positions run on `xla` only.  They are combined by `|` and
`&`, and with the `window` and the causal mask of a call:

    jaxkv.masks.Chunked(8192)                            # attention within chunks, as in Llama 4
    jaxkv.masks.Prefix(4) | jaxkv.masks.Sliding(1023, 0)  # attention sinks and the last 1,024 tokens
    jaxkv.masks.Prefix(n) | jaxkv.masks.Sliding(-1, 0)    # with `causal=False`: a prefix that all tokens see

A mask of your own is a subclass of `Intervals`.
"""

from jaxkv_kernels.masks import Chunked, Interval, Intervals, Mask, Prefix, Sliding

__all__ = ["Chunked", "Interval", "Intervals", "Mask", "Prefix", "Sliding"]
