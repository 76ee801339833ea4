"""Why steps took as long as they did: where their time went, and what would make them shorter.

Begin with `explanation`.
"""
