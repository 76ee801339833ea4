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
from inspect import Parameter, Signature, formatannotation
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.authors import author_of
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.metrics import numbers_of

CARRY_AND_MB = ("carry", "mb")
CALL_TAKES = ("module", *CARRY_AND_MB)
CALLED_WITHOUT_CALL = (
    "it was called as module(carry, mb): if it takes other arguments, give rrfp.layer(..., "
    "call=lambda module, carry, mb: module(...))"
)
"""What to do where an author's class takes something else as its second argument."""

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
_OF_FLAX = ("rngs", "parent", "name")
"""Parameters of modules that nobody gives here."""

_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@contextmanager
def named(who: str, failed: str) -> Iterator[None]:
    """Inside, users' code runs, and whatever it raises becomes a UsageError that begins with `who`.

    `failed` goes on as a sentence about it: "failed when it was called".
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None
    except Exception as error:
        raise UsageError(f"{who} {failed}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """An error's type and text, the user's line that led to it, and the innermost line of a package."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen ")]
    frames = [frame for frame in frames if author_of(frame.filename) != "ours"]
    own = [frame for frame in frames if author_of(frame.filename) == "user"]
    inner = [frame for frame in frames if author_of(frame.filename) in ("user", "package")] or frames
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
        case "nnx.Optimizer" | "TrainState" as kind:
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
        return f"this is flax's {kind}, the state of a training; list the layers of its model: {listed}"
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
    init: Any = next(vars(base)["__init__"] for base in function.__mro__ if "__init__" in vars(base))
    if init is object.__init__:
        return Signature()
    signature = inspect.signature(init)
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[parameters[0].kind in _POSITIONAL :])


@contextmanager
def building(factory: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str = "") -> Iterator[None]:
    """Inside, a module is made of these arguments; refuses those that `factory` does not take."""
    try:
        yield
    except TypeError as error:
        signature = signature_of(factory)
        if signature is None or not (misfit := _misfit(signature, args, kwargs)):
            raise
        name = factory.__name__
        called = f"{name}.__init__" if isinstance(factory, type) else name
        written = ", ".join([name, *filter(None, map(_written, signature.parameters.values()))])
        raise UsageError(
            f"{where}{called}(): {misfit}; give what it takes after it, rrfp.layer({written})"
        ) from error


@contextmanager
def calling(function: Callable[..., Any], takes: Sequence[str] = CARRY_AND_MB) -> Iterator[None]:
    """Inside, a layer, a module or a function, is called with arguments of these names, or refused."""
    try:
        yield
    except TypeError as error:
        signature = signature_of(function)
        if signature is None or not _misfit(signature, takes, {}):
            raise
        who = "" if hasattr(function, "__name__") else "__call__ "
        other = ", or give call=lambda module, carry, mb: module(...)" if who else ""
        raise UsageError(
            f"{who}must take ({', '.join(takes)}); {_remedy(signature, takes)}{other}"
        ) from error


def called(module: Any, carry: Any, mb: Any, call: Callable[[Any, Any, Any], Any] | None) -> Any:
    """What an object gives, called by `call` if there is one; refused if either takes other arguments."""
    if call is not None:
        with calling(call, CALL_TAKES):
            return call(module, carry, mb)
    signature = signature_of(module)
    places = [p for p in signature.parameters.values() if p.kind in _POSITIONAL] if signature else []
    second = places[1] if len(places) > 1 else None
    named_mb = second is not None and second.name == "mb"
    if second is not None and not named_mb and _is_flag(second):
        raise UsageError(f"takes {second} as its second argument; {CALLED_WITHOUT_CALL}")
    try:
        with calling(module):
            return module(carry, mb)
    except (TypeError, AttributeError) as error:
        if named_mb or type(error) not in (TypeError, AttributeError):
            raise
        told = type(error)(f"{str(error).partition(chr(10))[0]}; {CALLED_WITHOUT_CALL}")
        raise told.with_traceback(error.__traceback__) from error


def _is_flag(parameter: Parameter) -> bool:
    """Whether an argument is true or false, so that a microbatch in its place would silently be true."""
    hint = parameter.annotation
    text = hint if isinstance(hint, str) else formatannotation(hint)
    return parameter.name in _FLAGS or isinstance(parameter.default, bool) or bool(_BOOL.fullmatch(text))


def init_takes_carry(init: Callable[..., Any]) -> bool:
    """Whether an `init` wants `(key, carry, mb)`, not the key alone."""
    signature = signature_of(init)
    return signature is not None and bool(_misfit(signature, ["key"], {}))


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


def check_carry(carry: Any) -> None:
    """Refuse what cannot be sent: leaves that are neither arrays nor numbers, and random keys."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        where = f"carry{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, _NUMBERS):
            raise UsageError(
                f"gives {where} = {_short(leaf)}, of type {type(leaf).__name__}; a carry is a tree of arrays "
                f"and numbers: register a class of yours with jax.tree_util.register_dataclass, and keep "
                f"what is no number in the layer"
            )
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UsageError(
                f"gives {where} of dtype {leaf.dtype}, but random keys cannot be sent: read mb.key where it "
                f"is used"
            )


def check_sums(loss: Any) -> None:
    """Refuse a `Loss` whose numbers are no scalar sums, or whose total has no gradient, naming the number."""
    numbers = {"total": loss.total, "weight": loss.weight}
    for name, metric in loss.metrics.items():
        numbers |= {f"{name}.{of}" if of else name: value for of, value in numbers_of(metric).items()}
    for name, value in numbers.items():
        if not isinstance(value, _NUMBERS):
            raise UsageError(f"Loss {name} is {_short(value)}; it must be a number, a scalar sum")
        if jnp.shape(value) != ():
            raise UsageError(f"Loss {name} has shape {jnp.shape(value)}; it must be a scalar sum: add .sum()")
        if jnp.iscomplexobj(value):
            raise UsageError(f"Loss {name} is complex; it must be real: take its .real, or jnp.abs of it")
    if isinstance(loss.total, jax.Array) and not jnp.issubdtype(loss.total.dtype, jnp.floating):
        raise UsageError(
            f"Loss total is {loss.total.dtype}, which has no gradient; sum floating point numbers, and give "
            f"counts as metrics"
        )


def describe(tree: Any) -> str:
    """A tree of specs as short text, such as `{'x': float32[2, 16]}`."""
    if tree is None:
        return "None"
    return str(jax.tree.map(lambda leaf: _Bare(f"{leaf.dtype}{list(leaf.shape)}"), tree))


def _short(value: Any) -> str:
    text = repr(value).splitlines()[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Bare(str):
    """Text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
