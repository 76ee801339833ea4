"""What completes the commands of `rrfp` in a shell, made of their table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

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
    cases: dict[str, Sequence[str]] = {}  # words, by what stands before them
    for verb in VERBS.values():
        named = [flag for flag in verb.flags if not flag.is_positional]
        cases |= {f'"{verb.name} {flag.name}"': flag.choices for flag in named if flag.metavar}
        own = [f"{flag.name}{'=' * bool(flag.metavar and flag.name != '-n')}" for flag in named]
        if verb.config:
            cases[f'"{verb.name} --config"'] = ()
            own = ["--config=", *own]
        places = [word for flag in verb.flags if flag.is_positional for word in flag.choices]
        cases[f'"{verb.name} "*'] = [*own, "--help", *places]
    lines = (f'    {before}) words="{" ".join(words)}";;' for before, words in cases.items())
    text = SCRIPT.format(verbs=" ".join(VERBS), cases="\n".join(lines))
    print_whole(f"{FOR_ZSH}\n{text}" if options.shell == "zsh" else text)
    return DONE
