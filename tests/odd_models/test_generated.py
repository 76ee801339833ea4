"""Models drawn at random from a grammar of JAX operations."""

from tests.odd_models.grammar import model
from tests.odd_models.odd import ALL, held_against_plain_jax

COUNT = 300 if ALL else 24


def cases():
    for number in range(COUNT):
        yield f"model {number}", model(number)


test_like_plain_jax = held_against_plain_jax(cases(), every=1)
