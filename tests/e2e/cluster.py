"""The four processes of a transfer, with the test as the router: a daemon and a synthetic engine on either side, which
can be killed, stopped and started again one by one. Every byte of a landed room has been compared by the engine."""
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

ROLES = ("prefill", "decode")
FINAL = ("landed", "failed", "aborted")


def need(condition, what):
    if not condition:
        raise AssertionError(what)


def free_port():
    """A port that nobody listens on now; for an address that must stay the same over a restart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(address, path, timeout=20):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=timeout) as answer:
        return answer.read().decode()


class Process:
    """A child whose stdout is JSON lines, which a thread reads; stderr goes to a file."""

    def __init__(self, name, command, log, environment=None):
        self.name = name
        self.killed = False  # by the test
        self.log = log
        with open(log, "ab") as stderr:
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                                          env={**os.environ, "UCX_HANDLE_ERRORS": "none", **(environment or {})})
        self.pid = self.child.pid

    def say(self, **command):
        try:
            self.child.stdin.write(json.dumps(command) + "\n")
            self.child.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def signal(self, number):
        self.killed = self.killed or number in (signal.SIGKILL, signal.SIGTERM)
        self.child.send_signal(number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.child.wait(30)

    def check_alive(self):
        if not self.killed and self.child.poll() is not None:
            raise AssertionError(f"{self.name} died with {self.child.returncode}:\n{self.tail()}")

    def tail(self):
        log = Path(self.log)
        if not log.is_file():
            return f"(the log went to {log})"
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 3000))
            return file.read(3000).decode(errors="replace")

    def open_files(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def listening(self):
        """Its TCP ports on 127.0.0.1."""
        inodes = set()
        for entry in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                found = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{self.pid}/fd/{entry}"))
            except OSError:
                continue
            if found:
                inodes.add(found.group(1))
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


class Cluster:
    def __init__(self, build, folder, fabrics=("shm", "tcp"), pages=64, page_size=64, aux_slots=32, model="deepseek-v3",
                 config=None, wrap=None):
        self.build, self.folder = Path(build), str(folder)
        self.pages, self.page_size, self.aux_slots, self.model = pages, page_size, aux_slots, model
        self.fabrics, self.extra = list(fabrics), config or {}
        self.wrap = wrap or {role: [] for role in ROLES}  # what each side's processes are started with
        self.host = {role: "127.0.0.1" for role in ROLES}
        self.bootstrap = f"127.0.0.1:{free_port()}"
        self.dialled = self.bootstrap  # what decode is told; a test may put something in between
        self.tcp = {"listen": f"{self.host['decode']}:0"}  # likewise, the decode daemon's tcp fabric
        self.daemons, self.engines, self.ready = {}, {}, {}
        self.changed = threading.Condition()  # guards what follows
        self.events = []                      # (side, event), in order of arrival
        self.next_room = 1

    def __enter__(self):
        try:
            for role in ROLES:
                self.start_daemon(role)
            for role in ROLES:
                self.start_engine(role)
            for role in ROLES:
                self.await_attached(role)
        except BaseException:
            self.kill_all()
            raise
        return self

    def kill_all(self):
        for process in [*self.engines.values(), *self.daemons.values()]:
            if process.child.poll() is None:
                process.kill()

    def __exit__(self, kind, *_):
        if kind is not None:
            return self.kill_all()
        ended = []
        for engine in self.engines.values():
            engine.say(op="quit")
        for process in [*self.engines.values(), *self.daemons.values()]:
            if process.child.poll() is None:
                process.signal(signal.SIGCONT)
            if process in self.daemons.values() and process.child.poll() is None:
                process.signal(signal.SIGTERM)
            try:
                ended.append((process, process.child.wait(30)))
            except subprocess.TimeoutExpired:
                process.kill()
                ended.append((process, "no end within 30 s"))
        for process, status in ended:
            if status != 0:
                raise AssertionError(f"{process.name} ended with {status}:\n{process.tail()}")

    def config(self, role):
        config = {"instance": role, "model": self.model, "page_size": self.page_size,
                  "engine_socket": {"path": f"{self.folder}/{role}.sock"}, "metrics": {"listen": f"{self.host[role]}:0"},
                  "fabrics": self.fabrics, "timeouts": {"drain": "5s"}}
        if role == "prefill":
            config["bootstrap"] = {"listen": self.bootstrap}
        else:
            config["shm"] = {"socket": f"{self.folder}/decode-shm.sock"}
            config["tcp"] = self.tcp
        return {**config, **self.extra}

    def start_daemon(self, role, stderr=None):
        path = Path(self.folder) / f"{role}.json"
        path.write_text(json.dumps(self.config(role)))
        command = [*self.wrap[role], str(self.build / role / f"kvferry-{role}"), "--config", str(path)]
        daemon = Process(f"kvferry-{role}", command, stderr or f"{self.folder}/{role}.log")
        line = daemon.child.stdout.readline()
        if not line:
            raise AssertionError(f"{daemon.name} did not start:\n{daemon.tail()}")
        self.daemons[role], self.ready[role] = daemon, json.loads(line)

    def start_engine(self, role):
        command = [*self.wrap[role], str(self.build / "tools/kvferry-synthetic-engine"), "--role", role, "--socket",
                   f"{self.folder}/{role}.sock", "--model", self.model, "--page-size", str(self.page_size), "--pages",
                   str(self.pages), "--aux-slots", str(self.aux_slots), "--rooms", str(self.aux_slots)]
        engine = Process(f"{role} engine", command, f"{self.folder}/{role}-engine.log")
        self.engines[role] = engine
        threading.Thread(target=self._read, args=(role, engine), daemon=True).start()

    def _read(self, role, engine):
        for line in engine.child.stdout:
            with self.changed:
                self.events.append((role, json.loads(line)))
                self.changed.notify_all()

    def mark(self):
        """A place in the stream of events; wait() looks at what came after it."""
        with self.changed:
            return len(self.events)

    def wait(self, what, done, since=0, timeout=120):
        """Returns what `done`, given the events since then, returns other than None or False."""
        deadline = time.monotonic() + timeout
        with self.changed:
            while True:
                result = done(self.events[since:])
                if result:
                    return result
                self.check_alive()
                need(time.monotonic() < deadline, f"{what}: not within {timeout} s")
                self.changed.wait(0.2)

    def check_alive(self):
        for process in [*self.daemons.values(), *self.engines.values()]:
            process.check_alive()

    def await_attached(self, role, since=0):
        return self.wait(f"the {role} engine attaches", lambda events: any(
            side == role and event["event"] == "attached" for side, event in events), since)

    def open_room(self, tokens, chunk_tokens=1024, sides=ROLES):
        room, self.next_room = self.next_room, self.next_room + 1
        if "prefill" in sides:
            self.engines["prefill"].say(op="request", room=room, tokens=tokens, prefix=0, chunk_tokens=chunk_tokens, stream=True,
                                        corrupt=False)
        if "decode" in sides:
            self.engines["decode"].say(op="expect", room=room, tokens=tokens, prefix=0, bootstrap=self.dialled)
        return room

    def abort(self, role, room, reason="the test asked for it"):
        self.engines[role].say(op="abort", room=room, reason=reason)

    def ends(self, room, sides=ROLES, timeout=120, since=0):
        """The final event of each side."""
        def done(events):
            found = {side: event for side, event in events if event.get("room") == room and event["event"] in FINAL}
            return found if set(sides) <= set(found) else None
        return self.wait(f"room {room} ends", done, since, timeout)

    def land(self, tokens, timeout=120):
        """A new room lands with every byte right; returns how many were compared."""
        room = self.open_room(tokens)
        ends = self.ends(room, timeout=timeout)
        need(all(event["event"] == "landed" for event in ends.values()), f"room {room} did not land: {ends}")
        need(ends["decode"]["mismatches"] == 0, f"room {room} has wrong bytes: {ends['decode']}")
        return ends["decode"]["verified"]

    def strays(self):
        with self.changed:
            return [event for _, event in self.events if event["event"] in ("stray", "refused")]

    def stats(self, role):
        since = self.mark()
        self.engines[role].say(op="stats")
        return self.wait(f"the {role} engine counts", lambda events: next(
            (event for side, event in events if side == role and event["event"] == "stats"), None), since)

    def metric(self, role, name):
        text = get(self.ready[role]["metrics"], "/metrics")
        found = re.search(rf"^{re.escape(name)} ([0-9.e+]+)$", text, re.MULTILINE)
        need(found, f"{role} has no metric {name}")
        return float(found.group(1))

    def await_balance(self, timeout=60):
        """Every page is back: at the engines, and by the daemons' own count."""
        deadline = time.monotonic() + timeout
        owners = ("live", "quarantine")
        while True:
            held = {f"{role} engine": sum(rank["pages"] - rank["free"] for rank in self.stats(role)["ranks"])
                    for role in ROLES}
            for role in ROLES:
                held[role] = sum(self.metric(role, f'kvferry_pages{{owner="{owner}"}}') for owner in owners)
            if not any(held.values()):
                return
            need(time.monotonic() < deadline, f"pages did not come back within {timeout} s: {held}")
            wait_a_little()


def wait_a_little(seconds=0.1):
    """Between two looks at a fact that nothing announces."""
    selectors.DefaultSelector().select(seconds)
