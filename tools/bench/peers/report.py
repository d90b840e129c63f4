"""Statistics, the table and what is merged into it. Pure: no process, no clock, standard library only."""
import statistics

# Layouts of `kvferry bench` that are one of our work items.
WORK = {"same": "pages", "dcp1-4": "rows"}
COLUMNS = ("work", "peer", "GB/s median (min-max)", "ratio to memcpy (min-max)", "CPU s/GB", "latency ms", "note")


def kept(rounds):
    """The first round warms everything up and is not counted, unless it is all there is."""
    return rounds[1:] if len(rounds) > 1 else rounds


def spread(values):
    values = [value for value in values if value is not None]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def cell(work, peer, rounds, error=None, **facts):
    """`rounds` are dictionaries of one round each; `error` says why there are none, or too few."""
    made = {"work": work, "peer": peer, "rounds": len(kept(rounds)) if rounds else 0, **facts}
    if rounds:
        for name in ("gb_s", "ratio", "cpu_s_per_gb", "seconds", "prepare"):
            made[name] = spread([one.get(name) for one in kept(rounds)])
        made["descriptors"] = rounds[-1].get("descriptors")
        made["verified"] = all(one.get("verified", False) for one in rounds)
    if error:
        made["error"] = error
    return made


def _text(numbers, digits, with_range=True):
    if not numbers:
        return "-"
    text = f"{numbers['median']:.{digits}f}"
    if with_range and numbers["min"] != numbers["max"]:
        text += f" ({numbers['min']:.{digits}f}-{numbers['max']:.{digits}f})"
    return text


def row(made):
    note = made.get("note", "")
    if made.get("error"):
        note = ("not run: " if not made["rounds"] else "incomplete: ") + " ".join(str(made["error"]).split())
    seconds = made.get("seconds") if made["work"] == "one-page" else None
    latency = {key: value * 1e3 for key, value in seconds.items()} if seconds else None
    return (made["work"], made["peer"], _text(made.get("gb_s"), 3), _text(made.get("ratio"), 3),
            _text(made.get("cpu_s_per_gb"), 2, False), _text(latency, 3), note)


def table(cells):
    """Cells of the same work stand together, in the order in which each work first comes."""
    order = list(dict.fromkeys(made["work"] for made in cells))
    rows = [COLUMNS] + [row(made) for made in sorted(cells, key=lambda made: order.index(made["work"]))]
    widths = [max(len(one[i]) for one in rows) for i in range(len(COLUMNS) - 1)]
    lines = ["  ".join([*(text.ljust(width) for text, width in zip(one, widths)), one[-1]]).rstrip() for one in rows]
    lines.insert(1, "-" * max(map(len, lines[:1])))
    return "\n".join(lines)


def _first(record, *names):
    return next((record[name] for name in names if record.get(name) is not None), None)


def _numbers(record, *names):
    """A number, a list of rounds, or a dictionary with a median, as a spread."""
    value = _first(record, *names)
    if isinstance(value, dict):
        middle = _first(value, "median", "p50", "value")
        if not isinstance(middle, (int, float)):
            return None
        low, high = _first(value, "min"), _first(value, "max")
        return {"median": middle, "min": middle if low is None else low, "max": middle if high is None else high}
    if isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
        return spread(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"median": value, "min": value, "max": value}
    return None


def _cells_of(document):
    if isinstance(document, list):
        return [one for one in document if isinstance(one, dict)]
    if isinstance(document, dict):
        named = _first(document, "cells", "results", "rows")
        lists = [named] + [value for value in document.values() if isinstance(value, list)]
        return next((_cells_of(one) for one in lists if isinstance(one, list) and _cells_of(one)), [])
    return []


def kvferry_cells(document):
    """The cells of a `kvferry bench --json` file, as far as their fields are known."""
    made = []
    for record in _cells_of(document):
        layout = _first(record, "layout", "layouts", "work") or "?"
        if isinstance(layout, dict):
            layout = " ".join(f"{key}={value}" for key, value in layout.items())
        gb_s = _numbers(record, "goodput_gb_s", "gb_s", "goodput", "goodput_median", "goodput_gb_s_median")
        error = _first(record, "error", "not_run", "skipped", "reason")
        facts = [f"{name} {record[name]}" for name in ("model", "tokens", "rooms") if record.get(name) is not None]
        made.append({"work": WORK.get(str(layout), str(layout)), "peer": f"kvferry {_first(record, 'fabric') or '?'}",
                     "rounds": 1 if gb_s else 0, "gb_s": gb_s,
                     "ratio": _numbers(record, "ratio", "ratio_to_memcpy", "memcpy_ratio"),
                     "cpu_s_per_gb": _numbers(record, "cpu_s_per_gb"),
                     "seconds": None, "note": ", ".join(facts), "error": error,
                     "source": record})
    return made
