"""`python -m launch.local --config=configs/quickstart.py [--config.x=y ...]`: a run, a process per stage."""

if __name__ == "__main__":
    from rrfp_jax.commands.local import run

    run()
