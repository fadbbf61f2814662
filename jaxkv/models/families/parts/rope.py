"""The configuration of rotary embedding, and its scalings for long contexts."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxkv.models.config import Linear, Llama3, Rope, Yarn
from jaxkv.models.json_object import REQUIRED, JsonObject

Scalings = Mapping[str, Callable[[JsonObject], Yarn | Llama3]]
BESIDE_SCALINGS = {"rope_theta", "partial_rotary_factor"}
"""Keys of `rope_parameters` that belong to no scaling."""


def read(
    fields: JsonObject, scalings: Scalings, *, interleaved: bool, theta: Any = REQUIRED, partial: float = 1.0
) -> Rope:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (earlier versions).

    Args:
      fields: the object of `config.json`.
      scalings: functions that read the keys of a scaling, by the supported values of `rope_type` besides "default" and
        "linear".
      interleaved: as in `Rope`.
      theta: the value if `rope_theta` is absent; by default, the key is required.
      partial: the only supported value of `partial_rotary_factor`, which is optional.
    """
    factors = (1, 1.0) if partial == 1 else (partial,)
    fields.choice("partial_rotary_factor", *factors, default=partial)
    spelling = fields.spelling("rope_parameters", "rope_scaling")
    if spelling not in fields:
        return Rope(fields.number("rope_theta", above=1, default=theta), interleaved, None)
    values = fields.child(spelling)
    theta = (values if "rope_theta" in values else fields).number("rope_theta", above=1, default=theta)
    for held in (values, fields):
        if held.number("rope_theta", above=1, default=theta) != theta:
            raise held.error("rope_theta", f"{theta}, as in `{spelling}`")
    values.choice("partial_rotary_factor", *factors, default=partial)
    return read_values(values, scalings, theta, interleaved=interleaved)


def read_values(values: JsonObject, scalings: Scalings, theta: float, *, interleaved: bool) -> Rope:
    """Reads the scaling of an object like `rope_parameters`; `scalings` as in `read`.

    An object without keys of a scaling needs no type.
    """
    known = {"default": lambda values: None, "linear": linear, **scalings}
    key = values.spelling("rope_type", "type")
    if key not in values and BESIDE_SCALINGS.issuperset(name for name, value in values.items() if value is not None):
        return Rope(theta, interleaved, None)
    if values.value(key) == "dynamic":
        expected = f"{' or '.join(map(repr, known))}; with dynamic scaling, frequencies depend on the length of a"
        raise values.error(key, f"{expected} request, and those of cached keys would be wrong as it grows")
    return Rope(theta, interleaved, known[values.choice(key, *known)](values))


def linear(values: JsonObject) -> Linear:
    """Reads the parameter of linear scaling; those of YaRN, of which implementations use some, must be absent."""
    for key in ("mscale", "mscale_all_dim", "attention_factor"):
        values.choice(key, None, default=None)
    return Linear(values.number("factor", least=1))


def read_yarn(fields: JsonObject) -> Rope:
    """Reads the rotary embedding of MLA models: interleaved unless `rope_interleave` is false; YaRN is supported."""
    return read(fields, {"yarn": yarn}, interleaved=fields.flag("rope_interleave", default=True))


def yarn(values: JsonObject) -> Yarn:
    """Reads the parameters of YaRN."""
    beta_fast = values.number("beta_fast", default=None) or 32.0
    beta_slow = values.number("beta_slow", default=None) or 1.0
    if beta_fast < beta_slow:
        raise values.error("beta_fast", f"at least `beta_slow`, which is {beta_slow}")
    return Yarn(
        factor=values.number("factor", least=1),
        original_length=values.integer("original_max_position_embeddings"),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=values.number("mscale", least=0, default=None),
        mscale_all_dim=values.number("mscale_all_dim", least=0, default=None),
        attention_factor=values.number("attention_factor", default=None),
        truncate=values.flag("truncate", default=True),
    )


def llama3(values: JsonObject) -> Llama3:
    """Reads the parameters of Llama 3.1's scaling."""
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    if high <= low:
        raise values.error("high_freq_factor", f"more than `low_freq_factor`, which is {low}")
    return Llama3(
        factor=values.number("factor", least=1),
        original_length=values.integer("original_max_position_embeddings"),
        low_freq_factor=low,
        high_freq_factor=high,
    )
