"""Named runs: each file's `get_config()` describes one."""
