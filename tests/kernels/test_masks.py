"""Masks on implementations whose kernels have none: the suites with XLA's kernels, and what GPU kernels support."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import dispatch, masks
from jaxkv_kernels.calls import Kernels, supports
from jaxkv_kernels.formats.entries import KVEntry, MLAEntry
from jaxkv_kernels.xla import attention
from jaxkv_kernels.xla.masked import decode_by_parts, plan_by_parts, reasons_by_parts
from support import suites
from support.available import assume_available
from support.cases import further
from support.explained import REQUESTS, explained
from support.suites.attention.masks import every_third


def _reasons(call):
    """The reasons of kernels that have a causal mask and nothing else."""
    if call.ahead != 0 or (call.window, call.trailing, call.tree, call.mask) != (None, None, None, None):
        yield "not a causal call"


def _causal(decode):
    """The kernel `decode`, which uses the lengths in its plan."""

    def run(call):
        assert not list(_reasons(call))
        return decode(call if call.plan is None else replace(call, plan=None, seq_lens=call.plan))

    return run


class ByParts(Kernels):
    """XLA's kernels, of which only the causal mask is used."""

    @supports({MLAEntry: MLAEntry.formats, KVEntry: KVEntry.formats}, reasons_by_parts(_reasons))
    def plan_decode(self, call):
        return plan_by_parts(call, lambda call: call.seq_lens)

    @supports({MLAEntry: MLAEntry.formats}, reasons_by_parts(_reasons))
    def decode_mla(self, call):
        return decode_by_parts(call, _causal(attention.decode_mla))

    @supports({KVEntry: KVEntry.formats}, reasons_by_parts(_reasons))
    def decode_kv(self, call):
        return decode_by_parts(call, _causal(attention.decode_kv))


@pytest.fixture
def by_parts(monkeypatch):
    backend = dispatch.Backend("by_parts", "any device", ByParts, list)
    monkeypatch.setattr(dispatch, "BACKENDS", (*dispatch.BACKENDS, backend))


class Parts:
    implementation = "by_parts"
    gaps = ("`mask`, a function",)


@pytest.mark.usefixtures("by_parts")
class TestIntervals(Parts, suites.KVMasks):
    """The whole suite."""


@pytest.mark.usefixtures("by_parts")
class TestTrees(Parts, suites.KVMaskChecks):
    """What does not depend on layouts."""

    test_combinations = suites.KVTreeMasks.test_combinations
    test_ragged_query_tokens = suites.KVTreeMasks.test_ragged_query_tokens


@pytest.mark.usefixtures("by_parts")
class TestLatents(Parts, suites.DecodeMLAChecks):
    """The same for latents."""

    test_trees = suites.MLATreeMasks.test_combinations
    test_intervals = suites.MLAMasks.test_combinations


TOKENS = 5
TREE = jax.ShapeDtypeStruct((REQUESTS, TOKENS, TOKENS), jnp.bool_)
RAGGED = {"tree_mask": jax.ShapeDtypeStruct((TOKENS, 3), jnp.bool_)}


def reasons(implementation, operation, *, form="bf16", ragged=False, **options):
    """The reasons of an implementation against a call."""
    entry = jaxkv.MLAEntry(form) if operation == "decode_mla" else jaxkv.KVEntry(form, head_dim=128)
    found = explained(operation, entry, tokens=TOKENS, ragged=ragged, **options)
    assert not found.reasons["xla"] or "batch_invariant" in options
    return found.reasons[implementation]


each = pytest.mark.parametrize("operation", ["decode_mla", "decode_kv", "plan_decode"])
on_gpus = pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])


@on_gpus
@each
@pytest.mark.parametrize("mask", [every_third, further(lambda query, key: key <= query)])
def test_other_functions_are_rejected(implementation, operation, mask, monkeypatch):
    assume_available(monkeypatch, implementation)
    (reason,) = reasons(implementation, operation, mask=mask)
    assert reason.startswith("`mask`, a function: supports those of `jaxkv.masks`")


@on_gpus
@each
@pytest.mark.parametrize(
    "options",
    [
        {"tree_mask": TREE},
        further({"tree_mask": TREE, "window": (3, 3)}),
        further({"mask": masks.Chunked(100), "causal": False}),
        further({"mask": masks.Prefix(4) | masks.Sliding(63, 0), "tree_mask": TREE}),
        further({"ragged": True, **RAGGED}),
        {"ragged": True, **RAGGED, "mask": masks.Chunked(64), "window": 32},
    ],
)
def test_trees_and_intervals_are_supported(implementation, operation, options, monkeypatch):
    assume_available(monkeypatch, implementation)
    assert not reasons(implementation, operation, **options)


def test_plans_of_masked_calls_are_not_batch_invariant(monkeypatch):
    assume_available(monkeypatch, "mosaic_gpu")
    options = {"tree_mask": TREE, "batch_invariant": True}
    (reason,) = reasons("mosaic_gpu", "plan_decode", **options)
    assert reason.startswith("`batch_invariant` with a `mask` or `tree_mask`")
    assert not reasons("mosaic_gpu", "plan_decode", batch_invariant=True)


def test_the_rows_of_a_tree_are_those_of_its_tokens(monkeypatch):
    """All query tokens of a request become heads, of which kernels for quantised entries support few."""
    assume_available(monkeypatch, "mosaic_gpu")
    (reason,) = reasons("mosaic_gpu", "decode_kv", form="int8", tree_mask=TREE)
    assert reason.startswith("query tokens x heads")
    assert not reasons("mosaic_gpu", "decode_kv", form="int8", mask=masks.Chunked(100))
