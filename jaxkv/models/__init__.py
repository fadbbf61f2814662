"""Language models on the cache, of the families in `families/`: pure functions over pytrees.

    model = jaxkv.models.load("path/to/checkpoint")
    cache = model.cache(num_blocks=256)
    prefill = jax.jit(jaxkv.models.prefill, donate_argnums=1)
    decode = jax.jit(jaxkv.models.decode, donate_argnums=1)
    cache, logits = prefill(model, cache, tokens, seq_lens, block_tables, slot_mapping)
    cache, logits = decode(model, cache, tokens, seq_lens, block_tables, slot_mapping)

One compiled program of each serves all requests: lengths, tables and slots are traced.  Reading weights needs the
extra `jaxkv[models]`.
"""

from jaxkv.models.config import ModelConfig as ModelConfig
from jaxkv.models.decoder import decode as decode
from jaxkv.models.decoder import forward as forward
from jaxkv.models.decoder import head as head
from jaxkv.models.decoder import prefill as prefill
from jaxkv.models.model import Model as Model
from jaxkv.models.parallel import ContextParallel as ContextParallel
from jaxkv.models.parallel import DataParallel as DataParallel
from jaxkv.models.parallel import OneDevice as OneDevice
from jaxkv.models.parallel import TensorParallel as TensorParallel
from jaxkv.models.sampling import Sampling as Sampling
from jaxkv.models.weights.fingerprint import fingerprint as fingerprint
from jaxkv.models.weights.load import load as load
from jaxkv.models.weights.random import random_model as random_model
