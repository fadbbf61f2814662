"""`quantization_config`: what of a checkpoint is quantised, and how."""

import re

from jaxkv.models.json_object import JsonObject
from jaxkv_kernels.tile_scaled import TILE

GROUPED = ("compressed-tensors", "modelopt")
"""Quantisers that describe weights in `config_groups` and entries in `kv_cache_scheme`."""


def check(fields: JsonObject, *, mxfp4: bool) -> None:
    """ValueError unless weights and entries are quantised, if at all, in a way that is supported.

    Weights may be as in `weights/fp8.py` or, with `mxfp4`, as in `weights/mxfp4.py` instead.  Entries may have static
    scales for e4m3, which are in the files under the names of `weights/entry_scales.py`.  Which weights are quantised
    is not read here, because their dtypes show it.
    """
    method = fields.choice("quant_method", "mxfp4" if mxfp4 else "fp8", *GROUPED)
    if "kv_cache_scheme" in fields:
        _check_entries(fields.child("kv_cache_scheme"))
    if method == "fp8":
        fields.choice("fmt", "e4m3", default="e4m3")
        fields.choice("weight_block_size", [TILE, TILE])
    elif method in GROUPED:
        _check_groups(fields, fp8=not mxfp4)


def _check_entries(scheme: JsonObject) -> None:
    scheme.choice("num_bits", 8)
    scheme.choice("type", "float")
    scheme.choice("dynamic", False, default=False)
    scheme.choice("symmetric", True, default=True)
    scheme.choice("strategy", "tensor", "attn_head", default="tensor")


def _check_groups(fields: JsonObject, *, fp8: bool) -> None:
    """ValueError unless no weights are quantised or, with `fp8`, as in `weights/fp8.py`."""
    fields.choice("quant_algo", None, default=None)  # that of Model Optimizer for weights
    fields.choice("transform_config", {}, None, default=None)  # matrices that rotate weights or activations
    if "config_groups" not in fields:
        if "kv_cache_scheme" not in fields:
            own = "fp8" if fp8 else "mxfp4"
            expected = f"{own!r}, or `config_groups` or `kv_cache_scheme` beside it, which say what is quantised"
            raise fields.error("quant_method", expected)
        return
    groups = fields.child("config_groups")
    for name, _ in groups.items():
        group = groups.child(name)
        if "weights" in group:
            weights = group.child("weights")
            if not (fp8 and _are_tiled_fp8(weights)):
                supported = f"null{f', or 8-bit floats in blocks of {TILE} x {TILE}' if fp8 else ''}"
                raise group.error("weights", f"{supported}; {_described(fields, group, weights)} are not supported")
        else:
            group.choice("input_activations", None, default=None)
        group.choice("output_activations", None, default=None)


def _are_tiled_fp8(weights: JsonObject) -> bool:
    """Whether the weights of a group are e4m3 with a scale per tile of 128 x 128."""
    wanted = {"num_bits": 8, "type": "float", "strategy": "block", "symmetric": True, "dynamic": False}
    tiles = weights.value("block_structure", None)
    return tiles in ([TILE, TILE], f"{TILE}x{TILE}") and all(
        weights.value(key, None) == value for key, value in wanted.items()
    )


def _described(fields: JsonObject, group: JsonObject, weights: JsonObject) -> str:
    """What the weights of a group are, such as "INT4 weights (compressed-tensors, pack-quantized)"."""
    kind, bits = weights.value("type", None), weights.value("num_bits", None)
    number = {"int": "INT", "float": "FP"}.get(kind, "") if isinstance(kind, str) else ""
    known = f"{number}{bits} weights" if number and type(bits) is int else "weights quantised in this way"
    ways = [fields.value("quant_method"), group.value("format", None) or fields.value("format", None)]
    ways = [way for way in ways if isinstance(way, str) and re.fullmatch(r"[\w-]+", way)]
    return f"{known} ({', '.join(ways)})"
