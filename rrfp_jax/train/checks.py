"""Finds, before anything is compiled, what would train silently wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.checkpoint.leaves import keyed
from rrfp_jax.core.step_rules import Bucket
from rrfp_jax.data.contract import Data, Microbatch, buckets_of, load_repeatedly, takes_one, words_of_bucket
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.fields import LARGEST, shown
from rrfp_jax.printing import warn
from rrfp_jax.runtime._jax import cast_like, on_host
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.settings import Settings, is_whole
from rrfp_jax.runtime.mesh.stage_mesh import tracing_alone
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.model.gradient_flow import refuse_untrained, told_lost
from rrfp_jax.runtime.model.layers import MicrobatchView, zeros
from rrfp_jax.runtime.model.metrics import kinds_of
from rrfp_jax.runtime.model.pipeline import IDS, Pipeline
from rrfp_jax.runtime.model.roles import covering, leaf_paths
from rrfp_jax.runtime.model.user_errors import instead_of_layers, kind_of
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler
from rrfp_jax.runtime.programs.initial import ModelCheckedInit
from rrfp_jax.runtime.programs.library import specs_of
from rrfp_jax.runtime.sizes import as_sent, nbytes
from rrfp_jax.runtime.stages.optimizer import check_transformation
from rrfp_jax.train.report import REPORTED, VALIDATION

_OF_DATA = "a step has as many microbatches as data(step) returns: data=lambda step: [...]"

ELSEWHERE = {
    **{item.name: f"give it as settings=rrfp.Settings({item.name}=...)" for item in fields_of(Settings)},
    **{item.name: f"give it as mesh=rrfp.Mesh({item.name}=...)" for item in fields_of(Mesh)},
    **{key: f"give it as rrfp.Pipeline(layers, loss, {key}=...)" for key in ("frozen", "tied", "sharding")},
    **dict.fromkeys(["num_microbatches", "microbatches", "n_microbatches"], _OF_DATA),
    **dict.fromkeys(["accumulate_steps", "gradient_accumulation_steps"], _OF_DATA),
    **dict.fromkeys(
        ["batch_size", "micro_batch_size"], "the batch size is the number of rows in each microbatch"
    ),
    **dict.fromkeys(["num_stages", "stages", "devices"], "give the stages as mesh=rrfp.Mesh(pp=4)"),
    **dict.fromkeys(["lr", "learning_rate"], "give it to the optimizer: optax.adamw(3e-4)"),
    **dict.fromkeys(["steps", "num_steps", "max_steps", "epochs"], "for report in trainer.steps(100): ..."),
    **dict.fromkeys(["max_grad_norm", "grad_clip", "gradient_clipping"], "it is clip_norm=1.0"),
    **dict.fromkeys(["checkpoint", "gradient_checkpointing", "rematerialize"], "it is remat='full'"),
    **dict.fromkeys(["loss", "loss_fn"], "the loss is of the pipeline: rrfp.Pipeline(layers, loss)"),
    **dict.fromkeys(["model", "layers"], "the first argument is rrfp.Pipeline(layers, loss)"),
    **dict.fromkeys(["dataset", "train_data", "dataloader"], "it is data="),
    **dict.fromkeys(["rng", "key", "rngs", "random_seed"], "give a whole number, seed=0"),
}
"""What to write for an argument that a Trainer does not take; messages say it."""

SUM_TOLERANCE = 0.02
"""A mean of two rows is half of what their sum would be; rounding in bfloat16 stays far below this."""

LARGEST_LOSS_CHECK = 2**30
"""Bytes of logits and fields up to which the loss is tried out on two rows at start."""


def check_types(
    pipe: Any, optimizer: Any, mesh: Any, split: Any, init: Any, on_step: Any, settings: Any
) -> None:
    """Refuse arguments of a Trainer that have been mixed up."""
    if kind_of(pipe) is not None:
        raise UsageError(f"Trainer: the first argument is no Pipeline: {instead_of_layers(pipe)}")
    wanted = {"first argument": (pipe, Pipeline), "mesh": (mesh, Mesh), "settings": (settings, Settings)}
    for name, (value, kind) in wanted.items():
        if not isinstance(value, kind):
            given = type(value).__name__
            if given == kind.__name__:  # such as JAX's own mesh
                given = f"{type(value).__module__.partition('.')[0]}'s {given}"
            raise UsageError(
                f"Trainer: the {name} is of type {given}, not rrfp.{kind.__name__}: "
                f"Trainer(rrfp.Pipeline(layers, loss), optimizer, mesh=rrfp.Mesh(pp=4), ...)"
            )
    if type(settings) is not Settings:
        raise UsageError(
            f"Trainer: settings={type(settings).__name__}(...) is a whole config: give its settings, "
            f"config.settings, or call config.trainer()"
        )
    if optimizer is not None:
        check_transformation(optimizer)
    several = isinstance(split, Sequence) and not isinstance(split, str)
    if not (split is None or several or (isinstance(split, str) and split == "auto")):
        raise UsageError(
            f"split={shown(split)}: give 'auto', or a list with the number of layers of each stage"
        )
    if init is not None and not callable(init):
        raise UsageError(f"init={shown(init)}: give a function init(path, spec) -> array, or leave it out")
    if on_step is not None and not (callable(on_step) and takes_one(on_step)):
        remedy = "give a function of a step's report, such as logger.on_step, or leave it out"
        raise UsageError(f"on_step={on_step!r}: {remedy}")


def check_count(call: str, name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or below `least`."""
    if not is_whole(value) or not least <= value <= LARGEST:
        raise UsageError(f"Trainer.{call}({name}={shown(value)}): give a whole number, at least {least}")


def check_model(engine: Engine, data: Data, plan: Sequence[Microbatch]) -> None:
    """Refuse a model, its loss, or an optimizer that does not work for the microbatches of a first step."""
    buckets, optimizer = buckets_of(plan), engine.spec.optimizer
    library, flows = engine.library, []
    for bucket in dict.fromkeys(buckets):
        examined(engine, 0, bucket, buckets, training=True)
        flows.append(library.flow(bucket))
    keyed(engine.library.params, "params")
    if isinstance(engine.spec.init, ModelCheckedInit):
        engine.spec.init.check_model(leaf_paths(engine.library.params), engine.library.roles.owners)
    if optimizer is not None:
        refuse_untrained(flows)
        warn_of_lost(engine)
        _ = engine.staging.optimizer_state
    check_loss_is_a_sum(engine, data, plan)


def examined(engine: Engine, step: int, bucket: Bucket, buckets: Sequence[Bucket], training: bool) -> None:
    """Refuse a model for a bucket of a step; that names its microbatch, unless all are like it."""
    library = engine.library
    is_odd = library.first_bucket not in (None, bucket)
    try:
        shapes = library.examine(bucket, training)
        with library.tracing():
            view = MicrobatchView(specs_of(bucket), IDS, len(engine.pipe), training)
            loss = jax.eval_shape(engine.pipe.apply_loss, shapes[-1].carry_out, view)  # called so before
        # No two reductions for one name, and no figure that reports have themselves.
        kinds = kinds_of([*(own.metrics for own in shapes), loss.metrics])
        if taken := [name for name in kinds if name in REPORTED or name.startswith(VALIDATION)]:
            raise UsageError(
                f"the loss: Loss metric {taken[0]!r}: reports use that name themselves; give it another one"
            )
    except UsageError as error:
        if not is_odd:
            raise
        where = f"step {step}: microbatch {buckets.index(bucket)}, with {words_of_bucket(bucket)}"
        raise UsageError(f"{where}: {error}") from error.__cause__


def warn_of_lost(engine: Engine) -> None:
    """Say, in one process, which parameters have no gradient although the loss follows from them."""
    lost = engine.library.lost_gradients
    if lost and engine.layout.world.rank == 0:
        others = {*leaf_paths(engine.library.params)} - lost.keys()
        warn(
            f"warning: {told_lost(lost)}. They learn nothing: let the loss follow from them by functions "
            f"with a derivative, or say that it is meant: Pipeline(..., frozen={covering(lost, others)})"
        )


def loss_trouble(totals: Sequence[float], consequence: str) -> str | None:
    """Which summed loss of a microbatch is not finite, with a remedy; None if all are."""
    for j, total in enumerate(totals):
        if not math.isfinite(total):
            return (
                f"the loss of microbatch {j} is {total}{consequence}. Look at that microbatch's data, lower "
                f"the learning rate, or set clip_norm=1.0"
            )
    return None


def check_losses(totals: Sequence[float], where: str, consequence: str) -> None:
    """Refuse summed losses of microbatches that are not finite, with a TrainingError."""
    if trouble := loss_trouble(totals, consequence):
        raise TrainingError(f"{where}: {trouble}")


def check_loss_is_a_sum(engine: Engine, data: Data, plan: Sequence[Microbatch]) -> None:
    """Refuse a loss that is a mean: the loss of two rows together must be the sum of the two apart.

    Not done where two rows take more than `LARGEST_LOSS_CHECK` bytes, where a row cannot be taken by itself,
    nor for `Pipeline(additive=False)`.
    """
    if (program := rows_program(engine, data, plan, engine.alone)) is None:
        return
    losses, pair, numbers = program

    def values(share: float) -> Any:
        given = [(share * v).astype(v.dtype) if i in numbers else v for i, v in enumerate(pair)]
        return on_host(losses(engine.alone.stage_mesh.put(given)))

    trouble = _coupling(values(1.0))
    if trouble:  # a number in the carry may be a sum over rows, as of auxiliary losses, each row with its own
        shares = 1 / 1024, 31 / 1024, 32 / 1024  # small, lest it hide what it is added to
        trouble = _coupling(np.stack([values(share)[i] for i, share in enumerate(shares)]))
    if trouble:
        raise UsageError(trouble)


def _coupling(values: np.ndarray[Any, Any]) -> str:
    """What is said of totals and weights, of two rows and both, that are no sums; nothing if they are."""
    for name, (first, second, whole) in zip(("total", "weight"), values.T.tolist(), strict=True):
        parts, size = first + second, max(abs(whole), abs(first) + abs(second), 1e-6)
        if np.isfinite(whole) and abs(whole - parts) > SUM_TOLERANCE * size:
            return (
                f"the loss is not a sum: Loss.{name} of two rows together is {whole:.6g}, but {parts:.6g} "
                f"for the two apart. Return sums, not means: rrfp.Loss(values.sum(), weight=count); a step "
                f"divides by the summed weight itself. If rows are coupled on purpose, or a field has as "
                f"many values as there are rows by chance: Pipeline(..., additive=False)"
            )
    return ""


def rows_program(
    engine: Engine, data: Data, plan: Sequence[Microbatch], compiler: Compiler
) -> tuple[Compiled, Sequence[Any], Sequence[int]] | None:
    """What `check_loss_is_a_sum` runs, what that takes, which of it are numbers; None if nothing runs."""
    pipe, last = engine.pipe, len(plan) - 1  # the one most likely to differ from the rest
    fields = load_repeatedly(data, 0, last, plan[last])
    carry = engine.library.examine(buckets_of(plan)[last])[-1].carry_out
    leaves = [leaf for leaf in jax.tree.leaves((carry, dict(fields))) if math.prod(leaf.shape) and leaf.shape]
    if not pipe.additive or not leaves:
        return None
    rows = Counter(leaf.shape[0] for leaf in leaves).most_common(1)[0][0]  # of the first, if none prevails
    if sum(2 * nbytes(leaf) // leaf.shape[0] for leaf in leaves) > LARGEST_LOSS_CHECK:
        return None
    losses, pair = _losses_of_rows(pipe, carry, fields, rows)
    try:
        with tracing_alone():
            jax.eval_shape(losses, pair)
    except (TypeError, ValueError):  # such as for a carry [rows * length, ...]; it took all rows together
        return None
    numbers = [i for i, spec in enumerate(jax.tree.leaves(carry)) if not spec.shape]
    return compiler(losses, pair, effort="roughly"), pair, numbers


def _losses_of_rows(
    pipe: Pipeline, carry: Any, fields: Mapping[str, Any], rows: int
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Total and weight of a loss for row 0, row 1, and both, float32[3, 2]; and two rows, a flat list.

    If there is but one row, its fields twice; with random values of the carry. Arrays without any element are
    left as they are.
    """
    random = np.random.default_rng(0)
    chosen = [0, min(1, rows - 1)]

    def of_carry(spec: Any) -> Any:
        if spec.shape[:1] != (rows,):
            return random.standard_normal(spec.shape).astype(spec.dtype)
        two = [size * random.standard_normal(spec.shape[1:], np.float32) for size in (1, 2)]
        return np.stack(two).astype(spec.dtype)  # of unlike size, lest a mean be the same for both

    def of_field(array: Any) -> Any:
        return np.asarray(array)[chosen] if array.shape[:1] == (rows,) else array

    leaves, structure = jax.tree.flatten((carry, dict(fields)))
    has_rows = [leaf.shape[:1] == (rows,) for leaf in leaves]

    def loss(pair: Sequence[Any], part: slice) -> list[Any]:
        typed = map(cast_like, pair, leaves)
        own = [leaf[part] if has else leaf for leaf, has in zip(typed, has_rows, strict=True)]
        carry, fields = jax.tree.unflatten(structure, own)
        found = pipe.apply_loss(carry, MicrobatchView(fields, zeros(IDS), len(pipe)))
        return [jnp.asarray(found.total, jnp.float32), jnp.asarray(found.weight, jnp.float32)]

    def losses(pair: Sequence[Any]) -> Any:
        return jnp.array([loss(pair, part) for part in (slice(0, 1), slice(1, 2), slice(0, 2))])

    values = jax.tree.leaves((jax.tree.map(of_carry, carry), {k: of_field(v) for k, v in fields.items()}))
    return losses, [as_sent(value) for value in values]


def check_jax_settings() -> None:
    """Refuse settings of JAX's own under which no stage can run, naming them."""
    if getattr(jax.config, "jax_disable_jit"):  # noqa: B009 (JAX's types lack it)
        raise UsageError(
            "jax_disable_jit=True: stages are programs that are compiled before they run, so nothing could "
            "run; unset it (JAX_DISABLE_JIT), and to step through a layer call it in plain JAX"
        )
    for way in ("", "_host_to_device", "_device_to_device", "_device_to_host"):  # JAX has a guard for each
        if getattr(jax.config, name := f"jax_transfer_guard{way}") == "disallow_explicit":
            raise UsageError(
                f"{name}='disallow_explicit': data and messages must get to devices; use 'disallow', under "
                f"which only transfers that nobody asked for fail"
            )
