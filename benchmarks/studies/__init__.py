"""Studies by the simulator. `benchmarks/README.md` has a line for each command."""
