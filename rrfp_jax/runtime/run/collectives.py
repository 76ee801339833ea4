"""What all processes of a run do together: gather values, compare them, wait for what all compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from time import sleep
from typing import TYPE_CHECKING, Any

from rrfp_jax.errors import Disagreement, TrainingError
from rrfp_jax.runtime.run.frames import Message, pieces, whole
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.membership import Membership
from rrfp_jax.runtime.run.signals import Stop
from rrfp_jax.runtime.run.waits import LONGEST_SLEEP_SECONDS, ForDevices, ForGather, Waits, pause

if TYPE_CHECKING:
    import jax


class Gathered(Message, frozen=True):
    """A piece of a rank's value for a gather: number `index` of `count`."""

    number: int
    what: str
    index: int
    count: int
    piece: bytes


class Compared(Message, frozen=True):
    """A rank's value of something that must be equal everywhere."""

    number: int
    what: str
    value: dict[str, str]  # by name; one that stands alone has none


class Collectives:
    """What all processes do together: every process calls the same ones in the same order."""

    def __init__(self, membership: Membership, mailbox: Mailbox | None, waits: Waits, stop: Stop) -> None:
        self._members, self._mailbox, self._waits, self._stop = membership, mailbox, waits, stop
        self._size = len(membership.others) + 1
        self.gathers = self._comparisons = 0
        self._values: dict[int, dict[int, tuple[str, Any, int]]] = {}  # by gather and rank
        self._pieces: dict[tuple[int, int], list[bytes]] = {}
        self._compared: dict[int, dict[int, Compared]] = {}
        if mailbox is not None:
            mailbox.on(Gathered, self._on_gathered)
            mailbox.on(Compared, self._on_compared)

    def gather(self, what: str, value: Any, limit: float | None = None) -> list[Any]:
        """Every rank's value, of plain data, in rank order; waits for all, up to a limit in seconds.

        Raises:
            PeerLost: a rank whose value has not come is gone.
            Disagreement: another rank is at something else.
            TrainingError: it took longer than the limit; None is `waits.stall_seconds`.
        """
        number, self.gathers = self.gathers, self.gathers + 1
        values = self._values.setdefault(number, {})
        requested = int(self._stop.requested)
        values[self._members.rank] = (what, value, requested)
        if self._mailbox is not None:
            parts = pieces([value, requested])
            for index, piece in enumerate(parts):
                self._mailbox.post_all(Gathered(number, what, index, len(parts), piece))
            self._await(self._mailbox, what, values, limit)
        del self._values[number]
        me = self._members.rank
        for rank, (theirs, _, _) in sorted(values.items()):
            if theirs != what:
                raise Disagreement(
                    f"{self._members.describe(me)} is at {what}, {self._members.describe(rank)} at {theirs}: "
                    f"every process must run the same program with the same arguments",
                    rank,
                )
        self._stop.hear(max(requested for _, _, requested in values.values()))
        return [values[rank][1] for rank in range(self._size)]

    def agree(self, what: str, value: str | Mapping[str, str]) -> None:
        """Compare a value, or several by name, with the other ranks' without waiting for theirs.

        Raises:
            Disagreement: now, or whenever messages are handled next; on every rank, naming the odd one.
        """
        if self._mailbox is not None:
            number, self._comparisons = self._comparisons, self._comparisons + 1
            message = Compared(number, what, {"": value} if isinstance(value, str) else dict(value))
            self._mailbox.post_all(message)
            self._on_compared(self._members.rank, message)

    def await_ready(self, what: str, arrays: Sequence[jax.Array], limit: float | None = None) -> None:
        """Wait for what this process's devices, or those of several processes together, compute.

        Raises:
            PeerLost: a process is gone.
            TrainingError: the computation failed, or nothing came of it up to the limit.
        """
        import jax  # here: the launcher reads this package without JAX

        with self._waits.waits_for(ForDevices(what=what), limit) as wait:
            try:
                for array in arrays:
                    while not array.is_ready():  # type: ignore[attr-defined]
                        wait.check()
                        self._look_after(wait.shortened(min(pause(wait.waited), LONGEST_SLEEP_SECONDS)))
                jax.block_until_ready(arrays)
            except jax.errors.JaxRuntimeError as error:
                if self._mailbox is not None:
                    self._mailbox.hear_of_losses()
                raise TrainingError(f"{what}: {error}") from error

    def _look_after(self, seconds: float) -> None:
        if self._mailbox is None:
            sleep(seconds)
            return
        self._mailbox.pump()
        self._mailbox.membership.require_all()
        self._mailbox.sleep(seconds)

    def _await(self, mailbox: Mailbox, what: str, values: Mapping[int, Any], limit: float | None) -> None:
        """Until every rank's value is there."""

        def missing() -> list[int]:
            return [rank for rank in range(self._size) if rank not in values]

        def awaits() -> Sequence[ForGather]:
            return [ForGather(number=self.gathers, what=what, ranks=tuple(missing()))]

        with self._waits.waits_for(awaits, limit) as wait:
            known = mailbox.membership.gone
            mailbox.pump()
            while awaited := missing():
                mailbox.membership.require(awaited, known)
                wait.check()
                mailbox.sleep(wait.shortened(LONGEST_SLEEP_SECONDS))
                known = mailbox.membership.gone
                mailbox.pump()

    def _on_gathered(self, rank: int, message: Gathered) -> None:
        parts = self._pieces.setdefault((rank, message.number), [])
        parts.append(message.piece)  # messages of a rank come in order
        if message.index == message.count - 1:
            del self._pieces[rank, message.number]
            value, requested = whole(parts)
            self._values.setdefault(message.number, {})[rank] = (message.what, value, requested)

    def _on_compared(self, rank: int, message: Compared) -> None:
        known = self._compared.setdefault(message.number, {})
        known[rank] = message
        if len(known) < self._size:
            return
        del self._compared[message.number]
        texts = {rank: repr(one) for rank, one in sorted(known.items())}
        usual = Counter(texts.values()).most_common(1)[0][0]
        odd = next((rank for rank, text in texts.items() if text != usual), None)
        if odd is None:
            return
        value = known[odd].value
        elsewhere = next(known[rank].value for rank, text in texts.items() if text == usual)
        name = next((name for name in [*value, *elsewhere] if value.get(name) != elsewhere.get(name)), "")
        raise Disagreement(
            f"{known[odd].what}{name and ': '}{name} is {value.get(name)} on {self._members.describe(odd)}, "
            f"elsewhere it is {elsewhere.get(name)}: every process must run the same program on the same "
            f"data",
            odd,
        )
