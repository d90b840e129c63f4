#!/usr/bin/env python3
"""Runs clang-tidy (the set of .clang-tidy, all fatal) over every source that a build compiles.

    tidy.py BUILD_DIR

A file is looked at again only when it, one of the headers it includes or the set has changed since it was last
found clean; that is remembered in BUILD_DIR/tidy.json. Exit status 1 when anything is found, 77 (skipped) when
there is no clang-tidy.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

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


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    tool = shutil.which("clang-tidy")
    if tool is None:
        print("skipped: clang-tidy is not installed")
        return 77
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    memory = build / "tidy.json"
    try:
        clean = json.loads(memory.read_text())
    except (OSError, ValueError):
        clean = {}
    deps = headers_by_object(build)
    digests = Digests()
    waiting = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = pathlib.Path(entry["directory"], entry["file"]).resolve()
        if source.suffix != ".cc" or not source.is_relative_to(ROOT):
            continue
        made = re.search(r" -o (\S+)", entry["command"])
        key = key_of(source, deps.get(made.group(1), []) if made else [], version, digests)
        name = str(source.relative_to(ROOT))
        if clean.get(name) != key:
            waiting.append((name, source, key))
    bad = 0
    show = sys.stdout.isatty()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {pool.submit(check, tool, build, source): (name, key) for name, source, key in waiting}
        for count, run in enumerate(concurrent.futures.as_completed(runs), 1):
            name, key = runs[run]
            good, text = run.result()
            if good:
                clean[name] = key
                memory.write_text(json.dumps(clean, indent=0))
            else:
                bad += 1
                print(text)
            if show:
                print(f"\r{count}/{len(waiting)} {name:60.60}", end="", flush=True)
    print(f"{len(waiting)} files looked at, {bad} with findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
