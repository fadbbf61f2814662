"""Entry formats: how the values of an entry (latent and rope, K and V, or an indexer key) are stored.

Each format is one file here, registered below.  A kernel supports the formats that it lists.
"""

from jaxkv_kernels.formats.format import FORMATS as FORMATS
from jaxkv_kernels.formats.format import Format as Format
from jaxkv_kernels.formats.format import Part as Part
from jaxkv_kernels.formats.format import register as register
from jaxkv_kernels.formats.fp8 import Fp8
from jaxkv_kernels.formats.fp8_ds_mla import Fp8DsMla
from jaxkv_kernels.formats.indexer_fp8 import IndexerFp8
from jaxkv_kernels.formats.plain import Plain

register(Plain("bf16", "bfloat16"))
register(Plain("f16", "float16"))
register(Plain("f32", "float32"))
register(Fp8())
register(Fp8DsMla())
register(IndexerFp8())
