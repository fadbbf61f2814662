"""Configurations of kernels: validated, used by what is traced within `using`, and searched field by field."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import pytest

from jaxkv.bench.tuning import configurations, search
from jaxkv.cli import main
from jaxkv_kernels import tuning
from jaxkv_kernels.mosaic_gpu.gqa import GQAConfig
from jaxkv_kernels.mosaic_gpu.mla_dense import MLADenseConfig
from jaxkv_kernels.mosaic_gpu.mla_dense_swap_ab import MLASwapABConfig
from jaxkv_kernels.mosaic_gpu.mla_sparse import SparseConfig
from jaxkv_kernels.mosaic_gpu.tile_scheduler import SplitCosts
from jaxkv_kernels.triton.delta_rule import DeltaRuleConfig


@dataclass(frozen=True)
class Sizes:
    SEARCH: ClassVar[dict[str, tuple[Any, ...]]] = {"tile": (16, 32, 64), "stages": (1, 2, 3, 4)}
    tile: int = 32
    stages: int = 2

    def __post_init__(self):
        tuning.require(self.tile * self.stages <= 128, self, "stages", "what memory holds")


def test_the_search_keeps_the_best_value_of_each_field():
    def seconds(config):
        if config.stages == 3:
            raise RuntimeError("did not compile\nat all")
        return 10 / config.tile + abs(config.stages - 1)

    trials = list(search(Sizes(), seconds))
    tried = [(trial.config.tile, trial.config.stages) for trial in trials]
    assert tried == [(32, 2), (16, 2), (64, 2), (64, 1)]  # then 64 x 3 and 64 x 4, which are invalid
    assert min(trials, key=lambda trial: trial.seconds).config == Sizes(64, 1)


def test_what_cannot_run_is_reported_and_the_search_goes_on():
    def seconds(config):
        if config.stages == 1:
            raise RuntimeError("did not compile\nat all")
        return config.stages

    trials = list(search(Sizes(tile=16), seconds))
    assert [trial.reason for trial in trials if trial.seconds is None] == ["did not compile"]
    assert trials[-1].config.stages == 4


def test_functions_are_traced_again_for_another_configuration():
    double = jax.jit(lambda x: x * tuning.configuration(Sizes()).tile)
    assert double(1) == 32
    with tuning.using(Sizes(tile=64)):
        assert double(1) == 64
        with tuning.using(Sizes(tile=16), MLADenseConfig()):
            assert double(1) == 16
    assert double(1) == 32


def test_configurations_in_use_are_recorded_once():
    def trace():
        for _ in range(2):
            tuning.configuration(Sizes())
        tuning.configuration(GQAConfig())

    assert configurations(trace) == [Sizes(), GQAConfig()]


@pytest.mark.parametrize(
    ("config", "field", "value", "expected"),
    [
        (MLADenseConfig(), "producer_registers", 32, "24, 40 or 56"),
        (MLADenseConfig(), "rescale_threshold", 15, "0 to 14"),
        (MLASwapABConfig(), "stages", 3, "2, which is what shared memory holds"),
        (MLASwapABConfig(), "query_stages", 5, "2 to 4"),
        (GQAConfig(), "stages", 0, "1 or more"),
        (SparseConfig(), "producer_registers", 120, "40, 56, 72, 88 or 104"),
        (SparseConfig(), "units_ahead", 3, "1, 2 or 4"),
        (GQAConfig().split_costs, "least", 0, "at least 1 step"),
        (DeltaRuleConfig(), "columns", 24, "a power of two"),
        (SplitCosts(least=1, overhead=0, combining=0, split=0), "split", -1, "0 or more"),
    ],
)
def test_invalid_configurations_are_rejected(config, field, value, expected):
    with pytest.raises(ValueError, match=rf"`{field}` of {type(config).__name__} is {value}: expected {expected}"):
        replace(config, **{field: value})


def test_values_to_search_are_valid():
    for config in (MLADenseConfig(), MLASwapABConfig(), SparseConfig(), GQAConfig(), DeltaRuleConfig()):
        for field, values in type(config).SEARCH.items():
            assert getattr(config, field) in values
            for value in values:
                replace(config, **{field: value})


def test_tune_names_what_can_be_tuned():
    with pytest.raises(SystemExit, match="no selected shape runs a kernel that can be tuned"):
        main(["bench", "ops", "merge_states", "--suite", "cpu", "--tune"])
