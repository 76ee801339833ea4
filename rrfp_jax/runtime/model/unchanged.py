"""Which outputs of a traced function are its inputs themselves, through every program that it calls.

Transforms of flax return each variable of a module as an output of the transform, changed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxprs_in_params

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime._jax import scan_counts
from rrfp_jax.runtime.model.layers import Apply, MicrobatchView, Params
from rrfp_jax.runtime.model.roles import leaf_paths

Value: TypeAlias = Any
"""Stands for what a variable holds; two that are equal hold the same."""

Run: TypeAlias = Callable[[Params, Any, MicrobatchView], tuple[Any, Params]]
"""(parameters, carry, microbatch) -> what a layer gives, and its parameters after the call."""


def unchanging(run: Run, is_constant: Callable[[str], bool]) -> Apply:
    """The layer, which must leave its parameters as they are, or is refused when it is called.

    Args:
        run: the layer.
        is_constant: whether the parameter of a name is not trained.
    """
    checked = set()

    def apply(params: Params, carry: Any, mb: MicrobatchView) -> Any:
        out, after = run(params, carry, mb)
        before, now = _by_name(params), _by_name(after)
        doubtful = [name for name, leaf in before.items() if now.get(name) is not leaf]
        leaves, structure = jax.tree.flatten((carry, mb))
        kind = structure, tuple(map(jax.typeof, leaves))
        if doubtful and kind not in checked:
            for name in doubtful:
                if name not in now:
                    raise UsageError(f"removes its parameter {name} when it is called")

            def outputs(*given: Any) -> list[Any]:
                after = _by_name(run(*given)[1])
                return [after[name] for name in doubtful]

            same = inputs_of_outputs(jax.make_jaxpr(outputs)(params, carry, mb))
            places = {name: i for i, name in enumerate(before)}
            for name, place in zip(doubtful, same, strict=True):
                if place != places[name]:
                    raise UsageError(_changes(name, is_constant(name)))
            checked.add(kind)
        return out

    return apply


def _by_name(tree: Params) -> Mapping[str, Any]:
    return dict(zip(leaf_paths({"": tree}), jax.tree.leaves(tree), strict=True))


def _changes(name: str, constant: bool) -> str:
    if constant:
        return (
            f"changes its variable {name} when it is called, but layers keep no state from call to call. "
            f"In place of running statistics take those of a trained model (use_running_average=True), or "
            f"LayerNorm, RMSNorm or GroupNorm"
        )
    return (
        f"changes its parameter {name} when it is called; only the optimizer changes parameters: compute "
        f"with a local value"
    )


def inputs_of_outputs(closed: ClosedJaxpr) -> list[int | None]:
    """For each output the index of the input that it is; None if it may differ from every input."""
    inputs = list(range(len(closed.jaxpr.invars)))
    return [value if isinstance(value, int) else None for value in _outputs(closed, inputs)]


def _outputs(program: Any, inputs: Sequence[Value]) -> list[Value]:
    """What a program gives, closed or not."""
    jaxpr = getattr(program, "jaxpr", program)
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def held(atom: Any) -> Value:
        return object() if isinstance(atom, Literal) else known.get(atom, ("constant", atom))

    for equation in jaxpr.eqns:
        rule = _RULES.get(equation.primitive.name, _computed)
        made = rule(equation, [held(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, made, strict=True))
    return [held(atom) for atom in jaxpr.outvars]


def _computed(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    """New values."""
    return [object() for _ in equation.outvars]


def _called(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    """Those of the one program that runs on the equation's inputs."""
    bodies = list(jaxprs_in_params(equation.params))
    fits = len(bodies) == 1 and _kinds(bodies[0]) == _kinds(equation)
    return _outputs(bodies[0], read) if fits else _computed(equation, read)


def _kinds(program: Any) -> Any:
    """Shapes and dtypes of what a program or an equation takes and gives."""
    avals = [[atom.aval for atom in atoms] for atoms in (program.invars, program.outvars)]
    return [[(getattr(a, "shape", a), getattr(a, "dtype", a)) for a in some] for some in avals]


def _copied(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    """What the equation gets, unless in another dtype."""
    kept = zip(equation.invars, equation.outvars, read, strict=True)
    return [value if given.aval == out.aval else object() for given, out, value in kept]


def _cond(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    outputs = zip(*(_outputs(branch, read[1:]) for branch in equation.params["branches"]), strict=True)
    return [first if all(first == value for value in rest) else object() for first, *rest in outputs]


def _while(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    skipped, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    first = skipped + constants
    return _carried(equation.params["body_jaxpr"], read[skipped:first], read[first:], [])[0]


def _scan(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    constants, carried = scan_counts(equation)
    end = constants + carried
    rows = [("row", id(equation), value) for value in read[end:]]
    kept, stacked = _carried(equation.params["jaxpr"], read[:constants], read[constants:end], rows)
    return [*kept, *(value[2] if value in rows else object() for value in stacked)]


def _carried(
    body: Any, constants: Sequence[Value], carried: Sequence[Value], rows: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """What a loop's body leaves in what it carries, and what else it gives."""
    values = list(carried)
    while True:
        given = _outputs(body, [*constants, *values, *rows])
        changed = [i for i, value in enumerate(values) if given[i] != value]
        if not (fresh := [i for i in changed if values[i] is carried[i]]):
            break
        for i in fresh:
            values[i] = ("changing", object())
    kept = [carried[i] if values[i] is carried[i] else object() for i in range(len(values))]
    return kept, given[len(values) :]


def _transposed(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    """What is transposed back is itself."""
    value, permutation = read[0], tuple(equation.params["permutation"])
    if isinstance(value, tuple) and value[0] == "transposed":
        _, value, before = value
        permutation = tuple(before[axis] for axis in permutation)
    in_place = permutation == tuple(range(len(permutation)))
    return [value if in_place else ("transposed", value, permutation)]


def _unwrapped(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    return [read[0][1] if isinstance(read[0], tuple) and read[0][0] == "key" else object()]


_RULES: Mapping[str, Callable[[JaxprEqn, Sequence[Value]], Sequence[Value]]] = {
    **dict.fromkeys(  # in any version of JAX
        [
            *("jit", "pjit", "call", "core_call", "closed_call", "core_closed_call", "checkpoint", "remat2"),
            *("remat", "remat_opt", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
            *("custom_vmap_call", "compute_on", "xla_metadata_call"),
        ],
        _called,
    ),
    **dict.fromkeys(
        ("copy", "copy_p", "optimization_barrier", "sharding_constraint", "convert_element_type"), _copied
    ),
    "transpose": _transposed,
    "random_wrap": lambda equation, read: [("key", read[0], equation.params["impl"])],
    "random_unwrap": _unwrapped,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "shard_map": _computed,  # its program sees parts
}
"""By primitive, what an equation gives, of what it reads."""
