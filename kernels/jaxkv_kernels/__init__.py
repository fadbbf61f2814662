"""The implementations behind jaxkv: they know arrays and strides, never a cache or a layout object.

`entries`, `formats`: what one token stores, and how it is encoded.  `pages`: where an entry lies in the flat buffer.
`slots`: index arithmetic on block tables.  `xla`: every operation in plain JAX, one file each.
"""
