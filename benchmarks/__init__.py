"""Measurements. Each command takes --json=FILE, and --check to exit with 1 when an aim is missed."""
