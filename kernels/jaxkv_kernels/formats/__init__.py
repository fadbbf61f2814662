"""Entry formats: how the parts of an entry (latent and rope; K and V; an indexer key) become elements and back.

A format is a file here, its line in `FORMATS`, and its name in the `formats` of the entries that have it.  Kernels
support the formats that their `limits` list.
"""

from collections.abc import Sequence
from typing import Protocol

import jax

from jaxkv_kernels.formats.fp8 import Fp8
from jaxkv_kernels.formats.fp8_ds_mla import Fp8DsMla
from jaxkv_kernels.formats.indexer_fp8 import IndexerFp8
from jaxkv_kernels.formats.plain import Plain


class Format(Protocol):
    """What an entry format answers.  `sizes` are the lengths of an entry's parts, in values."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def dtype(self) -> str:
        """Natural dtype of the stored elements."""
        ...

    @property
    def alignment(self) -> int:
        """Bytes that an entry's address must be a multiple of."""
        ...

    @property
    def scaled(self) -> bool:
        """Whether every call must bring a scale for each part: value = stored * scale."""
        ...

    def width(self, sizes: Sequence[int]) -> int:
        """Stored elements an entry; ValueError if the format cannot hold parts of these sizes."""
        ...

    def encode(self, parts: Sequence[jax.Array], scales: Sequence[jax.Array | None]) -> jax.Array:
        """Parts [..., n_i] to stored elements [..., width]."""
        ...

    def decode(
        self, row: jax.Array, sizes: Sequence[int], scales: Sequence[jax.Array | None], dtype
    ) -> list[jax.Array]:
        """Stored elements [..., width] to parts [..., n_i] of `dtype`.

        Of a scaled format, a scale of None leaves a part as it is stored, exact in every `dtype`: the scale is then
        applied to sums of products.
        """
        ...


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Plain("bf16", "bfloat16"),
        Plain("f16", "float16"),
        Plain("f32", "float32"),
        Fp8(),
        Fp8DsMla(),
        IndexerFp8(),
    )
}
