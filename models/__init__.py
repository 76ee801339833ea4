"""Example models: plain flax modules that know nothing of the pipeline they are trained in."""
