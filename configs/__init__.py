"""Named runs: each file with a `get_config()` describes one; the others hold what several share."""
