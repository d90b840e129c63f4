"""The Python client. Always: what needs no library. With KVFERRY_LIBRARY: what the library alone answers.
With KVFERRY_TEST_SOCKET, too: a real attach at a daemon that accepts one latent buffer of layer 0.

    KVFERRY_LIBRARY=build/dev/common/libkvferry.so PYTHONPATH=tools/python \
        python3 -m unittest tests/unit/engine/python_client_test.py
"""

import array
import ctypes
import fcntl
import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tools" / "python"))
import kvferry  # noqa: E402

HAVE_LIBRARY = "KVFERRY_LIBRARY" in os.environ
SOCKET = os.environ.get("KVFERRY_TEST_SOCKET")


def small_pool(fd: int) -> kvferry.Pool:
    return kvferry.Pool(page_size=16, dtype="bf16",
                        buffers=[kvferry.Buffer(0, kvferry.BufferKind.LATENT, 1152, 64, fd)])


class WithoutLibrary(unittest.TestCase):
    def test_a_pool_descriptor_is_sealed_against_shrinking(self):
        fd = kvferry.make_pool(4096)
        self.addCleanup(os.close, fd)
        self.assertEqual(os.fstat(fd).st_size, 4096)
        with self.assertRaises(PermissionError):
            os.ftruncate(fd, 100)
        os.ftruncate(fd, 8192)
        self.assertEqual(fcntl.fcntl(fd, 1034) & 2, 2)

    def test_structs_have_the_layout_of_the_c_header(self):
        sizes = {kvferry._CBuffer: 56, kvferry._CAuxField: 32, kvferry._CPool: 64, kvferry._CChunk: 104,
                 kvferry._CExpectation: 96, kvferry._CEvent: 560}
        self.assertEqual({c.__name__: ctypes.sizeof(c) for c in sizes},
                         {c.__name__: size for c, size in sizes.items()})
        self.assertEqual([kvferry._CChunk.layer_begin.offset, kvferry._CChunk.layer_end.offset,
                          kvferry._CEvent.layer_end.offset], [96, 100, 556])

    def test_numbers_that_do_not_fit_are_refused_by_name(self):
        with self.assertRaisesRegex(kvferry.KvferryError, "invalid: room is -1, legal are 0 to 2\\^64-1"):
            kvferry._unsigned("room", -1, 64)
        with self.assertRaisesRegex(kvferry.KvferryError, "pages are not all"):
            kvferry._pages([1, 1 << 32])
        with self.assertRaisesRegex(kvferry.KvferryError, "pages are not all"):
            kvferry._pages([1.5])

    def test_page_lists_are_copied_once_and_arrays_not_at_all(self):
        pages = array.array("I", [5, 6, 7])
        pointer, count, owner = kvferry._pages(pages)
        self.assertIs(owner, pages)
        self.assertEqual(pointer[:count], [5, 6, 7])
        pointer, count, _owner = kvferry._pages(range(3))
        self.assertEqual(pointer[:count], [0, 1, 2])
        self.assertEqual(kvferry._pages([])[1], 0)

    def test_unknown_codes_are_internal(self):
        self.assertEqual(kvferry.Code(200), kvferry.Code.INTERNAL)
        self.assertEqual(kvferry.KvferryError(3, "x").code, kvferry.Code.CONFLICT)


@unittest.skipUnless(HAVE_LIBRARY, "set KVFERRY_LIBRARY to the path of libkvferry.so")
class WithLibrary(unittest.TestCase):
    def test_without_a_daemon_the_attach_says_so(self):
        fd = kvferry.make_pool(1 << 21)
        self.addCleanup(os.close, fd)
        with self.assertRaisesRegex(kvferry.KvferryError, "is the KVFerry daemon running") as caught:
            kvferry.Engine("no/such/socket", small_pool(fd))
        self.assertEqual(caught.exception.code, kvferry.Code.UNAVAILABLE)

    def test_memory_that_nobody_writes_has_no_writers(self):
        fd = kvferry.make_pool(4096)
        self.addCleanup(os.close, fd)
        self.assertTrue(kvferry.writers_gone(fd))
        with self.assertRaisesRegex(kvferry.KvferryError, "cannot be asked"):
            kvferry.writers_gone(-1)

    def test_the_version_is_text(self):
        self.assertRegex(kvferry.version(), r"^\d+\.\d+")


@unittest.skipUnless(HAVE_LIBRARY and SOCKET, "set KVFERRY_LIBRARY and KVFERRY_TEST_SOCKET")
class WithDaemon(unittest.TestCase):
    def setUp(self):
        fd = kvferry.make_pool(64 * 16 * 1152)
        self.addCleanup(os.close, fd)
        self.engine = kvferry.Engine(SOCKET, small_pool(fd))
        self.addCleanup(self.engine.detach)

    def test_an_illegal_room_is_refused_and_the_engine_lives_on(self):
        for _ in range(2):
            with self.assertRaisesRegex(kvferry.KvferryError, "room is 0"):
                self.engine.send(0, [1], first_token=0, token_count=16)

    def test_pages_outside_the_pool_are_refused(self):
        with self.assertRaisesRegex(kvferry.KvferryError, r"pages\[0\] is 64, but the pool has 64 pages"):
            self.engine.send(7, [64], first_token=0, token_count=16)

    def test_layers_are_named_by_32_bits(self):
        with self.assertRaisesRegex(kvferry.KvferryError, "layer_end is 4294967296, legal are 0 to 2\\^32-1"):
            self.engine.send(7, [1], first_token=0, token_count=16, layer_begin=0, layer_end=1 << 32)
        self.engine.send(7, [1], first_token=0, token_count=16, layer_begin=0, layer_end=1)

    def test_no_event_within_the_timeout_is_none(self):
        self.assertIsNone(self.engine.next_event(0.01))
        self.assertEqual(list(self.engine.events()), [])

    def test_a_detached_engine_is_unavailable(self):
        self.engine.detach()
        with self.assertRaisesRegex(kvferry.KvferryError, "attach again"):
            self.engine.abort(7)


if __name__ == "__main__":
    unittest.main()
