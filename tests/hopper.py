"""Where the Mosaic GPU kernels run."""

import pytest

from jaxkv_kernels import mosaic_gpu

on_hopper = pytest.mark.skipif(bool(mosaic_gpu.unavailable()), reason="; ".join(mosaic_gpu.unavailable()))
