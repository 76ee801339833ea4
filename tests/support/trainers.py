"""Trainers made of flat names: of the Trainer's own arguments, and of all other settings."""

import inspect
from dataclasses import fields

import rrfp_jax as rrfp

OWN = inspect.signature(rrfp.Trainer).parameters.keys()
OTHERS = {item.name for item in fields(rrfp.Settings)} - OWN


def made(pipe, optimizer=None, **given):
    """A Trainer; what is no argument of its own goes into `settings`."""
    others = {name: given.pop(name) for name in OTHERS & given.keys()}
    return rrfp.Trainer(pipe, optimizer, **given, **({"settings": rrfp.Settings(**others)} if others else {}))
