"""How formats compute and store the scales of their tiles: what GPU kernels need to know besides the byte map."""

from dataclasses import dataclass

from jaxkv_kernels.formats import indexer_fp8, indexer_mxfp4
from jaxkv_kernels.formats.latents import fp8_ds_mla, fp8_v4, fp8_v41, mxfp4_ds_mla, nvfp4_ds_mla


@dataclass(frozen=True)
class ScaleRule:
    """How the scales of a format's tiles are computed from the largest magnitude of a tile, and stored."""

    values: str
    """The dtype of the values that have scales: e4m3, e2m1x2 or int8.  Others of the same entry have none."""
    stored: str
    """float32; e8m0; e4m3.  The first two are powers of two, but for int8 values."""
    smallest_exponent: int = 0
    """Of a power of two."""
    round_up: bool = False
    """Whether an e4m3 scale is rounded up, instead of to nearest."""
    columns: int = 1
    """The bytes of scales are permuted: that of tile t is byte n / columns * (t % columns) + t // columns of n."""

    @property
    def itemsize(self) -> int:
        """Bytes per scale."""
        return 4 if self.stored == "float32" else 1

    @property
    def power_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return self.stored != "e4m3" and self.values != "int8"

    @property
    def largest(self) -> float:
        """The largest magnitude of the values."""
        return {"e4m3": 448.0, "e2m1x2": 6.0, "int8": 127.0}[self.values]


RULES = {
    "fp8_ds_mla": ScaleRule("e4m3", "float32", fp8_ds_mla.SMALLEST_EXPONENT),
    "indexer_fp8": ScaleRule("e4m3", "float32", indexer_fp8.SMALLEST_EXPONENT),
    "fp8_v4": ScaleRule("e4m3", "e8m0", fp8_v4.SMALLEST_EXPONENT),
    "fp8_v41": ScaleRule("e4m3", "e8m0", fp8_v41.SMALLEST_EXPONENT),
    "fp8_v41_split": ScaleRule("e4m3", "e8m0", fp8_v41.SMALLEST_EXPONENT),
    "nvfp4_ds_mla": ScaleRule("e2m1x2", "e4m3", round_up=True, columns=nvfp4_ds_mla.COLUMNS),
    "mxfp4_ds_mla": ScaleRule("e2m1x2", "e8m0", mxfp4_ds_mla.SMALLEST_EXPONENT),
    "fp4_v41": ScaleRule("e2m1x2", "e4m3"),
    "fp4_v41_split": ScaleRule("e2m1x2", "e4m3"),
    "int8": ScaleRule("int8", "float32"),
    "nvfp4": ScaleRule("e2m1x2", "e4m3"),
    "indexer_mxfp4": ScaleRule("e2m1x2", "e8m0", indexer_mxfp4.SMALLEST_EXPONENT),
}
"""By format, for formats that store scales."""
NO_SCALES = ScaleRule("", "")
