"""The cut network itself: the prefill side lives in a network namespace of its own, behind a virtual cable that is pulled
while rooms move. Nothing says goodbye then, and both daemons have to find out by themselves."""
import os
import random
import subprocess
import sys
import tempfile
import time

from chaos import CONFIG, LONG, PAGE_TOKENS, PAGES, Chaos, print_report
from cluster import ROLES, Cluster, need, wait_a_little

SKIPPED = 77


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


class Cable:
    """A namespace with one end of a veth pair; the other end stays here. Addresses are of a /30 that nobody routes."""

    def __init__(self):
        self.name = f"kvf{os.getpid()}"
        octet = os.getpid() % 250
        self.here, self.there = f"10.213.{octet}.1", f"10.213.{octet}.2"

    def __enter__(self):
        for words in (("netns", "add", self.name), ("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name),
                      ("addr", "add", f"{self.here}/30", "dev", self.name), ("link", "set", self.name, "up"),
                      ("-n", self.name, "addr", "add", f"{self.there}/30", "dev", "eth0"),
                      ("-n", self.name, "link", "set", "eth0", "up"), ("-n", self.name, "link", "set", "lo", "up")):
            done = ip(*words)
            if done.returncode != 0:
                self.__exit__()
                print(f"SKIPPED: ip {' '.join(words)}: {done.stderr.strip()} (needs root and network namespaces)")
                sys.exit(SKIPPED)
        return self

    def __exit__(self, *_):
        ip("link", "del", self.name)
        ip("netns", "del", self.name)

    def pull(self, end):
        self._set(end, "down")

    def plug(self, end):
        self._set(end, "up")

    def _set(self, end, state):
        words = ("link", "set", self.name, state) if end == "here" else ("-n", self.name, "link", "set", "eth0", state)
        done = ip(*words)
        need(done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}")


class CutChaos(Chaos):
    def __init__(self, cluster, dice, cable):
        super().__init__(cluster, dice)
        self.cable = cable

    def cut(self, until):
        end = self.dice.choice(("here", "there"))
        self.cable.pull(end)
        try:
            deadline = time.monotonic() + 20
            while not until() and time.monotonic() < deadline:
                wait_a_little(0.02)
        finally:
            self.cable.plug(end)

    def fault_cut_until_it_is_missed(self, _):
        self.cut(lambda: self.cluster.metric("decode", "kvferry_peers") == 0)

    def fault_cut_briefly(self, _):
        until = time.monotonic() + self.dice.uniform(0.02, 0.5)
        self.cut(lambda: time.monotonic() > until)

    def fault_cut_and_kill(self, _):
        role = self.dice.choice(ROLES)
        self.cut(lambda: self.kill_daemon(role) is None)


def network_cut(build):
    rounds = int(os.environ.get("KVF_ROUNDS", "0")) or (60 if LONG else 6)
    dice = random.Random(int(os.environ.get("KVF_SEED", "0")) or 7)
    forms = [name for name in dir(CutChaos) if name.startswith("fault_cut")]
    with tempfile.TemporaryDirectory() as folder, Cable() as cable:
        cluster = Cluster(build, folder, ["tcp"], pages=PAGES, page_size=PAGE_TOKENS, config={**CONFIG, "insecure": True},
                          wrap={"prefill": ["ip", "netns", "exec", cable.name], "decode": []})
        # Metrics too, so that the test reads them from here while the cable is in.
        cluster.host = {"prefill": cable.there, "decode": cable.here}
        cluster.bootstrap = cluster.dialled = cluster.bootstrap.replace("127.0.0.1", cable.there)
        cluster.tcp = {"listen": f"{cable.here}:0"}
        with cluster:
            test = CutChaos(cluster, dice, cable)
            test.land_again()
            for number in range(rounds):
                try:
                    test.run_round(getattr(test, forms[number % len(forms)]))
                except AssertionError as error:
                    logs = "\n".join(f"{one.name}:\n{one.tail()}" for one in cluster.daemons.values())
                    raise AssertionError(f"round {number + 1}, {forms[number % len(forms)]}: {error}\n{logs}") from error
            done = {name.removeprefix("fault_").replace("_", " "): len(range(i, rounds, len(forms))) for i, name in enumerate(forms)}
            print_report(test, done, rounds)
