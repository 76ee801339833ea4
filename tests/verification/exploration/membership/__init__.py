"""Exhaustive exploration of who is in a run: all states that a few ranks can reach."""
