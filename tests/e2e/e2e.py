#!/usr/bin/env python3
"""End-to-end tests with the real daemons and engines on this host. e2e.py CASE BUILD_DIR; `e2e.py list` names the cases.
Each case starts what it needs on ports that the system chooses and leaves nothing behind."""
import hashlib
import hmac
import json
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import bad_peers
import chaos
import network_cut

ROOT = Path(__file__).resolve().parent.parent.parent


def demo(build, *options, expect=0, timeout=600):
    memory = () if "--memory" in options else ("--memory", "0.5")
    verify = [] if "--verify" in options else ["--verify", "full"]  # the daemons compare every cell, too
    command = [str(build / "tools/kvferry"), "demo", *memory, *verify, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    text = done.stdout + done.stderr
    if done.returncode != expect:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}, expected {expect}:\n{text[-6000:]}")
    return text


def landed(text, requests):
    need(re.search(rf"requests +{requests} of {requests} landed, 0 failed", text), f"not all {requests} landed", text)
    need(re.search(r"mismatches +0\b", text), "mismatches", text)
    need(re.search(r"leaks +0 pages", text), "leaks", text)


def need(condition, what, text=""):
    if not condition:
        raise AssertionError(f"{what}\n{text[-6000:]}")


def transfer(fabric, *options):
    def run(build):
        landed(demo(build, "--fabric", fabric, "--requests", "4", *options), 4)
    return run


def corrupt(*options):
    def run(build):
        text = demo(build, "--requests", "2", "--corrupt", *options, expect=1)
        need(re.search(r"MISMATCH room \d+ .*layer \d+ .*position \d+ .*rank \d+", text), "the place is not named", text)
    return run


def killed(side, fabric):
    def run(build):
        text = demo(build, "--fabric", fabric, "--requests", "8", "--kill", side, "--kill-after", "1")
        need("OK" in text, "the demo does not say OK", text)
        need(re.search(r"leaks +0 pages", text), "leaks", text)
    return run


def abort_storm(fabric):
    def run(build):
        text = demo(build, "--fabric", fabric, "--abort-storm", os.environ.get("KVF_STORM", "50"))
        print(text)
    return run


class Daemon:
    """One daemon with a private configuration; .ready has what it printed when it was up."""

    def __init__(self, build, role, folder, **config):
        path = Path(folder) / f"{role}.json"
        base = {"instance": role, "model": "deepseek-v3", "engine_socket": {"path": f"{folder}/{role}.sock"},
                "metrics": {"listen": "127.0.0.1:0"}, "fabrics": ["tcp"]}
        if role == "prefill":
            base["bootstrap"] = {"listen": "127.0.0.1:0"}
        base.update(config)
        path.write_text(json.dumps(base))
        self.process = subprocess.Popen([str(build / role / f"kvferry-{role}"), "--config", str(path)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        readable, _, _ = select.select([self.process.stdout], [], [], 60)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            self.process.kill()
            raise AssertionError(f"kvferry-{role} did not start: {self.process.stderr.read()}")
        self.ready = json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        need(self.process.wait(60) == 0, f"exit status {self.process.returncode} after SIGTERM")


def http(address, method, path, body=None, headers=None):
    data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    request = urllib.request.Request(f"http://{address}{path}", data=data, method=method,
                                     headers={"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def routes(build):
    """The SGLang routes answer as documented, and bad input is a precise 4xx."""
    with tempfile.TemporaryDirectory() as folder, Daemon(build, "prefill", folder) as daemon:
        at = daemon.ready["bootstrap"]
        need(http(at, "GET", "/health") == (200, "OK"), "health")
        need(http(at, "GET", "/route")[0] == 400, "route without parameters")
        sentinel = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
        need(http(at, "GET", sentinel)[0] == 503, "not ready yet")
        registration = {"attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1,
                        "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0,
                        "rank_ip": "2001:db8::7", "rank_port": 4321, "page_size": 64, "kv_cache_dtype": "bf16"}
        need(http(at, "PUT", "/route", registration) == (200, "OK"), "registration")
        status, body = http(at, "GET", sentinel)
        topology = json.loads(body)
        need(status == 200 and topology["attn_tp_size"] == 1 and topology["page_size"] == 64, "topology", body)
        status, body = http(at, "GET", "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0")
        need((status, json.loads(body)) == (200, {"rank_ip": "2001:db8::7", "rank_port": 4321}), "rank", body)
        need(http(at, "GET", "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=9&target_pp_rank=0")[0] == 404, "404")
        need(http(at, "GET", "/route?prefill_dp_rank=x&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0")[0] == 400, "400")
        need(http(at, "DELETE", "/route")[0] == 405, "405")
        need(http(at, "POST", "/register_dp_rank", {"bootstrap_room": 77, "dp_rank": 0}) == (200, "OK"), "register dp rank")
        status, body = http(at, "POST", "/query_dp_ranks", {"bootstrap_rooms": [77, 78]})
        need((status, json.loads(body)) == (200, {"77": 0}), "query dp ranks", body)
        for bad in (b"{", b"[]", b'{"bootstrap_room": 9223372036854775808, "dp_rank": 0}', b'{"bootstrap_room": -1, "dp_rank": 0}',
                    b'{"bootstrap_room": 1.5, "dp_rank": 0}', b'{"bootstrap_room": "1", "dp_rank": 0}', b"[" * 100000):
            status, body = http(at, "POST", "/register_dp_rank", bad)
            need(400 <= status < 500, f"{bad[:60]!r} is answered with {status}", body)
        need(http(at, "PUT", "/route", b"x" * (2 << 20))[0] == 413, "a body over the limit")
        need(http(at, "GET", "/health")[0] == 200, "alive after all that")


def sign(key, method, target, body=b"", at=None):
    """The signature of a request, written down here a second time, from its description."""
    at = str(int(time.time() * 1000) if at is None else at)
    nonce = os.urandom(16).hex()
    parts = (b"request", method.encode(), target.encode(), at.encode(), nonce.encode(), body)
    message = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return {"X-Kvferry-Auth": f"v1 {at} {nonce} {hmac.new(key, message, hashlib.sha256).hexdigest()}"}


def auth(build):
    """With a key: what changes state or tells of the fleet wants a signature; metrics want their token."""
    key = b"0123456789abcdef0123456789abcdef"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("key", "token"):
            path = Path(folder) / name
            path.write_bytes(key + b"\n")
            path.chmod(0o600)
        options = {"auth": {"key_file": f"{folder}/key", "window": "10s"},
                   "metrics": {"listen": "127.0.0.1:0", "token_file": f"{folder}/token"}}
        with Daemon(build, "prefill", folder, **options) as daemon:
            at = daemon.ready["bootstrap"]
            need(http(at, "GET", "/health") == (200, "OK"), "health is for everybody")
            need(http(at, "GET", "/v1/status", headers=sign(key, "GET", "/v1/status"))[0] == 200, "signed status")
            seen = sign(key, "GET", "/v1/status")
            need(http(at, "GET", "/v1/status", headers=seen)[0] == 200, "signed status again")
            old = int(time.time() * 1000) - 11000
            for headers, why in (({}, "is not signed"), (seen, "a replay"),
                                 (sign(b"x" * 32, "GET", "/v1/status"), "not signed with this key"),
                                 (sign(key, "GET", "/v1/topology"), "not signed with this key"),
                                 (sign(key, "GET", "/v1/status", at=old), "ms ago"),
                                 ({"X-Kvferry-Auth": "v1 a b c"}, "is not 'v1")):
                status, body = http(at, "GET", "/v1/status", headers=headers)
                need(status == 401 and why in body, f"answered with {status}", body)
            for method, path, body in (("POST", "/v1/handshake", b"{}"), ("PUT", "/route", b"{}"),
                                       ("POST", "/register_dp_rank", b"{}"), ("GET", "/v1/topology", None)):
                need(http(at, method, path, body)[0] == 401, f"{method} {path} unsigned")
            need(http(at, "POST", "/v1/handshake", b"{}", headers=sign(key, "POST", "/v1/handshake", b"{}"))[0] == 400,
                 "a signed handshake is read")
            metrics = daemon.ready["metrics"]
            need(http(metrics, "GET", "/metrics")[0] == 401, "metrics without the token")
            need(http(metrics, "GET", "/metrics", headers={"Authorization": "Bearer " + key.decode()[:-1]})[0] == 401, "a wrong token")
            need(http(metrics, "GET", "/metrics", headers={"Authorization": "Bearer " + key.decode()})[0] == 200, "the token")
            status, text = http(at, "GET", "/v1/status", headers=sign(key, "GET", "/v1/status"))
            need(key.decode() not in text, "the key is in the status")


def metrics(build):
    """Metrics and health of both daemons on their own listeners; promtool finds nothing to say."""
    promtool = subprocess.run(["sh", "-c", "command -v promtool"], capture_output=True).returncode == 0
    with tempfile.TemporaryDirectory() as folder, Daemon(build, "prefill", folder) as one, \
            Daemon(build, "decode", folder, tcp={"listen": "127.0.0.1:0"}) as two:
        for daemon in (one, two):
            at = daemon.ready["metrics"]
            status, text = http(at, "GET", "/metrics")
            need(status == 200 and "kvferry_transfers_total" in text, "metrics", text)
            need(http(at, "GET", "/healthz")[0] == 200, "healthz")
            need(http(at, "GET", "/readyz")[0] == 503, "readyz without engines")
            if promtool:
                done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
                need(done.returncode == 0 and not done.stderr.strip(), f"promtool: {done.stdout}{done.stderr}")
    if not promtool:
        print("SKIPPED: promtool is not installed")
        sys.exit(77)


def configs(build):
    """Every problem of a configuration is reported at once, with exit status 2, before anything starts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bad.json"
        path.write_text('{"model": "deepseek-v4", "page_size": 0, /* a comment */ "topologie": {}, "fabrics": ["carrier pigeon"],'
                        ' "timeouts": {"transfer": "soon"}, "engine_socket": {"mode": "rw"}}')
        done = subprocess.run([str(build / "prefill/kvferry-prefill"), "--config", str(path), "--check-config"],
                              capture_output=True, text=True)
        need(done.returncode == 2, f"exit status {done.returncode}", done.stderr)
        for key in ("model", "page_size", "topologie", "fabrics", "timeouts.transfer", "engine_socket.mode"):
            need(key in done.stderr, f"{key} is not reported", done.stderr)
        for role in ("prefill", "decode"):
            good = ROOT / "deploy" / f"{role}.json"
            daemon = str(build / role / f"kvferry-{role}")
            need(subprocess.run([daemon, "--config", str(good), "--check-config"]).returncode == 0, f"deploy/{role}.json")
            printed = subprocess.run([daemon, "--config", str(good), "--print-config"], capture_output=True, text=True)
            path.write_text(printed.stdout)
            again = subprocess.run([daemon, "--config", str(path), "--print-config"], capture_output=True, text=True)
            need(again.stdout == printed.stdout and again.returncode == 0, "--print-config is not a fixed point", again.stderr)
            need(subprocess.run([daemon, "--version"], capture_output=True).returncode == 0, "--version")
        path.write_text('{"model": "deepseek-v3", "metrics": {"listen": "0.0.0.0:9402"}, "tcp": {"listen": "10.0.0.1:1"}}')
        done = subprocess.run([str(build / "decode/kvferry-decode"), "--config", str(path), "--check-config"],
                              capture_output=True, text=True)
        need(done.returncode == 2 and "insecure" in done.stderr, "an open listener needs insecure: true", done.stderr)


def plans(build):
    """The plan command needs nothing but its options, and its exit status says what became of them."""
    def run(*options, expect):
        done = subprocess.run([str(build / "tools/kvferry"), "plan", *options], capture_output=True, text=True)
        need(done.returncode == expect, f"{options}: exit status {done.returncode}, expected {expect}", done.stdout + done.stderr)
        return done

    layouts = ("--prefill", "tp=1", "--decode", "tp=8,dcp=8", "--page-size", "128", "--tokens", "67137")
    plan = json.loads(run(*layouts, "--json", expect=0).stdout)
    need(plan["prefill"]["pages"] == 525 and plan["decode"]["pages"] == 66, "pages of the plan", plan)
    need("needed 66, given 65" in run(*layouts, "--decode-pages", "65", expect=1).stdout, "too few pages are not named")
    need("--room" in run("--room", "0", expect=2).stderr, "--room 0 is not named")
    need("--no-such-option" in run("--no-such-option", expect=2).stderr, "an unknown option is not named")
    run("--help", expect=0)


def bench(build):
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "run.json"
        command = [str(build / "tools/kvferry"), "bench", "--quick", "--fabric", "shm,tcp", "--memory", "0.8",
                   "--json", str(stored)]
        # A tolerance that nothing can exceed: the stored baseline has the same cells, and this machine's load is no failure.
        baseline = ["--compare", str(ROOT / "tests/bench/baseline.json"), "--tolerance", "1"]
        done = subprocess.run([*command, *baseline], capture_output=True, text=True, timeout=300)
        text = done.stdout + done.stderr
        need(len(re.findall(r"(?:shm|tcp): [\d.]+ x memcpy, baseline [\d.]+$", text, re.M)) == 8, "not compared", text)
        need(done.returncode == 0 and text.endswith("OK\n"), f"the bench ended with {done.returncode}", text)
        run = json.loads(stored.read_text())
        need(run["schema"] == 1 and run["problems"] == [] and run["matrix"]["name"] == "quick", "not a good quick run", text)
        need([(cell["layout"], cell["tokens"]) for cell in run["cells"]] ==
             [("same", 64), ("same", 8192), ("dcp1-4", 64), ("dcp1-4", 8192)], "not the cells of the quick matrix", text)
        for cell in run["cells"]:
            need([one["fabric"] for one in cell["fabrics"]] == ["shm", "tcp"], f"fabrics of {cell}", text)
            need(all(cell[copy]["median"] > 0 for copy in ("memcpy", "copy", "copy_parallel")), f"copies of {cell}", text)
            for one in cell["fabrics"]:
                # Every turn, the discarded one too, was compared: its rows and what else lies in their pages.
                need(one["verified_bytes"] >= (run["matrix"]["rounds"] + 1) * cell["round_bytes"], f"not all compared: {one}", text)
                for ratio in ("to_memcpy", "to_copy", "to_copy_parallel"):
                    need(0 < one[ratio]["min"] <= one[ratio]["median"] <= one[ratio]["max"], f"{ratio} of {one}", text)
                need(0 < one["latency_s"]["p50"] <= one["latency_s"]["p99"] <= one["latency_s"]["p99.9"], f"latencies of {one}", text)
                need(one["latency_s"]["rooms"] == run["matrix"]["rounds"] * cell["waves"], f"rooms of {one}", text)
                need(one["writes_per_room"] > 0 and one["cpu_s_per_gb"]["prefill"] > 0, f"writes and CPU of {one}", text)
        need(len(run["daemons"]) == 2 * 2 * 2 and all(one["own_bytes"] > 0 for one in run["daemons"]), "the daemons' memory", text)
        # Wrong usage: the field, the value and what is possible, before anything is started.
        for options, said in ((("--fabric", "smoke"), "smoke"), (("--model", "nobody"), 'model preset "nobody" is unknown'),
                              (("--quick", "--full"), "excludes"), (("--memory", "60000"), "give less with --memory"),
                              (("--compare", __file__), "no run of kvferry bench"), (("--rounds", "0"), "--rounds")):
            done = subprocess.run([*command[:2], *options], capture_output=True, text=True, timeout=60)
            need(done.returncode == 2 and said in done.stderr + done.stdout, f"{options} ended with {done.returncode}", done.stdout + done.stderr)
        # A cell that is too large is reported; a run whose ratios were higher is a failure, and only the ratio counts.
        for cell in run["cells"]:
            for one in cell["fabrics"]:
                one["to_memcpy"]["median"] *= 1000
        stored.write_text(json.dumps(run))
        done = subprocess.run([*command[:2], "--fabric", "shm", "--layout", "same", "--tokens", "64,1048576", "--rooms", "1",
                               "--memory", "0.2", "--rounds", "1", "--compare", str(stored)], capture_output=True, text=True, timeout=300)
        need(done.returncode == 1 and re.search(r"same tokens 64 rooms 1 shm: .* FELL", done.stdout), "the fall is not found", done.stdout)
        need(re.search(r"1048576 +1 not run: needs 18.0 GiB", done.stdout), "the large cell is not named", done.stdout)


CASES = {
    "shm": transfer("shm"),
    "tcp": transfer("tcp"),
    "ucx over shared memory": transfer("ucx"),
    "ucx over tcp": transfer("ucx-tcp"),
    "without a shared key": transfer("tcp", "--no-auth"),
    "auth": auth,
    "over ipv6": transfer("tcp", "--host", "[::1]"),  # BL-35
    "gqa tp4 to tp8": transfer("shm", "--model", "llama-3.1-70b", "--prefill", "tp=4", "--decode", "tp=8"),
    "four heads, tp2 to tp8": transfer("tcp", "--model", "qwen3-235b-a22b", "--prefill", "tp=2", "--decode", "tp=8"),
    "gqa tp8 to tp2": transfer("shm", "--model", "llama-3.1-8b", "--prefill", "tp=8", "--decode", "tp=2"),
    "dcp 2 to 2": transfer("shm", "--prefill", "tp=2,dcp=2", "--decode", "tp=2,dcp=2"),
    "dcp 4 to 2": transfer("tcp", "--prefill", "tp=4,dcp=4", "--decode", "tp=2,dcp=2"),
    "dcp 2 to 8": transfer("shm", "--prefill", "tp=2,dcp=2", "--decode", "tp=8,dcp=8"),
    "dcp 8 to 1": transfer("shm", "--prefill", "tp=8,dcp=8", "--decode", "tp=1"),
    "gqa tp4 to tp2 x dcp2": transfer("tcp", "--model", "llama-3.1-8b", "--prefill", "tp=4", "--decode", "tp=4,dcp=2"),
    "uneven stages to one, mha": transfer("shm", "--model", "llama-3.1-8b", "--prefill", "tp=1,pp=2,pp_layers=17+15", "--decode", "tp=1"),
    "prefill cp zigzag": transfer("shm", "--prefill", "tp=1,cp=2,cp_split=zigzag", "--decode", "tp=2,dcp=2"),
    "linear state, tp2 to tp4": transfer("tcp", "--model", "qwen3-next-80b-a3b", "--prefill", "tp=2", "--decode", "tp=4",
                                         "--memory", "1.5", "--concurrency", "1"),
    "mla with linear state": transfer("shm", "--model", "kimi-linear-48b-a3b", "--memory", "1.5", "--concurrency", "1"),
    "a stage of linear layers only": transfer("tcp", "--model", "kimi-linear-48b-a3b", "--prefill", "tp=1,pp=2,pp_layers=3+24",
                                              "--decode", "tp=1", "--memory", "1.5", "--concurrency", "1"),
    "prefill cp without a split": transfer("shm", "--prefill", "tp=1,cp=2", "--decode", "tp=1"),
    "sliding windows": transfer("tcp", "--model", "gpt-oss-120b", "--prefill", "tp=4", "--decode", "tp=8"),
    "index pages": transfer("shm", "--model", "deepseek-v3.2", "--dtype", "fp8_e4m3"),
    "index pages over tcp": transfer("tcp", "--model", "deepseek-v3.2"),
    "draft layers": transfer("tcp", "--draft-layers", "1"),
    "page 64 to 16": transfer("shm", "--page-size", "64", "--decode-page-size", "16"),
    "by layers, dcp 1 to 4": transfer("tcp", "--prefill", "tp=1", "--decode", "tp=4,dcp=4", "--layer-group", "8"),
    "by layers, uneven stages": transfer("shm", "--model", "llama-3.1-8b", "--prefill", "tp=1,pp=2,pp_layers=17+15",
                                         "--decode", "tp=1", "--layer-group", "5"),
    "by layers, linear state": transfer("shm", "--model", "qwen3-next-80b-a3b", "--prefill", "tp=2", "--decode", "tp=4",
                                        "--memory", "1.5", "--concurrency", "1", "--layer-group", "5"),
    "by layers, sliding windows and small chunks": transfer("ucx", "--model", "gpt-oss-120b", "--prefill", "tp=2", "--decode", "tp=4",
                                                            "--chunk-tokens", "512", "--layer-group", "7"),
    "corrupt byte is found and named": corrupt(),
    "corrupt byte in a group of layers": corrupt("--layer-group", "3"),
    "prefill daemon killed over shm": killed("prefill", "shm"),
    "decode daemon killed over shm": killed("decode", "shm"),
    "prefill daemon killed over tcp": killed("prefill", "tcp"),
    "decode daemon killed over tcp": killed("decode", "tcp"),
    "prefill daemon killed over ucx": killed("prefill", "ucx"),
    "decode daemon killed over ucx": killed("decode", "ucx"),
    "abort storm over shm": abort_storm("shm"),
    "abort storm over tcp": abort_storm("tcp"),
    "abort storm over ucx": abort_storm("ucx"),
    "abort storm over ucx-tcp": abort_storm("ucx-tcp"),
    "bad peers, bytes over shm": bad_peers.bad_peers("shm", "tcp"),
    "bad peers, bytes over tcp": bad_peers.bad_peers("tcp", "shm"),
    "no open files left": bad_peers.no_more_files,
    "chaos over tcp": chaos.chaos("tcp"),
    "chaos over shm": chaos.chaos("shm"),
    "chaos over ucx": chaos.chaos("ucx"),
    "prefill dies with 31 of 64 pages out": chaos.lost_pages,
    "network cut in namespaces": network_cut.network_cut,
    "sglang routes": routes,
    "metrics": metrics,
    "configurations": configs,
    "plans": plans,
    "bench": bench,
}


def main():
    if len(sys.argv) == 2 and sys.argv[1] == "list":
        print("\n".join(CASES))
        return 0
    if len(sys.argv) != 3 or sys.argv[1] not in CASES:
        print(__doc__)
        return 2
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    try:
        CASES[sys.argv[1]](Path(sys.argv[2]).resolve())
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
