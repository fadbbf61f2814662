"""Language models that use the cache, of the families in `families/`: pytrees and pure functions.

    model = jaxkv.models.load("path/to/checkpoint")
    cache = model.cache(num_blocks=256)
    prefill = jax.jit(jaxkv.models.prefill, donate_argnums=1)
    decode = jax.jit(jaxkv.models.decode, donate_argnums=1)
    cache, logits = prefill(model, cache, tokens, seq_lens, block_tables, slot_mapping)
    cache, logits = decode(model, cache, tokens, seq_lens, block_tables, slot_mapping)

One compiled program of each function serves all requests, because lengths, tables and slots are traced.  Reading
weights needs the extra `jaxkv[models]`.
"""

from jaxkv.models.calibration import calibrate
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import NewTokens, decode, forward, head, prefill, step
from jaxkv.models.model import Model
from jaxkv.models.parallel import (
    ContextParallel,
    DataExpertParallel,
    DataParallel,
    ExpertParallel,
    OneDevice,
    TensorParallel,
)
from jaxkv.models.sampling import Sampling, SamplingBatch
from jaxkv.models.speculative import draft, mtp_forward, verify
from jaxkv.models.weights.fingerprint import fingerprint
from jaxkv.models.weights.load import load
from jaxkv.models.weights.random import random_model

__all__ = [
    "ContextParallel",
    "DataExpertParallel",
    "DataParallel",
    "ExpertParallel",
    "Model",
    "ModelConfig",
    "NewTokens",
    "OneDevice",
    "Sampling",
    "SamplingBatch",
    "TensorParallel",
    "calibrate",
    "decode",
    "draft",
    "fingerprint",
    "forward",
    "head",
    "load",
    "mtp_forward",
    "prefill",
    "random_model",
    "step",
    "verify",
]
