#!/usr/bin/env python3
"""Counts the instructions of the hot paths (hot_paths.cc) with callgrind and compares them with instructions.json.

  instructions.py HOT_PATHS BUILD_TYPE            exit status 1 when a count is more than 5 % off
  instructions.py HOT_PATHS BUILD_TYPE --update   writes the counts of this build to instructions.json

Fewer instructions than recorded fail as well: an improvement that is not recorded could be lost again unseen, and the
output of a passed test is not shown. So does a checksum that differs: then the work itself is another. Counts are only
compared where they were recorded: same build type, compiler, C library and CPU features. Elsewhere, and without
valgrind, the test is skipped (77) and says why."""
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RECORD = Path(__file__).resolve().parent / "instructions.json"
SECTION = "kvf_hot_section"
TOLERANCE_PERCENT = 5
BUILD_TYPE = "RelWithDebInfo"  # of the release preset
SKIPPED = 77


def valgrind(options, command):
    done = subprocess.run(["valgrind", "-q", *options, *command], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} under valgrind: status {done.returncode}\n{done.stderr}")
    return done.stdout


def machine(program):
    """What the program sees under valgrind, whose CPU is not quite the host's."""
    lines = valgrind(["--tool=none"], [program, "--machine"]).splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def count(program, path, folder):
    out = Path(folder) / path
    said = valgrind(["--tool=callgrind", f"--toggle-collect={SECTION}", f"--callgrind-out-file={out}"], [program, path])
    total = re.search(r"^totals: (\d+)", out.read_text(), re.MULTILINE)
    if total is None or int(total.group(1)) == 0:
        sys.exit(f"{path}: callgrind has not seen {SECTION}()")
    return {"instructions": int(total.group(1)), "checksum": said.split()[-1]}


def verdict(name, was, now):
    """A line for people and whether it is fine."""
    if was is None:
        return f"{name}: {now['instructions']} instructions, not recorded yet", False
    change = 100 * (now["instructions"] - was["instructions"])  # in percent of what was
    limit = TOLERANCE_PERCENT * was["instructions"]
    line = (f"{name}: {now['instructions']} instructions, recorded {was['instructions']} "
            f"({change / was['instructions']:+.1f} %)")
    if now["checksum"] != was["checksum"]:
        return f"{line}; FAILED: checksum {now['checksum']}, recorded {was['checksum']}: the work has changed", False
    if change > limit:
        return f"{line}; FAILED: slower", False
    if change < -limit:
        return f"{line}; FAILED: faster, and that is not recorded", False
    return line, True


def main():
    update = sys.argv[-1] == "--update"
    if len(sys.argv) != (4 if update else 3):
        print(__doc__, file=sys.stderr)
        return 2
    program, build_type = sys.argv[1:3]
    if build_type != BUILD_TYPE:
        print(f"SKIPPED: counts are of {BUILD_TYPE} builds (the release preset), this is {build_type or 'none'}")
        return SKIPPED
    if shutil.which("valgrind") is None:
        print("SKIPPED: valgrind is not installed")
        return SKIPPED
    here = machine(program)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"machine": here, "paths": {}}
    differing = [f"{name} {record['machine'].get(name)!r}, here {here.get(name)!r}"
                 for name in sorted(here.keys() | record["machine"].keys()) if record["machine"].get(name) != here.get(name)]
    if differing and not update:
        print("SKIPPED: counts were recorded with another " + "; another ".join(differing))
        return SKIPPED
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        counts = {name: count(program, name, folder) for name in names}
    if update:
        RECORD.write_text(json.dumps({"machine": here, "paths": counts}, indent=2) + "\n")
    fine = True
    for name in names:
        line, good = verdict(name, record["paths"].get(name), counts[name])
        fine = fine and good
        print(line)
    if update:
        print(f"written: {RECORD}")
        return 0
    if not fine:
        print(f"if that is meant: python3 {sys.argv[0]} {program} {build_type} --update, and commit {RECORD.name}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
