#!/usr/bin/env bash
# One command from a fresh clone to a trained policy: set-up, then `python -m launch run ARGUMENTS`.
# Without a preset or file in first place it runs the preset `embedded`.

source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
set_up || exit

if [[ $# -eq 0 || $1 == -* ]]; then
    set -- embedded "$@"
fi
# Paths in the arguments are the caller's, so no cd. A folder `shared` in the caller's folder must not replace ours.
export PYTHONSAFEPATH=1
exec "$(tandem_python)" -m launch run "$@"
