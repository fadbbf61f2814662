"""`KVCache.from_dlpack`: caches in the memory of NumPy's and JAX's arrays, and of objects that have nothing but DLPack.

PyTorch is not installed here: its tensors are stood in for by objects with the methods that it has.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import dlpack
from jaxkv.testing.buffers import to_cache
from support import scenes
from support.compare import assert_same_bits

ENTRY = jaxkv.MLAEntry("f32", latent=8, rope=4)
LAYOUT = jaxkv.CacheLayout(num_layers=2, num_blocks=5, block_size=4, entry=ENTRY)
CPU = jax.devices("cpu")[0]


def memory(size=LAYOUT.size, dtype="float32", *, begin=0):
    """Random NumPy memory that begins `begin` bytes after a multiple of 64."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(size * itemsize + 192, np.uint8)
    first = -raw.ctypes.data % 64 + begin
    own = raw[first : first + size * itemsize]
    own[:] = np.random.default_rng(0).integers(0, 256, own.size, np.uint8)
    return own.view(dtype)


def address(tensor):
    return tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.unsafe_buffer_pointer()


class Exporter:
    """An object with nothing but DLPack's two methods, of its first version."""

    def __init__(self, tensor, *, device=None, capsule=None):
        self._tensor, self._device, self._capsule = tensor, device, capsule

    def __dlpack__(self, stream=None):
        return self._capsule or self._tensor.__dlpack__()

    def __dlpack_device__(self):
        return self._device or self._tensor.__dlpack_device__()


class WithReshape(Exporter):
    """One whose `reshape` copies."""

    def reshape(self, shape):
        return self._tensor.reshape(shape).copy()


@pytest.mark.parametrize(
    "of",
    [
        lambda x: x,
        lambda x: x.reshape(2, 5, -1),
        lambda x: x.reshape(1, 1, -1),
        Exporter,
        lambda x: np.lib.stride_tricks.as_strided(x, (1, *x.shape), (3, *x.strides)),
    ],
    ids=["1 axis", "3 axes", "axes of length 1", "only DLPack", "any stride of an axis of length 1"],
)
def test_memory_of_numpy_is_shared(of):
    own = memory()
    cache = jaxkv.KVCache.from_dlpack(of(own), LAYOUT)
    assert cache.layout is LAYOUT
    assert address(cache.buffer) == address(own)
    assert cache.buffer.devices() == {CPU}
    blocks = jnp.asarray([3, 1])
    assert_same_bits(jaxkv.read_blocks(cache, blocks), jaxkv.read_blocks(to_cache(LAYOUT, own.view(np.uint8)), blocks))


def test_read_only_memory_is_shared_if_jax_can():
    own = memory()
    read_only = np.lib.stride_tricks.as_strided(own, writeable=False)
    if jax.__version_info__ >= (0, 12):
        assert address(jaxkv.KVCache.from_dlpack(read_only, LAYOUT).buffer) == address(own)
    else:
        with pytest.raises(
            ValueError, match=r"cannot share `tensor`: .* expected memory that may be written, or a newer"
        ):
            jaxkv.KVCache.from_dlpack(read_only, LAYOUT)


def test_an_array_of_jax_is_shared():
    own = jax.device_put(memory(), CPU)
    assert address(jaxkv.KVCache.from_dlpack(own, LAYOUT).buffer) == address(own)


def test_two_arrays():
    layout = scenes.apart(jaxkv.KVEntry("f32", 4, 8), "two arrays", num_blocks=5, block_size=4)
    own = memory(layout.size + 2), memory(layout.value_size).reshape(-1, 2)
    cache = jaxkv.KVCache.from_dlpack(own, layout)
    assert [*map(address, cache.buffer)] == [*map(address, own)]
    assert [array.shape for array in cache.buffer] == [(layout.size,), (layout.value_size,)]
    assert cache.nbytes == (layout.size + layout.value_size) * 4 == jaxkv.KVCache.zeros(layout).nbytes
    for pair, message in (
        (own[0], "`tensor` is a ndarray: expected the pair"),
        ((*own, own[0]), "`tensor` is 3 tensors: expected the pair"),
        ((own[0], own[1][1:]), r"`tensor\[1\]` has shape .* expected the layout's .* at least"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxkv.KVCache.from_dlpack(pair, layout)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int8", "uint16", "int16", "uint32", "int32"])
def test_every_dtype_that_numpy_exports(dtype):
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=4, entry=ENTRY, dtype=dtype)
    own = memory(layout.size, dtype)
    cache = jaxkv.KVCache.from_dlpack(own, layout)
    assert_same_bits(cache.buffer, own)
    assert address(cache.buffer) == address(own)


def test_bfloat16():
    layout = jaxkv.CacheLayout(num_layers=1, num_blocks=2, block_size=4, entry=jaxkv.MLAEntry("bf16", 8, 4))
    own = jax.device_put(memory(layout.size, "uint16").view(jnp.bfloat16), CPU)
    assert address(jaxkv.KVCache.from_dlpack(own, layout).buffer) == address(own)


def test_the_rest_of_a_longer_tensor_is_left_out():
    own = memory(LAYOUT.size + 64)
    cache = jaxkv.KVCache.from_dlpack(own, LAYOUT)
    assert cache.buffer.shape == (LAYOUT.size,)
    assert address(cache.buffer) == address(own)


def test_a_step_leaves_the_memory_as_it_is():
    own = memory()
    before = own.copy()
    step = jax.jit(jaxkv.copy_blocks, donate_argnums=0)
    for source in (own, jax.device_put(own, CPU)):
        cache = step(jaxkv.KVCache.from_dlpack(source, LAYOUT), jnp.asarray([1]), jnp.asarray([2]))
        assert_same_bits(source, before)
        assert not np.array_equal(np.asarray(cache.buffer).view(np.uint32), before.view(np.uint32))


def test_memory_lives_as_long_as_the_cache():
    cache = jaxkv.KVCache.from_dlpack(memory(), LAYOUT)
    assert_same_bits(cache.buffer, memory())


def test_copies_only_if_that_is_wanted():
    own = memory(begin=16)
    with pytest.raises(ValueError, match=r"`tensor` begins 16 bytes after a multiple of 64: .*`copy=True` to copy it"):
        jaxkv.KVCache.from_dlpack(own, LAYOUT)
    array = jax.device_put(own, CPU).reshape(2, -1)
    with pytest.raises(ValueError, match=r"`tensor` is a JAX array of shape \(2, 240\): expected \(480,\)"):
        jaxkv.KVCache.from_dlpack(array, LAYOUT)
    for given in (own, memory(), memory(LAYOUT.size + 3), array):
        cache = jaxkv.KVCache.from_dlpack(given, LAYOUT, copy=True)
        assert address(cache.buffer) != address(given)
        assert_same_bits(cache.buffer, np.asarray(given).reshape(-1)[: LAYOUT.size])


def test_a_copy_by_jax_is_found(monkeypatch):
    monkeypatch.setattr(dlpack.jnp, "from_dlpack", lambda tensor: jnp.array(np.from_dlpack(tensor)))
    with pytest.raises(ValueError, match=r"JAX .* copies `tensor` instead of sharing it: pass `copy=True`"):
        jaxkv.KVCache.from_dlpack(memory(), LAYOUT)


HERE = ", ".join(map(str, jax.local_devices()))
MISTAKES = {
    "another dtype": (
        lambda: memory(dtype="uint32"),
        "`tensor` has dtype uint32: expected float32, that of the layout",
    ),
    "64-bit numbers": (lambda: memory(dtype="float64"), "`tensor` has dtype float64: expected float32"),
    "complex numbers": (lambda: memory(dtype="complex64"), "`tensor` has dtype complex64: expected float32"),
    "booleans": (lambda: memory().astype(bool), "`tensor` has dtype type 6 of 8: expected float32"),
    "a dtype that NumPy does not export": (
        lambda: memory(dtype="uint16").view(jnp.bfloat16),
        "`tensor` is a ndarray of bfloat16, which it cannot export by DLPack: DLPack only supports",
    ),
    "too few elements": (
        lambda: memory(LAYOUT.size - 1),
        r"`tensor` has shape \(479,\), 479 elements: expected the layout's 480 at least",
    ),
    "no elements": (lambda: memory()[:0], r"`tensor` has shape \(0,\), 0 elements: expected the layout's 480"),
    "a scalar": (lambda: memory()[0:1].reshape(()), r"`tensor` has shape \(\), 1 elements: expected the layout's 480"),
    "every other element": (
        lambda: memory(2 * LAYOUT.size)[::2],
        r"`tensor` has shape \(480,\) and strides \(2,\), in elements: expected a contiguous .* strides \(1,\)",
    ),
    "a transposed matrix": (
        lambda: memory().reshape(2, 240).T,
        r"`tensor` has shape \(240, 2\) and strides \(1, 240\), in elements: .* with strides \(2, 1\)",
    ),
    "backwards": (lambda: memory()[::-1], r"`tensor` has shape \(480,\) and strides \(-1,\)"),
    "no DLPack": (lambda: b"bytes", "`tensor` is a bytes: expected a tensor with `__dlpack__` and `__dlpack_device__`"),
    "a device of an unknown type": (
        lambda: Exporter(memory(), device=(7, 0)),
        r"`tensor` is on a device of DLPack's type 7: expected one of 1 \(cpu\), 2 \(cuda\)",
    ),
    "no capsule": (lambda: Exporter(memory(), capsule=3), "`tensor` exports 3: expected a capsule of b'dltensor' or"),
    "a longer object without reshape": (
        lambda: Exporter(memory(LAYOUT.size + 1)),
        r"`tensor` has shape \(481,\): expected \(480,\), as it has no `reshape`",
    ),
    "a reshape that copies": (lambda: WithReshape(memory().reshape(2, -1)), r"`tensor.reshape\(-1\)` is a copy of it"),
}


@pytest.mark.parametrize(("tensor", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(tensor, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.KVCache.from_dlpack(tensor(), LAYOUT)


def test_a_device_that_jax_does_not_have():
    platform = next(n for n, name in dlpack.PLATFORMS.items() if name == "rocm")
    with pytest.raises(
        ValueError, match=f"`tensor` is on rocm:1: expected memory of a device that JAX has, {HERE[:5]}"
    ):
        jaxkv.KVCache.from_dlpack(Exporter(memory(), device=(platform, 1)), LAYOUT)


def test_mistakes_of_other_arguments():
    with pytest.raises(ValueError, match="`layout` is a str: expected a CacheLayout"):
        jaxkv.KVCache.from_dlpack(memory(), "BLNHC")
    with pytest.raises(ValueError, match="`copy` is None: expected True or False"):
        jaxkv.KVCache.from_dlpack(memory(), LAYOUT, copy=None)
