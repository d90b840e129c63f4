#!/usr/bin/env python3
"""Draws a run that `kvferry bench --json` stored: the rate of each fabric over that of memcpy of the same rows, with the
span of its rounds, one group of bars for each cell. plot.py RUN.json OUT.svg; plot.py --check ends well if it could."""
import json
import sys

try:
    import matplotlib
except ImportError:
    sys.exit("matplotlib is missing: apt-get install python3-matplotlib, or set PYTHON to the interpreter of a virtual "
             "environment that has it (python3 -m venv DIR && DIR/bin/pip install matplotlib)")

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402


def draw(run, path):
    cells = [cell for cell in run["cells"] if "fabrics" in cell]
    if not cells:
        sys.exit("the run has no measured cell")
    fabrics = run["matrix"]["fabrics"]
    width = 0.8 / len(fabrics)
    figure, axes = plt.subplots(figsize=(max(7, 1.6 * len(cells)), 5.5))
    for place, fabric in enumerate(fabrics):
        found = [next(one for one in cell["fabrics"] if one["fabric"] == fabric)["to_memcpy"] for cell in cells]
        middle = [one["median"] for one in found]
        spans = [[one["median"] - one["min"] for one in found], [one["max"] - one["median"] for one in found]]
        axes.bar([i + (place - (len(fabrics) - 1) / 2) * width for i in range(len(cells))], middle, width, yerr=spans,
                 capsize=2, label=fabric)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(cells)))
    axes.set_xticklabels([f"{cell['model']}\n{cell['layout']}\n{cell['tokens']} tokens\n{cell['rooms']} at once"
                          for cell in cells], fontsize=8)
    axes.set_ylabel("rate / memcpy of the same rows")
    machine = run["machine"]
    axes.set_title(f"kvferry {run['version']}, {machine['cores']} cores {machine['cpu']}, {machine['kernel']}", fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, format="svg")


def main():
    if sys.argv[1:] == ["--check"]:
        return 0
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    with open(sys.argv[1], encoding="utf-8") as file:
        draw(json.load(file), sys.argv[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
