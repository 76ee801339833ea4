"""`python -m launch.local --config=configs/quickstart.py [--config.x=y ...]`: a run, a process per stage."""

from rrfp_jax.train.local import run

if __name__ == "__main__":
    run()
