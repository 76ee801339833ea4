"""Two sets of goldens side by side: what differs first in each, and which differences are intended."""

import dataclasses
import fnmatch
import json

MISSING = "(missing)"
TOLD = ("suite/durations",)
"""Goldens that are shown side by side, and not compared."""

LONGEST = 200
"""Characters of a value that are shown."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference of a golden, or of one entry of a golden that is a table.

    Attributes:
        golden: its name; with the entry's key in brackets, if it has entries.
        where: path inside of it.
    """

    golden: str
    where: str
    old: object
    new: object

    def __str__(self):
        return f"{self.golden}{self.where}: {short(self.old)} -> {short(self.new)}"


def short(value):
    text = value if value is MISSING else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def first_difference(old, new, where=""):
    """(path, old, new) of the first place where two plain values differ; None if they are equal."""
    if type(old) is not type(new):
        return where, old, new
    if isinstance(old, dict):
        pairs = [(key, old.get(key, MISSING), new.get(key, MISSING)) for key in sorted({*old, *new})]
    elif isinstance(old, list):
        longest = range(max(len(old), len(new)))
        pairs = [(i, *(own[i] if i < len(own) else MISSING for own in (old, new))) for i in longest]
    else:
        return None if old == new else (where, old, new)
    found = (first_difference(a, b, f"{where}[{key!r}]") for key, a, b in pairs if a != b)
    return next(found, None)


def differences(name, old, new):
    """Those of one golden: one for each entry that differs, if it is a table, else the first."""
    if isinstance(old, dict) and isinstance(new, dict):
        entries = [(f"{name}[{key}]", old.get(key, MISSING), new.get(key, MISSING)) for key in {**old, **new}]
    else:
        entries = [(name, old, new)]
    found = ((label, first_difference(a, b)) for label, a, b in entries)
    return [Difference(label, *difference) for label, difference in found if difference is not None]


def accepted(text):
    """The reasons of an accept file by pattern; a line is `PATTERN: reason`, or begins with `#`."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pairs = [line.partition(": ") for line in lines]
    if odd := [line for line, pair in zip(lines, pairs, strict=True) if not pair[0] or not pair[2].strip()]:
        raise SystemExit(f"--accept: {odd[0]!r} has no reason: write `PATTERN: reason`")
    return {pattern.strip(): reason.strip() for pattern, _, reason in pairs}


def fits(pattern, difference):
    """Whether a pattern names the golden of a difference, or the entry; `*` is for any characters."""
    names = difference.golden, difference.golden.partition("[")[0]
    escaped = pattern.replace("[", "[[]")
    return any(fnmatch.fnmatchcase(name, escaped) for name in names)


def report(old, new, reasons, most=10, all_of_them=True):
    """Compare two sets of goldens.

    Args:
        old, new: `{"goldens": ..., "failed": ...}`.
        reasons: by pattern, why a difference is intended.
        most: differences that are shown of one golden.
        all_of_them: whether these are all goldens, so that a reason that fits none has had its day.

    Returns:
        Lines of a table, and whether all that differs is intended.
    """
    lines, good, used = [], True, set()
    for name in sorted({*old["goldens"], *old["failed"], *new["goldens"], *new["failed"]}):
        failures = [
            (side, own["failed"][name]) for side, own in (("old", old), ("new", new)) if name in own["failed"]
        ]
        if failures:
            side, text = failures[0]
            lines.append(f"{name:50} FAILED in the {side} checkout: {text.strip().splitlines()[-1]}")
            good = False
            continue
        if name in TOLD:
            lines.append(
                f"{name:50} {' -> '.join(json.dumps(own['goldens'].get(name)) for own in (old, new))}"
            )
            continue
        found = differences(name, *(own["goldens"].get(name, MISSING) for own in (old, new)))
        by = [(one, next((p for p in reasons if fits(p, one)), None)) for one in found]
        used |= {pattern for _, pattern in by if pattern}
        open_ones = [one for one, pattern in by if pattern is None]
        good &= not open_ones
        state = (
            "equal"
            if not found
            else f"{len(open_ones)} differ"
            + (f", {len(found) - len(open_ones)} accepted" if len(found) > len(open_ones) else "")
        )
        lines.append(f"{name:50} {state}")
        lines += [f"    {one}" for one in open_ones[:most]]
        lines += [f"    ... and {len(open_ones) - most} more"] if len(open_ones) > most else []
        lines += [f"    accepted: {p} ({reasons[p]})" for p in dict.fromkeys(p for _, p in by if p)]
    stale = [pattern for pattern in reasons if all_of_them and pattern not in used]
    lines += [f"--accept: {pattern!r} fits no difference: delete its line" for pattern in stale]
    return lines, good and not stale
