"""The truth, in NumPy float64: attention, written from its definition; `truths.py` has the entry formats."""

import numpy as np

from support.truths import E4M3 as E4M3
from support.truths import FORMATS as FORMATS
from support.truths import PLAIN as PLAIN
from support.truths import Truth as Truth
from support.truths import decode as decode
from support.truths import encode as encode


def attention(q, k, v, scale, *, ends=None, window=None, logit_cap=None, sinks=None):
    """Softmax attention of q [Q, Hq, D] to k [S, H, D], v [S, H, Dv]; query t sees keys below ends[t].

    Returns out [Q, Hq, Dv] and lse [Q, Hq]; 0 and -inf where no key is seen.
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1] if k.shape[1] else 1
    out, lse = np.zeros((tokens, heads, v.shape[-1])), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        end = k.shape[0] if ends is None else min(max(ends[t], 0), k.shape[0])
        begin = 0 if window is None else max(end - window, 0)
        if end <= begin:
            continue
        for h in range(heads):
            s = k[begin:end, h // group] @ q[t, h].astype(np.float64) * scale
            s = s if logit_cap is None else logit_cap * np.tanh(s / logit_cap)
            top = s.max()
            p = np.exp(s - top)
            lse[t, h] = top + np.log(p.sum())
            out[t, h] = p @ v[begin:end, h // group] / p.sum()
            if sinks is not None:
                out[t, h] /= 1 + np.exp(np.float64(sinks[h]) - lse[t, h])
    return out, lse


def experts(x, experts, weights, gate, up, down, rounded=lambda values: values):
    """Tokens x [T, D] through their experts [T, K] of gate, up [E, I, D] and down [E, D, I], summed by `weights`.

    `rounded` is applied to the values before `down`.
    """
    out = np.zeros_like(x)
    for t, k in np.ndindex(*experts.shape):
        if 0 <= experts[t, k] < len(gate):
            e = int(experts[t, k])
            inner = gate[e] @ x[t]
            out[t] += weights[t, k] * (down[e] @ rounded(inner / (1 + np.exp(-inner)) * (up[e] @ x[t])))
    return out
