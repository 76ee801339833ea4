"""Exhaustive exploration of one-sided transfers: all states that a receiver and its senders can reach."""
