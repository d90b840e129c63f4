#!/usr/bin/env python3
"""Rules of the source tree that a compiler does not see. Each check prints file:line and what to do.

  check_tree.py layers    folders include only what they may; third-party headers stay in their home folders
  check_tree.py format    clang-format would change nothing
  check_tree.py headers   every header compiles alone, with warnings as errors
  check_tree.py files     no file over 500 lines, no unfinished work by its own words, no sleep in tests
  check_tree.py self      the checks above find what they must find, in a tree made for it
"""
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CODE = {".h", ".cc", ".cu", ".cuh", ".c"}

# folder -> folders of ours it may include
ALLOWED = {
    "common": {"common"},
    "kernels": {"common", "kernels"},
    # kernels is the arithmetic of copies; a fabric may use it, and it knows nothing of fabrics.
    "transport": {"common", "kernels", "transport"},
    "prefill": {"common", "kernels", "transport", "prefill"},
    "decode": {"common", "kernels", "transport", "decode"},
    "tools": {"common", "kernels", "transport", "prefill", "decode", "tools"},
    "tests": {"common", "kernels", "transport", "prefill", "decode", "tools", "tests"},
}
# third-party prefix -> folders that may include it
HOMES = {
    "ucp/": ["transport/ucx"], "ucs/": ["transport/ucx"], "uct/": ["transport/ucx"],
    "infiniband/": ["transport/verbs"], "rdma/": ["transport/verbs"],
    "nccl.h": ["transport/nccl"],
    "cuda": ["kernels"],
    "boost/beast": ["common/http", "common/control"],
    "boost/asio": ["common/http", "common/control", "common/engine", "common/daemon", "prefill", "decode"],
    "openssl/": ["common/http", "common/auth"],
    "prometheus/": ["common/metrics"],
    "CLI/": ["common/daemon", "tools"],
    "systemd/": ["common/daemon"],
    "xxhash": ["kernels", "common/base"],
    "tl/": ["common/base"],
    "catch2/": ["tests"],
}
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b|not implemented", re.IGNORECASE)
SLEEP = re.compile(r"sleep_for|sleep_until|\busleep\s*\(|\bnanosleep\s*\(|\bsleep\s*\(|time\.sleep")


def sources(root, suffixes=frozenset(CODE)):
    for top in ALLOWED:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path


def check_layers(root):
    problems = []
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        top = name.split("/")[0]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = INCLUDE.match(line)
            if not found:
                continue
            target = found.group(2)
            first = target.split("/")[0]
            if first in ALLOWED and "/" in target and first not in ALLOWED[top]:
                problems.append(f"{name}:{number}: {top}/ must not include {target}")
            for prefix, homes in HOMES.items():
                at_home = any(name.startswith(home + "/") for home in homes) or top == "tests"
                if found.group(1) == "<" and target.startswith(prefix) and not at_home:
                    problems.append(f"{name}:{number}: <{target}> belongs in {' or '.join(homes)} only")
    return problems


def check_files(root):
    problems = []
    for path in list(sources(root, frozenset(CODE | {".py", ".sh"}))):
        name = path.relative_to(root).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        limit = 800 if name.startswith("tests/") else 500
        if len(lines) > limit:
            problems.append(f"{name}: {len(lines)} lines; at most {limit}: give its second idea a file of its own")
        if name == "tests/style/check_tree.py":
            continue
        for number, line in enumerate(lines, 1):
            if UNFINISHED.search(line):
                problems.append(f"{name}:{number}: unfinished by its own words: {line.strip()[:80]}")
            if name.startswith("tests/") and SLEEP.search(line) and "// polls a fact" not in line:
                problems.append(f"{name}:{number}: tests wait on facts, not on time: {line.strip()[:80]}")
    return problems


def check_format(root):
    if shutil.which("clang-format") is None:
        print("SKIPPED: clang-format is not installed")
        sys.exit(77)
    files = [str(path) for path in sources(root) if path.suffix != ".c"]
    done = subprocess.run(["clang-format", "--dry-run", "-Werror", *files], cwd=root, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    return sorted({line.split(":")[0] for line in done.stderr.splitlines() if "warning" in line or "error:" in line})


def compile_header(root, name):
    flags = ["-std=c++20", "-fsyntax-only", "-I.", '-DKVF_VERSION="test"', "-DKVF_HAVE_UCX=1", "-Wall", "-Wextra", "-Wshadow",
             "-Wconversion", "-Werror", "-x", "c++", "-"]
    done = subprocess.run([os.environ.get("CXX", "g++"), *flags], cwd=root, input=f'#include "{name}"\n#include "{name}"\n',
                          capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{name}: does not compile alone:\n{done.stderr[:1500]}"


def check_headers(root):
    names = [path.relative_to(root).as_posix() for path in sources(root, frozenset({".h"}))
             if not path.relative_to(root).as_posix().startswith("tests/")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [problem for problem in pool.map(lambda name: compile_header(root, name), names) if problem]


def check_self(_):
    """A check that cannot fail proves nothing: plant one violation of each kind and see it found."""
    planted = {
        "prefill/a.cc": '#include "decode/rooms.h"\n',
        "common/b.cc": '#include "transport/fabric.h"\n',
        "transport/tcp/c.cc": "#include <ucp/api/ucp.h>\n",
        "common/plan/d.cc": "#include <boost/beast/http.hpp>\n",
        "decode/e.cc": "// TO" + "DO: later\n",
        "tests/f.cc": "void f() { usleep(1); }\n",
        "kernels/g.cc": "int x;\n" * 501,
        "kernels/h.h": "inline Undeclared f();\n",
        "kernels/i.cc": "int   i ;\n",
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in planted.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        shutil.copy(ROOT / ".clang-format", root)
        found = check_layers(root) + check_files(root) + check_headers(root)
        if shutil.which("clang-format"):
            found += check_format(root)
        else:
            del planted["kernels/i.cc"]
    return [f"planted violation not found: {name}" for name in planted if not any(name in one for one in found)]


def main():
    checks = {"layers": check_layers, "format": check_format, "headers": check_headers, "files": check_files, "self": check_self}
    if len(sys.argv) != 2 or sys.argv[1] not in checks:
        print(__doc__)
        return 2
    problems = checks[sys.argv[1]](ROOT)
    for problem in problems:
        print(problem)
    print(f"check_tree {sys.argv[1]}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
