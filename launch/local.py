"""`python -m launch.local --config=configs/quickstart.py [--config.x=y ...]`: a run, a process per stage."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is to be tidied up while JAX is imported
    from rrfp_jax.commands.local import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
