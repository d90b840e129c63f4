#!/usr/bin/env python3
"""Adds up ctest's JUnit files. Prints each failed and skipped test with its reason, then the closing line
"N passed, N failed, N skipped". Exit status 1 when anything failed, or a file is missing or empty."""
import sys
import xml.etree.ElementTree as xml
from pathlib import Path


def main(paths):
    passed = failed = skipped = 0
    broken = not paths
    for path in paths:
        preset = Path(path).parent.name
        try:
            cases = list(xml.parse(path).getroot().iter("testcase"))
        except (OSError, xml.ParseError) as error:
            print(f"no results of preset {preset}: {error}")
            broken = True
            continue
        broken = broken or not cases
        for case in cases:
            status = case.get("status")
            name = f"[{preset}] {case.get('name')}"
            if status == "run":
                passed += 1
            elif status in ("notrun", "disabled") or case.find("skipped") is not None:
                skipped += 1
                out = case.findtext("system-out") or ""
                reason = next((line for line in out.splitlines() if "SKIPPED" in line), case.find("skipped").get("message", "")
                              if case.find("skipped") is not None else "")
                print(f"skipped: {name}: {reason.strip()}")
            else:
                failed += 1
                print(f"failed: {name}")
    failed += 1 if broken else 0
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
