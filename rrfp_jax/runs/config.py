"""Runs as typed, frozen dataclasses, the files that they are in, and in what two of them differ."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import sys
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Self

import numpy as np
import optax

from rrfp_jax.checkpoint.saving import OnError
from rrfp_jax.data.contract import as_data
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, check_name, config_path, misfit_of, path_of, says_its_arguments
from rrfp_jax.forecast.forecast import AUTO, RunSpec
from rrfp_jax.json_files import flat
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.mesh.topology import Mesh
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.programs.initial import InitFunction
from rrfp_jax.train.named import read_schedule
from rrfp_jax.train.report import Evaluation, Report
from rrfp_jax.train.trainer import Trainer
from rrfp_jax.user_code import called, own_traceback


@says_its_arguments()
@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """A run's checkpoints, in `<directory>/<name>.checkpoints/`. Without an interval there are none.

    Attributes:
        every_steps: steps between two checkpoints; 0 for no such interval.
        every_minutes: minutes between two, whichever comes first; 0 for no such interval.
        keep: how many are kept.
        on_error: if one cannot be written, "continue" with a warning, or "stop".
        resume: resume from the latest one; otherwise, existing ones are moved away.

    Raises:
        UsageError: a negative interval, nothing to keep, or an unknown `on_error`.
    """

    every_steps: int = 0
    every_minutes: float = 0.0
    keep: int = 3
    on_error: OnError = "continue"
    resume: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every_steps < 0 or not self.every_minutes >= 0:
            raise UsageError(
                f"checkpoint.every_steps={self.every_steps}, every_minutes={self.every_minutes}: give an "
                f"interval, or 0 for none"
            )
        if self.keep < 1:
            raise UsageError(f"checkpoint.keep={self.keep}: at least one must be kept")
        if self.on_error not in ("continue", "stop"):
            raise UsageError(f"checkpoint.on_error={self.on_error!r}: choose 'continue' or 'stop'")

    @property
    def wanted(self) -> bool:
        """Whether there are any."""
        return self.every_steps > 0 or self.every_minutes > 0


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings, ABC):
    """The configuration of a named run.

    Subclass it in a config file; add fields, and methods that build model, optimizer and data. It inherits
    the fields of `Settings`, so config files and command lines name them without a prefix.

    Attributes:
        name: of the run; its files go to `<directory>/<name>/`.
        steps: training steps.
        mesh: pipeline stages, tensor and data parallelism; see `Mesh`.
        schedule: bf, bfw, fb, b-priority, f-priority, 1f1b, gpipe, zb-h1, zb-h2, interleaved-1f1b, zb-v,
            v-half, v-min, v-zb, dualpipe-v; planned, by what was measured or by the costs in a file
            (planned:FILE); csv:FILE, an order in a file; ranked: and the name of an order, which ranks ready
            tasks by that order and reserves its memory; or auto, the hint that the simulator finds fastest,
            reconsidered after some steps.
        split: layers per stage, or per virtual stage in the model's order if stages have several chunks;
            empty for an even split; "auto" for one by predicted costs.
        validate_every: steps between validations; 0 for one at the end.
        validation_steps: at most so many steps of validation data per validation; 0 for the data's own
            `steps`, or 1 if it has none.
        checkpoint: how often the run saves itself, and whether it resumes.
        executables: a folder to keep compiled programs in, so that a restart compiles nothing; auto for
            `<directory>/.executables/`, none to compile at every start.
        directory: where runs are kept.

    Raises:
        UsageError: an invalid field, with its value.
    """

    name: str
    steps: int
    mesh: Mesh = field(default_factory=Mesh)
    schedule: str = "bf"
    split: tuple[int | str, ...] | str = ()
    validate_every: int = 0
    validation_steps: int = 0
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    executables: str | Path | None = "auto"
    directory: str = "runs"

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse fields that are not there, and a class that does not say how to build all of it.

        Nor may it have types for names, as fields have, if it is no dataclass.
        """
        if "__dataclass_params__" in vars(cls) and vars(cls)["__dataclass_params__"].init:
            made = vars(cls)["__init__"]
            taken = inspect.signature(made).parameters
            if kwargs.keys() - taken and not any(own.kind is own.VAR_KEYWORD for own in taken.values()):
                raise UsageError(misfit_of(cls.__name__, made, args, kwargs))
        for own in cls.__mro__:
            if issubclass(own, RunConfig) and "__dataclass_params__" not in vars(own):
                types_of = inspect.get_annotations(own)
                if names := [name for name, hint in types_of.items() if "ClassVar" not in str(hint)]:
                    verb = "are no fields" if names[1:] else "is no field"
                    raise UsageError(
                        f"{own.__name__}: {' and '.join(names)} {verb}; "
                        f"put `@dataclass(frozen=True, kw_only=True)` above the class"
                    )
        if lacking := sorted(cls.__abstractmethods__):
            methods = " and ".join(f"{name}(self)" for name in lacking)
            raise UsageError(f"{cls.__name__}: define {methods}, which every rrfp.RunConfig needs")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "directory", str(path_of("directory", self.directory)))
        check_name("name", self.name, self.directory)
        if isinstance(self.split, str):  # as a tuple, of which command lines make others
            object.__setattr__(self, "split", (self.split,))
        if self.steps < 1:
            raise UsageError(f"steps={self.steps}: a run needs at least one step")
        sizes = self.split[0] if len(self.split) == 1 else self.split
        if self.split != (AUTO,) and not all(isinstance(size, int) for size in self.split):
            raise UsageError(
                f"split={sizes!r}: give 'auto', or the number of layers of each stage, such as (2,1,1,2); "
                f"nothing for an even split"
            )
        if self.validate_every < 0:
            raise UsageError(f"validate_every={self.validate_every}: give a number of steps, 0 for the end")
        if self.validation_steps < 0:
            raise UsageError(f"validation_steps={self.validation_steps}: give a number of steps, 0 for all")
        if self.executables == "none":  # as command lines say it
            object.__setattr__(self, "executables", None)
        if self.executables in ("True", "False", "None"):
            raise UsageError(f"executables={self.executables}: give a folder, auto, or none for no folder")
        super().__post_init__()
        if self.mesh.share_devices and (self.injected.link_delay or self.injected.link_bandwidth):
            raise UsageError("link_delay or link_bandwidth with mesh.share_devices: no link is between them")

    @abstractmethod
    def pipeline(self) -> Pipeline:
        """The model and its loss."""

    @abstractmethod
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer."""

    @abstractmethod
    def train_data(self) -> Any:
        """Training data; see `Trainer`."""

    def validation_data(self) -> Any:
        """Validation data, or None for no validation. `validation_steps` says how much of it is taken."""
        return None

    def init(self) -> InitFunction | None:
        """Initial values from elsewhere, as from `rrfp_jax.weights.pretrained`; None for the layers' own."""
        return None

    def on_step(self, report: Report) -> bool | None:
        """Called after every step, in every process: for loggers, which write in one of them.

        Returns:
            True to end the run with this step, as if it were its last; in all processes, if one of them says
            so.
        """
        return None

    def on_validation(self, report: Report, evaluation: Evaluation) -> bool | None:
        """Called after every validation, in every process; as `on_step`, after it.

        Args:
            report: of the step before.
            evaluation: mean loss and metrics.
        """
        return None

    def made(self, what: str) -> Any:
        """What the method of this name makes.

        Raises:
            UsageError: what it raised, with its own traceback.
        """
        with called(f"{type(self).__name__}.{what}()", UsageError):
            return getattr(self, what)()

    @property
    def layers_per_virtual_stage(self) -> Any:
        """What `split` is to a Trainer."""
        return AUTO if self.split == (AUTO,) else self.split or None

    @property
    def settings(self) -> Settings:
        """Its settings, as a Trainer's."""
        own = {item.name: getattr(self, item.name) for item in dataclasses.fields(Settings)}
        if self.executables == AUTO:
            own["executables"] = Path(self.directory) / ".executables"
        return Settings(**own)

    def spec(self) -> RunSpec:
        """What the run consists of, but for its validation data, to be forecast or compiled ahead."""
        schedule, split = read_schedule(self.schedule), self.layers_per_virtual_stage
        pipe, optimizer, data = map(self.made, ("pipeline", "optimizer", "train_data"))
        return RunSpec(pipe, optimizer, as_data(data), self.mesh, schedule, split, self.settings)

    def trainer(self, mesh: Mesh | None = None) -> Trainer:
        """The run's Trainer, on its own mesh or on another."""
        return Trainer(
            self.made("pipeline"),
            self.made("optimizer"),
            data=self.made("train_data"),
            mesh=mesh or self.mesh,
            schedule=self.schedule,
            split=self.layers_per_virtual_stage,
            init=self.made("init"),
            settings=self.settings,
        )


def is_nested(value: Any) -> bool:
    """Whether a field's value has fields of its own; a class has none."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def has_flag(value: Any) -> bool:
    """Whether a command line can give a field with this value another; of lists and dicts it cannot."""
    return not isinstance(value, (list, Mapping))


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted names, values and declared types of fields that can be given, nested dataclasses taken apart."""
    types_of = typing.get_type_hints(type(config))
    for item in (own for own in dataclasses.fields(config) if own.init):
        value = getattr(config, item.name)
        if is_nested(value):
            yield from fields_of(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, types_of[item.name]


def plain(value: Any) -> Any:
    """A number of NumPy's as Python's, a dtype by its name, as a command line gives it; else as it is."""
    if isinstance(value, np.generic):
        return value.item()
    is_number = isinstance(value, type) and issubclass(value, (np.generic, bool, int, float, complex))
    is_jax = isinstance(value, type) and isinstance(getattr(value, "dtype", None), np.dtype)
    return np.dtype(value).name if is_number or is_jax or isinstance(value, np.dtype) else value


def as_json(value: Any) -> Any:
    """A config, or a value in one, as JSON can hold it: what JSON does not know as text."""
    if is_nested(value):
        return {item.name: as_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): as_json(own) for name, own in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [as_json(own) for own in ordered]
    value = plain(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


MISSING = "nothing"


def differences(before: Any, now: Any) -> list[str]:
    """The fields in which two configs differ, such as "learning_rate: 0.006 -> 0.001"."""
    old, new = dict(flat(before)), dict(flat(as_json(now)))
    names = [*new, *(name for name in old if name not in new)]
    changed = [name for name in names if old.get(name, MISSING) != new.get(name, MISSING)]
    return [f"{name}: {_text(old.get(name, MISSING))} -> {_text(new.get(name, MISSING))}" for name in changed]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def load_config(path: str) -> RunConfig:
    """The `get_config()` of a Python file."""
    file, name = config_path(path), f"--config={path}"
    folder = str(file.parent.absolute())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with called(f"{name}: the file", UsageError):
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            if not str(error).startswith("attempted relative import"):
                raise
            raise UsageError(
                f"{name}: a config file is in no package, so nothing can be imported relative to it; Python "
                f"looks in its folder first: write `from my_model import ...` for a my_model.py beside it"
                f"{own_traceback(error)}"
            ) from None
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UsageError(f"{name}: the file has no function get_config()")
    with called(f"{name}: get_config()", UsageError):
        config = get_config()
    if not isinstance(config, RunConfig):
        given = "None (is a `return` missing?)" if config is None else type(config).__name__
        raise UsageError(f"{name}: get_config() returned {given}; it must return an rrfp.RunConfig")
    return config


def _module_name(file: Path) -> str:
    """The name by which Python imports the file; one of ours if that name would lead elsewhere.

    A worker that a data loader has spawned imports the file by this name, to find what it is to call.
    """
    found, known = PathFinder.find_spec(file.stem), sys.modules.get(file.stem)
    places = [found and found.origin, *([getattr(known, "__file__", None)] if known is not None else [])]
    leads_there = all(place and os.path.exists(place) and os.path.samefile(place, file) for place in places)
    return file.stem if leads_there else f"_rrfp_config_{file.stem}"
