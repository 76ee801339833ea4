"""What completes the commands of `rrfp` in a shell, made of their table."""

from __future__ import annotations

import argparse

from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.commands.verbs import VERBS
from rrfp_jax.errors import DONE

SCRIPT = """\
_rrfp() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" flag="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$word" = "=" ]; then word=""
  elif [ "$flag" = "=" ]; then flag="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  if [ "$COMP_CWORD" = 1 ]; then words="{verbs}"
  else case "${{COMP_WORDS[1]}} $flag" in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ "${{COMPREPLY[0]: -1}}" = "=" ] && compopt -o nospace 2>/dev/null
  return 0
}}
complete -o default -F _rrfp rrfp"""
"""For bash; `-o default` completes names of files where there are no words."""

FOR_ZSH = "autoload -U +X bashcompinit && bashcompinit"


def main(options: argparse.Namespace) -> int:
    """Print the functions of a shell."""
    cases = []
    for verb in VERBS.values():
        cases += [
            f'    "{verb.name} {flag.name}") words="{" ".join(flag.choices)}";;'
            for flag in verb.flags
            if flag.metavar and flag.name.startswith("-")
        ]
        flags = [f"{flag.name}{'=' * bool(flag.metavar and flag.name != '-n')}" for flag in verb.flags]
        own = ["--config="] * verb.config + [flag for flag in flags if flag.startswith("-")] + ["--help"]
        cases.append(f'    "{verb.name} --config") ;;' * verb.config)
        shown = next((" ".join(flag.choices) for flag in verb.flags if not flag.name.startswith("-")), "")
        cases.append(f'    "{verb.name} "*) words="{" ".join(own)} {shown}";;')
    text = SCRIPT.format(verbs=" ".join(VERBS), cases="\n".join(case for case in cases if case))
    print_whole(f"{FOR_ZSH}\n{text}" if options.shell == "zsh" else text)
    return DONE
