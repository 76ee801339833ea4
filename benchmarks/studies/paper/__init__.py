"""The figures of arXiv:2605.18750 (RRFP) by simulation: 20 rows from three fitted numbers."""
