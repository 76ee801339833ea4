"""The command lines: flags are read here and nowhere else.

One file a command; `command_line` has what they share.
"""
