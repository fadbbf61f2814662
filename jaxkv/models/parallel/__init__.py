"""A model on several devices: what they divide, and how partial results are combined.

A step of the model is one `shard_map` around all layers.  The code inside is that of one device; it calls
`model.parallel` where the devices' parts differ or must be combined.  Choose with `load(..., parallel=...)`.
"""

from jaxkv.models.parallel.context import ContextParallel as ContextParallel
from jaxkv.models.parallel.data import DataParallel as DataParallel
from jaxkv.models.parallel.one_device import OneDevice as OneDevice
from jaxkv.models.parallel.tensor import TensorParallel as TensorParallel
