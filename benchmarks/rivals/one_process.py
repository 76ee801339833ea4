"""Systems of one process with a device a stage that train the model of a case: ours, some of plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from benchmarks.rivals.cases import RATE, STAGES, CaseModel, given_value
from configs.quickstart import loss, pipeline
from models import gpt

MOST_STEPS = 2**30

Placing: TypeAlias = Literal["device", "named", "entered"]
"""How a hand-written stage says where it computes: by its device; by a mesh of that device, named in every
sharding; or by entering that mesh with `jax.set_mesh` around every call, with bare `PartitionSpec`s."""


class System(Protocol):
    """Something that trains. A step gives its loss once that is known, perhaps before its update is done."""

    def step(self) -> float: ...

    def params(self) -> Any:
        """What `jax.block_until_ready` waits for behind the last step."""
        ...


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(RATE)


class Ours:
    """The Trainer, with its own defaults, or the settings that hide more of the host's work."""

    def __init__(self, model: CaseModel, schedule: str, **settings: Any) -> None:
        self._trainer = rrfp.Trainer(
            pipeline(model.config),
            optimizer(),
            data=model.batch,
            mesh=rrfp.Mesh(pp=STAGES),
            schedule=schedule,
            init=given_value,
            settings=rrfp.Settings(**settings),
        )
        self._steps = self._trainer.steps(MOST_STEPS)
        self.peak_bytes = 0

    def step(self) -> float:
        report = next(self._steps)
        self.peak_bytes = sum(report.peak_bytes)
        return report.loss

    def params(self) -> Any:
        return self._trainer.stage_params


class Stage:
    """What a hand-written 1F1B has of a stage: its parameters, and a program for each thing that it does.

    Residuals are kept between forward and backward, nothing is computed again. Gradients are added inside
    the backward. A *fused* last stage computes its forward and backward as one program.
    """

    def __init__(self, model: CaseModel, number: int, fused: bool, placing: Placing) -> None:
        self.model, self.number = model, number
        self.last = number == STAGES - 1
        self.fused = fused and self.last
        mesh = jax.sharding.Mesh(np.array([jax.devices()[number]]), ("data",))
        named = NamedSharding(mesh, P())
        self.place = jax.devices()[number] if placing == "device" else named
        self._constraint = {"device": None, "named": named, "entered": P()}[placing]
        self._entered = partial(jax.set_mesh, mesh) if placing == "entered" else nullcontext
        self.values = jax.device_put(model.stage_values(number), self.place)
        self.state = jax.jit(optimizer().init)(self.values)
        self._zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like))
        self._forward = jax.jit(lambda params, carry, mb: jax.vjp(partial(self._run, mb), params, carry))
        self._backward = jax.jit(self._add_pulled, donate_argnums=2)
        self._both = jax.jit(self._add_both, donate_argnums=3)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))

    def begin(self) -> None:
        with self.entered():
            self.sums = self._zeros(self.values)
        self._held: dict[int, Any] = {}

    def entered(self) -> AbstractContextManager[Any]:
        """What stands around a call."""
        return self._entered()

    def _run(self, mb: Any, params: Any, carry: Any) -> Any:
        carry = self.model.run_stage(self.number, params, carry, mb)
        if self._constraint is not None:
            carry = jax.lax.with_sharding_constraint(carry, self._constraint)
        return loss(carry, mb).total if self.last else carry

    def _add_pulled(self, pullback: Any, gradient: Any, sums: Any) -> Any:
        own, gradient = pullback(gradient)
        return jax.tree.map(jnp.add, sums, own), gradient

    def _add_both(self, params: Any, carry: Any, mb: Any, sums: Any) -> Any:
        total, (own, gradient) = jax.value_and_grad(partial(self._run, mb), (0, 1))(params, carry)
        return jax.tree.map(jnp.add, sums, own), gradient, total

    def _updated(self, params: Any, state: Any, sums: Any, weight: Any) -> Any:
        updates, state = optimizer().update(jax.tree.map(lambda a: a / weight, sums), state, params)
        return optax.apply_updates(params, updates), state

    def forward(self, number: int, carry: Any, mb: Any) -> Any:
        """The carry for the next stage; the loss behind the last one, unless its backward gives that."""
        carry, mb = jax.device_put((carry, mb), self.place)
        if self.fused:
            self._held[number] = carry, mb
            return None
        with self.entered():
            carry, self._held[number] = self._forward(self.values, carry, mb)
        return carry

    def backward(self, number: int, gradient: Any) -> tuple[Any, Any]:
        """The gradient for the stage before, and the loss where this program computes it."""
        held = self._held.pop(number)
        if self.fused:
            with self.entered():
                self.sums, gradient, total = self._both(self.values, *held, self.sums)
            return gradient, total
        gradient = jax.device_put(gradient, self.place)
        with self.entered():
            self.sums, gradient = self._backward(held, gradient, self.sums)
        return gradient, None

    def update(self, weight: float) -> None:
        with self.entered():
            self.values, self.state = self._update(self.values, self.state, self.sums, weight)


def one_f_one_b(stages: int, microbatches: int) -> Iterator[tuple[str, int, int]]:
    """Kind, stage and microbatch of every task of 1F1B, each behind what it needs."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        order = [("F", j) for j in range(ahead)]
        for j in range(microbatches):
            order += [("B", j)] + ([("F", j + ahead)] if j + ahead < microbatches else [])
        orders.append(iter(order))
    done: set[tuple[str, int, int]] = set()
    coming = [next(order, None) for order in orders]
    while any(coming):
        for stage, task in enumerate(coming):
            if task is None:
                continue
            kind, j = task
            before = (kind, stage - 1, j) if kind == "F" else (kind, stage + 1, j)
            if before in done or before[1] in (-1, stages):
                done.add((kind, stage, j))
                yield kind, stage, j
                coming[stage] = next(orders[stage], None)


class ByHand:
    """1F1B written by hand: all tasks are dispatched ahead, in a known order; none waits for another."""

    def __init__(self, model: CaseModel, fused: bool = False, placing: Placing = "device") -> None:
        self._model = model
        self._stages = [Stage(model, number, fused, placing) for number in range(STAGES)]
        self._order = list(one_f_one_b(STAGES, model.case.microbatches))
        self._first = [{"tokens": mb["tokens"]} for mb in model.batch]
        self._last = [{"labels": mb["labels"], "mask": mb["mask"]} for mb in model.batch]

    def step(self) -> float:
        losses: list[Any] = []
        between: dict[tuple[str, int, int], Any] = {}
        for stage in self._stages:
            stage.begin()
        for kind, number, j in self._order:
            stage = self._stages[number]
            if kind == "F":
                mb = self._first[j] if number == 0 else self._last[j] if stage.last else {}
                carry = between.pop(("F", number - 1, j), None)
                between["F", number, j] = stage.forward(j, carry, mb)
                if stage.last:
                    losses.append(between.pop(("F", number, j)))
            else:
                gradient = np.float32(1) if stage.last else between.pop(("B", number + 1, j))
                between["B", number, j], total = stage.backward(j, gradient)
                losses.append(total)
        for stage in self._stages:
            stage.update(self._model.weight)
        return sum(float(each) for each in losses if each is not None) / self._model.weight

    def params(self) -> Any:
        return [stage.values for stage in self._stages]


class Spmd:
    """One jit: all stages do the same in each tick, carries go round by `ppermute`. Microbatches of several
    lengths are padded to the longest. Blocks are computed again in the backward: to keep the residuals of all
    ticks took longer (real-8: 640 to 720 ms of CPU a step, against 500 to 620)."""

    def __init__(self, model: CaseModel) -> None:
        self._model = model
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()[:STAGES]), ("pp",))
        stacked, self._whole = NamedSharding(self._mesh, P("pp")), NamedSharding(self._mesh, P())
        kinds = [(gpt.Embed, [0]), (gpt.Block, range(1, STAGES + 1)), (gpt.Head, [STAGES + 1])]
        own = [[model.values(kind, i) for i in layers] for kind, layers in kinds]
        values = tuple(jax.tree.map(lambda *leaves: np.stack(leaves), *some) for some in own)
        self._values = jax.device_put(values, (self._whole, stacked, self._whole))
        self._state = jax.jit(optimizer().init)(self._values)
        self._step = jax.jit(self._updated, donate_argnums=(0, 1))

    def _updated(self, params: Any, state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(self._piped)(params, batch)
        updates, state = optimizer().update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    def _piped(self, params: Any, batch: Any) -> Any:
        model, count = self._model, self._model.case.microbatches
        embed, blocks, head = params
        first, last = (jax.tree.map(lambda leaf: leaf[0], own) for own in (embed, head))
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        x = model.apply(gpt.Embed, first, None, flat)
        x = x.reshape(count, -1, *x.shape[1:])
        through = jax.shard_map(
            self._ticks, mesh=self._mesh, in_specs=(P("pp"), P()), out_specs=P("pp"), check_vma=False
        )
        x = through(blocks, x)[-1]
        # The head's work is shared out among the stages' devices: whole, each of them would do all of it.
        x = jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, P("pp")))
        logits = jax.vmap(lambda own: model.apply(gpt.Head, last, own, {}))(x)
        found = loss(logits, batch)
        return found.total / found.weight

    def _ticks(self, blocks: Any, x: Any) -> Any:
        number = jax.lax.axis_index("pp")
        ring = [(i, (i + 1) % STAGES) for i in range(STAGES)]
        own = jax.tree.map(lambda leaf: leaf[0], blocks)
        block = jax.checkpoint(lambda params, carry: self._model.apply(gpt.Block, params, carry, {}))

        def tick(arrived: Any, now: Any) -> Any:
            out = block(own, jnp.where(number == 0, now, arrived))
            return jax.lax.ppermute(out, "pp", ring), out

        rest = jnp.zeros((STAGES - 1, *x.shape[1:]), x.dtype)
        _, outs = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.concatenate([x, rest]))
        return outs[STAGES - 1 :][None]

    def step(self) -> float:
        batch = jax.device_put(self._model.padded, self._whole)
        self._values, self._state, value = self._step(self._values, self._state, batch)
        return float(value)

    def params(self) -> Any:
        return self._values


SYSTEMS: Mapping[str, Callable[[CaseModel], System]] = {
    "by-hand": ByHand,
    "by-hand-fused": partial(ByHand, fused=True),
    "named": partial(ByHand, placing="named"),
    "set-mesh": partial(ByHand, placing="entered"),
    "1f1b": partial(Ours, schedule="1f1b"),
    "bf": partial(Ours, schedule="bf"),
    "bf-ready": partial(Ours, schedule="bf", dispatch="ready"),
    "bf-whole": partial(Ours, schedule="bf", layers_per_program=1000),
    "1f1b-whole": partial(Ours, schedule="1f1b", layers_per_program=1000),
    "1f1b-remat": partial(Ours, schedule="1f1b", remat="full"),
    "spmd": Spmd,
}
