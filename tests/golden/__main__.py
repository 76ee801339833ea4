"""`python -m tests.golden --write=FOLDER` and `python -m tests.golden --old=COMMIT`; see README.md."""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.golden.checkout import ROOT, environment, produced, worktree
from tests.golden.comparing import accepted, report
from tests.golden.producing import PRODUCERS, wanted


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    verb = parser.add_mutually_exclusive_group(required=True)
    verb.add_argument("--write", type=Path, metavar="FOLDER", help="write this checkout's goldens here")
    verb.add_argument("--old", metavar="COMMIT", help="compare this checkout with an older commit")
    verb.add_argument("--against", type=Path, metavar="FOLDER", help="compare with goldens written before")
    parser.add_argument("--old-python", type=Path, metavar="PATH", help="Python for --old; else one is made")
    parser.add_argument("--only", default="", metavar="WORDS", help="goldens whose name has one of the words")
    parser.add_argument("--accept", type=Path, metavar="FILE", help="differences that are intended")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="producers at the same time (2)")
    options = parser.parse_args(arguments)
    words, reasons = options.only.split(), accepted(options.accept.read_text()) if options.accept else {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="golden-")))
        if options.write:
            options.write.mkdir(parents=True)
            alone = [("this checkout", ROOT, sys.executable, options.write, None)]
            return 1 if sides(alone, words, options.jobs) else 0
        old, turns = options.against, []
        if options.old:
            old = scratch / "old"
            checkout = stack.enter_context(worktree(options.old))
            if not (checkout / "tests" / "golden" / "producing.py").exists():
                raise SystemExit(f"--old={options.old}: that commit has no tests/golden")
            python = options.old_python or environment(scratch / "environment")
            turns.append((options.old, checkout, python, old, None))
        turns.append(("this checkout", ROOT, sys.executable, scratch / "new", old))
        failed = sides(turns, words, options.jobs)
        both = [asked_for(gathered(folder), words) for folder in (old, scratch / "new")]
        for word in words:
            if not any(wanted(name, [word]) for found in both for part in found.values() for name in part):
                raise SystemExit(f"--only: no golden has {word!r} in its name; words are separated by spaces")
        lines, good = report(*both, reasons, all_of_them=not words)
        print("\n".join(lines))
        return 0 if good and not failed else 1


def sides(turns, words, jobs):
    """Run all producers of some checkouts, each producer's in turns; whether one of them failed."""
    for _, _, _, folder, _ in turns:
        folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        return any([*pool.map(lambda producer: in_turns(producer, turns, words), needed(words))])


def in_turns(producer, turns, words):
    failed = False
    for name, checkout, python, folder, before in turns:
        began = time.perf_counter()
        said = produced(producer, checkout, python, folder, words, before)
        seconds = time.perf_counter() - began
        read = {"failed": {producer: said}} if said is not None else json.loads(written(folder, producer))
        used = read.get("cpu_seconds", "no")
        print(f"{producer} of {name}: {seconds:.0f} s, {used} of CPU", file=sys.stderr, flush=True)
        for golden, text in read["failed"].items():
            failed = True
            print(f"{golden} of {name} FAILED\n{text}", file=sys.stderr, flush=True)
    return failed


def needed(words):
    """The producers whose goldens may have one of the words in their name."""
    first = [word.partition("/")[0] for word in words]
    named = [producer for producer in PRODUCERS if any(word in producer for word in first)]
    return named or PRODUCERS


def gathered(folder, producers=PRODUCERS):
    """The goldens that were written to a folder."""
    found = {"goldens": {}, "failed": {}}
    for producer in producers:
        if (folder / f"{producer}.json").exists():
            read = json.loads(written(folder, producer))
            found = {part: found[part] | read[part] for part in found}
    return found


def asked_for(found, words):
    """Those goldens of a folder that have one of the words in their name."""
    return {part: {name: own[name] for name in own if wanted(name, words)} for part, own in found.items()}


def written(folder, producer):
    return (folder / f"{producer}.json").read_text()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
