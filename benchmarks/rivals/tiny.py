"""The model and the step of `null_step.py`: the same for everybody. Needs neither JAX nor PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NullStep:
    """Steps whose compute is next to nothing: forwards, backwards, squared error, SGD.

    Attributes:
        ranks: processes, one stage each.
        microbatches: of a step, each of `rows` x `width` float32.
        layers: of the model, each a `width` x `width` matrix, a bias and tanh; shared out equally.
        warm_up, steps: that are not measured, and that are.
    """

    ranks: int = 2
    microbatches: int = 8
    rows: int = 4
    width: int = 64
    layers: int = 4
    learning_rate: float = 1e-3
    warm_up: int = 20
    steps: int = 200
