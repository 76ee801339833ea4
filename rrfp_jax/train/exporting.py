"""Takes the trained model out: of a Trainer, or of a folder of checkpoints, as flax itself has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.checkpoint.folder import CheckpointView, readable_checkpoints
from rrfp_jax.checkpoint.format import Damaged, StoredLayer
from rrfp_jax.checkpoint.leaves import (
    PARAMETERS,
    Key,
    Place,
    filled,
    forms_of,
    keyed,
    name_of,
    shards_to_write,
    slices_of,
)
from rrfp_jax.checkpoint.saving import leaf_differences
from rrfp_jax.errors import UsageError
from rrfp_jax.printing import say
from rrfp_jax.runtime._jax import on_host
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.model.layers import FunctionLayer, Params, nested
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.user_errors import init_takes_carry
from rrfp_jax.runtime.run.world import START_SECONDS
from rrfp_jax.train.resume import leaves_of

if TYPE_CHECKING:
    from rrfp_jax.train.trainer import Trainer


def whole_params(engine: Engine) -> Params:
    """Those of a started engine, {layer index as text: tree}, on the host; a layer at a time."""
    # Further stage replicas are of other replicas, which are alike.
    stages = [stage for number, stage in engine.stages.items() if number < engine.layout.stages]
    mine = dict(leaves_of(stages, []))
    found = {}
    for layer, specs in engine.library.params.items():
        wanted = keyed(specs, PARAMETERS, layer)
        own = [_told(mine, key) for key, _ in wanted]
        parts = engine.world.gather(f"the parameters of layer {layer}", own, START_SECONDS)
        arrays = {
            key: _joined(spec, [part for rank in parts for part in rank[i]])
            for i, (key, spec) in enumerate(wanted)
        }
        found[layer] = filled(specs, arrays, PARAMETERS, layer)
    return found


def _told(mine: Mapping[Key, jax.Array], key: Key) -> list[tuple[Place, Any, Any]]:
    """This process's parts of an array as plain data: place, shape and bytes."""
    leaf = mine.get(key)
    parts = {} if leaf is None else shards_to_write(leaf)
    return [(place, part.shape, on_host(part).tobytes()) for place, part in parts.items()]


def _joined(spec: jax.ShapeDtypeStruct, parts: list[Any]) -> np.ndarray[Any, Any]:
    """An array from all its parts."""
    array = np.empty(spec.shape, spec.dtype)
    for place, shape, content in parts:
        array[slices_of(place, shape)] = np.frombuffer(content, spec.dtype).reshape(shape)
    return array


def flax_states(layers: Sequence[Any], params: Params, modules: bool) -> list[Any]:
    """A state of each layer, or what can be called as it is; see `rrfp.export`."""
    with _on_host(), jax.transfer_guard("allow"):
        arrays = [jax.tree.map(_array, params[str(index)]) for index in range(len(layers))]
    if modules:
        return [layer.fill(own) for layer, own in zip(layers, arrays, strict=True)]
    return [_state(layer.kind, own) for layer, own in zip(layers, arrays, strict=True)]


def _state(kind: str, params: Params) -> Any:
    """A layer's parameters as flax has them."""
    if kind == "nnx":
        from flax import nnx

        return nnx.State(params)
    if kind == "linen":
        from rrfp_jax.runtime.model.flax_layers import variables_of

        return variables_of(params)
    return params


def _on_host() -> Any:
    """Inside, arrays are made in the host's memory, without being bound to it."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS names others only
        return nullcontext()


def _array(leaf: np.ndarray[Any, Any]) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise UsageError(
            f"export: a parameter is {leaf.dtype}, which JAX makes narrower here; set jax_enable_x64 first"
        )
    return jnp.array(leaf)


def export(
    source: Trainer | str | PathLike[str],
    *,
    pipe: Pipeline | None = None,
    step: int | None = None,
    modules: bool = False,
) -> list[Any]:
    """The trained model, layer by layer, whole in this process, for plain flax.

        states = rrfp.export("runs/quickstart.checkpoints")  # or trainer.params()
        nnx.update(block, states[1])  # of an NNX layer: a state
        logits = head.apply(states[-1], carry, mb)  # of a Linen layer: its variables

        for layer in trainer.params(modules=True):
            carry = layer(carry, rrfp.EvaluationBatch(fields))  # with call=: call(layer, carry, ...)

    A Trainer is asked by all its processes together, and each of them gets the whole model; where they have
    no room for that, save, and export the folder in one process. A folder may be that of a run of any number
    of processes and of any mesh; nothing of the run is needed, and it may still be running.

    Args:
        source: a Trainer that has been started, the folder of a run's checkpoints, or one of them.
        pipe: the model, for a folder; needed for `modules`, and for checkpoints of the first versions, which
            do not say of what kind their layers are.
        step: to take the checkpoint of another step than the latest intact one.
        modules: give, instead of its parameters, what can be called as the layer is, `module(carry, mb)`: the
            user's own NNX module with its parameters, after `module.eval()`; a Linen module that is bound to
            its variables; a function; or the object that `make` of `rrfp.layer` returns. Where
            there is a `call=`, it is that which calls this, `call(module, carry, mb)`. As `mb` give an
            `rrfp.EvaluationBatch`, which has what layers read of one, such as `mb.training`.

    Returns:
        For each layer, in the model's order: of an NNX layer an `nnx.State` (for `nnx.update`), of a Linen
        layer its variables, {"params": ...} (for `apply`), of a function the parameters as its `init` gives
        them, from a folder without `pipe` as nested dicts, and of an object from `make` nested dicts. Arrays
        are in the host's memory, and go to where they are used; on the first device if JAX_PLATFORMS leaves
        no other backend, as "cuda" does: "cuda,cpu" leaves it.

    Raises:
        UsageError: a Trainer that has not been started, no checkpoint, one of another model than `pipe`, or
            one whose layers are not known.
        TrainingError: there are only damaged checkpoints, or that of the step is.
    """
    from rrfp_jax.train.trainer import Trainer  # which uses this file

    if isinstance(source, Trainer):
        if pipe is not None or step is not None:
            raise UsageError("export(trainer): pipe= and step= are for folders; leave them out")
        return source.params(modules=modules)
    if modules and pipe is None:
        raise UsageError("export(folder, modules=True): the folder has no modules; give pipe=, the model")
    layers, params = _of_folder(source, pipe, step)
    return flax_states(layers, params, modules)


def _of_folder(
    folder: str | PathLike[str], pipe: Pipeline | None, step: int | None
) -> tuple[Sequence[Any], Params]:
    """The layers, of the model if it is given, else as they were stored; and all parameters."""
    if pipe is not None and not isinstance(pipe, Pipeline):
        raise UsageError(f"export: pipe is of type {type(pipe).__name__}, not Pipeline")
    for stored in readable_checkpoints("export", folder, step):
        if stored.run.base is not None:
            raise UsageError(
                f"{stored.folder} leaves out {stored.run.base}: restore it in a Trainer whose init= reads "
                f"them, and take trainer.params()"
            )
        try:
            arrays = {key: stored.array(key) for key in stored.leaves if key[0] == PARAMETERS}
        except Damaged as error:
            say(f"the checkpoint {stored.folder} is rejected: {error}")
            continue
        if mixed := {key[:n] for key in arrays for n in range(len(key))} & arrays.keys():
            raise UsageError(f"{stored.folder}: {name_of(min(mixed))} is an array, and has arrays in it")
        if pipe is not None:
            return pipe.layers, _of_pipe(pipe, stored, arrays)
        if not stored.run.layers:
            raise UsageError(
                f"export({str(folder)!r}): the checkpoint was written by an earlier version, which did not "
                f"store of what kind layers are; give pipe=, the model"
            )
        layers = stored.run.layers
        told = [_key_of(i, path) for i, layer in enumerate(layers) for path in layer.paths]
        if sorted(told) != sorted(arrays):
            raise UsageError(
                f"{stored.folder}: its layers have other arrays than it says; give pipe=, the model"
            )
        return layers, {str(i): _of_stored(i, layer, arrays) for i, layer in enumerate(layers)}
    raise AssertionError("the last of them raises")


def _of_stored(index: int, layer: StoredLayer, arrays: Mapping[Key, Any]) -> Params:
    """A layer's parameters as nested dicts, by the paths that were stored."""
    return nested(layer.paths, (arrays[_key_of(index, path)] for path in layer.paths))


def _key_of(layer: int, path: Sequence[int | str]) -> Key:
    """Of an array, given its path in a layer."""
    return (PARAMETERS, str(layer), *map(str, path))


def _of_pipe(pipe: Pipeline, stored: CheckpointView, arrays: Mapping[Key, Any]) -> Params:
    """The parameters of a model's layers, as trees like those that the layers make."""
    key, known = jax.eval_shape(jax.random.key, 0), dict[int, Params]()
    specs: dict[str, Params] = {}
    for index, layer in enumerate(pipe.layers):
        made = layer.make_params if isinstance(layer, FunctionLayer) else None
        of_input = made is not None and init_takes_carry(made)
        if of_input or layer.kind == "linen":  # depends on its input, but is nested dicts by names
            paths = tuple(key[2:] for key in arrays if key[1] == str(index))
            if of_input and any(name.isdigit() for path in paths for name in path):
                raise UsageError(
                    f"export({str(stored.folder)!r}): {pipe.who(index)} makes lists for what it gets, "
                    f"which a folder does not tell from dicts; take trainer.params(), or have init give dicts"
                )
            specs[str(index)] = _of_stored(index, StoredLayer(kind="linen", paths=paths), arrays)
        else:
            if id(layer) not in known:
                known[id(layer)] = jax.eval_shape(layer.init, key, None, None)
            specs[str(index)] = known[id(layer)]
    there = {name_of(leaf.key): leaf for leaf in stored.leaves.values() if leaf.key[0] == PARAMETERS}
    if misfits := leaf_differences(there, forms_of(keyed(specs, PARAMETERS))):
        raise UsageError(f"{stored.folder} is of another model than pipe: {'; '.join(misfits[:8])}")
    return filled(specs, arrays, PARAMETERS)
