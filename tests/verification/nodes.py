"""Faults of nodes and links at every moment of a run over four nodes: how it ends, and what is lost.

    python -m tests.verification.nodes [--json=FILE] [--check] [--only=FAULT/MOMENT,...] [--at-once=N]
        [--write]

Isolated nodes (`tests/nodes/nodes.py`) have a rank each of a named run that saves itself, started by hand.
When rank 2 (of the rows about node 0: rank 0) comes to the moment, it waits until the fault has been caused.
Ranks are given up after 4 s of silence, in the row about an outage after the default 25 s. A line per cell:
exit statuses, seconds from the fault until all ranks had ended, whom their sentences name. A run that failed
once it trained is started again on healed nodes: each step must be there once, with the loss, to the bit, of
an undisturbed run. `*` stands for all faults or moments. --write puts the cells that were run into
benchmarks/results/nodes.md, beside those that are there. Root on Linux only.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import files
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

from benchmarks.harness import RESULTS, Aim, finish, parse, put_figures, table
from tests.nodes import ranks
from tests.nodes.nodes import Nodes

MOMENTS = ("joining", "compiling", "step", "validation", "saving", "shutdown")
STEPS = 8
BRISK_SILENCE, USUAL_SILENCE = 4.0, 25.0
START_SECONDS = 300.0
"""Within which four ranks start and come to the moment, however busy the machine is."""
HANG_SECONDS = 45.0
"""From the fault on, beyond the limit on silence; a run ends within a fraction of it."""
GOES_ON_SECONDS = 200.0
JOIN_SECONDS = 20.0
"""Within which all ranks must have been started, from when the first of them asks."""
PAGE = RESULTS / "nodes.md"


@dataclass(frozen=True)
class Scene:
    """Where a fault is caused: at a rank, if it has been started, on a node; files are in a folder."""

    nodes: Nodes
    node: str
    folder: Path
    started: subprocess.Popen[Any] | None

    @property
    def rank(self) -> subprocess.Popen[Any]:
        """The rank's process."""
        assert self.started is not None
        return self.started


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row.

    Attributes:
        cause: causes it.
        rank: where.
        ends: whether the run is to end.
        silence: limit on it, in s.
        undone_after: seconds after which nodes are healed.
        lives: whether the rank itself is to end, too.
        before: whether it is there before the ranks start.
        environment: of the ranks.
        nothing: moments at which there is nothing to see, with the reason.
    """

    name: str
    cause: Callable[[Scene], None]
    rank: int = 2
    ends: bool = True
    silence: float = BRISK_SILENCE
    undone_after: float | None = None
    lives: bool = False
    before: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    nothing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: of each rank status, seconds from the fault, sentence; and of the one after it."""

    came: bool
    statuses: Sequence[int | None]
    seconds: Sequence[float]
    sentences: Sequence[str]
    steps: Sequence[int]
    same_losses: bool
    resumed: Sequence[int | None]
    texts: Sequence[str]


def _mount_over(scene: Scene, file: Path, change: str) -> None:
    """Put a file that `sed` has changed in place of a shared one, on one node."""
    own = f"/run/{file.name}"
    done = scene.nodes.run(
        scene.node,
        "sh",
        "-c",
        f"sed '{change}' {file} >{own} && ! cmp -s {file} {own} && mount --bind {own} {file}",
    )
    assert done.returncode == 0, f"{file}: {done.stderr}"


def _other_code(scene: Scene) -> None:
    _mount_over(scene, ranks.ROOT / "tests" / "nodes" / "faulted_run.py", "s/jnp.tanh/jnp.sin/")


def _other_version(scene: Scene) -> None:
    (file,) = (path for path in files("jaxlib") or [] if path.name == "METADATA")
    _mount_over(scene, Path(str(file.locate())), "s/^Version: .*/Version: 0.10.99/")


def _local_folder(scene: Scene) -> None:
    scene.nodes.local(
        scene.node, scene.folder if scene.started is None else scene.folder / "faulted.checkpoints"
    )


def only(*moments: str, because: str) -> dict[str, str]:
    """All other moments, with a reason."""
    return {moment: f"n/a: {because}" for moment in MOMENTS if moment not in moments}


def _found_at_the_start(name: str, cause: Callable[[Scene], None]) -> Fault:
    """What differs before the ranks start, and is looked for once."""
    nothing = only("joining", because="looked for once, at the start")
    return Fault(name=name, cause=cause, lives=True, before=True, nothing=nothing)


Row: TypeAlias = tuple[Fault, str, Outcome, list[str]]

FAULTS = {
    one.name: one
    for one in (
        Fault(name="kill", cause=lambda scene: scene.nodes.signal(scene.rank, signal.SIGKILL)),
        Fault(name="freeze", cause=lambda scene: scene.nodes.signal(scene.rank, signal.SIGSTOP)),
        Fault(name="cut", cause=lambda scene: scene.nodes.cut(scene.node), lives=True),
        Fault(name="mute", cause=lambda scene: scene.nodes.mute(scene.node), lives=True),
        Fault(name="nothing to it", cause=lambda scene: scene.nodes.mute(scene.node, of=False), lives=True),
        Fault(name="nothing of it", cause=lambda scene: scene.nodes.mute(scene.node, to=False), lives=True),
        Fault(
            name="outage of 14 s",
            cause=lambda scene: scene.nodes.mute(scene.node),
            ends=False,
            silence=USUAL_SILENCE,
            undone_after=14.0,
        ),
        Fault(name="2 Mbit/s", cause=lambda scene: scene.nodes.slow(scene.node, "2mbit"), ends=False),
        Fault(name="crash", cause=lambda scene: scene.nodes.crash(scene.node)),
        Fault(name="crash of node 0", cause=lambda scene: scene.nodes.crash(scene.node), rank=0),
        _found_at_the_start("other code", _other_code),
        _found_at_the_start("other versions", _other_version),
        _found_at_the_start("local folder", _local_folder),
        Fault(
            name="no room",
            cause=lambda scene: None,
            lives=True,
            environment={"MOMENT_FAULT": "full"},
            nothing=only("saving", because="ranks but the first write checkpoints only"),
        ),
    )
}


# Running a cell.


def run_cell(fault: Fault, moment: str, nodes: Nodes, folder: Path, calm: Sequence[str]) -> Outcome:
    """Run a cell to its end; `calm` are the losses of a run to which nothing happens."""
    silence = {"RRFP_SILENCE_SECONDS": str(fault.silence)}
    own = {"MOMENT": moment, "MOMENT_RANK": str(fault.rank), "MOMENT_FOLDER": str(folder)}
    (folder / "run").mkdir()
    node = nodes.names[fault.rank]
    if fault.before:
        fault.cause(Scene(nodes, node, folder / "run", None))
    started = _start(nodes, folder / "run", own | silence | dict(fault.environment))
    came = _await_moment(started, folder)
    caused = time.monotonic()
    if came:
        if not fault.before:
            fault.cause(Scene(nodes, node, folder / "run", started[fault.rank]))
        (folder / "caused").touch()
    limit = fault.silence + HANG_SECONDS if fault.ends else GOES_ON_SECONDS
    gone = {fault.rank} if fault.ends and not fault.lives else set()
    ended = _wait(started, caused, limit, nodes, fault, gone)
    statuses = [
        None if rank in ended and ended[rank] is None else one.poll() for rank, one in enumerate(started)
    ]
    nodes.renew()
    texts = [ranks.said(folder / "run", rank) for rank in range(4)]
    resumed: list[int | None] = []
    if came and any(statuses) and moment not in ("joining", "compiling"):
        again = _start(nodes, folder / "run", {})
        _wait(again, time.monotonic(), GOES_ON_SECONDS + START_SECONDS, nodes, None, set())
        resumed = [one.poll() for one in again]
        nodes.renew()
    found = losses(folder / "run")
    return Outcome(
        came=came,
        statuses=statuses,
        seconds=[seconds for seconds in ended.values() if seconds is not None],
        sentences=[sentence(text) for text in texts],
        steps=[step for step, _ in found],
        same_losses=[loss for _, loss in found] == list(calm)[: len(found)],
        resumed=resumed,
        texts=texts,
    )


def _start(nodes: Nodes, folder: Path, more: Mapping[str, str]) -> ranks.Ranks:
    program = "from tests.nodes import moments; moments.main()"
    config = ["train", "--config=tests/nodes/faulted_run.py", f"--config.directory={folder}"]
    limits = {"RRFP_JOIN_SECONDS": str(JOIN_SECONDS)}
    return ranks.start(
        nodes, nodes.names, [sys.executable, "-c", program, *config], folder, limits | dict(more)
    )


def _await_moment(started: ranks.Ranks, folder: Path) -> bool:
    """Whether the rank comes to the moment."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and any(rank.poll() is None for rank in started):
        if (folder / "came").exists():
            return True
        time.sleep(0.02)
    return False


def _wait(
    started: ranks.Ranks, caused: float, limit: float, nodes: Nodes, fault: Fault | None, gone: set[int]
) -> dict[int, float | None]:
    """By rank, seconds until it ended; None for one that hangs. Those that are gone are not waited for."""
    ended: dict[int, float | None] = {}
    undone = fault is None or fault.undone_after is None
    awaited = [rank for rank in range(len(started)) if rank not in gone]
    while len(ended) < len(awaited) and time.monotonic() < caused + limit:
        passed = time.monotonic() - caused
        if not undone and fault is not None and passed >= (fault.undone_after or 0.0):
            nodes.heal()
            undone = True
        ended |= {r: passed for r in awaited if r not in ended and started[r].poll() is not None}
        time.sleep(0.02)
    return ended | {rank: None for rank in awaited if rank not in ended}


def sentence(text: str) -> str:
    """The line with which a rank says why it ends."""
    found = re.findall(r"^(?:rank \d|rrfp train: (?!Explicitly requested dtype)).*$", text, re.MULTILINE)
    return str(found[-1]) if found else ""


def losses(folder: Path) -> list[tuple[int, str]]:
    """By line of the run's metrics, step and loss to the bit."""
    file = folder / "faulted" / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [(line["step"], float.hex(line["loss"])) for line in map(json.loads, lines)]


# Judging it.


def named(said: str) -> int | None:
    """The rank that a sentence is about, who says it apart."""
    found = re.search(r"\brank (\d)", re.sub(r"^(rrfp train: )?rank \d( \([^)]*\))?: ", "", said))
    return int(found[1]) if found else None


def faults_of(fault: Fault, moment: str, outcome: Outcome) -> list[str]:
    """What was not as it should be."""
    if not outcome.came:
        return [f"the moment did not come: {outcome.statuses}"]
    done = outcome.steps == list(range(STEPS))
    survivors = [rank for rank in range(4) if rank != fault.rank]
    hung = [
        r for r in (range(4) if fault.lives or not fault.ends else survivors) if outcome.statuses[r] is None
    ]
    faults = [f"rank {rank} hung" for rank in hung]
    if any(outcome.resumed) or None in outcome.resumed:
        faults.append(f"started again, it ended with {list(outcome.resumed)}")
    if not outcome.same_losses or outcome.steps != list(range(len(outcome.steps))):
        faults.append(f"steps lost, repeated or changed: {list(outcome.steps)}")
    if not fault.ends:
        return faults + ([] if done and not any(outcome.statuses) else [f"it ended: {outcome.statuses}"])
    for rank in survivors:
        status, said = outcome.statuses[rank], outcome.sentences[rank]
        if status == 0 and not (moment == "shutdown" and done):
            faults.append(f"rank {rank} ended with status 0")
        elif status and named(said) != fault.rank:
            faults.append(f"rank {rank} names {named(said)}: {said!r}")
    return faults


def shown(fault: Fault, outcome: Outcome, faults: Sequence[str]) -> str:
    """A cell of the table."""
    if not outcome.came:
        return "**the moment did not come**"
    others = [r for r in range(4) if r != fault.rank and outcome.statuses[r]]
    names = sorted({str(named(outcome.sentences[r])) for r in others})
    whom = f", names {' and '.join(names).replace('None', 'nobody')}" if names else ""
    statuses = {outcome.statuses[r] for r in range(4) if r != fault.rank}
    took = f"{max(outcome.seconds, default=0.0):.1f} s"
    text = f"done after {took}" if statuses == {0} else f"ends in {took}{whom}"
    if outcome.resumed:
        text += ", resumes" if not any(outcome.resumed) else ", does not resume"
    more = dict.fromkeys(each.partition(":")[0] for each in faults if " names " not in each)
    return f"**{'; '.join([text, *more])}**" if faults else text


# The command.


def _cells(text: str) -> Iterator[tuple[Fault, str]]:
    for part in text.split(","):
        name, _, moment = part.rpartition("/")
        names, moments = ([*FAULTS] if name == "*" else [name]), MOMENTS if moment == "*" else (moment,)
        if not set(names) <= set(FAULTS) or not set(moments) <= set(MOMENTS):
            sys.exit(f"--only={part}: give FAULT/MOMENT of {[*FAULTS]} and {MOMENTS}, or * for all")
        yield from ((FAULTS[one], each) for one in names for each in moments)


def write(rows: Mapping[tuple[str, str], str]) -> None:
    """Put cells into the page, beside those that are there."""
    there = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in PAGE.read_text().splitlines()}
    before = {name: [cell.strip("| ") for cell in cells[1:]] for name, cells in there.items()}
    lines = []
    for name, fault in FAULTS.items():
        old = dict(zip(MOMENTS, before.get(name, []), strict=False))
        texts = [fault.nothing.get(m) or rows.get((name, m)) or old.get(m) or "not run" for m in MOMENTS]
        lines.append([name, *texts])
    put_figures(PAGE, "nodes", table(["", *MOMENTS], lines) + "\n")


def main(argv: Sequence[str]) -> int:
    """Run the cells, print them, and give the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--only", default="*/*", metavar="FAULT/MOMENT,...", help="only these; * for all")
    parser.add_argument(
        "--at-once", type=int, default=1, help="cells that run at once, each on nodes of its own"
    )
    parser.add_argument("--write", action="store_true", help="put the cells into the page of results")
    options = parser.parse_args(argv)
    cells = [(fault, moment) for fault, moment in _cells(options.only) if moment not in fault.nothing]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rrfp-nodes-") as scratch:
        for row in _run(cells, options.at_once, Path(scratch)):
            rows.append(row)
            fault, moment, outcome, faults = row
            text = shown(fault, outcome, faults)
            print(f"{fault.name:16} {moment:10} {text}", *outcome.sentences, sep="\n    ", flush=True)
            if options.write:
                write({(fault.name, moment): text})
    for fault, moment, outcome, faults in rows:
        if faults:
            print(f"\n{fault.name}, {moment}: {'; '.join(faults)}", *outcome.texts, sep="\n--- ")
    figures = [asdict(outcome) | {"fault": f.name, "moment": m, "faults": w} for f, m, outcome, w in rows]
    aims = [Aim("cells with a fault", sum(bool(faults) for *_, faults in rows), 0, "cells")]
    return finish(options, {"cells": figures}, aims)


def _run(cells: Sequence[tuple[Fault, str]], at_once: int, scratch: Path) -> Iterator[Row]:
    """Run cells, so many at once, each on nodes of its own."""
    shared: list[Path | str] = [ranks.ROOT, sys.prefix, sys.base_prefix, scratch]
    free: SimpleQueue[Nodes] = SimpleQueue()
    with ExitStack() as all_nodes:
        for _ in range(at_once):
            free.put(all_nodes.enter_context(Nodes(4, shared=shared)))

        def found(cell: tuple[Fault, str]) -> Row:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            nodes = free.get()
            try:
                outcome = run_cell(*cell, nodes, folder, calm)
            finally:
                nodes.renew()
                free.put(nodes)
            return *cell, outcome, faults_of(*cell, outcome)

        nodes = free.get()
        calm = undisturbed(nodes, scratch / "calm")
        free.put(nodes)
        with ThreadPoolExecutor(at_once) as pool:
            yield from pool.map(found, cells)


def undisturbed(nodes: Nodes, folder: Path) -> list[str]:
    """The losses of a run to which nothing happens."""
    started = _start(nodes, folder, {})
    _wait(started, time.monotonic(), START_SECONDS, nodes, None, set())
    if [one.poll() for one in started] != [0] * 4:
        sys.exit(f"the undisturbed run failed:\n{ranks.said(folder, 0)}")
    nodes.renew()
    return [loss for _, loss in losses(folder)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
