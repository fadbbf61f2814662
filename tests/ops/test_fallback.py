"""A call that runs on a slower implementation than the device has is logged, once per reason."""

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import dispatch
from jaxkv.ops import OPERATIONS
from support.available import assume_available


def chosen(entry, implementation=None, **padding):
    """The implementation of a `decode_mla` call on such a cache."""
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=4, block_size=64, entry=entry, **padding)
    shape = jax.ShapeDtypeStruct
    q = [shape((1, 1, 16, n), entry.input_dtype) for n in entry.sizes]
    cache = jaxkv.KVCache(shape((layout.size,), layout.dtype), layout)
    declared = next(operation for operation in OPERATIONS if operation.function is jaxkv.decode_mla)
    call = declared.call(*q, cache, shape((1, 4), jnp.int32), shape((1,), jnp.int32), layer=0, scale=1.0)
    return dispatch.choose(call, implementation).name


@pytest.fixture
def _on_hopper(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assume_available(monkeypatch, "mosaic_gpu")
    dispatch._warn_once.cache_clear()


@pytest.mark.usefixtures("_on_hopper")
def test_a_slower_implementation_is_logged_once_per_reason(caplog):
    assert chosen(jaxkv.MLAEntry("bf16")) == "mosaic_gpu"
    assert not caplog.messages
    for _ in range(2):
        assert chosen(jaxkv.MLAEntry("bf16"), block_padding=4) != "mosaic_gpu"
    (message,) = caplog.messages
    assert message.startswith("decode_mla runs on ")
    assert "; mosaic_gpu does not support block stride of 73736 bytes: supports multiples of 16" in message
    chosen(jaxkv.MLAEntry("f32"))
    assert len(caplog.messages) == 2


@pytest.mark.usefixtures("_on_hopper")
def test_a_choice_of_the_caller_is_not_logged(caplog):
    assert chosen(jaxkv.MLAEntry("f32"), "xla") == "xla"
    assert not caplog.messages


def test_other_devices_are_not_logged(caplog):
    dispatch._warn_once.cache_clear()
    assert chosen(jaxkv.MLAEntry("f32")) != "mosaic_gpu"
    assert not caplog.messages
