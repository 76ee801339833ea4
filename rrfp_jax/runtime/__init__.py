"""The JAX runtime: what a stage computes, where its data is, and the driver that feeds the core."""
