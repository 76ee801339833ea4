"""Documents of natural length: where they come from, and how rows of few lengths are made of them. No JAX."""
