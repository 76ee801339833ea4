"""Why a living run does not move: what is seen of its ranks, and what follows from that."""
