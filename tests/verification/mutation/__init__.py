"""Mutants: the rows of the table, and what puts one into the processes of a test."""
