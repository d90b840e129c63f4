"""Statistics, the table and what is merged into it. Pure: no process, no clock, standard library only."""
import statistics

# Layouts of `kvferry bench` that are one of our work items, for the model of our pools.
WORK = {"same": "pages", "dcp1-4": "rows"}
MODEL = "deepseek-v3"
PAGE_TOKENS = 64
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
    seconds = made.get("seconds") if made["work"].startswith("one-page") else None
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
    """A number, a list of rounds, a dictionary with a median, or one number for each side, as a spread."""
    value = _first(record, *names)
    if isinstance(value, dict):
        middle = _first(value, "median", "p50", "value")
        if middle is None and set(value) == {"prefill", "decode"}:
            middle = sum(value.values())
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


def _records(document):
    """One for each cell and fabric: a cell may hold a list of its fabrics."""
    for record in _cells_of(document):
        inner = [one for one in record.get("fabrics") or [] if isinstance(one, dict)]
        yield from ({**record, **one} for one in inner) if inner else (record,)


def _work(record, layers):
    layout = _first(record, "layout", "layouts", "work") or "?"
    if isinstance(layout, dict):
        layout = " ".join(f"{key}={value}" for key, value in layout.items())
    model = record.get("model")
    if model not in (None, MODEL):
        return f"{layout} {model}"
    if layout == "same" and record.get("tokens") == PAGE_TOKENS and record.get("rooms") == 1:
        return "one-page" if record.get("layers", layers) == layers else "one-page of other layers"
    return WORK.get(layout, str(layout))


def kvferry_cells(document, layers=61):
    """The cells of a `kvferry bench --json` file, as far as their fields are known; the peers move `layers` layers."""
    made = []
    for record in _records(document):
        gb_s = _numbers(record, "goodput_gb_s", "gb_s", "goodput", "goodput_median")
        rate = _numbers(record, "rate")  # bytes a second
        if gb_s is None and rate is not None:
            gb_s = {key: value / 1e9 for key, value in rate.items()}
        facts = [f"{name} {record[name]}" for name in ("layers", "tokens", "rooms") if record.get(name) is not None]
        if record.get("beside"):
            facts.append(f"beside a room of {record['beside']} tokens")
        made.append({"work": _work(record, layers), "peer": f"kvferry {_first(record, 'fabric') or '?'}",
                     "rounds": 1 if gb_s else 0, "gb_s": gb_s,
                     "ratio": _numbers(record, "to_memcpy", "ratio", "ratio_to_memcpy"),
                     "cpu_s_per_gb": _numbers(record, "cpu_s_per_gb"), "seconds": _numbers(record, "latency_s"),
                     "note": ", ".join(facts), "error": _first(record, "error", "not_run", "skipped", "reason"),
                     "source": record})
    return made
