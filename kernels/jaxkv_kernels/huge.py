import ctypes, mmap

KEEP = []


def registered(nbytes):
    huge = 2 << 20
    m = mmap.mmap(-1, nbytes + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(m))
    address = -(-start // huge) * huge
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    print("madvise", libc.madvise(address, nbytes, 14))
    ctypes.memset(address, 0, nbytes)
    cuda = ctypes.CDLL("libcuda.so.1")
    ctx, dev = ctypes.c_void_p(), ctypes.c_int()
    codes = [
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(dev), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), dev),
        cuda.cuCtxPushCurrent_v2(ctx),
    ]
    cuda.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    codes.append(cuda.cuMemHostRegister_v2(address, nbytes, 1))
    codes.append(cuda.cuCtxPopCurrent_v2(ctypes.byref(ctx)))
    print("codes", codes, flush=True)
    KEEP.append(m)
    return address
