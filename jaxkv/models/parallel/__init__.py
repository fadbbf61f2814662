"""A model on several devices: what is divided over them, and how partial results are combined.

A step of the model is one `shard_map` around all layers.  The code inside is that of one device.  It calls
`model.parallel` where the work of the devices differs, or where their results must be combined.  The argument
`parallel` of `load` selects one of these.
"""

from jaxkv.models.parallel.base import OneDevice as OneDevice
from jaxkv.models.parallel.context import ContextParallel as ContextParallel
from jaxkv.models.parallel.data import DataParallel as DataParallel
from jaxkv.models.parallel.expert import DataExpertParallel as DataExpertParallel
from jaxkv.models.parallel.expert import ExpertParallel as ExpertParallel
from jaxkv.models.parallel.tensor import TensorParallel as TensorParallel
