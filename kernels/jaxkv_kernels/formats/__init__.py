"""Entry formats: how the values of an entry (latent and rope, K and V, or an indexer key) are stored.

Each format is one file here, registered below.  A kernel supports the formats that it lists.
"""

from jaxkv_kernels.formats.format import FORMATS as FORMATS
from jaxkv_kernels.formats.format import Field as Field
from jaxkv_kernels.formats.format import Format as Format
from jaxkv_kernels.formats.format import register as register
from jaxkv_kernels.formats.fp8 import Fp8
from jaxkv_kernels.formats.indexer_fp8 import IndexerFp8
from jaxkv_kernels.formats.indexer_mxfp4 import IndexerMxfp4
from jaxkv_kernels.formats.indexer_mxfp8 import IndexerMxfp8
from jaxkv_kernels.formats.int4 import Int4
from jaxkv_kernels.formats.int8 import Int8
from jaxkv_kernels.formats.kvfp4 import KvFp4
from jaxkv_kernels.formats.latents.fp4_v41 import Fp4V41
from jaxkv_kernels.formats.latents.fp8_ds_mla import Fp8DsMla
from jaxkv_kernels.formats.latents.fp8_v4 import Fp8V4
from jaxkv_kernels.formats.latents.fp8_v41 import Fp8V41
from jaxkv_kernels.formats.latents.mxfp4_ds_mla import Mxfp4DsMla
from jaxkv_kernels.formats.latents.nvfp4_ds_mla import Nvfp4DsMla
from jaxkv_kernels.formats.nvfp4 import Nvfp4
from jaxkv_kernels.formats.plain import Plain

register(Plain("bf16", "bfloat16"))
register(Plain("f16", "float16"))
register(Plain("f32", "float32"))
register(Fp8("fp8", "e4m3"))
register(Fp8DsMla())
register(IndexerFp8())
register(Fp8("fp8_e5m2", "e5m2"))
register(Fp8V4())
register(Fp8V41("fp8_v41", split=False))
register(Fp8V41("fp8_v41_split", split=True))
register(Nvfp4DsMla())
register(Mxfp4DsMla())
register(Fp4V41("fp4_v41", split=False))
register(Fp4V41("fp4_v41_split", split=True))
register(Int8())
register(Nvfp4())
register(IndexerMxfp4())
register(KvFp4())
register(Int4())
register(IndexerMxfp8())
