"""``python -m rarefy completion``: a script with which a shell completes the words after python -m rarefy."""

from __future__ import annotations

import argparse

# What each command takes; a test holds it against their --help.
WORDS = {
    "": "--json --block --help advise convert report bench completion",
    "advise": "--shape --tokens --density --dtype --device --threads --json --help",
    "convert": "--spec --explain --help",
    "report": "--spec --tokens --json --html --help",
    "bench": "--spec --tokens --json --html --help",
    "completion": "bash zsh --help",
}

# Of "python -m rarefy report x" the words are 0 to 4. Other lines of python complete file names, as before.
_SCRIPT = """_rarefy_module() {
  [ "${COMP_WORDS[1]}" = -m ] && [ "${COMP_WORDS[2]}" = rarefy ] || return 0
  local words
  case ${COMP_WORDS[3]} in
%s
    *) words= ;;
  esac
  [ "$COMP_CWORD" -gt 3 ] || words="%s"
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o bashdefault -o default -F _rarefy_module python python3
"""


def script(shell: str) -> str:
    """The script, for "bash" or "zsh"."""
    cases = "\n".join(f'    {name}) words="{words}" ;;' for name, words in WORDS.items() if name)
    begin = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return begin + _SCRIPT % (cases, WORDS[""])


def main(argv: list[str]) -> int:
    """Prints a script that completes the words after python -m rarefy."""
    parser = argparse.ArgumentParser(
        prog="python -m rarefy completion",
        description=main.__doc__,
        epilog="Put  source <(python -m rarefy completion bash)  into ~/.bashrc, or with zsh into ~/.zshrc.",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    print(script(parser.parse_args(argv).shell), end="")
    return 0
