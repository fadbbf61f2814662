"""The implementations behind jaxkv.  They work on arrays and strides, and do not depend on the cache or layout classes.

- `jaxkv_kernels.formats`: what one token stores, and how it is encoded and decoded.
- `jaxkv_kernels.addressing`: where an entry lies in the flat buffer, and index arithmetic on block tables.
- `jaxkv_kernels.calls`: the record of a call of each operation, and `Kernels`, the interface of an implementation.
- `jaxkv_kernels.xla`, `jaxkv_kernels.triton`, `jaxkv_kernels.mosaic_gpu`: the implementations.  The class in the module
  `kernels` of each has a method per operation, and what it supports.
"""
