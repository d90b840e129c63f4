"""One side of one peer, started by `run`: worker.py ROLE PEER FD OPTIONS. FD is a socket to the other side. The initiator
prints one JSON line for each work item; both print {"error": ...} when they fail."""
import ctypes
import json
import os
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection

import memory
import workload

PR_SET_PDEATHSIG = 1
TARGET_CPU, INITIATOR_CPU = 0, 1


def peer_module(name):
    if name == "nixl":
        import peer_nixl
        return peer_nixl.Nixl, peer_nixl.version
    import peer_mooncake
    return peer_mooncake.Mooncake, peer_mooncake.version


def target(link, options):
    size = options["layers"], options["pages"]
    segments = memory.Segments(options["library"])
    pool = memory.Pool(workload.pool_bytes(*size))
    segments.blank(pool)
    make, _ = peer_module(options["peer"])
    peer = make("target", pool, options)
    link.send(peer.hello())
    while True:
        command = link.recv()
        if command["do"] == "end":
            return
        if command["do"] == "await":
            cpu = time.process_time()
            link.send("armed")
            peer.wait(command["tag"], link.recv)
            link.send({"seen": time.monotonic_ns(), "cpu": time.process_time() - cpu})
        elif command["do"] == "check":
            parts = workload.segments(command["item"], *size, command["repeat"])
            link.send({"wrong": segments.check(pool, parts), "strays": segments.strays(pool)})


class Initiator:
    def __init__(self, link, options):
        self.link = link
        self.options = options
        self.segments = memory.Segments(options["library"])
        self.pool = memory.Pool(workload.pool_bytes(options["layers"], options["pages"]))
        self.scratch = memory.Pool(self.pool.size)
        self.segments.fill(self.pool)
        self.segments.blank(self.scratch)
        make, version = peer_module(options["peer"])
        self.version = version()
        self.peer = make("initiator", self.pool, options)
        self.peer.connect(link.recv())
        self.tags = 0

    def memcpy_seconds(self, parts):
        start = time.monotonic_ns()
        self.segments.copy(self.scratch, self.pool, parts)
        return (time.monotonic_ns() - start) / 1e9

    def transfer(self, item, repeat):
        """One verified transfer: seconds, seconds of preparing it, CPU seconds of both sides, memcpy seconds around it."""
        parts = workload.segments(item, self.options["layers"], self.options["pages"], repeat)
        self.tags += 1
        tag = b"%016d" % self.tags
        before = self.memcpy_seconds(parts)
        start = time.monotonic_ns()
        handle = self.peer.prepare(parts, tag)
        prepared = (time.monotonic_ns() - start) / 1e9
        self.link.send({"do": "await", "tag": tag})
        assert self.link.recv() == "armed"
        cpu = time.process_time()
        start = time.monotonic_ns()
        self.peer.write(handle, tag, self.link.send)
        done = time.monotonic_ns()
        cpu = time.process_time() - cpu
        answer = self.link.recv()
        self.peer.release(handle)
        after = self.memcpy_seconds(parts)
        self.link.send({"do": "check", "item": item, "repeat": repeat})
        found = self.link.recv()
        if found["wrong"] or found["strays"]:
            raise RuntimeError(f"{item}: {found['wrong']} wrong words, {found['strays']} words written elsewhere")
        return {"seconds": (max(done, answer["seen"]) - start) / 1e9, "prepare": prepared, "cpu": cpu + answer["cpu"],
                "memcpy": (before + after) / 2, "bytes": int(parts[2].sum()), "descriptors": len(parts[2])}

    def measure(self, item):
        done = [self.transfer(item, repeat) for repeat in range(self.options["repeats"][item])]
        median = {key: statistics.median(one[key] for one in done) for key in done[0]}
        size = done[0]["bytes"]
        median.update(item=item, verified=True, gb_s=size / median["seconds"] / 1e9, version=self.version,
                      ratio=statistics.median(one["memcpy"] / one["seconds"] for one in done),
                      cpu_s_per_gb=median["cpu"] / size * 1e9, memcpy_gb_s=size / median["memcpy"] / 1e9)
        return median


def initiator(link, options):
    side = Initiator(link, options)
    for repeat in range(3):
        side.transfer("one-page", repeat)  # connects and warms up
    for item in options["items"]:
        print(json.dumps(side.measure(item)), flush=True)
    link.send({"do": "end"})


def main():
    role, fd, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, {TARGET_CPU if role == "target" else INITIATOR_CPU})
    try:
        (target if role == "target" else initiator)(Connection(fd), options)
    except Exception as error:  # whatever a peer's library raises is the reason that the table gives
        print(json.dumps({"error": f"{role}: {type(error).__name__}: {error}"}), flush=True)
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)  # without the peer's own tear-down, which can hang


if __name__ == "__main__":
    main()
