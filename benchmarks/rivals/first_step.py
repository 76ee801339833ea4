"""What a first step costs from nothing: ours, a loop written by hand, and SPMD in one jit with a scan."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from benchmarks.harness import Found, bench, on_ranks, say, table
from configs.quickstart import loss, pipeline
from models import gpt

MICROBATCHES, ROWS, LENGTH = 4, 2, 64
LIMIT_SECONDS = 600.0
EQUAL = 1e-4
"""How far losses of the same values may differ, of themselves."""

VALUES = ("given", "made")


@bench(
    "What CPU seconds does a first step take from nothing, beside a loop by hand, and one jit with a scan?",
    minutes="2 a round *",
    aims="none yet",
)
def first_step(rounds: int = 5, size: tuple[str, ...] = ("8/4", "4/2", "64/2")) -> Found:
    """A GPT of so many blocks on so many stages, 64 wide, 4 microbatches of 2 x 64 bytes, AdamW. Each start
    is a process of its own with virtual CPU devices, in turns, without any cache of programs. It ends when
    loss and updated parameters are there. Imports are not counted. Parameters are *given* as arrays of NumPy,
    or *made* on the devices. *By hand*: forward, backward by `jax.vjp`, sums and update of each stage are a
    `jax.jit` each, blocks one after the other. *SPMD*: a `shard_map` in one jit; blocks are stacked, scanned
    and rematerialised. The losses of given parameters must be equal up to rounding."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for one in size:
            for system in SYSTEMS:
                for values in VALUES:
                    spent = on_ranks(0, start_once, system, one, values, seconds=LIMIT_SECONDS)
                    found.setdefault(f"{one} {system} {values}", []).append(spent)
                    say(f"{one} {system} {values}: {spent}")
    rows = []
    for one in size:
        losses = [found[f"{one} {system} given"][0]["loss"] for system in SYSTEMS]
        if not np.allclose(losses, losses[0], rtol=EQUAL):
            raise RuntimeError(f"{one}: the losses differ: {dict(zip(SYSTEMS, losses, strict=True))}")
        for values in VALUES:
            seconds = {s: median(own["seconds"] for own in found[f"{one} {s} {values}"]) for s in SYSTEMS}
            cells = (f"{seconds[s]:.1f} ({seconds[OURS] / seconds[s]:.2f})" for s in SYSTEMS)
            rows.append((*one.split("/"), values, *cells))
    heads = ["blocks", "stages", "parameters", *SYSTEMS]
    return Found(found, tables={"rivals.md first step": table(heads, rows)})


def start_once(system: str, size: str, values: str) -> dict[str, float]:
    """CPU seconds of this process from its first program to the end of the first step, and the loss."""
    blocks, stages = map(int, size.split("/"))
    jax.config.update("jax_num_cpu_devices", stages)
    model = Model(blocks, stages, values == "given")
    model.batch  # noqa: B018 (what data costs is no question here)
    jax.block_until_ready(jax.device_put(np.zeros(1), jax.devices()[-1]))
    began = process_time()
    total = SYSTEMS[system](model)
    return {"seconds": round(process_time() - began, 2), "loss": total}


@dataclass(frozen=True)
class Model:
    """The GPT, its data, and values of its parameters, which are nested dicts of a layer."""

    blocks: int
    stages: int
    given: bool

    @cached_property
    def config(self) -> gpt.GPTConfig:
        return gpt.GPTConfig(d_model=64, n_heads=2, d_ff=128, n_layers=self.blocks)

    @cached_property
    def batch(self) -> list[dict[str, Any]]:
        tokens = np.random.default_rng(0).integers(0, 256, (MICROBATCHES, ROWS, LENGTH)).astype(np.int32)
        return [{"tokens": own, "labels": own, "mask": np.ones(own.shape, bool)} for own in tokens]

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)

    @cached_property
    def kinds(self) -> dict[type, tuple[Any, Any]]:
        """By class of layer, its definition, and specs of its parameters."""
        kinds = (gpt.Embed, gpt.Block, gpt.Head)
        return {kind: nnx.split(nnx.eval_shape(partial(self._module, kind))) for kind in kinds}

    def _module(self, kind: type, key: Any = 0) -> Any:
        return kind(self.config, rngs=nnx.Rngs(key))

    def make(self, kind: type, key: Any) -> Any:
        """A layer's own values, inside a trace."""
        return nnx.to_pure_dict(nnx.split(self._module(kind, key))[1])

    def specs(self, kind: type) -> Any:
        """Shape and dtype of a layer's parameters, by name."""
        return nnx.to_pure_dict(self.kinds[kind][1])

    def values(self, kind: type, layer: int) -> Any:
        """Those that are given to a layer."""
        return {name: given_value(f"{layer}.{name}", spec) for name, spec in self.specs(kind).items()}

    def apply(self, kind: type, params: Any, carry: Any, mb: Any) -> Any:
        """A layer of these values."""
        definition, specs = self.kinds[kind]
        state = jax.tree.map(lambda spec: spec, specs)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(definition, state)(carry, mb)


def given_value(path: str, spec: Any) -> Any:
    """The value of a parameter, by its path."""
    random = np.random.default_rng(zlib.crc32(path.encode()))
    return (0.05 * random.standard_normal(spec.shape)).astype(spec.dtype)


def ours(model: Model) -> float:
    """A step of the Trainer."""
    trainer = rrfp.Trainer(
        pipeline(model.config),
        model.optimizer,
        data=model.batch,
        mesh=rrfp.Mesh(pp=model.stages),
        init=given_value if model.given else None,
    )
    (report,) = trainer.steps(1)
    jax.block_until_ready(trainer.stage_params)
    return float(report.loss)


def by_hand(model: Model) -> float:
    """A step of stages, each on its device, whose programs a loop calls."""
    each, batch = model.blocks // model.stages, model.batch
    stages = [Stage(model, i, range(1 + i * each, 1 + (i + 1) * each)) for i in range(model.stages)]
    total = 0.0
    for mb in batch:
        carry: Any = None
        pullbacks = []
        for stage in stages:
            carry, pullback = stage.forward(carry, mb)
            pullbacks.append(pullback)
        total += float(carry)
        gradient: Any = np.float32(1)
        for stage, pullback in zip(reversed(stages), reversed(pullbacks), strict=True):
            gradient = stage.backward(pullback, gradient)
    weight = float(sum(mb["mask"].sum() for mb in batch))
    for stage in stages:
        stage.update(weight)
    jax.block_until_ready([stage.params for stage in stages])
    return total / weight


class Stage:
    """What a hand-written pipeline has of a stage: its parameters, and a jit for each thing that it does."""

    def __init__(self, model: Model, number: int, blocks: range) -> None:
        first, last = number == 0, number == model.stages - 1
        self.layers = [(gpt.Embed, 0)] * first + [(gpt.Block, i) for i in blocks]
        self.layers += [(gpt.Head, model.blocks + 1)] * last
        self.model, self.last, self.device = model, last, jax.devices()[number]
        makes = {kind: jax.jit(partial(model.make, kind)) for kind, _ in self.layers}
        self.params = [
            jax.device_put(
                model.values(kind, i) if model.given else makes[kind](jax.random.key(i)), self.device
            )
            for kind, i in self.layers
        ]
        self._forward = jax.jit(lambda params, carry, mb: jax.vjp(partial(self._run, mb), params, carry))
        self._backward = jax.jit(lambda pullback, gradient: pullback(gradient))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))
        self.state = jax.jit(model.optimizer.init)(self.params)
        self.sums: Any = None

    def _run(self, mb: Any, params: Any, carry: Any) -> Any:
        for (kind, _), own in zip(self.layers, params, strict=True):
            carry = self.model.apply(kind, own, carry, mb)
        return loss(carry, mb).total if self.last else carry

    def _updated(self, params: Any, state: Any, sums: Any, weight: Any) -> Any:
        updates, state = self.model.optimizer.update(jax.tree.map(lambda a: a / weight, sums), state, params)
        return optax.apply_updates(params, updates), state

    def forward(self, carry: Any, mb: Any) -> Any:
        return self._forward(self.params, jax.device_put(carry, self.device), mb)

    def backward(self, pullback: Any, gradient: Any) -> Any:
        own, gradient = self._backward(pullback, jax.device_put(gradient, self.device))
        self.sums = own if self.sums is None else self._add(self.sums, own)
        return gradient

    def update(self, weight: float) -> None:
        self.params, self.state = self._update(self.params, self.state, self.sums, weight)


def spmd(model: Model) -> float:
    """A step of one program: all stages do the same, blocks are scanned, carries go round by `ppermute`."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: model.stages]), ("pp",))
    stacked, whole = NamedSharding(mesh, P("pp")), NamedSharding(mesh, P())
    where = (whole, stacked, whole)
    kinds = [(gpt.Embed, [0]), (gpt.Block, range(1, model.blocks + 1)), (gpt.Head, [model.blocks + 1])]
    if model.given:
        own = [[model.values(kind, i) for i in layers] for kind, layers in kinds]
        embed, blocks, head = (jax.tree.map(lambda *leaves: np.stack(leaves), *some) for some in own)
        params = jax.device_put((embed, blocks, head), where)
    else:

        def made() -> Any:
            keys = [jax.vmap(jax.random.key)(jnp.arange(layers[0], layers[-1] + 1)) for _, layers in kinds]
            makes = [jax.vmap(partial(model.make, kind)) for kind, _ in kinds]
            return tuple(make(own) for make, own in zip(makes, keys, strict=True))

        params = jax.jit(made, out_shardings=where)()
    state = jax.jit(model.optimizer.init)(params)
    batch = jax.device_put(jax.tree.map(lambda *leaves: np.stack(leaves), *model.batch), whole)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(partial(_piped, model, mesh))(params, batch)
        updates, state = model.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    *updated, value = step(params, state, batch)
    jax.block_until_ready(updated)
    return float(value)


def _piped(model: Model, mesh: jax.sharding.Mesh, params: Any, batch: Any) -> Any:
    embed, blocks, head = params
    first, last = (jax.tree.map(lambda leaf: leaf[0], own) for own in (embed, head))
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
    carried = model.apply(gpt.Embed, first, None, flat)
    x = carried.reshape(MICROBATCHES, -1, *carried.shape[1:])

    @jax.checkpoint
    def block(carry: Any, own: Any) -> Any:
        return model.apply(gpt.Block, own, carry, {}), None

    def stage(own: Any, x: Any) -> Any:
        number, stages = jax.lax.axis_index("pp"), model.stages
        ring: Sequence[tuple[int, int]] = [(i, (i + 1) % stages) for i in range(stages)]

        def tick(arrived: Any, now: Any) -> Any:
            out, _ = jax.lax.scan(block, jnp.where(number == 0, now, arrived), own)
            return jax.lax.ppermute(out, "pp", ring), out

        rest = jnp.zeros((stages - 1, *x.shape[1:]), x.dtype)
        _, outs = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.concatenate([x, rest]))
        return outs[stages - 1 :][None]

    through = jax.shard_map(stage, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P("pp"), check_vma=False)
    logits = model.apply(gpt.Head, last, through(blocks, x)[-1].reshape(carried.shape), flat)
    found = loss(logits, flat)
    return found.total / found.weight


OURS = "ours"
SYSTEMS: Mapping[str, Callable[[Model], float]] = {OURS: ours, "by hand": by_hand, "SPMD": spmd}
"""What takes a step of a model, and gives its loss."""
