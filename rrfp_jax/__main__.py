"""`python -m rrfp_jax VERB ...`: the command `rrfp`."""

from rrfp_jax.commands.cli import run

if __name__ == "__main__":
    run()
