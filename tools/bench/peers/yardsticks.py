"""iperf3 and ucx_perftest: what the machine's loopback and shared memory give to a program that sends one buffer, which
stays in the cache, again and again. No peer: nothing is placed in a pool and nothing is verified."""
import json
import os
import re
import select
import socket
import subprocess
import time

WARNING = "re-uses one cached buffer: no pool is read or written, nothing is verified"
SIZE = 73728


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pinned(cpu, *command):
    return ["taskset", "-c", str(cpu), *command]


def wait_for(process, text, seconds):
    """Reads the output of `process` until a line has `text`."""
    end = time.monotonic() + seconds
    seen = b""
    while text not in seen:
        left = end - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            raise RuntimeError(f"{' '.join(process.args)} said {seen.decode(errors='replace')!r}, not {text.decode()!r}")
        part = os.read(process.stdout.fileno(), 4096)
        if not part:
            raise RuntimeError(f"{' '.join(process.args)} ended: {seen.decode(errors='replace')!r}")
        seen += part


def children_cpu():
    times = os.times()
    return times.children_user + times.children_system


def pair(children, server, ready, client, env, seconds):
    """Runs both ends, one per core; the client's output and the CPU seconds of both."""
    before = children_cpu()
    env = {**os.environ, **env}
    first = children.start(pinned(0, *server), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(first, ready, seconds)
    second = children.start(pinned(1, *client), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = second.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{client[0]} was not done after {seconds} s") from None
    finally:
        children.end(second)
        if second.returncode == 0:
            try:
                first.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                pass
        children.end(first)
    if second.returncode != 0:
        raise RuntimeError(f"{' '.join(client)}: status {second.returncode}: {output.decode(errors='replace')[-300:]}")
    return output.decode(errors="replace"), children_cpu() - before


def iperf3(children, seconds):
    port = str(free_port())
    output, cpu = pair(children, ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, "--forceflush"], b"listening",
                       ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", "2", "-l", "1M", "--json"], {}, seconds)
    received = json.loads(output)["end"]["sum_received"]
    return {"gb_s": received["bits_per_second"] / 8e9, "cpu_s_per_gb": cpu / received["bytes"] * 1e9}


def perftest(children, seconds, env, iterations):
    port = str(free_port())
    output, cpu = pair(children, ["stdbuf", "-oL", "ucx_perftest", "-p", port], b"Waiting for connection",
                       ["ucx_perftest", "127.0.0.1", "-p", port, "-t", "ucp_am_bw", "-s", str(SIZE), "-n",
                        str(iterations), "-w", "1000", "-f"], env, seconds)
    # iterations, overhead in us (median, average, overall), 2^20 B/s (average, overall), messages/s (average, overall)
    lines = [line.split() for line in output.splitlines() if re.fullmatch(r"[\d.\s]+", line) and len(line.split()) == 8]
    if not lines:
        raise RuntimeError(f"ucx_perftest printed no result: {output[-300:]}")
    return {"gb_s": float(lines[-1][5]) * 2**20 / 1e9, "cpu_s_per_gb": cpu / (iterations * SIZE) * 1e9}


YARDSTICKS = {
    "iperf3 -l 1M": (["iperf3"], iperf3),
    "ucx_perftest am tcp": (["ucx_perftest"], lambda children, seconds: perftest(
        children, seconds, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}, 20000)),
    "ucx_perftest am sm": (["ucx_perftest"], lambda children, seconds: perftest(
        children, seconds, {"UCX_TLS": "posix,sysv,cma"}, 100000)),
}
