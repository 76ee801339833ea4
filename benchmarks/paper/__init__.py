"""The figures of the paper, by simulation."""
