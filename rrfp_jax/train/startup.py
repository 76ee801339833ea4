"""A pipeline that is to be trained, as far as it must be there before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import optax

from rrfp_jax.data.contract import Data, Microbatch, as_data, plan_step
from rrfp_jax.errors import UsageError
from rrfp_jax.progress import Progress, silent
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.stages.memory import StageLedger
from rrfp_jax.train.checks import check_model, check_order
from rrfp_jax.train.flax_states import flax_states
from rrfp_jax.train.gathering import whole_params
from rrfp_jax.train.one_thread import OneThread, one_thread
from rrfp_jax.train.report import Report
from rrfp_jax.train.stepping import Stepper
from rrfp_jax.views.progress_line import shown_progress


class Startup:
    """Compiled and allocated before its first step, or by `start`.

    Args:
        stepper: makes its steps.
        optimizer: None if it is never updated.
        data: of its steps; None if microbatches are given to `step` and `value_and_grad`.
        on_step: called with every `Report`.

    Raises:
        UsageError: the model, its loss or the optimizer does not work for the data's first step.
    """

    def __init__(
        self,
        stepper: Stepper,
        optimizer: optax.GradientTransformation | None,
        data: Data | None,
        on_step: Callable[[Report], None] | None,
    ) -> None:
        self._stepper, self._optimizer, self._data, self._on_step = stepper, optimizer, data, on_step
        self._world = stepper.engine.world
        self._checked, self._programs = False, (0, 0)
        self._one_thread = OneThread()
        if data is not None:
            self._check_model(data, plan_step(data, 0))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse `copy`, `pickle` and whatever uses them."""
        raise UsageError(
            "a Trainer cannot be copied or pickled, as its arrays and programs are on devices of this "
            "process: write it with trainer.save(folder), or copy trainer.params()"
        )

    @property
    def _engine(self) -> Engine:
        return self._stepper.engine

    @property
    def pipe(self) -> Pipeline:
        """The model."""
        return self._engine.pipe

    @property
    def is_main(self) -> bool:
        """Whether this process is the one of its run that prints and writes what is wanted once."""
        return self._world.rank == 0

    @property
    def progress(self) -> Progress:
        """What is told of whatever lasts, from now on: compiling, also for shapes that are met later, too."""
        return self._engine.library.progress

    def start(
        self, evaluate: Any = None, *, progress: Progress | bool | None = None
    ) -> Sequence[StageLedger]:
        """Compile and allocate, unless that has been done; what each stage needs.

        Args:
            evaluate: data that will be evaluated between steps, for which to compile at once, too.
            progress: True to show what lasts, now and later: compiling, evaluating, saving, restoring; on a
                terminal or in a notebook as a live line, elsewhere as plain lines, of several processes on
                one. Or a listener that is told instead, False for none, None to leave it as it is. Unless
                one is given a Trainer is quiet.
        """
        if progress is not None:
            self._engine.library.progress = self._listener(progress)
        self._start(self._own_data("start"), None if evaluate is None else as_data(evaluate))
        return self._engine.memory.ledgers()

    @property
    def programs(self) -> tuple[int, int]:
        """How many programs all processes compiled for the first step, and how many they loaded instead."""
        return self._programs

    @one_thread("params")
    def params(self, *, modules: bool = False) -> list[Any]:
        """The trained model, layer by layer, whole in this process, for plain flax; see `rrfp.export`."""
        return flax_states(self.pipe.layers, whole_params(self._started("params")), modules)

    @property
    def stage_params(self) -> Params:
        """The parameters of this process's stages, {layer index as text: nested dict}, on their devices.

        In a run of one process those are all. The next step frees them: copy them.
        """
        stages = self._started("stage_params").distinct
        return {k: v for stage in stages for k, v in stage.params.items()}

    def _started(self, asked: str) -> Engine:
        if not self._engine.stages:
            raise UsageError(f"Trainer.{asked}: there are none before the first step; call start() first")
        return self._engine

    def _listener(self, progress: Progress | bool) -> Progress:
        if not isinstance(progress, bool):
            return progress
        return shown_progress() if progress and self.is_main else silent

    def _require_optimizer(self) -> None:
        if self._optimizer is None:
            raise UsageError("this Trainer has no optimizer: Trainer(pipe, optax.adamw(...), ...)")

    def _own_data(self, method: str) -> Data:
        if self._data is None:
            raise UsageError(f"Trainer.{method}() needs data: Trainer(..., data=...)")
        return self._data

    def _start(self, data: Data, evaluate: Data | None = None) -> None:
        if self._engine.stages:
            return
        with self._one_thread.uses("start"):
            plan = plan_step(data, 0)
            self._check_model(data, plan)
            self._programs = self._stepper.start(data, plan, evaluate)

    def _check_model(self, data: Data, plan: Sequence[Microbatch]) -> None:
        if not self._checked:
            check_order(self._stepper.rules(len(plan), "train"))
            check_model(self._engine.pipe, self._engine, self._optimizer, data, plan)
            self._checked = True
