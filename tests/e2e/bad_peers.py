"""Everything that is no peer, against every listener of both daemons while rooms move between them. Each attempt is a
table row: listener, attempt, what came back. Rooms must land with every byte right, both daemons must live, answer
/healthz, and come back to the number of open files that they had before."""
import os
import random
import re
import selectors
import socket
import struct
import tempfile
import threading
import time

from cluster import Cluster, get, need, wait_a_little

# Longer than every deadline of the daemons for a first message (10 s), so that what is still open then is idle by right.
OPEN_LIMIT = 15
SCANS = 300
CROWD = 130

CLIENT_HELLO = bytes.fromhex(
    "16030100c8010000c40303" + "5a" * 32 + "20" + "a5" * 32 + "0006130113021303" + "0100" + "0075"
    "000b000403000102000a000c000a001d0017001e00190018002300000016000000170000000d001e001c040305030603080708080809"
    "080a080b080408050806040105010601002b0003020304002d00020101003300260024001d0020" + "3c" * 32)


def request(method, path, body=b"", headers=()):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def upgrade(path):
    return request("GET", path, headers=("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
                                         "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="))


def frame(body):
    return struct.pack("<I", len(body)) + body


class Attempt:
    """One connection: sends its bytes (at once, or one at a time), and keeps what comes back."""

    def __init__(self, listener, name, data, slow=False, shut=False, expect=None):
        self.listener, self.name, self.data = listener, name, data
        self.slow = slow      # a byte at a time
        self.shut = shut      # ends its direction after the last byte
        self.expect = expect  # start of the answer, where there is only one right one
        self.sent, self.got, self.end = 0, b"", None
        self.next_byte = 0.0

    def open(self, now):
        self.begun = now
        unix = self.listener.address.startswith("/")
        self.socket = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        host, _, port = self.listener.address.rpartition(":")
        self.socket.connect(self.listener.address if unix else (host, int(port)))
        self.socket.setblocking(False)
        if self.shut and not self.data:
            self.socket.shutdown(socket.SHUT_WR)

    def step(self, readable, now):
        try:
            if readable:
                data = self.socket.recv(65536)
                self.got += data[:4096]
                if not data:
                    return self.finish("closed", now)
            if self.sent < len(self.data) and now >= self.next_byte:
                # The pace of a slow one, far below any deadline for the whole.
                self.next_byte = now + 0.2
                self.sent += self.socket.send(self.data[self.sent:self.sent + (1 if self.slow else 65536)])
                if self.sent == len(self.data) and self.shut:
                    self.socket.shutdown(socket.SHUT_WR)
            if not self.slow:
                self.next_byte = 0.0
        except BlockingIOError:
            pass
        except OSError as error:
            return self.finish(f"closed ({error.strerror})", now)
        if now > self.begun + OPEN_LIMIT:
            self.finish("still open", now)

    def finish(self, end, now):
        self.end, self.seconds = end, now - self.begun
        # Not a polite end: the daemon sees a reset.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def answer(self):
        first = self.got.split(b"\r\n")[0].decode("latin-1")
        if not first.isprintable():
            # A frame: the sentence in it.
            first = max(re.findall(r"[ -~]+", first), key=len, default=first.encode().hex())
        return f"{first[:100] or 'no byte'}; {self.end} after {self.seconds:.1f} s"


class Listener:
    def __init__(self, name, kind, address):
        self.name, self.kind, self.address = name, kind, address


def listeners(cluster):
    prefill, decode = cluster.ready["prefill"], cluster.ready["decode"]
    known = {int(decode["metrics"].rpartition(":")[2])}
    fabric = cluster.daemons["decode"].listening() - known
    need(len(fabric) == 1, f"the decode daemon listens on {fabric} beside its metrics")
    return [Listener("prefill bootstrap", "http", prefill["bootstrap"]),
            Listener("prefill metrics", "metrics", prefill["metrics"]),
            Listener("decode metrics", "metrics", decode["metrics"]),
            Listener("decode tcp fabric", "tcp", f"127.0.0.1:{fabric.pop()}"),
            Listener("decode shm socket", "shm", f"{cluster.folder}/decode-shm.sock"),
            Listener("prefill engine socket", "engine", prefill["engine_socket"]),
            Listener("decode engine socket", "engine", decode["engine_socket"])]


def for_everybody(at, dice):
    yield Attempt(at, "nothing", b"")
    yield Attempt(at, "nothing, and the end", b"", shut=True)
    yield Attempt(at, "one byte", b"\x00")
    yield Attempt(at, "4 KiB of noise", dice.randbytes(4096))
    yield Attempt(at, "1 MiB of noise", dice.randbytes(1 << 20))
    yield Attempt(at, "1 MiB of zeros", bytes(1 << 20))
    yield Attempt(at, "TLS ClientHello", CLIENT_HELLO)
    yield Attempt(at, "slow noise", dice.randbytes(4096), slow=True)
    if at.kind not in ("http", "metrics"):
        yield Attempt(at, "GET / HTTP/1.1", request("GET", "/"))


def for_http(at):
    yield Attempt(at, "slow request", request("GET", "/healthz", headers=["X: " + "y" * 4000]), slow=True, expect=b"HTTP/1.1 408")
    yield Attempt(at, "half a request, and the end", b"GET /health HT", shut=True)
    yield Attempt(at, "1 MiB of header", request("GET", "/", headers=["X: " + "y" * (1 << 20)]), expect=b"HTTP/1.1 431")
    yield Attempt(at, "10,000 header lines", request("GET", "/", headers=["X: y"] * 10000), expect=b"HTTP/1.1 431")
    yield Attempt(at, "64 GiB announced", request("POST", "/route", headers=[f"Content-Length: {64 << 30}"]), expect=b"HTTP/1.1 413")
    yield Attempt(at, "16 MiB of body", request("PUT", "/route", bytes(16 << 20)), expect=b"HTTP/1.1 413")
    yield Attempt(at, "body that never comes", request("PUT", "/route", headers=["Content-Length: 100"]), expect=b"HTTP/1.1 408")
    yield Attempt(at, "endless chunks", request("PUT", "/route", headers=["Transfer-Encoding: chunked"]) +
                  (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 500, expect=b"HTTP/1.1 413")
    yield Attempt(at, "bad chunk size", request("PUT", "/route", headers=["Transfer-Encoding: chunked"]) + b"zz\r\n", expect=b"HTTP/1.1 400")
    yield Attempt(at, "two lengths", request("PUT", "/route", b"{}", ["Content-Length: 7"]), expect=b"HTTP/1.1 400")
    yield Attempt(at, "length and chunks", request("PUT", "/route", b"{}", ["Transfer-Encoding: chunked"]), expect=b"HTTP/1.1 400")
    yield Attempt(at, "HTTP/9.9", b"GET / HTTP/9.9\r\n\r\n", expect=b"HTTP/1.1 400")
    yield Attempt(at, "NUL in a header", request("GET", "/", headers=["X: a\0b"]), expect=b"HTTP/1.1 400")
    yield Attempt(at, "target with a blank", b"GET /a b HTTP/1.1\r\n\r\n", expect=b"HTTP/1.1 400")
    yield Attempt(at, "target not encoded", request("GET", "/a%zz"), expect=b"HTTP/1.1 400")
    yield Attempt(at, "unknown path", request("GET", "/../../etc/passwd"), expect=b"HTTP/1.1 404")
    yield Attempt(at, "200 requests at once", request("GET", "/nowhere") * 200, expect=b"HTTP/1.1 404")
    yield Attempt(at, "upgrade elsewhere", upgrade("/"), expect=b"HTTP/1.1 404")


def for_bootstrap(at):
    session = "/v1/control?session="
    yield Attempt(at, "upgrade, no session", upgrade("/v1/control"), expect=b"HTTP/1.1 4")
    yield Attempt(at, "upgrade, wrong session", upgrade(session + "0123456789abcdef"), expect=b"HTTP/1.1 4")
    yield Attempt(at, "upgrade, session 0", upgrade(session + "0" * 16), expect=b"HTTP/1.1 4")
    yield Attempt(at, "upgrade, session is noise", upgrade(session + "%ff%fe" * 50), expect=b"HTTP/1.1 4")
    yield Attempt(at, "control without upgrade", request("GET", "/v1/control"), expect=b"HTTP/1.1 426")
    for method, path in (("DELETE", "/route"), ("PATCH", "/v1/handshake"), ("GET", "/v1/handshake"), ("POST", "/v1/topology"),
                         ("PUT", "/register_dp_rank"), ("BREW", "/health")):
        yield Attempt(at, f"{method} {path}", request(method, path), expect=b"HTTP/1.1 4")
    for path in ("/v1/handshake", "/register_dp_rank", "/query_dp_ranks"):
        for name, body in (("{", b"{"), ("[[[[...", b"[" * 100000), ("no object", b"7"), ("not UTF-8", b'{"a":"\xff"}'),
                           ("a huge number", b'{"bootstrap_room":' + b"9" * 5000 + b"}")):
            yield Attempt(at, f"{path[1:]}: {name}", request("POST", path, body), expect=b"HTTP/1.1 4")


def for_sockets(at, dice):
    if at.kind == "tcp":
        hello = b"KVBH" + struct.pack("<HBB", 1, 0, 1)
        yield Attempt(at, "hello, wrong token", hello + dice.randbytes(16))
        yield Attempt(at, "hello, version 9", b"KVBH" + struct.pack("<HBB", 9, 0, 1) + bytes(16))
        yield Attempt(at, "hello, stream 9 of 2", b"KVBH" + struct.pack("<HBB", 1, 9, 2) + bytes(16))
        yield Attempt(at, "half a hello", hello)
        yield Attempt(at, "slow hello", hello + dice.randbytes(16) + bytes(4096), slow=True)
        yield Attempt(at, "blocks without hello", b"KVB1" + bytes(84) * 100)
        return
    for name, body in (("empty frame", frame(b"")), ("frame of 4 GiB", b"\xff\xff\xff\xff" + bytes(100)),
                       ("truncated frame", struct.pack("<I", 5000) + bytes(100)), ("frame of noise", frame(dice.randbytes(500))),
                       ("100 frames of {}", frame(b"\x80") * 100), ("deep frame", frame(b"\x91" * 5000 + b"\xc0"))):
        yield Attempt(at, name, body)
        yield Attempt(at, f"{name}, and the end", body, shut=True)
    yield Attempt(at, "slow frame", frame(bytes(4096)), slow=True)
    yield Attempt(at, "hello, wrong token", frame(b'{"type":"hello","version":1,"token":"' + b"0" * 32 + b'"}'))
    fixed = b"\x83\xa2op\xa6detach\xa3seq\x01\xa3fds"
    yield Attempt(at, "detach before attach", frame(fixed + b"\x00"))
    yield Attempt(at, "descriptors that never come", frame(fixed + b"\x40"))


def run_together(attempts):
    """All at once, in one loop, until each has an end."""
    pending = list(attempts)
    opened = []
    with selectors.DefaultSelector() as selector:
        while pending or opened:
            now = time.monotonic()
            # A bounded number is open at a time: listeners may refuse more, which is an attempt of its own.
            while pending and len(opened) < 150:
                attempt = pending.pop()
                attempt.open(now)
                selector.register(attempt.socket, selectors.EVENT_READ, attempt)
                opened.append(attempt)
            readable = {key.data for key, _ in selector.select(0.02)}
            now = time.monotonic()
            for attempt in list(opened):
                attempt.step(attempt in readable, now)
                if attempt.end:
                    forget(selector, opened, attempt)


def forget(selector, opened, gone):
    """The socket is closed already, so the selector is told by its key."""
    opened.remove(gone)
    for key in list(selector.get_map().values()):
        if key.data is gone:
            selector.unregister(key.fileobj)


def scan(at):
    """Connects and closes, every second time with a reset."""
    refused = 0
    unix = at.address.startswith("/")
    for number in range(SCANS):
        probe = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        host, _, port = at.address.rpartition(":")
        try:
            probe.connect(at.address if unix else (host, int(port)))
        except OSError:
            refused += 1
        if number % 2:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        probe.close()
    return f"{SCANS - refused} accepted, {refused} refused"


class Crowd:
    """Many connections to each listener that say nothing and stay."""

    def __init__(self, places, count):
        self.places, self.count, self.sockets = places, count, {at.name: [] for at in places}

    def __enter__(self):
        for at in self.places:
            for _ in range(self.count):
                unix = at.address.startswith("/")
                one = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
                one.settimeout(1)
                host, _, port = at.address.rpartition(":")
                try:
                    one.connect(at.address if unix else (host, int(port)))
                except OSError:  # a full backlog
                    one.close()
                    continue
                self.sockets[at.name].append(one)
        return self

    def answers(self):
        """Of each listener: how many were turned away by now, how many stand."""
        for at in self.places:
            turned = 0
            for one in self.sockets[at.name]:
                one.setblocking(False)
                try:
                    one.recv(1)
                    turned += 1
                except BlockingIOError:
                    pass
                except OSError:
                    turned += 1
            stand = len(self.sockets[at.name]) - turned
            yield at.name, f"{self.count} that stay", f"{turned} turned away, {stand} stand, {self.count - stand - turned} not connected"

    def __exit__(self, *_):
        for one in [one for sockets in self.sockets.values() for one in sockets]:
            one.close()


class Traffic:
    """Rooms, one after the other, until told to stop."""

    def __init__(self, cluster):
        self.cluster, self.stop, self.rooms, self.verified, self.problem = cluster, threading.Event(), 0, 0, None
        self.thread = threading.Thread(target=self.run)

    def run(self):
        try:
            while not self.stop.is_set():
                self.verified += self.cluster.land(1000)
                self.rooms += 1
        except AssertionError as error:
            self.problem = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


def bad_peers(*fabrics):
    def run(build):
        dice = random.Random(7)
        with tempfile.TemporaryDirectory() as folder, Cluster(build, folder, fabrics) as cluster:
            cluster.land(1000)
            cluster.await_balance()
            before = {role: daemon.open_files() for role, daemon in cluster.daemons.items()}
            rows = []
            with Traffic(cluster) as traffic:
                attempts = []
                for at in listeners(cluster):
                    attempts += for_everybody(at, dice)
                    attempts += for_http(at) if at.kind in ("http", "metrics") else for_sockets(at, dice)
                    attempts += for_bootstrap(at) if at.kind == "http" else []
                run_together(attempts)
                rows += [(one.listener.name, one.name, one.answer()) for one in attempts]
                rows += [(at.name, f"port scan, {SCANS} times", scan(at)) for at in listeners(cluster)]
                with Crowd(listeners(cluster), CROWD) as crowd:
                    begun = traffic.rooms
                    wait_for(lambda: traffic.rooms > begun + 2 or traffic.problem, "rooms go on")
                    rows += crowd.answers()
            need(traffic.problem is None, f"{traffic.problem}")
            for row in rows:
                print("{:<22} {:<34} {}".format(*row))
            wrong = [f"{one.listener.name}: {one.name}: {one.answer()}" for one in attempts
                     if one.expect and not one.got.startswith(one.expect)]
            need(not wrong, "wrong answers:\n" + "\n".join(wrong))
            need(not cluster.strays(), f"{cluster.strays()}")
            for role, daemon in cluster.daemons.items():
                daemon.check_alive()
                need(get(cluster.ready[role]["metrics"], "/healthz") is not None, "healthz")
                await_files(daemon, before[role])
            cluster.land(1000)
            cluster.await_balance()
            print(f"{len(attempts)} attempts and {SCANS} scans of each listener; {traffic.rooms} rooms landed meanwhile, "
                  f"{traffic.verified} bytes compared, 0 wrong; open files before and after: {before}")
    return run


def no_more_files(build):
    """Both daemons may have 40 open files, and a crowd takes them all: rooms between those that know each other go on, and
    everything is as before when the crowd has left."""
    limit = ["prlimit", "--nofile=40"]
    with tempfile.TemporaryDirectory() as folder, Cluster(build, folder, ["shm", "tcp"],
                                                          wrap={"prefill": limit, "decode": limit}) as cluster:
        cluster.land(1000)
        before = {role: daemon.open_files() for role, daemon in cluster.daemons.items()}
        with Traffic(cluster) as traffic, Crowd(listeners(cluster), 60) as crowd:
            wait_for(lambda: all(daemon.open_files() >= 39 for daemon in cluster.daemons.values()), "the daemons use every file")
            begun, busy = traffic.rooms, {role: cpu_seconds(daemon.pid) for role, daemon in cluster.daemons.items()}
            wait_for(lambda: traffic.rooms > begun + 5 or traffic.problem, "rooms go on")
            for row in crowd.answers():
                print("{:<22} {:<34} {}".format(*row))
            used = {role: cpu_seconds(daemon.pid) - busy[role] for role, daemon in cluster.daemons.items()}
        need(traffic.problem is None, f"{traffic.problem}")
        for role, daemon in cluster.daemons.items():
            daemon.check_alive()
            await_files(daemon, before[role])
            need(get(cluster.ready[role]["metrics"], "/healthz") is not None, "healthz")
        cluster.daemons["prefill"].kill()
        since = cluster.mark()
        cluster.start_daemon("prefill")
        cluster.await_attached("prefill", since)
        cluster.land(1000)
        print(f"{traffic.rooms} rooms landed meanwhile; open files before and after: {before}; CPU seconds {used}")


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(fact, what, timeout=60):
    deadline = time.monotonic() + timeout
    while not fact():
        need(time.monotonic() < deadline, f"not within {timeout} s: {what}")
        wait_a_little()


def await_files(daemon, wanted):
    wait_for(lambda: daemon.open_files() <= wanted, f"{daemon.name} has again the {wanted} open files that it had before")
