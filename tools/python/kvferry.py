"""Python client of a KVFerry daemon: a thin layer over libkvferry.so (see kvferry.h for the rules).

    fd = make_pool(total_bytes)                      # a sealed memfd; mmap it, or give it to torch/numpy
    engine = Engine("/run/kvferry/prefill.sock", Pool(page_size=64, dtype="bf16", buffers=[...]))
    engine.send(room, pages, first_token=0, token_count=len(pages) * 64, last=True)
    for event in engine.events(timeout=1.0): ...

One Engine may be used by one thread at a time. The library is found as KVFERRY_LIBRARY (a path) or as
libkvferry.so.0 on the loader's path.
"""

from __future__ import annotations

import array
import ctypes
import enum
import fcntl
import os
import select
import sys
import time
from dataclasses import dataclass, field
from typing import Iterable, Iterator, Optional, Sequence

__all__ = ["AuxField", "Buffer", "BufferKind", "Code", "Engine", "Event", "EventType", "Hybrid", "KvferryError",
           "Pool", "make_pool", "version"]


class Code(enum.IntEnum):
    """Why a call was refused or a room failed; the numbers of kvf_code."""

    OK = 0
    INVALID = 1
    NOT_FOUND = 2
    CONFLICT = 3
    MISMATCH = 4
    EXHAUSTED = 5
    UNAUTHORIZED = 6
    DEADLINE = 10
    PEER_LOST = 11
    ABORTED = 12
    ENGINE_LOST = 13
    UNAVAILABLE = 14
    TRANSPORT = 20
    PROTOCOL = 21
    CORRUPT = 22
    IO = 30
    INTERNAL = 31

    @classmethod
    def _missing_(cls, value):  # a newer daemon may know more
        return cls.INTERNAL


class BufferKind(enum.IntEnum):
    KEY = 0
    VALUE = 1
    LATENT = 2
    INDEX_KEY = 3
    INDEX_SCALE = 4
    CONV = 5
    RECURRENT = 6


class EventType(enum.IntEnum):
    NONE = 0
    GRANTED = 1
    CHUNK_DONE = 2
    LANDED = 3
    FAILED = 4
    ABORTED = 5

    @property
    def is_final(self) -> bool:
        """The room is over and its pages may be used again."""
        return self in (EventType.LANDED, EventType.FAILED, EventType.ABORTED)


class KvferryError(Exception):
    """A refused call, or a lost daemon (Code.UNAVAILABLE: attach again)."""

    def __init__(self, code: int, message: str):
        super().__init__(f"{Code(code).name.lower()}: {message}")
        self.code = Code(code)
        self.message = message


@dataclass(frozen=True)
class Buffer:
    """Pages of page_rows (0: page_size) rows of row_bytes, page_stride bytes apart (0: without gaps)."""

    layer: int
    kind: BufferKind
    row_bytes: int
    pages: int
    fd: int
    offset: int = 0
    page_rows: int = 0
    page_stride: int = 0


@dataclass(frozen=True)
class Hybrid:
    """What a request of a hybrid model needs beside its pages: see kvf_hybrid."""

    window_pages: Sequence[int] = ()
    window_first: int = 0
    state_slot: Optional[int] = None


@dataclass(frozen=True)
class AuxField:
    """`slots` rows of `width` bytes; both sides pair fields by name."""

    name: str
    width: int
    slots: int
    fd: int
    offset: int = 0


@dataclass(frozen=True)
class Pool:
    page_size: int
    dtype: str
    buffers: Sequence[Buffer]
    aux: Sequence[AuxField] = field(default_factory=tuple)
    tp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0
    dp_rank: int = 0


@dataclass(frozen=True)
class Event:
    type: EventType
    room: int
    tokens: int
    bytes: int
    transfer_ns: int
    code: Code
    reason: str
    layer_end: int = 0  # CHUNK_DONE: of the send; 0: all layers


class _CBuffer(ctypes.Structure):
    _fields_ = [("layer", ctypes.c_uint32), ("kind", ctypes.c_uint32), ("row_bytes", ctypes.c_uint32),
                ("pages", ctypes.c_uint64), ("fd", ctypes.c_int), ("offset", ctypes.c_uint64),
                ("page_rows", ctypes.c_uint32), ("page_stride", ctypes.c_uint64)]


class _CHybrid(ctypes.Structure):
    _fields_ = [("window_pages", ctypes.POINTER(ctypes.c_uint32)), ("window_page_count", ctypes.c_size_t),
                ("window_first", ctypes.c_uint64), ("has_state", ctypes.c_int), ("state_slot", ctypes.c_uint32)]


class _CAuxField(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("width", ctypes.c_uint32), ("slots", ctypes.c_uint32),
                ("fd", ctypes.c_int), ("offset", ctypes.c_uint64)]


class _CPool(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("tp_rank", ctypes.c_uint32), ("pp_rank", ctypes.c_uint32),
                ("cp_rank", ctypes.c_uint32), ("dp_rank", ctypes.c_uint32), ("page_size", ctypes.c_uint32),
                ("dtype", ctypes.c_char_p), ("buffers", ctypes.POINTER(_CBuffer)),
                ("buffer_count", ctypes.c_size_t), ("aux", ctypes.POINTER(_CAuxField)),
                ("aux_count", ctypes.c_size_t)]


class _CChunk(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("room", ctypes.c_uint64),
                ("pages", ctypes.POINTER(ctypes.c_uint32)), ("page_count", ctypes.c_size_t),
                ("first_token", ctypes.c_uint64), ("token_count", ctypes.c_uint64), ("last", ctypes.c_int),
                ("aux_slot", ctypes.c_int), ("ready_fd", ctypes.c_int), ("hybrid", _CHybrid),
                ("layer_begin", ctypes.c_uint32), ("layer_end", ctypes.c_uint32)]


class _CExpectation(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("room", ctypes.c_uint64), ("bootstrap", ctypes.c_char_p),
                ("pages", ctypes.POINTER(ctypes.c_uint32)), ("page_count", ctypes.c_size_t),
                ("prefix", ctypes.c_uint64), ("token_count", ctypes.c_uint64), ("aux_slot", ctypes.c_int),
                ("prefill_dp_rank", ctypes.c_int), ("hybrid", _CHybrid)]


class _CEvent(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("type", ctypes.c_uint32), ("room", ctypes.c_uint64),
                ("tokens", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("transfer_ns", ctypes.c_uint64),
                ("code", ctypes.c_int32), ("reason", ctypes.c_char * 512), ("layer_end", ctypes.c_uint32)]


_library: Optional[ctypes.CDLL] = None


def _load() -> ctypes.CDLL:
    global _library
    if _library is not None:
        return _library
    library = ctypes.CDLL(os.environ.get("KVFERRY_LIBRARY", "libkvferry.so.0"))
    engine = ctypes.c_void_p
    library.kvf_attach.argtypes = [ctypes.c_char_p, ctypes.POINTER(_CPool), ctypes.POINTER(engine),
                                   ctypes.c_char_p, ctypes.c_size_t]
    library.kvf_send.argtypes = [engine, ctypes.POINTER(_CChunk)]
    library.kvf_expect.argtypes = [engine, ctypes.POINTER(_CExpectation)]
    library.kvf_abort.argtypes = [engine, ctypes.c_uint64, ctypes.c_char_p]
    library.kvf_next_event.argtypes = [engine, ctypes.POINTER(_CEvent), ctypes.c_int]
    library.kvf_event_fd.argtypes = [engine]
    library.kvf_detach.argtypes = [engine]
    library.kvf_detach.restype = None
    library.kvf_last_error.argtypes = [engine]
    library.kvf_last_error.restype = ctypes.c_char_p
    library.kvf_writers_gone.argtypes = [ctypes.c_int]
    library.kvf_writers_gone.restype = ctypes.c_int
    library.kvf_version.argtypes = []
    library.kvf_version.restype = ctypes.c_char_p
    _library = library
    return library


def version() -> str:
    return _load().kvf_version().decode()


def make_pool(size: int, name: str = "kvferry-pool") -> int:
    """A memfd of `size` bytes that can never shrink, as the daemon demands. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # The numbers of <linux/fcntl.h>; the fcntl module has the names only since Python 3.9 or later.
        fcntl.fcntl(fd, getattr(fcntl, "F_ADD_SEALS", 1033), getattr(fcntl, "F_SEAL_SHRINK", 2))
    except OSError:
        os.close(fd)
        raise
    return fd


def writers_gone(fd: int) -> bool:
    """Whether no other process can write this pool descriptor's memory any more. For a decode engine whose daemon
    died: its pages may be used again from 50 ms after that on, once this is true for each descriptor.
    Ask before attaching again: the next attachment gives the pool to writers anew."""
    answer = _load().kvf_writers_gone(fd)
    if answer < 0:
        raise KvferryError(Code(-answer), "the writers of the pool cannot be asked for")
    return answer == 1


def _unsigned(name: str, value: int, bits: int) -> int:
    # ctypes would cut a number that is too large without a word.
    if not 0 <= value < 1 << bits:
        raise KvferryError(Code.INVALID, f"{name} is {value}, legal are 0 to 2^{bits}-1")
    return value


def _slot(name: str, value: Optional[int]) -> int:
    if value is None:
        return -1
    return _unsigned(name, value, 31)


def _text(name: str, value: str) -> bytes:
    raw = value.encode("utf-8", "replace")
    if b"\0" in raw:
        raise KvferryError(Code.INVALID, f"{name} has a NUL character: {value!r}")
    return raw


def _pages(pages: Iterable[int]):
    """The page list as C memory, and the object that owns it."""
    try:
        owner = pages if isinstance(pages, array.array) and pages.typecode == "I" else array.array("I", pages)
    except (OverflowError, TypeError) as error:
        raise KvferryError(Code.INVALID, f"pages are not all 0 to 2^32-1: {error}") from None
    address, count = owner.buffer_info()
    return ctypes.cast(address if count else None, ctypes.POINTER(ctypes.c_uint32)), count, owner


def _hybrid(hybrid: Optional[Hybrid]):
    """The C form, and the object that owns its pages."""
    if hybrid is None:
        return _CHybrid(), None
    pointer, count, owner = _pages(hybrid.window_pages)
    has_state = hybrid.state_slot is not None
    return _CHybrid(pointer, count, _unsigned("window_first", hybrid.window_first, 64), int(has_state),
                    _unsigned("state_slot", hybrid.state_slot if has_state else 0, 32)), owner


class Engine:
    """One rank's connection to its daemon. Closing it (detach, `with`, or death) aborts what is alive."""

    def __init__(self, socket_path: str, pool: Pool):
        self._handle = None
        self._lib = _load()
        buffers = (_CBuffer * len(pool.buffers))(*[
            _CBuffer(_unsigned("layer", b.layer, 32), _unsigned("kind", int(b.kind), 32),
                     _unsigned("row_bytes", b.row_bytes, 32), _unsigned("pages", b.pages, 64), b.fd,
                     _unsigned("offset", b.offset, 64), _unsigned("page_rows", b.page_rows, 32),
                     _unsigned("page_stride", b.page_stride, 64)) for b in pool.buffers])
        aux = (_CAuxField * len(pool.aux))(*[
            _CAuxField(_text("name", a.name), _unsigned("width", a.width, 32), _unsigned("slots", a.slots, 32),
                       a.fd, _unsigned("offset", a.offset, 64)) for a in pool.aux])
        description = _CPool(ctypes.sizeof(_CPool), _unsigned("tp_rank", pool.tp_rank, 32),
                             _unsigned("pp_rank", pool.pp_rank, 32), _unsigned("cp_rank", pool.cp_rank, 32),
                             _unsigned("dp_rank", pool.dp_rank, 32), _unsigned("page_size", pool.page_size, 32),
                             _text("dtype", pool.dtype), buffers, len(buffers), aux, len(aux))
        handle = ctypes.c_void_p()
        error = ctypes.create_string_buffer(16 * 1024)
        rc = self._lib.kvf_attach(_text("socket_path", socket_path), ctypes.byref(description),
                                  ctypes.byref(handle), error, len(error))
        if rc < 0:
            raise KvferryError(-rc, error.value.decode("utf-8", "replace"))
        self._handle = handle

    def send(self, room: int, pages: Iterable[int], *, first_token: int, token_count: int, last: bool = False,
             aux_slot: Optional[int] = None, ready_fd: Optional[int] = None,
             hybrid: Optional[Hybrid] = None, layer_begin: int = 0, layer_end: int = 0) -> None:
        """Prefill: these tokens lie in these pages, which now belong to the daemon until the final event. With
        layer_end: only the layers [layer_begin, layer_end) so far, by the rules of kvf_chunk."""
        pointer, count, owner = _pages(pages)
        extra, extra_owner = _hybrid(hybrid)
        chunk = _CChunk(ctypes.sizeof(_CChunk), _unsigned("room", room, 64), pointer, count,
                        _unsigned("first_token", first_token, 64), _unsigned("token_count", token_count, 64),
                        int(bool(last)), _slot("aux_slot", aux_slot), _slot("ready_fd", ready_fd), extra,
                        _unsigned("layer_begin", layer_begin, 32), _unsigned("layer_end", layer_end, 32))
        self._check(self._lib.kvf_send(self._live(), ctypes.byref(chunk)))
        del owner, extra_owner

    def expect(self, room: int, bootstrap: str, pages: Iterable[int], *, token_count: int, prefix: int = 0,
               aux_slot: Optional[int] = None, prefill_dp_rank: Optional[int] = None,
               hybrid: Optional[Hybrid] = None) -> None:
        """Decode: tokens [prefix, token_count) of the room are to land in these pages."""
        pointer, count, owner = _pages(pages)
        extra, extra_owner = _hybrid(hybrid)
        expectation = _CExpectation(ctypes.sizeof(_CExpectation), _unsigned("room", room, 64),
                                    _text("bootstrap", bootstrap), pointer, count,
                                    _unsigned("prefix", prefix, 64), _unsigned("token_count", token_count, 64),
                                    _slot("aux_slot", aux_slot), _slot("prefill_dp_rank", prefill_dp_rank), extra)
        self._check(self._lib.kvf_expect(self._live(), ctypes.byref(expectation)))
        del owner, extra_owner

    def abort(self, room: int, reason: str = "") -> None:
        """Asks for the end of the room; its final event follows."""
        self._check(self._lib.kvf_abort(self._live(), _unsigned("room", room, 64),
                                        reason.encode("utf-8", "replace").replace(b"\0", b"?")))

    def next_event(self, timeout: Optional[float] = None) -> Optional[Event]:
        """The next event within `timeout` seconds (None: for ever, but Ctrl-C works); None without one."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            event = self._take_event()
            if event is not None:
                return event
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            poll.poll(None if left is None else max(1, int(left * 1000)))

    def events(self, timeout: float = 0.0) -> Iterator[Event]:
        """Every event that is there, waiting up to `timeout` seconds for the first."""
        event = self.next_event(timeout)
        while event is not None:
            yield event
            event = self._take_event()

    def fileno(self) -> int:
        """Readable when there may be events, for select, poll and asyncio's add_reader."""
        return self._lib.kvf_event_fd(self._live())

    def detach(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._lib.kvf_detach(handle)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_exception) -> None:
        self.detach()

    def __del__(self):
        if not sys.is_finalizing():
            self.detach()

    def _take_event(self) -> Optional[Event]:
        raw = _CEvent(struct_size=ctypes.sizeof(_CEvent))
        if self._check(self._lib.kvf_next_event(self._live(), ctypes.byref(raw), 0)) == 0:
            return None
        return Event(EventType(raw.type), raw.room, raw.tokens, raw.bytes, raw.transfer_ns, Code(raw.code),
                     raw.reason.decode("utf-8", "replace"), raw.layer_end)

    def _live(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise KvferryError(Code.UNAVAILABLE, "this engine is detached: attach again")
        return self._handle

    def _check(self, rc: int) -> int:
        if rc < 0:
            raise KvferryError(-rc, self._lib.kvf_last_error(self._handle).decode("utf-8", "replace"))
        return rc
