#!/usr/bin/env python3
"""Runs clang-tidy (the set of .clang-tidy, all fatal) over every source that a build compiles.

    tidy.py BUILD_DIR [--jobs N] [--seconds S]

A file is looked at again only when it, one of the headers it includes or the set has changed since it was last
found clean; that is remembered in BUILD_DIR/tidy.json. With --seconds no file is begun after S seconds: what was
changed last comes first, and the next run goes on with the rest. Exit status 1 when anything is found, 77
(skipped) when there is no clang-tidy or no ninja build to read.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def headers_by_object(build):
    """What ninja knows from the last build: object -> files it was made of, those of this tree."""
    text = subprocess.run(["ninja", "-C", build, "-t", "deps"], capture_output=True, text=True, check=True).stdout
    files, current = {}, None
    for line in text.splitlines():
        if line and not line[0].isspace():
            current = files.setdefault(line.split(":", 1)[0], [])
        elif line.strip() and current is not None:
            path = (build / line.strip()).resolve()
            if path.is_relative_to(ROOT) and not path.is_relative_to(build):
                current.append(path)
    return files


class Digests:
    def __init__(self):
        self.known = {}

    def of(self, path):
        if path not in self.known:
            self.known[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self.known[path]


def key_of(source, headers, version, digests):
    out = hashlib.sha256(version.encode())
    for path in [ROOT / ".clang-tidy", source, *sorted(headers)]:
        out.update(f"{path.relative_to(ROOT)} {digests.of(path)}\n".encode())
    return out.hexdigest()


def check(tool, build, source):
    # GCC's warning flags mean nothing to clang; what it does not know must not be an error here.
    done = subprocess.run(
        [tool, "-p", build, "--quiet", "--extra-arg=-Wno-everything", source],
        capture_output=True, text=True)
    return done.returncode == 0, done.stdout + done.stderr


def by_last_change(names):
    """Names, those that changed last first: uncommitted ones, then as the history has them."""
    try:
        git = ["git", "-C", ROOT]
        changed = subprocess.run([*git, "ls-files", "-mo", "--exclude-standard"], capture_output=True, text=True,
                                 check=True).stdout.split()
        changed += subprocess.run([*git, "log", "-n", "200", "--name-only", "--format="], capture_output=True,
                                  text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        changed = []  # no history: any order
    rank = {name: at for at, name in reversed(list(enumerate(changed)))}
    return sorted(names, key=lambda name: (rank.get(name, len(changed)), name))


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=float("inf"))
    return parser.parse_args()


def main():
    begin = time.monotonic()
    options = arguments()
    build = options.build.resolve()
    tool = shutil.which("clang-tidy")
    for missing in [n for n in ("clang-tidy", "ninja") if shutil.which(n) is None]:
        print(f"skipped: {missing} is not installed")
        return 77
    for missing in [n for n in ("compile_commands.json", "build.ninja") if not (build / n).exists()]:
        print(f"skipped: {build} has no {missing}")
        return 77
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    memory = build / "tidy.json"
    try:
        clean = json.loads(memory.read_text())
    except (OSError, ValueError):
        clean = {}
    deps = headers_by_object(build)
    digests = Digests()
    waiting = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = pathlib.Path(entry["directory"], entry["file"]).resolve()
        if source.suffix != ".cc" or not source.is_relative_to(ROOT):
            continue
        made = re.search(r" -o (\S+)", entry["command"])
        key = key_of(source, deps.get(made.group(1), []) if made else [], version, digests)
        name = str(source.relative_to(ROOT))
        if clean.get(name) != key:
            waiting[name] = (source, key)
    bad, left = 0, 0
    show = sys.stdout.isatty()

    def look(source):
        in_time = time.monotonic() - begin < options.seconds
        return check(tool, build, source) if in_time else None

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(look, waiting[name][0]): name for name in by_last_change(waiting)}
        for count, run in enumerate(concurrent.futures.as_completed(runs), 1):
            name = runs[run]
            key = waiting[name][1]
            if run.result() is None:
                left += 1
                continue
            good, text = run.result()
            if good:
                clean[name] = key
                memory.write_text(json.dumps(clean, indent=0))
            else:
                bad += 1
                print(text, flush=True)
            if show:
                print(f"\r{count}/{len(waiting)} {name:60.60}", end="", flush=True)
    print(f"{len(waiting) - left} files looked at, {bad} with findings; {left} changed ones left for the next run")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
