"""A TCP proxy between the two daemons that can do what a network does: reset every connection, or go silent."""
import selectors
import socket
import struct
import threading

BUFFER_MAX = 1 << 20


class Half:
    """One direction: what was read from `source` and not yet taken by `target`."""

    def __init__(self, source, target):
        self.source, self.target, self.waiting, self.ended = source, target, b"", False


class Proxy:
    def __init__(self, listen, target):
        """`listen` and `target` are (host, port); the port that was bound is in .port. Target may change later."""
        self.target = target
        self.listener = socket.create_server(listen)
        self.port = self.listener.getsockname()[1]
        self.halves = []
        self.silent, self.stopped = threading.Event(), threading.Event()
        self.reset_wanted, self.reset_done = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def reset(self):
        """Returns when every connection is gone."""
        self.reset_done.clear()
        self.reset_wanted.set()
        self.reset_done.wait(10)

    def stop(self):
        self.stopped.set()
        self.thread.join()

    def _run(self):
        while not self.stopped.is_set():
            if self.reset_wanted.is_set():
                self._close(self.halves)
                self.reset_wanted.clear()
                self.reset_done.set()
            with selectors.DefaultSelector() as selector:
                self._register(selector)
                ready = {(key.fileobj, mask) for key, mask in selector.select(0.02)}
            self._serve({sock for sock, mask in ready if mask & selectors.EVENT_READ},
                        {sock for sock, mask in ready if mask & selectors.EVENT_WRITE})
        self._close(self.halves)
        self.listener.close()

    def _register(self, selector):
        wanted = {self.listener: selectors.EVENT_READ}
        for half in [] if self.silent.is_set() else self.halves:
            if len(half.waiting) < BUFFER_MAX and not half.ended:
                wanted[half.source] = wanted.get(half.source, 0) | selectors.EVENT_READ
            if half.waiting:
                wanted[half.target] = wanted.get(half.target, 0) | selectors.EVENT_WRITE
        for sock, mask in wanted.items():
            selector.register(sock, mask)

    def _serve(self, readable, writable):
        if self.listener in readable:
            self._accept()
        for half in list(self.halves):
            if half not in self.halves:
                continue  # went with its other direction
            try:
                if half.source in readable:
                    data = half.source.recv(1 << 18)
                    half.waiting += data
                    half.ended = half.ended or not data
                if half.waiting and half.target in writable:
                    half.waiting = half.waiting[half.target.send(half.waiting):]
                if half.ended and not half.waiting:
                    self._close([half])
            except BlockingIOError:
                pass
            except OSError:
                self._close([half])

    def _accept(self):
        source, _ = self.listener.accept()
        try:
            target = socket.create_connection(self.target, 2)
        except OSError:
            source.close()
            return
        for one in (source, target):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.halves += [Half(source, target), Half(target, source)]

    def _close(self, halves):
        """Both directions of each, with a reset."""
        gone = {half.source for half in halves} | {half.target for half in halves}
        self.halves = [half for half in self.halves if half.source not in gone]
        for one in gone:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
