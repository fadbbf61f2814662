"""Top-k routing of experts."""

from typing import Literal, get_args

import jax
from jax.typing import ArrayLike

from jaxkv.checks import Dims, positive_int, static_bool, static_scale
from jaxkv.dispatch import Implementations, run
from jaxkv.ops.operation import Operation
from jaxkv.ops.samples import TOKENS, array
from jaxkv_kernels import calls

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)


def select_experts(
    logits: ArrayLike,
    per_token: int,
    *,
    bias: ArrayLike | None = None,
    scoring: Scoring = "softmax",
    groups: int = 1,
    groups_per_token: int = 1,
    normalize: bool = False,
    scale: float = 1.0,
    implementation: Implementations | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The experts with the highest scores for each token, and their weights, for `grouped_swiglu`.

    Scores are the softmax of a token's logits (DeepSeek-V2, arXiv 2405.04434, section 2.1), their sigmoids
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), or the square roots of their softplus (DeepSeek-V4).  A bias per
    expert is added to them for the choice, but not for the weights.  With groups, only experts of the best groups may
    be chosen; the score of a group is that of its best expert with softmax, and otherwise the sum of its two best.  Of
    equal scores, those of lower ids come first.

    A token with a NaN among its logits, or in `bias`, has ids within range and weights without meaning.

    Args:
      logits: float32 [T, E].
      per_token: static number of experts of a token, K.
      bias: float32 [E].
      scoring: "softmax", "sigmoid" or "sqrtsoftplus" (supported by `xla`).
      groups: static number of groups of equal size, each of consecutive experts.
      groups_per_token: static number of groups that a token's experts may be in.
      normalize: whether the weights of a token are divided by their sum, before they are multiplied by `scale`.
      scale: static number.
      implementation: None (the best that supports the call), a name, or a sequence of names.

    Returns:
      ids int32 [T, K], from the highest score to the lowest, and weights float32 [T, K].

    Raises:
      ValueError: a shape, dtype or static argument is wrong.
    """
    dims = Dims()
    logits = dims.check("logits", logits, "T E", ("float32",))
    if bias is not None:
        bias = dims.check("bias", bias, "E", ("float32",))
    count = dims["E"]
    if scoring not in SCORINGS:
        raise ValueError(f"`scoring` is {scoring!r}: expected {' or '.join(map(repr, SCORINGS))}")
    groups = positive_int("groups", groups, below=None)
    if count % groups:
        raise ValueError(f"`groups` is {groups}: expected a divisor of the {count} experts of `logits`")
    groups_per_token = positive_int("groups_per_token", groups_per_token, below=None)
    if groups_per_token > groups:
        raise ValueError(f"`groups_per_token` is {groups_per_token}: expected at most the {groups} `groups`")
    if groups > 1 and scoring != "softmax" and count == groups:
        raise ValueError(
            f"`groups` is {groups}: expected groups of 2 or more of {count} experts, to add their two best"
        )
    per_token, most = positive_int("per_token", per_token, below=None), count // groups * groups_per_token
    if per_token > most:
        raise ValueError(f"`per_token` is {per_token}: expected at most {most}, the experts of the groups of a token")
    call = calls.SelectExperts(
        logits=logits,
        bias=bias,
        per_token=per_token,
        scoring=scoring,
        groups=groups,
        groups_per_token=groups_per_token,
        normalize=static_bool("normalize", normalize),
        scale=static_scale(scale),
    )
    return run(call, implementation)


OPERATIONS = (Operation(select_experts, lambda: ((array("float32", TOKENS, 64), 6), {})),)
