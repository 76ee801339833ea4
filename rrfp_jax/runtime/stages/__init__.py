"""A stage at work: its arrays, gradient sums, optimizer, replicas and tied parameters.

`stage` keeps what lasts from step to step, `step` what each microbatch holds, `memory` counts bytes.
"""
