"""Checkpoints: every process writes and reads its own leaves; none ever holds the whole model.

Each process writes in a thread of its own. At step boundaries the processes tell each other how far they are
(`Checkpoints.advance`). Once all have written their leaves, rank 0 commits. If a process cannot write, or
dies, the earlier checkpoints stay as they are, and nobody waits for it in a barrier.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import msgspec
import numpy as np

from rrfp_jax import printing
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.format import (
    METADATA,
    Damaged,
    LeafRecord,
    LeafRecords,
    RunState,
    StateCheck,
    StoredBase,
    StoredLeaf,
    joined,
    read_leaf,
    write_leaf,
)
from rrfp_jax.checkpoint.leaves import (
    PARAMETERS,
    Forms,
    Key,
    Parts,
    Shards,
    forms_of,
    name_of,
    places_here,
    shards_to_write,
)
from rrfp_jax.errors import TrainingError, UsageError, caused_by
from rrfp_jax.runtime._jax import fetch, is_on_host, on_host
from rrfp_jax.runtime.run.waits import LONGEST_SLEEP_SECONDS, ForOther
from rrfp_jax.runtime.run.world import START_SECONDS, World

RUNNING = "running"

SMALL_BYTES = 2**16
"""Of an array that is compared between processes wherever it belongs: that costs nothing."""

FILES_AT_ONCE = 8
"""Arrays that are read or written at once: a disk serves several requests to sync in the time of one."""

EXAMPLES = 2
"""Leaves that a message names."""

OnError: TypeAlias = Literal["continue", "stop"]


Hashes: TypeAlias = Mapping[str, str]
"""SHA-256 of parameters' values, by path."""

BaseRefusal: TypeAlias = Callable[[Path, StoredBase], str]
"""(folder, what its checkpoint leaves out) -> why this process does not have that; "" if it does."""


def needs_base(folder: Path, base: StoredBase) -> str:
    """What to do about parameters that a checkpoint leaves out."""
    remedy = "give the Trainer an init= that reads them, and to resume freeze them as that run did"
    return f"{folder} leaves out {base}: {remedy}"


class NoneIntact(TrainingError):
    """There are checkpoints, but only damaged ones."""


class Restored(NamedTuple):
    """A checkpoint, as far as this process has asked for it."""

    run: RunState
    leaves: Mapping[Key, Parts]


@dataclass(frozen=True, kw_only=True)
class LeafSelection:
    """What of a checkpoint is wanted."""

    root: str | None = None  # what the keys of leaves must begin with, such as "params"
    sources: Mapping[Key, Key] = field(default_factory=dict)  # of leaves that are to have others' values
    layers: int | None = None  # of the model that they are for, for messages; None if that is not known
    base: BaseRefusal = needs_base

    def of(self, leaves: LeafRecords) -> LeafRecords:
        """The leaves below the root."""
        return {name: leaf for name, leaf in leaves.items() if self.root in (None, leaf.key[0])}


class _Saving(NamedTuple):
    """A checkpoint under way: first every rank writes its leaves, then rank 0 commits it."""

    run: RunState
    job: Future[Any]
    commits: bool = False


class Checkpoints:
    """The checkpoints of a run; every process calls every method at the same point.

    Args:
        folder: on a file system that all processes share.
        world: the processes.
        keep: how many to keep; older ones are removed once a newer one is complete.
        on_error: what to do when one cannot be written: "continue" training, or "stop" with an error.
        say: what rank 0 does with a message.
        tells: of each that it is complete.

    Raises:
        UsageError: on_error is neither.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        keep: int = 3,
        on_error: OnError = "continue",
        say: Callable[[str], None] = printing.say,
        tells: bool = True,
    ) -> None:
        if on_error not in ("continue", "stop"):
            raise UsageError(f"checkpoints: on_error={on_error!r}: choose 'continue' or 'stop'")
        self._folder, self._world = CheckpointFolder(folder), world
        self._keep, self._on_error = keep, on_error
        self._say = say if world.rank == 0 else lambda text: None
        self._tells = tells
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._copied = threading.Event()
        self._saving: _Saving | None = None
        self.trouble = 0, ""  # the rank that could not write the latest, and why; all processes agree
        self.complete: int | None = None  # step of the latest checkpoint completed here; all processes agree

    # Saving.

    def save(
        self, run: RunState, leaves: Sequence[tuple[Key, jax.Array]], hashes: Callable[[], Hashes] = dict
    ) -> None:
        """Begin to write a checkpoint; an earlier one that is under way is completed first, see `advance`.

        Leaves are of this process's devices, not to be donated before `copied` returns; of those that several
        have, one writes. Where several stages have the same key, they must have the same values. `hashes`
        gives those of what `run.base` names and this process has; the thread asks for them.
        """
        self.advance(to_the_end=True)
        self._copied.clear()
        own = [(key, leaf, shards) for key, leaf in leaves if (shards := shards_to_write(leaf))]
        with jax.transfer_guard_device_to_host("allow"):
            for _, _, shards in own:
                for shard in shards.values():
                    fetch(shard)
        self._saving = _Saving(run, self._thread.submit(self._write, run.step, own, hashes))
        _UNDER_WAY[self._folder.path] = self

    def copied(self) -> None:
        """Wait until the leaves being saved are copied to the host, so that they may be donated."""
        if self._saving is not None:
            what = f"the leaves of the checkpoint of step {self._saving.run.step} to be copied to the host"
            with self._world.waits_for(ForOther(what=what)) as wait:
                while not self._copied.wait(wait.shortened(LONGEST_SLEEP_SECONDS)):
                    wait.check()

    def advance(self, *, to_the_end: bool = False) -> None:
        """Go on with the checkpoint under way, if there is one; at every step boundary, or to its end.

        Raises:
            TrainingError: it cannot be written, and `on_error` is "stop"; or stages differ in a leaf that
                they share; or the end does not come within an hour.
        """
        limit = START_SECONDS if to_the_end else None
        while (saving := self._saving) is not None:
            what = f"the checkpoint of step {saving.run.step}"
            if to_the_end:
                with self._world.waits_for(ForOther(what=f"{what} to be written"), START_SECONDS):
                    wait([saving.job], START_SECONDS)
            states = self._world.gather(what, _state(saving.job), limit)
            if RUNNING in states:
                if to_the_end:
                    slow = self._world.describe(states.index(RUNNING))
                    raise TrainingError(f"{what}: {slow} has not written it in {START_SECONDS:.0f} s")
                return
            self._saving = None
            if any(states):
                self._give_up(saving.run.step, states)
            elif saving.commits:
                self.complete = saving.run.step
                if self._tells:
                    self._say(f"{what} is complete: {self._folder.final(saving.run.step)}")
            else:
                parts = self._world.gather(f"the leaves of {what}", saving.job.result(), limit)
                told = msgspec.convert(parts, list[tuple[list[StoredLeaf], dict[str, str]]])
                found, run = self._merged([own for own, _ in told]), saving.run
                if run.base is not None:
                    hashes = self._hashes([own for _, own in told])
                    run = replace(run, base=replace(run.base, sha256=hashes))
                commit = self._folder.commit if self._world.rank == 0 else lambda run, leaves, keep: None
                self._saving = _Saving(run, self._thread.submit(commit, run, found, self._keep), commits=True)
        _UNDER_WAY.pop(self._folder.path, None)

    def end(self) -> None:
        """At the script's end: complete the one under way if this process is alone, or say that it is not."""
        try:
            if self._world.size == 1:
                self.advance(to_the_end=True)
            elif self._saving is not None and not self._saving.commits:
                self._say(
                    f"the checkpoint of step {self._saving.run.step} was not completed: the script ended "
                    f"while it was written; call trainer.finish_saving() last"
                )
        except TrainingError as error:
            self._say(str(error))

    def _write(
        self, step: int, leaves: Sequence[tuple[Key, jax.Array, Shards]], hashes: Callable[[], Hashes]
    ) -> tuple[list[StoredLeaf], Hashes]:
        """Copy this process's shards of leaves and write them; runs in the thread."""
        try:
            arrays = [(key, _host_copy(leaf, shards)) for key, leaf, shards in leaves]
        finally:
            self._copied.set()
        staging = self._folder.staging(step)
        staging.mkdir(parents=True, exist_ok=True)
        ways = {key[1:] for key, _ in arrays if key[0] == PARAMETERS}  # from a layer to its parameters

        def write(key: Key, parts: Parts) -> StoredLeaf:
            of_layer = any(key[i:] in ways for i in range(1, len(key)))  # whose stage alone has it
            return write_leaf(staging, key, parts, parts.nbytes <= SMALL_BYTES or not of_layer)

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            return list(pool.map(lambda pair: write(*pair), arrays)), hashes()

    def _hashes(self, parts: Sequence[Hashes]) -> Hashes:
        """All ranks' hashes; TrainingError: two have read other values."""
        found: dict[str, str] = {}
        for path, digest in (pair for own in parts for pair in own.items()):
            if found.setdefault(path, digest) != digest:
                raise TrainingError(
                    f"{path}, which checkpoints leave out, differs between processes: its file was changed "
                    f"while the run had it, or is another one there; start again with one that stays"
                )
        return found

    def _merged(self, parts: Sequence[Sequence[StoredLeaf]]) -> dict[str, LeafRecord]:
        """All ranks' leaves by name.

        Raises:
            TrainingError: two have the same name and other contents.
        """
        found: dict[str, list[tuple[int, StoredLeaf]]] = {}
        for rank, part in enumerate(parts):
            for own in part:
                found.setdefault(name_of(own.leaf.key), []).append((rank, own))
        merged = {}
        for name, stored in found.items():
            if (leaf := joined([own for _, own in stored])) is None:
                ranks = " and ".join(self._world.describe(rank) for rank, _ in stored[:2])
                raise TrainingError(
                    f"{name} belongs to no layer, yet differs between {ranks}, so it cannot be saved: this "
                    f"optimizer does more than to treat each parameter alone"
                )
            merged[name] = leaf
        return merged

    def _give_up(self, step: int, states: Sequence[str]) -> None:
        if self._world.rank == 0:
            self._folder.discard(self._folder.staging(step))
        steps = self._folder.steps()
        latest = f"the latest complete one is of step {steps[-1]}" if steps else "there is no other"
        rank = next(rank for rank, state in enumerate(states) if state)
        self.trouble = rank, f"{self._world.describe(rank)}: {states[rank]}"
        reason = f"the checkpoint of step {step} cannot be written by {self.trouble[1]}; {latest}"
        if self._on_error == "stop":
            remedy = "free the disk, save elsewhere, or let training continue without (on_error='continue')"
            raise caused_by(rank, self._world.rank, f"{reason}; {remedy}")
        self._say(reason)

    # Restoring.

    def restore(
        self,
        wanted: Mapping[Key, Any],
        step: int | None = None,
        check: StateCheck = lambda run: None,
        only: LeafSelection = LeafSelection(),
    ) -> Restored | None:
        """The latest checkpoint, or that of a step. One that is damaged is passed over, and that is said.

        Args:
            wanted: specs (shape, dtype, sharding) of this process's leaves, or arrays like them; what its
                devices have of them is read, however they lay when they were saved.
            step: of the checkpoint; None for the latest.
            check: raises `ValueError` for a state that nobody could go on from.
            only: what of it is wanted, of a folder that may be another run's; None for everything.

        Returns:
            None if there is no checkpoint.

        Raises:
            UsageError: it has other leaves than all processes want together, or there is none of that step.
            NoneIntact: there are only damaged ones.
        """
        steps = self._world.decide("the steps of checkpoints", lambda: self._folder.candidates(step))
        parts = self._world.gather("the leaves to restore", forms_of(wanted.items()), START_SECONDS)
        everything = {name: form for part in parts for name, form in part.items()}
        for candidate in reversed(steps):
            found = self._read(candidate, wanted, everything, check, only)
            if found is not None:
                return found
        if steps:
            remedy = "; to begin anew, move it away" if step is None else ""
            raise NoneIntact(f"{self._folder.path}: {self._folder.none_intact(step)}{remedy}")
        return None

    def _read(
        self, step: int, wanted: Mapping[Key, Any], everything: Forms, check: StateCheck, only: LeafSelection
    ) -> Restored | None:
        """This process's leaves of a checkpoint; None if it is damaged for any process."""
        folder, found, damage, refusal = self._folder.final(step), None, "", ""
        try:
            run, leaves = self._folder.open(step, check)
            refusal = mismatch_reason(folder, run, leaves, everything, only)
            refusal = refusal or (only.base(folder, run.base) if run.base else "")
            if not refusal:
                absent = left_out(run)
                names = {key: name_of(only.sources.get(key, key)) for key in wanted}
                stored = {key: leaves[name] for key, name in names.items() if name not in absent}
                found = Restored(run=run, leaves=_read_all(folder, stored, wanted))
        except Damaged as error:
            damage = str(error)
        told = self._world.gather(f"the checkpoint of step {step} as read", [damage, refusal], START_SECONDS)
        damage, refusal = (next(filter(None, own), "") for own in zip(*told, strict=True))
        if damage:
            self._say(f"the checkpoint {folder} is rejected: {damage}")
            return None
        if refusal:
            raise UsageError(refusal)
        return found


_UNDER_WAY: dict[Path, Checkpoints] = {}
"""By folder, those that are being written, of which a script may forget to wait for the end."""


def _end_all() -> None:
    for checkpoints in [*_UNDER_WAY.values()]:
        checkpoints.end()


# Before pools take no more work, which `concurrent.futures` registered when it was imported.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]  # nothing public comes as early
os.register_at_fork(after_in_child=_UNDER_WAY.clear)  # the thread that writes is the parent's


def _state(job: Future[Any]) -> str:
    """RUNNING, empty if it has ended well, or what went wrong."""
    if not job.done():
        return RUNNING
    error = job.exception()
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}"
    return "" if error is None else f"{type(error).__name__}: {error}"


def _host_copy(leaf: jax.Array, shards: Shards) -> Parts:
    """The values in memory of the host's own; on CPU NumPy would share the device's, which is donated."""
    shared = is_on_host(leaf)
    copies = {place: np.array(own, copy=shared) for place, own in on_host(shards).items()}
    return Parts(leaf.shape, np.dtype(leaf.dtype), leaf.sharding.shard_shape(leaf.shape), copies)


def _read_all(folder: Path, leaves: Mapping[Key, LeafRecord], specs: Mapping[Key, Any]) -> dict[Key, Parts]:
    """Of these leaves, what this process's devices have; `Damaged` if a file has changed."""

    def read(key: Key) -> Parts:
        leaf, spec = leaves[key], specs[key]
        if spec.sharding is None:
            return read_leaf(folder, leaf)
        return read_leaf(folder, leaf, spec.sharding.shard_shape(spec.shape), places_here(spec))

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return dict(zip(leaves, pool.map(read, leaves), strict=True))


def left_out(run: RunState) -> frozenset[str]:
    """The names of parameters that a checkpoint has in files of others."""
    return frozenset(f"{PARAMETERS}.{path}" for path in run.base.sha256) if run.base else frozenset()


def leaf_differences(leaves: LeafRecords, here: Forms) -> list[str]:
    """How the leaves of a checkpoint differ from those wanted, as sentences."""
    there = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}
    found = [f"it lacks {name}" for name in here if name not in there]
    found += [f"its {name} is not in the model" for name in there if name not in here]
    other = [name for name in here if name in there and here[name] != there[name]]
    return found + [f"its {name} is {there[name]} instead of {here[name]}" for name in other]


def mismatch_reason(where: Path, run: RunState, leaves: LeafRecords, here: Forms, only: LeafSelection) -> str:
    """Why a checkpoint has other leaves than those wanted, whose forms are given; "" if not."""
    absent = left_out(run)
    if unknown := sorted(absent - here.keys()):
        return f"{where} is of another model: it leaves out {unknown[0]}, which is not in the model"
    here = {name: form for name, form in here.items() if name not in absent}
    misfits = leaf_differences(only.of(leaves), here)
    if not misfits:
        return ""
    params = {name: form for name, form in here.items() if name.partition(".")[0] == PARAMETERS}
    of_params = leaf_differences(LeafSelection(root=PARAMETERS).of(leaves), params)
    what, cause, remedy = "model", "the parameters differ", ""
    if not of_params:
        what, cause = "optimizer", "the parameters fit, the optimizer's state does not"
        if len(params) == len(here):
            cause = "the parameters fit, but this Trainer has no optimizer, or one without state"
        remedy = "; for the parameters alone: restore(folder, params_only=True)"
    elif run.layers and only.layers not in (None, len(run.layers)):
        cause = f"the checkpoint has {len(run.layers)} layers, this model {only.layers}"
    examples = of_params or misfits
    more = f"; and {len(examples) - EXAMPLES} more" if len(examples) > EXAMPLES else ""
    return (
        f"{where} is of another {what}: {cause} ({'; '.join(examples[:EXAMPLES])}{more}){remedy}; "
        f"{METADATA} in it has the config that it was saved with"
    )
