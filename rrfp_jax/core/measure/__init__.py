"""What a step took, or would take: traces, the metrics made of them, workloads and costs.

Begin with `trace` (what was) and `workload` (what is assumed).
"""
