"""Tells when layers move to other stages."""

from rrfp_jax.runtime.stages import leaves as moving


def before_each_layer(call):
    """In this process, from now on: `call()` before a layer's leaves are exchanged, on every rank."""
    inner = moving.move

    def move(held, found, layout, exchange):
        def exchanged(*arguments, **named):
            call()
            return exchange(*arguments, **named)

        inner(held, found, layout, exchanged)

    moving.move = move
