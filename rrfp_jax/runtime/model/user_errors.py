"""Errors in users' models, each as one sentence with what to write instead.

Python's own TypeError counts `self`, and may be about any call further inside. So signatures are asked
whether it is about the call that was made here.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import Parameter, Signature, formatannotation
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rrfp_jax.authors import author_of
from rrfp_jax.errors import UsageError

NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
"""What JAX takes for an array or a number."""

CARRY_AND_MB = ("carry", "mb")
_BY_CALL = "call=lambda module, carry, mb: module(...)"
_CALLED_WITHOUT_CALL = (
    "it was called as module(carry, mb): if it takes other arguments, give rrfp.layer(..., " + _BY_CALL + ")"
)

_BUILT = {
    ("flax.nnx", "Module"): "NNX module",
    ("flax.linen", "Module"): "Linen module",
    ("flax.nnx", "Optimizer"): "nnx.Optimizer",
    ("flax.training", "TrainState"): "TrainState",
}
"""By the package and name of a class of flax: what its instances are called."""

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_FLAGS = ("train", "training", "is_training", "deterministic", "use_running_average")
"""What authors call an argument that is true or false."""
_BOOL = re.compile(r"bool( ?\| ?None)?|None ?\| ?bool|([\w.]+\.)?Optional\[bool\]")
_OF_LAYER = ("repeat", "init", "call", "make", "split", "combine")
_OF_FLAX = ("rngs", "parent", "name")
"""Parameters of modules that nobody gives here."""


@contextmanager
def named(who: str, failed: str) -> Iterator[None]:
    """Make whatever users' code raises inside a UsageError: "{who}: ...", or "{who} {failed}: ..."."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None
    except Exception as error:
        raise UsageError(f"{who} {failed}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """An error's type and text, the user's line that led to it, and the innermost line of a package."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen ")]
    by = [(author_of(frame.filename), frame) for frame in frames]
    own = [frame for author, frame in by if author == "user"]
    inner = [frame for author, frame in by if author in ("user", "package")]
    inner = inner or [frame for author, frame in by if author != "ours"]
    where = [f"{Path(frame.filename).name}, line {frame.lineno}" for frame in own[-1:]]
    if inner and inner[-1:] != own[-1:]:
        in_package = re.sub(".*/(site|dist)-packages/", "", inner[-1].filename)
        where.append(f"raised in {in_package}, line {inner[-1].lineno}")
    return f"{text} ({'; '.join(where)})" if where else text


def kind_of(value: Any) -> str | None:
    """What an instance of a class of flax is called; None if it is none, as a class itself is not."""
    bases = (base for base in type(value).__mro__ if base.__module__.startswith("flax."))
    names = ((".".join(base.__module__.split(".")[:2]), base.__name__) for base in bases)
    return next((_BUILT[name] for name in names if name in _BUILT), None)


def instead_of_layer(value: Any) -> str:
    """What to write for something that stands where a layer from `rrfp.layer` must."""
    name = type(value).__name__
    if isinstance(value, type):
        return f"{value.__name__} is a class; write rrfp.layer({value.__name__}, ...) with its arguments"
    match kind_of(value):
        case "NNX module":
            return (
                f"{name} is a module that is already built, on one device; write rrfp.layer({name}, ...) "
                f"with its class and arguments, so that only the stage that owns it allocates it"
            )
        case "Linen module":
            return f"{name} is a Linen module; write rrfp.layer({name}(...))"
        case str(kind):
            return f"this is flax's {kind}, the state of a training; list the layers of its model"
    own = getattr(value, "__name__", f"something of type {name}")
    return f"{own} is no layer; write rrfp.layer({own if callable(value) else '...'})"


def instead_of_layers(value: Any) -> str:
    """What to write for something that stands where a list of layers must."""
    listed = "[rrfp.layer(Embed, ...), rrfp.layer(Block, ..., repeat=24), rrfp.layer(Head, ...)]"
    name, kind = type(value).__name__, kind_of(value)
    if kind in ("NNX module", "Linen module"):
        return f"{name} is one {kind}, and stages are cut between layers; list its parts: {listed}"
    if kind is not None:
        return f"{instead_of_layer(value)}: {listed}"
    own = getattr(value, "name", None)  # of a single layer
    what = f"{own} is one layer" if isinstance(own, str) else f"this is of type {name}"
    return f"{what}; give a list of layers: {listed}"


def instead_of_optimizer(value: Any) -> str:
    """What to write for something that stands where an optax transformation must."""
    kind = kind_of(value)
    if kind in ("nnx.Optimizer", "TrainState"):
        return (
            f"this is flax's {kind}, which holds the state of one device; a Trainer makes that of every "
            f"stage itself: give the transformation in it, its .tx"
        )
    if callable(value) and hasattr(value, "__name__"):
        return f"{value.__name__} is a function; call it for a transformation, such as optax.adamw(3e-4)"
    return "give an optax transformation, such as optax.adamw(3e-4)"


def signature_of(function: Any) -> Signature | None:
    """What a class, or anything else that is called, takes, without `self`; None if it does not say.

    A class's `__init__` is asked, since NNX's metaclass takes whatever comes.
    """
    if not isinstance(function, type):
        try:
            return inspect.signature(function)
        except (TypeError, ValueError):  # as what is written in C
            return None
    init = inspect.getattr_static(function, "__init__")
    if init is object.__init__:
        return Signature()
    signature = inspect.signature(init)
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[parameters[0].kind in _POSITIONAL :])


def takes(function: Any, name: str, or_any: bool = False) -> bool:
    """Whether a class or function takes a keyword, by name or, if that counts, among whatever come."""
    signature = signature_of(function)
    parameters = signature.parameters.values() if signature else ()
    return any(p.name == name or (or_any and p.kind is p.VAR_KEYWORD) for p in parameters)


def init_takes_carry(init: Callable[..., Any]) -> bool:
    """Whether an `init` wants `(key, carry, mb)`, not the key alone."""
    signature = signature_of(init)
    return signature is not None and bool(_misfit(signature, ["key"], {}))


@contextmanager
def building(factory: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str = "") -> Iterator[None]:
    """Refuse arguments that `factory` does not take, of which a module is made inside."""
    try:
        yield
    except TypeError as error:
        signature = signature_of(factory)
        if signature is None or not (misfit := _misfit(signature, args, kwargs)):
            raise
        name = factory.__name__
        called = f"{name}.__init__" if isinstance(factory, type) else name
        strange = [name for name in kwargs if name not in signature.parameters]
        near = [meant for name in strange for meant in get_close_matches(name, _OF_LAYER, 1)]
        misfit += f" (did you mean rrfp.layer(..., {near[0]}=)?)" if near else ""
        written = ", ".join([name, *filter(None, map(_written, signature.parameters.values()))])
        raise UsageError(
            f"{where}{called}(): {misfit}; give what it takes after it, rrfp.layer({written})"
        ) from error


@contextmanager
def calling(
    function: Callable[..., Any], takes: Sequence[str] = CARRY_AND_MB, without_params: bool = False
) -> Iterator[None]:
    """Refuse a layer, a module or a function, that is called inside but takes no arguments of these names."""
    try:
        yield
    except TypeError as error:
        signature = signature_of(function)
        if signature is None or not _misfit(signature, takes, {}):
            raise
        if without_params and not _misfit(signature, ["params", *takes], {}):
            raise UsageError(
                f"takes {len(signature.parameters)} arguments, as a function with parameters does; say how "
                f"they are made: rrfp.layer({getattr(function, '__name__', 'f')}, init=lambda key: params)"
            ) from error
        who, other = ("", "") if hasattr(function, "__name__") else ("__call__ ", f", or give {_BY_CALL}")
        raise UsageError(
            f"{who}must take ({', '.join(takes)}); {_remedy(signature, takes)}{other}"
        ) from error


def called(module: Any, carry: Any, mb: Any, call: Callable[[Any, Any, Any], Any] | None) -> Any:
    """What an object gives, called by `call` if there is one; refused if either takes other arguments."""
    if call is not None:
        with calling(call, ("module", *CARRY_AND_MB)):
            return call(module, carry, mb)
    signature = signature_of(module)
    places = [p for p in signature.parameters.values() if p.kind in _POSITIONAL] if signature else []
    second = places[1] if len(places) > 1 else None
    if second is not None and _is_flag(second):
        raise UsageError(f"takes {second} as its second argument; {_CALLED_WITHOUT_CALL}")
    try:
        with calling(module):
            return module(carry, mb)
    except (TypeError, AttributeError) as error:
        if (second and second.name == "mb") or type(error) not in (TypeError, AttributeError):
            raise
        told = type(error)(f"{str(error).partition(chr(10))[0]}; {_CALLED_WITHOUT_CALL}")
        raise told.with_traceback(error.__traceback__) from error


def _is_flag(parameter: Parameter) -> bool:
    """Whether an argument is true or false, so that a microbatch in its place would silently be true."""
    hint = parameter.annotation
    text = hint if isinstance(hint, str) else formatannotation(hint)
    return parameter.name in _FLAGS or isinstance(parameter.default, bool) or bool(_BOOL.fullmatch(text))


def _misfit(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why a call with these arguments fails; empty if it does not."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _written(parameter: Parameter) -> str:
    """An argument as one writes it in a call; empty for any number of them, and for flax's own."""
    if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) or parameter.name in _OF_FLAX:
        return ""
    by_place = parameter.kind in _POSITIONAL and parameter.default is Parameter.empty
    return parameter.name if by_place else f"{parameter.name}=..."


def _remedy(signature: Signature, takes: Sequence[str]) -> str:
    """What a layer must take besides, and what it cannot ask for."""
    own = signature.parameters.values()
    places = [parameter.name for parameter in own if parameter.kind in _POSITIONAL]
    if lacking := max(len(takes) - len(places), 0):
        absent = [name for name in takes if name not in places]
        last = "mb" not in places  # which is left out more often than what comes first
        return f"add {' and '.join(absent[-lacking:] if last else absent[:lacking])}"
    needed = [parameter.name for parameter in own if parameter.default is Parameter.empty]
    return f"give {' and '.join(name for name in needed if name not in places[: len(takes)])} a default"


def describe(tree: Any) -> str:
    """A tree of specs as short text, such as `{'x': float32[2, 16]}`."""
    text = str(jax.tree.map(lambda leaf: f"`{leaf.dtype}{list(leaf.shape)}`", tree))
    return re.sub("'?`(.*?)`'?", r"\1", text)
