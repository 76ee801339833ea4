"""Initial parameters: from the layers themselves, from a user's function, or some of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import INDEX, LayerShapes, Pipeline
from rrfp_jax.runtime.model.roles import leaf_path, leaf_paths
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler

InitFunction: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], Any]
"""(path such as "3.attention.query", spec) -> array, or None for the layer's own initial value."""


@runtime_checkable
class ModelCheckedInit(Protocol):
    """An init function that can tell beforehand, of all parameters, whether it fits."""

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """Raise `UsageError` for a model that it does not fit.

        `params` are the paths of all its parameters; `owners` has by path of each tied alias its owner's,
        which is the one that is asked for.
        """


@runtime_checkable
class SourcedInit(Protocol):
    """An init function whose values are in files of others, and are found there again when a run resumes."""

    def source_of(self, path: str) -> str | None:
        """The files that have a parameter's value, for messages; None if it is in no such file."""


@dataclass(frozen=True, kw_only=True)
class InitialParams:
    """Makes initial parameters on the devices of one stage.

    Values of a layer depend on (seed, layer index) only. Those of a tied parameter depend on its owner's
    layer, which is made here once more rather than sent. A layer that `init` gives whole does not make its
    own.
    """

    pipe: Pipeline
    shapes: Sequence[LayerShapes]
    fields: Mapping[str, jax.ShapeDtypeStruct]
    seed: int
    init: InitFunction | None
    owners: Mapping[str, str]
    compiler: Compiler
    sharding: Sharding
    _programs: dict[Any, Compiled] = field(default_factory=dict, init=False)

    def of(self, layers: range) -> Params:
        """The parameters of some layers, {layer index as text: tree}; `UsageError` for what `init` gives."""
        return {str(layer): self._of_layer(layer) for layer in layers}

    def _of_layer(self, layer: int) -> Params:
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.shapes[layer].params)
        places = zip(leaves, self._lies(layer), strict=True)
        values = [self._from_elsewhere(leaf_path(layer, path), spec, lies) for (path, spec), lies in places]
        if any(value is None for value in values):
            own = jax.tree.leaves(self._made(layer))
            values = [made if value is None else value for value, made in zip(values, own, strict=True)]
        return jax.tree.unflatten(structure, values)

    def _lies(self, layer: int) -> list[Any]:
        specs = self.sharding.of_params({str(layer): self.shapes[layer].params})
        return [self.compiler.stage_mesh.sharding(spec) for spec in specs]

    def compile(self, layers: range) -> None:
        """Compile what `of` runs if `init` gives nothing."""
        for layer in layers:
            paths = leaf_paths({str(layer): self.shapes[layer].params})
            owners = {int(self.owners[path].partition(".")[0]) for path in paths if path in self.owners}
            for one in sorted({layer} | owners):
                self._program(one)

    def _made(self, layer: int) -> Params:
        numbers = self.compiler.stage_mesh.put((np.uint32(self.seed), np.uint32(layer)))
        return self._program(layer)(*numbers)  # type: ignore[no-any-return]

    def _program(self, layer: int) -> Compiled:
        """Its program: seed and layer, both like an index -> what the layer makes itself."""
        shapes = self.shapes[layer]
        leaves, structure = jax.tree.flatten(shapes.carry_in)
        out = jax.tree.unflatten(jax.tree.structure(shapes.params), self._lies(layer))
        # Repeats of a layer share a program.
        kind = id(self.pipe.layers[layer]), structure, tuple(leaves), tuple(jax.tree.leaves(out))
        if kind not in self._programs:
            init_layer = partial(self.pipe.init_layer, layer, shapes, self.fields)
            self._programs[kind] = self.compiler(init_layer, INDEX, INDEX, out=out, effort="once")
        return self._programs[kind]

    def _from_elsewhere(self, path: str, spec: jax.ShapeDtypeStruct, lies: Any) -> jax.Array | None:
        """A value that is the user's or the owner's; None if it is the layer's own."""
        owner = self.owners.get(path, path)
        given = None if self.init is None else self.init(owner, spec)
        if given is not None:
            got = (getattr(given, "shape", None), getattr(given, "dtype", type(given).__name__))
            if got != (spec.shape, spec.dtype):
                raise UsageError(
                    f"init({owner!r}) gave {got[1]}{list(got[0] or ())}; the parameter is "
                    f"{spec.dtype}{list(spec.shape)}"
                )
            # Copied, for updates donate it.
            return self.compiler.stage_mesh.put(np.array(given), lies)  # type: ignore[no-any-return]
        if owner == path:
            return None
        layer = owner.partition(".")[0]
        tree = {layer: self._made(int(layer))}
        return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))[owner]  # type: ignore[no-any-return]
