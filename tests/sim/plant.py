"""Writes a copy of a source file with a fault planted in it, which the simulator has to find. A plant that does
not fit any more, because the source has changed, ends the build.

usage: plant.py NAME COPY    writes the copy
       plant.py NAME         prints the source's path"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLANTS = {
    # Pages go back to the engine before the writers have stopped.
    "no_drain": ("decode/rooms_ending.cc", [
        ("return source.landed || source.drained || places;", "(void)places;\n  return true;")]),
    # What an earlier use of a room left behind is taken for this one's.
    "no_generation": ("decode/rooms_peer.cc", [
        ("at->second.key != transfer.grant || ", ""),
        (" || at->second.key != landed->key.grant", "")]),
    # The first source that has delivered everything ends the wait for the others.
    "early_landing": ("decode/rooms_ending.cc", [
        ("all([](const Source& source) { return source.landed; })",
         "!entry.sources.empty() && !all([](const Source& source) { return !source.landed; })")]),
}

name = sys.argv[1]
path, pairs = PLANTS[name]
if len(sys.argv) == 2:
    print(path, end="")
    sys.exit()
text = (ROOT / path).read_text(encoding="utf-8")
for old, new in pairs:
    if text.count(old) != 1:
        sys.exit(f"{path}: {old!r} occurs {text.count(old)} times, the fault {name!r} is planted where it occurs once")
    text = text.replace(old, new)
pathlib.Path(sys.argv[2]).write_text(text, encoding="utf-8")
