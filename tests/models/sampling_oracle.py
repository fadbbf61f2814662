"""The tokens that filters leave, in float64 NumPy."""

import numpy as np


def oracle(logits, sampling):
    """The tokens that remain, the most likely first, and their probabilities, in float64."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / sampling.temperature)
    order, weights = order[weights >= sampling.min_p], weights[weights >= sampling.min_p]
    if sampling.top_k:
        order, weights = order[: sampling.top_k], weights[: sampling.top_k]
    p = weights / weights.sum()
    count = len(p) if sampling.top_p == 1 else np.searchsorted(np.cumsum(p), sampling.top_p) + 1
    return order[:count], p[:count] / p[:count].sum()
