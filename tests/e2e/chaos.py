"""Killing things: rounds of one fault each while rooms move between real daemons. After every round nothing has died that
the test did not kill, every page is back (at the engines, and by the daemons' own count), and a new room lands with every
byte right. KVF_LONG=1 runs 200 rounds, KVF_SEED=<number> other ones."""
import os
import random
import signal
import tempfile
import time
from collections import Counter

from cluster import FINAL, ROLES, Cluster, free_port, need, wait_a_little
from proxy import Proxy

LONG = os.environ.get("KVF_LONG") == "1"
OTHER = {"prefill": "decode", "decode": "prefill"}
PAGES = 64
PAGE_TOKENS = 64
# A peer is lost after one second of silence: rounds are short, and a busy machine is not taken for a dead one.
CONFIG = {"timeouts": {"drain": "5s", "bootstrap": "30s", "transfer": "30s", "heartbeat_interval": "200ms",
                       "heartbeat_misses": 5}}


class Chaos:
    """The rooms of a round, and the faults: each method named fault_* is one form."""

    def __init__(self, cluster, dice, proxies=()):
        self.cluster, self.dice, self.proxies = cluster, dice, proxies
        self.ends, self.retries, self.verified = Counter(), Counter(), 0
        self.recovered = []  # seconds from the fault to the new room's landing

    def run_round(self, fault):
        since = self.cluster.mark()
        rooms = [self.cluster.open_room(self.dice.randrange(700, 1300), chunk_tokens=256) for _ in range(3)]
        target = self.dice.choice(rooms)
        self.cluster.wait("a room is granted", lambda events: any(
            event.get("room") == target and event["event"] in ("granted", *FINAL) for _, event in events), since)
        begun = time.monotonic()
        replaced = fault(rooms) or ()
        sides = [role for role in ROLES if f"{role} engine" not in replaced]
        self.ends.update(event["event"] for event in self.end_rooms(rooms, since, sides).values())
        self.land_again()
        self.recovered.append(time.monotonic() - begun)
        self.cluster.await_balance()
        self.cluster.check_alive()
        need(not self.cluster.strays(), f"{self.cluster.strays()}")

    def end_rooms(self, rooms, since, sides):
        """Every room ends on every side whose engine still knows it. As a router does, the test aborts what is left on
        one side once the other side has ended it, or is gone."""
        aborted, first = set(), {}

        def done(events):
            ends = {(event["room"], side): event for side, event in events if event.get("room") in rooms and event["event"] in FINAL}
            left = [(room, side) for room in rooms for side in sides if (room, side) not in ends]
            for room, side in left:
                other = ends.get((room, OTHER[side]))
                ended = OTHER[side] not in sides or (other and other["event"] != "landed")
                if ended and (room, side) not in aborted:
                    first.setdefault(room, time.monotonic())
                    if time.monotonic() > first[room] + 2:
                        aborted.add((room, side))
                        self.cluster.abort(side, room)
            return None if left else ends

        ends = self.cluster.wait(f"rooms {rooms} end on {sides}", done, since)
        for (_, side), event in ends.items():
            if event["event"] == "landed" and side == "decode":
                need(event["mismatches"] == 0, f"wrong bytes: {event}")
                self.verified += event["verified"]
        return ends

    def land_again(self, tokens=700):
        """What is refused or lost while the two daemons find each other again may be repeated, for a while."""
        deadline = time.monotonic() + 60
        while True:
            since = self.cluster.mark()
            ends = self.end_rooms([self.cluster.open_room(tokens)], since, ROLES)
            if all(event["event"] == "landed" for event in ends.values()):
                return
            need(time.monotonic() < deadline, f"no new room lands: {ends}")
            self.retries.update(f'{event["event"]}: {event.get("code")}' for event in ends.values() if event["event"] != "landed")
            wait_a_little(0.2)

    # Faults. Each returns the engines that it has replaced.

    def kill_daemon(self, role, stderr=None):
        since = self.cluster.mark()
        self.cluster.daemons[role].kill()
        self.cluster.start_daemon(role, stderr)
        self.cluster.await_attached(role, since)

    def fault_kill_prefill_daemon(self, _):
        self.kill_daemon("prefill")

    def fault_kill_decode_daemon(self, _):
        self.kill_daemon("decode")

    def fault_log_on_full_disk(self, _):
        self.kill_daemon(self.dice.choice(ROLES), stderr="/dev/full")

    def kill_engine(self, role):
        since = self.cluster.mark()
        self.cluster.engines[role].kill()
        self.cluster.start_engine(role)
        self.cluster.await_attached(role, since)
        return (f"{role} engine",)

    def fault_kill_prefill_engine(self, _):
        return self.kill_engine("prefill")

    def fault_kill_decode_engine(self, _):
        return self.kill_engine("decode")

    def stop_process(self, process, until):
        process.signal(signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 20
            while not until() and time.monotonic() < deadline:
                wait_a_little(0.02)
        finally:
            process.signal(signal.SIGCONT)

    def fault_stop_daemon_until_it_is_missed(self, _):
        role = self.dice.choice(ROLES)
        self.stop_process(self.cluster.daemons[role], lambda: self.cluster.metric(OTHER[role], "kvferry_peers") == 0)

    def fault_stop_daemon_briefly(self, _):
        self.stop_process(self.cluster.daemons[self.dice.choice(ROLES)], lambda: True)

    def fault_stop_engine_briefly(self, _):
        self.stop_process(self.cluster.engines[self.dice.choice(ROLES)], lambda: True)

    def fault_reset_connections(self, _):
        for proxy in self.proxies:
            if self.dice.random() < 0.7:
                proxy.reset()

    def fault_network_goes_silent(self, _):
        chosen = [proxy for proxy in self.proxies if self.dice.random() < 0.7] or self.proxies[:1]
        for proxy in chosen:
            proxy.silent.set()
        try:
            # As long as the peers believe in each other, or for a moment only.
            deadline = time.monotonic() + self.dice.choice((0.3, 4))
            while time.monotonic() < deadline and self.cluster.metric("decode", "kvferry_peers") > 0:
                wait_a_little(0.05)
        finally:
            for proxy in chosen:
                proxy.silent.clear()

    def fault_abort_and_kill_at_once(self, rooms):
        role = self.dice.choice(ROLES)
        for room in rooms:
            self.cluster.abort(self.dice.choice(ROLES), room)
        self.kill_daemon(role)


def forms(chaos):
    names = [name for name in dir(chaos) if name.startswith("fault_")]
    return [name for name in names if chaos.proxies or name not in ("fault_reset_connections", "fault_network_goes_silent")]


def with_proxies(cluster, fabric):
    """In front of the control channel, and of the tcp fabric, which advertises another loopback address."""
    host, port = cluster.bootstrap.rsplit(":", 1)
    control = Proxy(("127.0.0.1", 0), (host, int(port)))
    cluster.dialled = f"127.0.0.1:{control.port}"
    if fabric != "tcp":
        return [control]
    port = free_port()
    cluster.tcp = {"listen": f"127.0.0.1:{port}", "advertise": "127.0.0.2"}
    return [control, Proxy(("127.0.0.2", port), ("127.0.0.1", port))]


def chaos(fabric, rounds=8, rounds_long=200):
    def run(build):
        seed = int(os.environ.get("KVF_SEED", "0")) or 20240607
        total = int(os.environ.get("KVF_ROUNDS", "0")) or (rounds_long if LONG else rounds)
        dice = random.Random(seed)
        config = {**CONFIG, **({"ucx": {"transports": "shm", "device": "lo"}} if fabric == "ucx" else {})}
        print(f"seed {seed}, {total} rounds over {fabric}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(build, folder, [fabric], pages=PAGES, page_size=PAGE_TOKENS, config=config)
            proxies = with_proxies(cluster, fabric)
            with cluster:
                test = Chaos(cluster, dice, proxies)
                test.land_again()
                done, order = Counter(), []
                for number in range(total):
                    if not order:
                        order = forms(test)
                        dice.shuffle(order)
                    name = order.pop()
                    try:
                        test.run_round(getattr(test, name))
                    except AssertionError as error:
                        logs = "\n".join(f"{one.name}:\n{one.tail()}" for one in cluster.daemons.values())
                        raise AssertionError(f"round {number + 1}, {name}: {error}\n{logs}") from error
                    done[name.removeprefix("fault_").replace("_", " ")] += 1
                print_report(test, done, total)
            for proxy in proxies:
                proxy.stop()
    return run


def print_report(test, done, total):
    for name, count in sorted(done.items()):
        print(f"  {name:<32} {count}")
    slowest = sorted(test.recovered)
    print(f"{total} rounds: daemons that died without being killed 0, pages out after a round 0, new rooms that did not land 0 "
          f"(attempts repeated after {dict(test.retries)}); ends of hit rooms {dict(test.ends)}; bytes compared {test.verified}, wrong 0; "
          f"fault to next landing p50 {slowest[len(slowest) // 2]:.1f} s, max {slowest[-1]:.1f} s")


def lost_pages(build):
    """31 of 64 pages are out when the prefill daemon dies in the middle, decode aborts, and the daemon comes back: all 64
    must serve the next room."""
    with tempfile.TemporaryDirectory() as folder, Cluster(build, folder, ["tcp"], pages=PAGES, page_size=PAGE_TOKENS,
                                                          config=CONFIG) as cluster:
        test = Chaos(cluster, random.Random(25))
        rounds = 100 if LONG else 3
        for _ in range(rounds):
            since = cluster.mark()
            room = cluster.open_room(31 * PAGE_TOKENS, chunk_tokens=256)
            cluster.wait("the room is granted", lambda events: any(event.get("room") == room and event["event"] == "granted"
                                                                    for _, event in events), since)
            need(cluster.metric("decode", 'kvferry_pages{owner="live"}') in (31, 0), "31 pages are out")
            cluster.daemons["prefill"].kill()
            cluster.abort("decode", room)
            again = cluster.mark()
            cluster.start_daemon("prefill")
            cluster.await_attached("prefill", again)
            test.ends.update(event["event"] for event in test.end_rooms([room], since, ROLES).values())
            cluster.await_balance()
            test.land_again(PAGES * PAGE_TOKENS)
            cluster.await_balance()
        print(f"{rounds} rounds: ends {dict(test.ends)}; 0 pages lost, a room of all {PAGES} pages landed after each "
              f"(attempts repeated after {dict(test.retries)})")
