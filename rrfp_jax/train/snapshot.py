"""What a checkpoint holds of this process's stages, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax

from rrfp_jax.checkpoint.format import RunState, StoredLayer
from rrfp_jax.checkpoint.leaves import OPTIMIZER, PARAMETERS, Key, Parts, filled, keyed, plain_key
from rrfp_jax.checkpoint.saving import Checkpoints, LeafSelection, OnError
from rrfp_jax.errors import UsageError
from rrfp_jax.json_files import as_kind
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.model.roles import leaf_paths
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.optimizer import Optimizer
from rrfp_jax.runtime.stages.stage import Stage
from rrfp_jax.train.nonfinite import Standing


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


def put_back(stages: Iterable[Stage], optimizers: Iterable[Optimizer], leaves: Mapping[Key, Parts]) -> None:
    """Give stages and optimizers what `leaves_of` had found."""
    for stage in stages:
        stage.replace(filled(stage.params, leaves, PARAMETERS))
    for optimizer in optimizers:
        optimizer.replace(filled(optimizer.tree, leaves, OPTIMIZER))


def standing_of(run: RunState) -> Standing:
    """How training stood.

    Raises:
        ValueError: it is something else.
    """
    return as_kind(dict(run.standing), Standing)


def check_seed(run: RunState, seed: int) -> None:
    """Refuse to go on from a run with another seed.

    Raises:
        UsageError: it had another.
    """
    if run.seed != seed:
        raise UsageError(
            f"seed={seed}: the checkpoint of step {run.step} is of a run with seed={run.seed}, whose random "
            f"keys and data order follow from it; give that one"
        )


class Saves:
    """The checkpoints that a Trainer writes and reads; all processes call every method at the same point.

    Args:
        engine: gives the present one, with the stages of this process once it has been started.
        world: the run's processes.
        seed: of the run.
    """

    def __init__(self, engine: Callable[[], Engine], world: World, seed: int) -> None:
        self._present, self._world, self._seed = engine, world, seed
        self._latest: Checkpoints | None = None  # the folder that was last written to
        self._held: Checkpoints | None = None  # in the host's memory

    @property
    def _engine(self) -> Engine:
        return self._present()

    def save(self, folder: Path, keep: int, on_error: OnError, run: RunState) -> None:
        """Begin to write a checkpoint, once an earlier one is complete."""
        self.finish()
        self._latest = Checkpoints(folder, self._world, keep=keep, on_error=on_error)
        self._latest.save(run, self._leaves())

    def hold(self, folder: Path, run: RunState) -> bool:
        """Write a checkpoint in place of the one before; whether it is complete, equal on all processes.

        That it cannot be written is said, and training goes on.
        """
        if self._held is None:
            self._held = Checkpoints(folder, self._world, keep=1, on_error="continue", tells=False)
        self._held.save(run, self._leaves())
        self._held.advance(to_the_end=True)
        return self._held.complete == run.step

    def _leaves(self) -> list[tuple[Key, jax.Array]]:
        """What this process writes: of replicas that are alike, the first one's."""
        first = self._engine.layout.stages  # from here on are those of other replicas
        stages = [stage for stage_replica, stage in self._engine.stages.items() if stage_replica < first]
        shared = [own for own in self._engine.optimizers if own.stage_mesh.replicas > 1]
        own = [own for own in self._engine.optimizers if own not in shared and own.stages[0].index < first]
        return leaves_of(stages, [*shared, *own])

    def finish(self) -> bool:
        """Wait for the one under way; whether the latest is complete."""
        if self._latest is None:
            return False
        self._latest.advance(to_the_end=True)
        return self._latest.complete is not None

    def step_begins(self) -> None:
        """Go on with the one under way."""
        if self._latest is not None:
            self._latest.advance()

    def update_begins(self) -> None:
        """Wait until what is being saved has been copied: the update donates it."""
        if self._latest is not None:
            self._latest.copied()

    def restore(self, folder: Path, step: int | None) -> tuple[RunState, Standing] | None:
        """Put back the latest intact checkpoint, or that of a step; None if there is none."""
        stages, optimizers = list(self._engine.stages.values()), self._engine.optimizers
        wanted = {
            key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for key, leaf in leaves_of(stages, optimizers)
        }
        everything = LeafSelection(layers=len(self._engine.library.params))
        found = Checkpoints(folder, self._world).restore(wanted, step, standing_of, everything)
        if found is None:
            return None
        check_seed(found.run, self._seed)
        put_back(stages, optimizers, found.leaves)
        return found.run, standing_of(found.run)

    def restore_params(self, folder: Path, step: int | None) -> None:
        """Take the parameters of the latest intact checkpoint, or that of a step.

        Optimizers begin anew with them. Aliases of tied parameters take their owners' values: they may not
        have been tied when it was saved.

        Raises:
            UsageError: there is none.
        """
        stages = list(self._engine.stages.values())
        wanted = {
            key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for key, leaf in leaves_of(stages, [])
        }
        specs, owners = self._engine.library.params, self._engine.library.roles.owners
        keys = dict(zip(leaf_paths(specs), (key for key, _ in keyed(specs, PARAMETERS)), strict=True))
        sources = {keys[alias]: keys[owner] for alias, owner in owners.items()}
        only = LeafSelection(root=PARAMETERS, sources=sources, layers=len(specs))
        found = Checkpoints(folder, self._world).restore(wanted, step, only=only)
        if found is None:
            raise UsageError(f"{folder}: no checkpoint is there to take parameters from")
        put_back(stages, [], found.leaves)
        for optimizer in self._engine.optimizers:
            optimizer.begin()
