"""The implementations behind jaxkv: they know arrays and strides, never a cache or a layout object.

`formats`: what one token stores, and how it is encoded.  `addressing`: where an entry lies in the flat buffer.  `xla`,
`triton`, `mosaic_gpu`: the implementations, each with a table `KERNELS` of `Kernel`s by operation.
"""
