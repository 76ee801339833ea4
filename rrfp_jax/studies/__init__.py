"""Schedules side by side in the simulator, on steps that vary as others have measured; a lower bound.

Enter at `compare`.
"""
