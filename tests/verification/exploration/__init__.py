"""Exhaustive exploration of the scheduling core: all states that the stages of a small step can reach."""
