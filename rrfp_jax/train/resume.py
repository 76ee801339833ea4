"""What a checkpoint holds of a Trainer, and how training goes on from one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rrfp_jax.checkpoint.folder import MANIFEST, CheckpointFolder
from rrfp_jax.checkpoint.format import Damaged, RunState, StoredBase, StoredLayer
from rrfp_jax.checkpoint.leaves import (
    OPTIMIZER,
    PARAMETERS,
    Key,
    filled,
    forms_of,
    keyed,
    name_of,
)
from rrfp_jax.checkpoint.saving import (
    BaseRefusal,
    Checkpoints,
    LeafSelection,
    OnError,
    Restored,
    left_out,
    mismatch_reason,
    needs_base,
)
from rrfp_jax.checkpoint.shared_folder import require_shared
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable
from rrfp_jax.json_files import Count, as_kind
from rrfp_jax.loss_scale import LossScale
from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.model.layers import plain_key
from rrfp_jax.runtime.model.roles import leaf_paths
from rrfp_jax.runtime.run.world import START_SECONDS, World
from rrfp_jax.runtime.stages.optimizer import Optimizer
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.train.base import FrozenBase


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """How training stands after some steps, equal on all processes.

    Attributes:
        loss_scale: of the next step.
        skipped: steps that were left out so far.
        in_vain: of them, those in a row up to now for which the loss scale could not be lowered.
    """

    loss_scale: LossScale
    skipped: Count = 0
    in_vain: Count = 0

    def after(self, finite: bool) -> TrainingState:
        """After one more step."""
        scale = self.loss_scale.after(finite) if self.loss_scale.dynamic else self.loss_scale
        if finite:
            return replace(self, loss_scale=scale, in_vain=0)
        in_vain = self.in_vain + 1 if scale.value == self.loss_scale.value else 0
        return TrainingState(loss_scale=scale, skipped=self.skipped + 1, in_vain=in_vain)


def leaves_of(stages: Iterable[Stage], optimizers: Iterable[Optimizer]) -> list[tuple[Key, jax.Array]]:
    """All arrays that an update changes, by layer and parameter; see `leaves.Key`."""
    trees = [(PARAMETERS, stage.params) for stage in stages]
    trees += [(OPTIMIZER, optimizer.tree) for optimizer in optimizers]
    return [pair for name, tree in trees for pair in keyed(tree, name)]


def stored_layers(engine: Engine) -> tuple[StoredLayer, ...]:
    """What a checkpoint says of the layers, so that their parameters can be taken out without the model."""
    specs = engine.library.params
    leaves = [jax.tree_util.tree_leaves_with_path(specs[str(i)]) for i in range(len(specs))]
    paths = [tuple(tuple(map(plain_key, path)) for path, _ in own) for own in leaves]
    kinds = [layer.kind for layer in engine.pipe.layers]
    return tuple(StoredLayer(kind=kind, paths=own) for kind, own in zip(kinds, paths, strict=True))


def state_of(run: RunState) -> TrainingState:
    """How training stood."""
    return as_kind(dict(run.standing), TrainingState)


def _other_seed(run: RunState, seed: int) -> str:
    """Why a run with this seed cannot go on from another run; "" if it can."""
    if run.seed == seed:
        return ""
    return (
        f"seed={seed}: the checkpoint of step {run.step} is of a run with seed={run.seed}, whose random "
        f"keys and data order follow from it; give that one"
    )


class CheckpointWriter:
    """The checkpoints that a Trainer writes and reads; all processes call every method at the same point."""

    def __init__(self, engine: Callable[[], Engine], seed: int) -> None:
        self._engine, self._world, self._seed = engine, engine().world, seed
        init = engine().spec.init
        self._base = init if isinstance(init, FrozenBase) else None
        if self._base is not None:  # an engine that layers have moved from is not kept
            self._base.roles = lambda: engine().library.roles
        self._told = False  # what checkpoints leave out
        self._shared = set[Path]()  # folders that all processes have seen
        self._tidy = set[Path]()  # where nothing is left of saves that were broken off
        self.latest: Checkpoints | None = None  # the folder that was last written to
        self._held: Checkpoints | None = None  # in the host's memory

    def save(self, folder: Path, keep: int, on_error: OnError, run: RunState) -> None:
        """Begin to write a checkpoint, once an earlier one is complete."""
        self.finish()
        self.require_shared(folder)
        if folder not in self._tidy:
            self._world.decide("what is left of earlier saves", partial(_tidy, folder), START_SECONDS)
            self._tidy.add(folder)
        self.latest = Checkpoints(folder, self._world, keep=keep, on_error=on_error)
        run, leaves, hashes = self._without_base(run)
        if run.base is not None and not self._told and self._world.rank == 0:
            say(f"checkpoints leave out {run.base}: to resume, give these again")
        self._told = True
        self.latest.save(run, leaves, hashes)

    def require_shared(self, folder: Path) -> None:
        """UsageError if not all processes see the same in a folder, which is looked at once."""
        if self._world.size > 1 and folder not in self._shared:
            require_shared(self._world, folder)
            self._shared.add(folder)

    def hold(self, folder: Path, run: RunState) -> bool:
        """Write a checkpoint in place of the one before; whether it is complete, equal on all processes.

        That it cannot be written is said, and training goes on.
        """
        if self._held is None:
            self._held = Checkpoints(folder, self._world, keep=1, on_error="continue", tells=False)
        self._held.save(*self._without_base(run))
        self._held.advance(to_the_end=True)
        return self._held.complete == run.step

    def _without_base(
        self, run: RunState
    ) -> tuple[RunState, list[tuple[Key, jax.Array]], Callable[[], Mapping[str, str]]]:
        """What is kept of a run, the leaves that are not in files of others, and the hashes of others."""
        if self._base is None:
            return run, self._leaves(), dict
        run = replace(run, base=self._base.kept())
        absent, leaves = left_out(run), self._leaves()
        hashes = partial(self._base.sha256, _by_path(leaf for leaf in leaves if name_of(leaf[0]) in absent))
        return run, [(key, leaf) for key, leaf in leaves if name_of(key) not in absent], hashes

    def _base_refusal(self, leaves: Sequence[tuple[Key, jax.Array]]) -> BaseRefusal:
        """For what a checkpoint may leave out of these leaves."""
        return needs_base if self._base is None else partial(self._base.refusal, _by_path(leaves))

    def _leaves(self) -> list[tuple[Key, jax.Array]]:
        """What this process writes: of replicas that are alike, the first one's."""
        engine = self._engine()
        first = engine.layout.stages  # from here on are those of other replicas
        stages = [stage for stage_replica, stage in engine.stages.items() if stage_replica < first]
        mine = [
            own for own in engine.optimizers if own.stage_mesh.replicas > 1 or own.stages[0].index < first
        ]
        return leaves_of(stages, mine)

    def finish(self) -> bool:
        """Wait for the one under way; whether the latest is complete."""
        if self.latest is None:
            return False
        self.latest.advance(to_the_end=True)
        return self.latest.complete is not None

    def check_resume(self, folder: Path, step: int | None) -> Found | None:
        """The checkpoint that would be restored, as rank 0 sees it; None without one.

        Nothing is compiled. Small files are read, not leaves: a damaged checkpoint may yet be passed over.
        The engine has examined a bucket.
        """
        self.finish()  # else it would be taken for one that was broken off
        find = partial(_seen, self._engine(), self._seed, CheckpointFolder(folder), step)
        found = self._world.decide("the checkpoint to go on from", find, START_SECONDS)
        return None if found is None else Found(*found)

    def restore(self, folder: Path, step: int | None) -> tuple[RunState, TrainingState] | None:
        """Put back the latest intact checkpoint, or that of a step; None if there is none."""
        engine = self._engine()
        stages, optimizers = list(engine.stages.values()), engine.optimizers
        leaves = leaves_of(stages, optimizers)
        everything = LeafSelection(layers=len(engine.library.params), base=self._base_refusal(leaves))
        found = Checkpoints(folder, self._world).restore(_wanted(leaves), step, state_of, everything)
        if found is None:
            return None
        if refusal := _other_seed(found.run, self._seed):
            raise UsageError(refusal)
        del leaves, everything  # else all that is replaced would be there twice
        self._put_back(stages, optimizers, found)
        return found.run, state_of(found.run)

    def restore_params(self, folder: Path, step: int | None) -> None:
        """Take the parameters of the latest intact checkpoint, or that of a step; UsageError: there is none.

        Optimizers begin anew with them. Aliases of tied parameters take their owners' values: they may not
        have been tied when it was saved.
        """
        engine = self._engine()
        stages = list(engine.stages.values())
        specs, owners = engine.library.params, engine.library.roles.owners
        keys = dict(zip(leaf_paths(specs), (key for key, _ in keyed(specs, PARAMETERS)), strict=True))
        sources = {keys[alias]: keys[owner] for alias, owner in owners.items()}
        leaves = leaves_of(stages, [])
        refusal = self._base_refusal([(key, leaf) for key, leaf in leaves if key not in sources])
        only = LeafSelection(root=PARAMETERS, sources=sources, layers=len(specs), base=refusal)
        found = Checkpoints(folder, self._world).restore(_wanted(leaves), step, only=only)
        if found is None:
            raise no_params(folder)
        del leaves, refusal, only  # as above
        self._put_back(stages, [], found)
        for optimizer in engine.optimizers:
            optimizer.begin()

    def _put_back(self, stages: Sequence[Stage], optimizers: Sequence[Optimizer], found: Restored) -> None:
        """Give them a checkpoint's values; what it leaves out they have already."""
        leaves = {**dict(leaves_of(stages, [])), **found.leaves}
        for stage in stages:
            stage.replace(filled(stage.params, leaves, PARAMETERS))
        for optimizer in optimizers:
            optimizer.replace(filled(optimizer.tree, leaves, OPTIMIZER))
        if self._base is not None:
            self._base.replaced(found.run.base.sha256 if found.run.base is not None else ())


def _tidy(folder: Path) -> None:
    """Remove what saves that were broken off have left in the folder that this Trainer begins to write to."""
    for unfinished in CheckpointFolder(folder).tidy():
        say(f"the checkpoint {unfinished} was never completed: it is removed")


def _by_path(leaves: Iterable[tuple[Key, jax.Array]]) -> dict[str, jax.Array]:
    """Parameters by path, such as "3.attention.query"."""
    return {name_of(key[1:]): leaf for key, leaf in leaves if key[0] == PARAMETERS}


def _wanted(leaves: Sequence[tuple[Key, jax.Array]]) -> dict[Key, jax.ShapeDtypeStruct]:
    return {key: jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=own.sharding) for key, own in leaves}


def given_hyperparameters(engine: Engine) -> Mapping[str, float]:
    """Those of this process that no schedule gives; empty where another process tells them."""
    return {
        name: value
        for optimizer in engine.optimizers
        if optimizer.hyperparams is not None
        for name, value in optimizer.hyperparams.kept_numbers(optimizer.state).items()
    }


def say_restored_hyperparameters(engine: Engine, asked: Mapping[str, float]) -> None:
    """Say which ones of the checkpoint count instead of those that the optimizer was made with.

    All processes together, after a checkpoint has been put back; `asked` were given before.
    """
    now = given_hyperparameters(engine)
    mine = [[name, asked[name], now[name]] for name in now if now[name] != asked[name]]
    told = engine.world.gather("the optimizer's restored numbers", mine)
    every = dict.fromkeys(tuple(number) for own in told for number in own)  # replicas tell the same ones
    for name, new, old in every if engine.world.rank == 0 else ():
        say(
            f"{name} stays {old:g}, as the checkpoint has it in the optimizer's state; {new:g} was asked "
            f"for. Only what is a schedule from a run's beginning on can be changed: "
            f"{name}=optax.constant_schedule({new:g})",
        )


class Found(NamedTuple):
    """A checkpoint that a run would go on from.

    Attributes:
        config: that was kept with it.
        refusal: why this Trainer cannot; empty if it can.
        steps: that were done; 0 if none that is there can be opened, which `restore` says.
    """

    config: Any = None
    refusal: str = ""
    steps: int = 0


def _seen(engine: Engine, seed: int, folder: CheckpointFolder, step: int | None) -> Found | None:
    candidates = folder.candidates(step)
    for candidate in reversed(candidates):
        try:
            run, leaves = folder.open(candidate, state_of)
        except (Damaged, OSError):
            continue  # `restore` says so
        except UsageError as error:
            return Found(refusal=str(error))
        there, everything = folder.final(candidate), LeafSelection(layers=len(engine.library.params))
        refusal = _other_seed(run, seed)
        own = keyed(engine.library.params, PARAMETERS) + keyed(engine.staging.optimizer_state, OPTIMIZER)
        refusal = refusal or mismatch_reason(there, run, leaves, forms_of(own), everything)
        if run.base is not None and not _reads(engine, run.base):
            refusal = refusal or needs_base(there, run.base)
        return Found(run.config, refusal, candidate)
    return Found() if candidates else None


def _reads(engine: Engine, base: StoredBase) -> bool:
    """Whether an init function takes from files all that a checkpoint leaves out, whatever their contents."""
    init, frozen = engine.spec.init, engine.library.roles.frozen
    return isinstance(init, FrozenBase) and all(own in frozen and init.source_of(own) for own in base.sha256)


def say_none(world: World, folder: Path, steps: int) -> None:
    """Say that a folder has no checkpoint, so that training begins with this step; all processes together."""

    def find() -> None:
        if reason := _other_folder(folder):
            raise UsageError(reason)
        say(f"no checkpoint in {folder}: training begins with step {steps}")

    world.decide("what is in the folder of checkpoints", find, START_SECONDS)


def no_params(folder: Path) -> UsageError:
    """That no checkpoint is there to take parameters from."""
    return UsageError(_other_folder(folder) or f"{folder}: no checkpoint is there to take parameters from")


def _other_folder(folder: Path) -> str:
    """Why a folder without checkpoints is not one for them; empty if it can be."""
    try:
        names = CheckpointFolder(folder).other_things()
    except OSError as error:
        return f"{folder}: cannot be read: {error.strerror}"
    if not names:
        return ""
    if MANIFEST in names:
        return f"{folder} is itself a checkpoint: give restore() the folder that it is in, and its step"
    beside = Path(f"{folder}.checkpoints")
    remedy = f"did you mean {beside}?" if beside.is_dir() else "give a folder of checkpoints, or a new one"
    return f"{folder} has no checkpoint, but {printable(', '.join(names[:3]))}: {remedy}"
