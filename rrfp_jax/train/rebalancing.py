"""Another split of a Trainer's layers: set by hand, or with `rebalance=` by what steps have taken.

Rank 0 decides (`sim/splits.py`) and says so to all. Under "auto" every process then compiles for the new
split beside its steps. Once all have, layers move, before the same step everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.resplit import Compiling, Ready, compiled_for_split, recut
from rrfp_jax.runtime.engine.settings import Rebalance
from rrfp_jax.runtime.run.signals import interrupts_held
from rrfp_jax.sim.splits import FIRST, MOST, Balance, Move, RebalanceDecision, Verdict
from rrfp_jax.trace.records import RecordedStep


def rebalancing(mode: Rebalance, widths: Sequence[int]) -> Rebalancing | None:
    """What a Trainer with this setting goes by, on stages of so many devices; None if it stays as it is.

    Raises:
        UsageError: layers cannot move between these stages.
    """
    if mode == "off":
        return None
    if len(set(widths)) > 1:
        raise UsageError(
            f"rebalance={mode!r} with stages of {', '.join(map(str, widths))} devices: between steps layers "
            f"move between stages with equally many; leave it off, or give equal ones"
        )
    return Rebalancing(mode)


class Rebalancing:
    """When layers move, and what is said of it.

    All processes have one and ask it before every step.

    Args:
        mode: "suggest" or "auto".

    Attributes:
        watched_seconds: what watching has taken in this process so far, but for the moves themselves (s).
    """

    def __init__(self, mode: Rebalance) -> None:
        self._mode = mode
        self._balance: Balance | None = None  # of rank 0
        self._split: list[int] = []
        self._steps, self._due = 0, FIRST  # with this split; when it is looked at
        self._compiling: Compiling | None = None
        self._began, self._beside = 0.0, 0  # when that began, and the steps beside it
        self._slowed = 0.0  # by how much these took longer (s), on rank 0
        self._move: Move | None = None  # what is being compiled for, on rank 0
        self._said: set[object] = set()
        self.watched_seconds = 0.0

    def before_step(
        self,
        step: int,
        left: int,
        engine: Engine,
        rules: Sequence[StepRules],
        recorded: Sequence[RecordedStep],
        recut: Callable[[Sequence[int], Ready | None], None],
    ) -> None:
        """Look at what was measured, if it is time, and move layers, if all processes are ready for that.

        Args:
            step: the next one.
            left: how many there will be, this one among them.
            engine: that has run steps.
            rules: of steps that there may be, those that train first.
            recorded: the latest steps, all with the present split.
            recut: moves the layers.
        """
        began = perf_counter()
        if self._split != engine.split:  # it is the first time, or somebody has set another one
            self._begin(engine)
        self._steps += 1
        if self._compiling is not None:
            self._beside += 1
            self._slowed += recorded[-1].trace.makespan - self._move.seconds if self._move else 0.0
            if not self._all_ready(engine, self._compiling):
                self.watched_seconds += perf_counter() - began
                return
            self._go(step, engine, self._compiling.ready(), recut)
            return
        if self._steps >= self._due and len(recorded) >= FIRST:  # fewer after a move that was taken back
            split = self._look(step, left, engine, recorded)
            if split is not None:
                self._compiling, self._began = Compiling(engine, split, rules), began
                self._beside, self._slowed = 0, 0.0
        self.watched_seconds += perf_counter() - began

    def _begin(self, engine: Engine) -> None:
        self._split, self._steps, self._due = engine.split, 0, FIRST
        self._drop()
        self._move = None
        if self._balance is None and engine.world.rank == 0:
            self._balance = Balance(max(engine.library.compile_seconds.values()))

    def _look(
        self, step: int, left: int, engine: Engine, recorded: Sequence[RecordedStep]
    ) -> Sequence[int] | None:
        """The split to compile for, as rank 0 finds it; all processes ask together."""
        told = None
        if self._balance is not None:
            look = self._looked(self._balance, step, recorded, left)
            self._move = look.move if self._mode == "auto" else None
            told = [look.again, self._move and list(self._move.split)]
        again, split = engine.world.gather(f"the split from step {step} on", told)[0]
        self._due = self._steps + again
        found: Sequence[int] | None = split
        return found

    def _looked(
        self, balance: Balance, step: int, recorded: Sequence[RecordedStep], left: int
    ) -> RebalanceDecision:
        """What is to be done, said as well; nothing if it cannot be told, for training goes on without."""
        try:
            look = balance.look(list(recorded), left)
        except Exception as error:
            _print(f"steps could not be looked at, so layers stay: {type(error).__name__}: {error}")
            return RebalanceDecision(MOST)
        self._say(step, look)
        return look

    def _all_ready(self, engine: Engine, compiling: Compiling) -> bool:
        """Whether all processes have compiled; if one cannot, all stay as they are."""
        mine = [compiling.over, compiling.refusal] if compiling.over else [False, ""]
        told = engine.world.gather("whether all have compiled for another split", mine)
        refusals = [refusal for _, refusal in told if refusal]
        if refusals:
            self._stay(refusals[0])
        return not refusals and all(over for over, _ in told)

    def _stay(self, refusal: str) -> None:
        """Do without the split that was compiled for."""
        self._drop()
        if self._balance is not None and self._move is not None:
            self._balance.failed(self._move)
            _print(f"layers stay where they are: {_text(self._move.split)} was refused: {refusal}")

    def _drop(self) -> None:
        """Have nothing more compiled for another split."""
        if self._compiling is not None:
            self._compiling.drop()
        self._compiling = None

    def _go(
        self,
        step: int,
        engine: Engine,
        ready: Ready,
        recut: Callable[[Sequence[int], Ready | None], None],
    ) -> None:
        began, move, before = perf_counter(), self._move, engine.split
        try:
            recut(ready.engine.split, ready)
        except UsageError as error:  # bytes do not suffice, which only the programs there can tell
            recut(before, None)
            self._stay(str(error))
            return
        took = perf_counter() - began
        self._begin(ready.engine)
        if self._balance is not None and move is not None:
            slowed = max(self._slowed, 0.0)
            self._balance.moved(move, took + slowed, began - self._began)
            _print(
                f"from step {step} on {_text(move.split)}: layers have moved in {took:.3g} s; compiling cost "
                f"{slowed:.3g} s in {self._beside} steps: in all {(took + slowed) / move.seconds:.1f} steps"
            )

    def _say(self, step: int, look: RebalanceDecision) -> None:
        """Print what a look says, and what it has not said yet."""
        if look.verdict is not None:
            _print(_of_verdict(look.verdict))
        if look.distrusted is not None and "distrusted" not in self._said:
            self._said.add("distrusted")
            _print(
                f"the simulator is {look.distrusted:.0%} off on steps that ran, so nothing is predicted yet"
            )
        if look.move is not None and (self._mode == "auto" or look.move.split not in self._said):
            self._said.add(look.move.split)
            _print(_of_move(look.move, self._mode, step))


def _of_move(move: Move, mode: Rebalance, step: int) -> str:
    if move.back:
        return f"layers go back to {_text(move.split)}, where a step took {move.expected:.4g} s"
    found = (
        f"a step takes {move.seconds:.4g} s, and {move.expected:.4g} s, {move.gain:.1%} less, with "
        f"{_text(move.split)} instead of {_text(move.before)}"
    )
    sizes = ",".join(map(str, move.split))
    if mode == "auto":
        return f"{found}; programs for that are compiled beside the steps from step {step} on"
    return (
        f"{found}: set trainer.split = {list(move.split)}, go on from a checkpoint with "
        f"--config.split={sizes}, or have rebalance='auto' do it"
    )


def _of_verdict(verdict: Verdict) -> str:
    less = f"{verdict.gain:.1%} less" if verdict.gain >= 0 else f"{-verdict.gain:.1%} more"
    found = (
        f"a step takes {verdict.seconds:.4g} s with {_text(verdict.move.split)}, {less} than before the "
        f"move; {verdict.move.gain:.1%} less was expected"
    )
    return found if verdict.kept else f"{found}. From now on twice as much is asked of a move"


def _text(split: Sequence[int]) -> str:
    return f"split={','.join(map(str, split))}"


def _print(text: str) -> None:
    say(f"rebalance: {text}")


def resplit(
    engine: Engine,
    split: Sequence[int],
    rules: Sequence[StepRules],
    take: Callable[[Engine], None],
    ready: Ready | None = None,
) -> None:
    """Go on with another split, unless the engine has it; all processes together.

    Args:
        engine: the old one.
        split: layers per virtual stage, in the model's order.
        rules: of steps that there may be, those that train first.
        take: is given what goes on, before a Ctrl-C that came meanwhile is raised.
        ready: what has been compiled for this split already; None to do so now.

    Raises:
        UsageError: the split does not add up, or layers cannot move so; nothing has changed.
        TrainingError: see `check_whole`; a process is gone, or nothing moves any more.
    """
    check_whole(engine)
    engine.world.agree("the split", str(split))
    if list(split) == engine.split:
        return
    if not engine.stages:
        new = Engine(engine.spec, split, engine.executables)
        new.library.know(engine.library)
        take(new)
        return
    ready = ready or compiled_for_split(engine, split, rules)
    with interrupts_held():  # all of it, or none
        take(recut(engine, ready, rules))


def check_whole(engine: Engine) -> None:
    """Refuse to begin anew without a word.

    Raises:
        TrainingError: layers were lost on their way to another split.
    """
    if engine.given_up:
        raise TrainingError(
            "layers were lost on their way to other stages: begin again, from a checkpoint if there is one"
        )
