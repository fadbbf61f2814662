"""Checks of kernels for paged caches, for those of jaxkv and for your own.

- `assert_write_correct`, `assert_gather_correct`, `assert_attention_correct` run a function on each of the layouts that
  you pass, with NaN and random bytes in all neighbouring memory, and compare it with a packed cache, bit for bit.
- `every_layout` has these layouts by name, `large_layout` one of more than 2**31 elements, and `layouts` is a
  hypothesis strategy of random ones.
- `poisoned` is a cache full of NaN, and `assert_caches_equal` compares the entries of two caches.

`jaxkv verify` runs the random calls and checks of jaxkv's own operations that the other modules have.
"""

from jaxkv.testing.caches import assert_caches_equal, poisoned
from jaxkv.testing.conformance import assert_attention_correct, assert_gather_correct, assert_write_correct
from jaxkv.testing.named_layouts import every_layout, large_layout
from jaxkv.testing.strategies import layouts

__all__ = [
    "assert_attention_correct",
    "assert_caches_equal",
    "assert_gather_correct",
    "assert_write_correct",
    "every_layout",
    "large_layout",
    "layouts",
    "poisoned",
]
