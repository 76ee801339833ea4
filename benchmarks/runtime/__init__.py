"""What the runtime costs on this machine. `benchmarks/README.md` has a line for each command."""
