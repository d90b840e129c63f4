"""Pools and what is done to them, through segments.c (compiled once by `run`)."""
import ctypes
import mmap

import numpy as np

BLANK = 0xEEEEEEEEEEEEEEEE
SEED = 0x5EED


class Pool:
    """Private anonymous memory, as a malloc'd KV cache is. Touch it (fill, blank) before it is used."""

    def __init__(self, size):
        self.size = size
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class Segments:
    def __init__(self, library):
        self.lib = ctypes.CDLL(library)
        self.lib.check_segments.restype = ctypes.c_uint64
        self.lib.count_strays.restype = ctypes.c_uint64

    @staticmethod
    def _array(values):
        assert values.dtype == np.uint64 and values.flags.c_contiguous
        return ctypes.c_void_p(values.ctypes.data)

    def fill(self, pool):
        self.lib.fill_pattern(ctypes.c_void_p(pool.address), ctypes.c_uint64(pool.size), ctypes.c_uint64(SEED))

    def blank(self, pool):
        self.lib.set_blank(ctypes.c_void_p(pool.address), ctypes.c_uint64(pool.size), ctypes.c_uint64(BLANK))

    def copy(self, dst, src, parts):
        dst_at, src_at, lengths = parts
        self.lib.copy_segments(ctypes.c_void_p(dst.address), ctypes.c_void_p(src.address), self._array(dst_at),
                               self._array(src_at), self._array(lengths), ctypes.c_size_t(len(dst_at)))

    def check(self, dst, parts):
        """Wrong words in the segments, which are blank again afterwards."""
        dst_at, src_at, lengths = parts
        return self.lib.check_segments(ctypes.c_void_p(dst.address), self._array(dst_at), self._array(src_at),
                                       self._array(lengths), ctypes.c_size_t(len(dst_at)), ctypes.c_uint64(SEED),
                                       ctypes.c_uint64(BLANK))

    def strays(self, pool):
        return self.lib.count_strays(ctypes.c_void_p(pool.address), ctypes.c_uint64(pool.size), ctypes.c_uint64(BLANK))

