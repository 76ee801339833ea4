"""The words for why a run does not move: the finding, every rank in a line, and stacks."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.launcher.why.judge import HangCause, HangReport, Lost, SentInput, SentToGroup, SentValue
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
    phases = list(dict.fromkeys(str(one.phase) for one in report.seen.values()))
    names = [name_of(report, rank) for rank in report.blamed]
    match report.cause:
        case HangCause.MOVES:
            ago = f"{max(report.seconds, 0.0):.1f} s ago"
            text = f"the run moves ({', '.join(phases)}): {ago} it began something"
        case HangCause.PAUSES:
            text = (
                f"nothing has moved for {report.seconds:.1f} s ({', '.join(phases)}), but there was such a "
                f"pause before, of {report.paused:.1f} s: ask again"
            )
        case HangCause.PREPARES:
            text = f"all ranks are {' or '.join(phases)}, for {report.seconds:.1f} s; none waits for another"
        case HangCause.ABSENT:
            has = "has" if len(names) == 1 else "have"
            text = f"{', '.join(names)} {has} not begun to join the others: no rrfp.Trainer is made there yet"
        case HangCause.RING:
            text = f"the ranks wait for one another: {', '.join(names)}"
        case _:
            text = _blame(report, *(report.seen[rank] for rank in report.blamed))
    return text


def _blame(report: HangReport, one: RankSnapshot, other: RankSnapshot | None = None) -> str:
    """Of one rank or two."""
    lost, program, at = report.lost, report.program, _at(report, one)
    if report.cause is HangCause.OUT:
        return f"{one.name} {_how_absent(one)}"
    if other is not None and lost is not None:
        how = "heard of it, but its data has not come" if lost.heard else "not heard of it"
        messages = "message" if report.more == 1 else "messages"
        more = f" (and {report.more} more such {messages})" if report.more else ""
        return f"{one.name} has sent {_message(lost)} to {other.name}, which has {how}{more}"
    if other is not None:
        return orders_differ(one.recording, other.recording, report.position)
    missing = "" if program is None else f"has not entered {program.what}, "
    if program is not None and report.cause is HangCause.NOT_ENTERED:
        waits = name_of(report, program.waits)
        return f"{one.name} {missing}in which {waits} waits for it; {one.name} {at}"
    who = "another rank waits" if report.others == 1 else f"{report.others} other ranks wait"
    return f"{one.name} {missing}{at}" + (f"; {who} for it" if report.others else "")


def _message(lost: Lost) -> str:
    match lost.what:
        case SentInput(wanted, stage, step):
            return f"the input of {wanted} on stage {stage} in step {step}"
        case SentValue(gather):
            return f"its value of {gather}"
        case SentToGroup(number, step, decided, task):
            what = f"decision {number} ({task})" if decided else f"message {number}"
            return f"{what} of their group in step {step}"


def orders_differ(one: Recording, other: Recording, number: int) -> str:
    """Two ranks of a stage have dispatched different tasks at a position."""
    step = next(entry.step for entry in one.last if entry.position == number)
    return difference(one.name, other.name, number, step, one.tasks, other.tasks)


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
