"""The implementations behind jaxkv.  They work on arrays and strides, and do not depend on the cache or layout classes.

- `jaxkv_kernels.formats`: what one token stores, and how it is encoded and decoded.
- `jaxkv_kernels.addressing`: where an entry lies in the flat buffer, and index arithmetic on block tables.
- `jaxkv_kernels.kernel`: what an implementation registers for each operation.
- `jaxkv_kernels.xla`, `jaxkv_kernels.triton`, `jaxkv_kernels.mosaic_gpu`: the implementations, each with a table
  `KERNELS` of its kernels by operation.
"""
