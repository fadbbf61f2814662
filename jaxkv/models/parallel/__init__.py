"""A model on several devices: what they divide, and where they add up.

A step of the model is one `shard_map` around all its layers, whose code is that of one device; it queries
`model.parallel` where devices differ.  `load(..., parallel=...)` chooses.
"""

from jaxkv.models.parallel.context import ContextParallel as ContextParallel
from jaxkv.models.parallel.data import DataParallel as DataParallel
from jaxkv.models.parallel.one_device import OneDevice as OneDevice
from jaxkv.models.parallel.tensor import TensorParallel as TensorParallel
