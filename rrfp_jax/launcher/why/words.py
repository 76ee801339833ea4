"""The words for why a run does not move: the finding, every rank in a line, and stacks."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.launcher.why.judge import (
    Absent,
    HangReport,
    Late,
    Lost,
    Moves,
    NotEntered,
    OrdersDiffer,
    Out,
    Prepares,
    Ring,
    SentDecision,
    SentInput,
    SentToGroup,
    SentValue,
)
from rrfp_jax.launcher.why.snapshot import RankSnapshot
from rrfp_jax.runtime.run.consensus import difference
from rrfp_jax.runtime.run.recorder import COMPILING, Recording
from rrfp_jax.runtime.run.stacks import Thread
from rrfp_jax.runtime.run.waits import words

BOOTSTRAP = ("_bootstrap", "_bootstrap_inner")
"""Outermost in every thread but the main one, and of no interest."""


def render_report(report: HangReport, *, blamed_only: bool = False) -> str:
    """The finding, every rank, then the Python stacks: of those that it blames first, equal ones once.

    Args:
        report: of the run.
        blamed_only: leave out the stacks of all others.
    """
    alike: dict[str, list[str]] = {}
    for one in sorted(report.seen.values(), key=lambda one: (one.rank not in report.blamed, one.rank)):
        if one.rank in report.blamed or not blamed_only:
            alike.setdefault("\n".join(_stacks(one)), []).append(one.name)
    blocks = [f"{', '.join(names)}:\n{stacks}" for stacks, names in alike.items()]
    head = ["the stacks of all threads, the latest call first:"] if blocks else []
    lines = (f"  {line(report, one)}" for one in report.seen.values())
    return "\n".join([sentence(report), *lines, *head, *blocks])


def line(report: HangReport, one: RankSnapshot) -> str:
    """What a rank is at."""
    return f"{one.name}, {one.recording.sentence(one.now)}: {_at(report, one)}"


def sentence(report: HangReport) -> str:
    """What is wrong; of a run that moves, where it is."""
    seen, finding = report.seen, report.finding
    match finding:
        case Moves() | Prepares():
            text = _moving(report, finding)
        case Out(rank):
            text = f"{seen[rank].name} {_how_absent(seen[rank])}"
        case Absent(ranks):
            names, has = ", ".join(f"rank {rank}" for rank in ranks), "has" if len(ranks) == 1 else "have"
            text = f"{names} {has} not begun to join the others: no rrfp.Trainer is made there yet"
        case OrdersDiffer(rank, other, number):
            text = orders_differ(seen[rank].recording, seen[other].recording, number)
        case Lost():
            text = _lost(report, finding)
        case Late(rank, others, entered):
            missing = "" if entered is None else f"has not entered {entered.what}, "
            awaited = f"; {others} other ranks wait for it" if others > 1 else "; another rank waits for it"
            text = f"{seen[rank].name} {missing}{_at(report, seen[rank])}{awaited if others else ''}"
        case NotEntered(rank, waits, what):
            name = seen[rank].name
            inside = f"in which {seen[waits].name} waits for it"
            text = f"{name} has not entered {what}, {inside}; {name} {_at(report, seen[rank])}"
        case Ring():
            text = f"the ranks wait for one another: {', '.join(one.name for one in seen.values())}"
    return text


def orders_differ(one: Recording, other: Recording, number: int) -> str:
    """Two ranks of a stage have dispatched different tasks at a position."""
    step = next(entry.step for entry in one.last if entry.position == number)
    return difference(one.name, other.name, number, step, one.tasks, other.tasks)


def _moving(report: HangReport, finding: Moves | Prepares) -> str:
    phases = list(dict.fromkeys(str(one.phase) for one in report.seen.values()))
    if isinstance(finding, Prepares):
        return f"all ranks are {' or '.join(phases)}, for {finding.quiet:.1f} s; none waits for another"
    if finding.paused is None:
        quiet = max(finding.quiet, 0.0)
        return f"the run moves ({', '.join(phases)}): {quiet:.1f} s ago it began something"
    return (
        f"nothing has moved for {finding.quiet:.1f} s ({', '.join(phases)}), but there was such a pause "
        f"before, of {finding.paused:.1f} s: ask again"
    )


def _lost(report: HangReport, lost: Lost) -> str:
    match lost.what:
        case SentInput(wanted, stage, step):
            what = f"the input of {wanted} on stage {stage} in step {step}"
        case SentValue(gather):
            what = f"its value of {gather}"
        case SentDecision(number, step, task):
            what = f"decision {number} ({task}) of their group in step {step}"
        case SentToGroup(number, step):
            what = f"message {number} of their group in step {step}"
    sender, receiver = report.seen[lost.sender].name, report.seen[lost.receiver].name
    how = "which has heard of it, but its data has not come" if lost.heard else "which has not heard of it"
    more = f" (and {lost.more} more such message{'s' if lost.more > 1 else ''})" if lost.more else ""
    return f"{sender} has sent {what} to {receiver}, {how}{more}"


def _how_absent(one: RankSnapshot) -> str:
    if one.state == "gone":
        return "has ended, and the others have not noticed yet"
    if one.state == "stopped":
        return "stands still: it was stopped, as by SIGSTOP"
    where = f"; it is in {one.users or _where(one)}" if one.main_frames else ""
    since = f"its last sign of life was {one.now - one.recording.beat:.1f} s ago"
    return f"does not answer: something holds its interpreter, {since}{where}"


def _where(one: RankSnapshot) -> str:
    """Where its main thread is: its latest call, and the latest that is no library's."""
    innermost, *_ = one.main_frames
    caller = next((frame for frame in one.main_frames if frame.whose != "library"), innermost)
    return str(innermost) if caller == innermost else f"{innermost}, called by {caller}"


def _at(report: HangReport, one: RankSnapshot) -> str:
    """What a rank is at, after its name."""
    if one.state in ("gone", "stopped"):
        return _how_absent(one)
    does = ""
    if one.running:
        oldest = one.running[0]
        does = f"runs {oldest.task}, dispatched {one.now - oldest.at:.1f} s ago, which has not ended"
    elif one.waiting:
        does = f"waits for {words(one.waiting[0], lambda rank: name_of(report, rank))}"
    if one.users is not None:
        return f"{does}, in the user's {one.users}" if does else f"is in the user's {one.users}"
    if does:
        return does
    compiles = "compiles, and " if one.phase == COMPILING and one.is_busy else ""
    return f"{compiles}is in {_where(one)}" if one.main_frames else f"{compiles}has not said what it does"


def name_of(report: HangReport, rank: int) -> str:
    """A rank's name."""
    return report.seen[rank].name if rank in report.seen else f"rank {rank}"


def _stacks(one: RankSnapshot) -> Sequence[str]:
    if not one.threads:
        return [f"  none: {'it stands still' if one.state == 'stopped' else 'it does not answer'}"]
    return [line for thread in one.threads for line in _lines(thread)]


def _lines(thread: Thread) -> Sequence[str]:
    frames = [frame for frame in thread.frames if frame.function not in BOOTSTRAP]
    name = f"{thread.name} (main)" if thread.is_main else thread.name
    return [f"  thread {name}", *(f"    {frame.file}:{frame.line} {frame.function}" for frame in frames)]
