"""What users give: layers, their parameters, how they are split, tied, frozen and spread over devices.

Begin with `layers`, then `pipeline`.
"""
