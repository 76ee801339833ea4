"""The model and the step of `null_step.py`: the same for everybody. Needs neither JAX nor PyTorch.

Forwards, backwards, squared error against the input itself, and SGD.
"""

from __future__ import annotations

RANKS, MICROBATCHES = 2, 8
"""Processes, one stage each; and what a step has of them."""

ROWS, WIDTH = 4, 64
"""A microbatch has so many float32."""

LAYERS = 4
"""Of the model, each a matrix of `WIDTH` x `WIDTH`, a bias and tanh; every virtual stage has as many."""

LEARNING_RATE = 1e-3

WARM_UP, STEPS = 20, 200
"""Steps that are not measured, and that are."""
