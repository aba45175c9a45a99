"""What a shell offers when TAB is pressed after `tandem` or `python -m launch`.

    python -m launch completion bash|zsh|fish     prints the script for that shell, which asks this module on each TAB:
    python -m launch.completion WORD...           the command line so far; the last word is the one to complete
    python -m launch.completion --line TEXT       the same for bash, which splits words at `=`

The answer has one candidate per line, then a tab and a description. After a candidate that ends in `=` or `/` there is
more to type, so no space follows. If there is no candidate, the shell offers files.

Commands, options and choices are read from the parser and keys from the configuration, so nothing here has to be kept
up to date. argcomplete was left out: it would be one more dependency, and it cannot complete `python -m`.
Nothing here loads torch, and no other command loads this module.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from launch.cli import make_parser
from shared.config.tree import Config

Candidates = Mapping[str, str]
"""Word -> what it is; empty where that is clear."""
Shell = Literal["bash", "zsh", "fish"]

ROOT = Path(__file__).resolve().parents[1]
PRESETS = Path(__file__).parent / "presets"
CONFIGURATIONS = (".toml", ".yaml", ".yml")
MODULE_CALL = ["-m", "launch"]

BASH = """\
_tandem() {
    mapfile -t COMPREPLY < <(ASK --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null | cut -f 1)
    if [[ ${COMPREPLY[0]-} == *[=/] ]]; then compopt -o nospace; fi
}
_tandem_module() {
    if [[ $COMP_LINE == *" -m launch "* ]]; then _tandem; fi
}
complete -o bashdefault -o default -F _tandem tandem
complete -o bashdefault -o default -F _tandem_module python python3
"""
ZSH = """\
_tandem() {
    local line word what tab=$'\\t'
    local -a whole shown open
    for line in "${(@f)$(ASK "${(@Q)words[1,CURRENT]}" 2>/dev/null)}"; do
        word=${line%%$tab*} what=${line#*$tab}
        if [[ $word == *[=/] ]]; then
            open+=("$word")
        elif [[ -n $word ]]; then
            whole+=("$word")
            shown+=("$word${what:+  -- $what}")
        fi
    done
    (( $#whole + $#open )) || { _files; return }
    # zsh would quote the ~ of a candidate, but not that of their common prefix.
    compset -P '\\~/' && whole=("${(@)whole#\\~/}") open=("${(@)open#\\~/}")
    compadd -l -d shown -a whole
    compadd -S '' -a open
}
_tandem_module() {
    if [[ $words[2] == -m && $words[3] == launch ]]; then
        _tandem
    else
        (( $+functions[_python] )) && _python "$@" || _files
    fi
}
compdef _tandem tandem
compdef _tandem_module python python3
"""
FISH = """\
function __tandem
    set -l token (commandline -ct | string unescape)
    set -l found (ASK (commandline -opc) "$token" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$token"
    end
end
function __tandem_module
    set -l words (commandline -opc)
    test "$words[2]" = -m -a "$words[3]" = launch
end
complete -c tandem -f -a '(__tandem)'
for name in python python3
    complete -c $name -n __tandem_module -f -a '(__tandem)'
end
"""
SCRIPTS: Mapping[Shell, str] = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def print_script(shell: Shell) -> int:
    """It names this interpreter, so that a TAB works whatever environment is active then."""
    ask = f"env PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m launch.completion"
    print(SCRIPTS[shell].replace("ASK", ask), end="")
    return 0


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--line"]:
        print_candidates(candidates_for_bash(argv[1], Path.cwd()))
    else:
        print_candidates(candidates(arguments(argv), Path.cwd()))
    return 0


def print_candidates(found: Candidates) -> None:
    for word, what in found.items():
        print(word, what, sep="\t")


def candidates_for_bash(line: str, here: Path) -> Candidates:
    """bash replaces what follows the last `=`, and takes the text as it is."""
    words = split(line)
    found = candidates(arguments(words), here)
    kept = words[-1].rfind("=") + 1
    return {escaped(word[kept:]): what for word, what in found.items()}


def escaped(word: str) -> str:
    """As bash reads it without quotes: a word in quotes would be complete, and its ~ would be no home folder."""
    home = "~/" if word.startswith("~/") else ""
    return home + re.sub(r"[^\w@%+=:,./-]", r"\\\g<0>", word.removeprefix(home))


def split(line: str) -> list[str]:
    """The words of a line, without their quotes; one that is still open is closed."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if line[-1:].isspace() and not end else words
    return [""]


def arguments(words: Sequence[str]) -> list[str]:
    """What follows `tandem` or `python -m launch`."""
    return list(words[3:] if list(words[1:3]) == MODULE_CALL else words[1:])


def candidates(words: Sequence[str], here: Path) -> Candidates:
    """words: the arguments so far, of which the last one is to be completed."""
    *before, part = words or [""]
    parser = make_parser("tandem")
    if not before:
        return starting(part, {**commands(parser), **options(parser)})
    command = subparsers(parser).choices.get(before[0])
    if command is None:
        return {}
    option, position = place(command, before[1:])
    if option:
        return values(option, part, here)
    if part.startswith("-"):
        return starting(part, options(command))
    positional = [action for action in command._actions if not action.option_strings]
    return values(positional[position], part, here) if position < len(positional) else {}


def place(command: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.Action | None, int]:
    """The option whose value comes next, if one does, and the number of positional arguments before."""
    option, position = None, 0
    for word in words:
        if option:
            option = None
        elif word.startswith("-"):
            named = command._option_string_actions.get(word)
            option = named if named and named.nargs != 0 else None
        else:
            position += 1
    return option, position


def subparsers(parser: argparse.ArgumentParser) -> "argparse._SubParsersAction[argparse.ArgumentParser]":
    """argparse has no public way to ask for this."""
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def commands(parser: argparse.ArgumentParser) -> Candidates:
    return {action.dest: action.help or "" for action in subparsers(parser)._choices_actions}


def options(parser: argparse.ArgumentParser) -> Candidates:
    """Long ones; short ones are typed faster than completed."""
    return {
        name: action.help or ""
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and action.help != argparse.SUPPRESS
    }


def values(action: argparse.Action, part: str, here: Path) -> Candidates:
    """What this argument may be, as far as it can be known."""
    if action.choices:
        return starting(part, dict.fromkeys(map(str, action.choices), ""))
    metavar = str(action.metavar or action.dest)
    if metavar == "KEY=VALUE":
        return assignments(part)
    if metavar == "PRESET|FILE":
        return {**starting(part, presets()), **entries(part, here, endings=CONFIGURATIONS)}
    if metavar in ("DIR", "A", "B") and not action.option_strings:
        return run_folders(part, here)
    # `STEP|best|latest` and `bf16|fp32` name their words.
    return starting(part, {word: "" for word in metavar.split("|") if word.islower() and "|" in metavar})


def starting(part: str, found: Candidates) -> Candidates:
    return {word: what for word, what in found.items() if word.startswith(part)}


def presets() -> Candidates:
    return {path.stem: "preset" for path in sorted(PRESETS.glob("*.toml"))}


def assignments(part: str) -> Candidates:
    """`section.key=` with the default of each; after `=` the values of a key that has few."""
    key, equals, _ = part.partition("=")
    if not equals:
        return starting(part, {f"{name}=": f"default: {default}" for name, _, default in keys()})
    choices = (few_values(kind) for name, kind, _ in keys() if name == key)
    return starting(part, {f"{key}={value}": "" for found in choices for value in found})


def keys() -> Iterable[tuple[str, Any, Any]]:
    """section.key, type, default."""
    for section, kind in get_type_hints(Config).items():
        defaults = getattr(Config(), section)
        for key, hint in get_type_hints(kind).items():
            yield f"{section}.{key}", hint, getattr(defaults, key)


def few_values(kind: Any) -> Sequence[str]:
    if kind is bool:
        return ("true", "false")
    return [str(value) for value in get_args(kind)] if get_origin(kind) is Literal else ()


def run_folders(part: str, here: Path) -> Candidates:
    """Run directories, and folders that may have some; of an empty word only those here and in runs/."""
    found = entries(part, here)
    if part:
        return found
    known = {word: what for word, what in {**found, **entries("runs/", here)}.items() if not word.endswith("/")}
    return known or found


def entries(part: str, here: Path, endings: tuple[str, ...] = ()) -> Candidates:
    """Folders below which the word can go on, run directories, and files that end like this."""
    folder, slash, name = part.rpartition("/")
    # Unlike Path.expanduser, no error without a home.
    where = Path(os.path.expanduser(folder + slash))
    found: dict[str, str] = {}
    for path in sorted((here / where).glob("*")) if (here / where).is_dir() else ():
        word = f"{folder}{slash}{path.name}"
        if not path.name.startswith(name) or (path.name.startswith(".") and not name):
            continue
        if path.is_dir() and not endings and (path / "run.json").is_file():
            found[word] = "run"
        elif path.is_dir():
            found[f"{word}/"] = ""
        elif path.name.endswith(endings or ("/",)):
            found[word] = "file"
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
