"""Builds a model from the arrays of a checkpoint's weights."""

from typing import Any

import numpy as np

from jaxkv.checks import FLOATS, float_dtype
from jaxkv.models.config import CompressedAttention, ModelConfig
from jaxkv.models.families import FAMILIES
from jaxkv.models.model import Model
from jaxkv.models.parallel.base import OneDevice, Parallel
from jaxkv.models.weights import entry_scales
from jaxkv.models.weights.weight import Weight
from jaxkv_kernels.formats.entries import IndexerEntry
from jaxkv_kernels.formats.format import unquantised


class Build:
    """The options of a model: the arguments of `load`, checked."""

    def __init__(
        self,
        config: ModelConfig,
        dtype,
        entry_format: str | None,
        implementation,
        parallel: Parallel | None,
        mtp: bool,
    ):
        self._config = config
        if mtp and config.num_nextn_predict_layers != 1:
            raise ValueError(
                f"`mtp` is True, and `num_nextn_predict_layers` is {config.num_nextn_predict_layers}: expected a model "
                "with 1 layer of multi-token prediction"
            )
        if dtype is None and config.dtype is None:
            raise ValueError(
                "`dtype` is None, and config.json states no `dtype` of the weights: expected "
                f"{', '.join(map(repr, FLOATS))}"
            )
        self._dtype = float_dtype("dtype", config.dtype if dtype is None else dtype)
        self.entry_format = entry_format or unquantised(self._dtype)
        """The format of the cached entries."""
        # An unsupported entry format raises here, before gigabytes are read, not only when a cache is made.
        config.attention.entry(self.entry_format)
        if isinstance(config.attention, CompressedAttention):
            config.attention.key_entry(self.entry_format)
        if config.indexer is not None:
            IndexerEntry.for_latents(self.entry_format, config.indexer.head_dim)
        self._implementation = tuple(implementation) if isinstance(implementation, list) else implementation
        self.parallel = OneDevice() if parallel is None else parallel
        if not isinstance(self.parallel, Parallel):
            raise ValueError(
                f"`parallel` is {parallel!r}: expected a OneDevice, TensorParallel, ExpertParallel, "
                "ContextParallel, DataParallel or DataExpertParallel"
            )
        divides = self.parallel.divides_layers
        if divides and (config.recurrent is not None or isinstance(config.attention, CompressedAttention)):
            what = "recurrent layers" if config.recurrent is not None else "compressed attention"
            raise ValueError(
                f"`parallel` is a {type(self.parallel).__name__}, and the model has {what}, whose states are not "
                "divided: expected a OneDevice, DataParallel or DataExpertParallel"
            )
        self.parallel.check(config)

    def dtype_of(self, weight: Weight, stored: Any = None):
        """The dtype in which a weight is kept; `stored` is that in its file, by default the model's."""
        if weight.below:
            return "int32"
        rounds = weight.lossless and stored is not None and stored != self._dtype
        return "float32" if weight.exact or weight.centred or rounds else self._dtype

    @property
    def scales_entries(self) -> bool:
        """Whether the model has scales of entries."""
        return self._config.attention.entry(self.entry_format).codec.scaled

    def model(self, params: dict[str, Any], scales: dict[str, np.ndarray] | None = None) -> Model:
        """The model with the weights `params`, arrays in the tree that `parameters` describes.

        `scales` are those of `entry_scales.read`; they are 1 by default.
        """
        config, convert = self._config, FAMILIES[self._config.architecture].convert_weights
        params["layers"] = tuple(convert(config, config.attention, layer) for layer in params["layers"])
        if "mtp" in params:
            params["mtp"]["layer"] = convert(config, config.attention, params["mtp"]["layer"])
        if self.scales_entries and scales is None:
            shapes = entry_scales.shapes(config, mtp="mtp" in params)
            scales = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        params["entry_scales"] = entry_scales.placed(scales or {}, self.parallel)
        return Model(params, config, self.entry_format, self._implementation, self.parallel)
