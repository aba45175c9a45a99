# Sourced by launch/run.sh and tests/run.sh: `set_up [EXTRA ...]` makes .venv hold this project and those extras.
#
# Ready is what .venv/tandem-setup says: a fingerprint (this folder, Python's version, pyproject.toml) and the extras
# installed under it. It is taken away before pip starts and written when pip is done, so that an interrupted set-up is
# repeated and a finished one costs a few milliseconds. Extras add up: asking for none never removes one.
# `set_up_in FOLDER EXTRA ...` does the same in another folder of the project.
# TANDEM_PYTHON=/path/to/python takes that Python with the packages it has: nothing is made, nothing is installed. It is
# for machines without network. `tandem_python` names the Python in both cases.
# Left out on purpose: indexes, mirrors, proxies. pip reads those from its own configuration.

TANDEM_ROOT="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
TANDEM_VENV="$TANDEM_ROOT/.venv"
TANDEM_STAMP="$TANDEM_VENV/tandem-setup"

set_up_in() {
    TANDEM_VENV="$TANDEM_ROOT/$1"
    TANDEM_STAMP="$TANDEM_VENV/tandem-setup"
    set_up "${@:2}"
}

tandem_python() {
    echo "${TANDEM_PYTHON:-$TANDEM_VENV/bin/python}"
}

set_up() {
    check_system || return
    if [[ -n ${TANDEM_PYTHON-} ]]; then
        check_given_python
        return
    fi
    is_set_up "$@" && return
    (
        # Two calls at once: the second one waits here and then finds the work done. Without flock there is no guard.
        exec 9>"$TANDEM_VENV.lock" || exit 2
        if command -v flock >/dev/null; then flock 9; fi
        is_set_up "$@" || install_into_venv "$@"
    )
}

# Before pip fetches gigabytes. bash sets OSTYPE.
check_system() {
    [[ $OSTYPE != linux* ]] || return 0
    echo "error: this system is '$OSTYPE', and Tandem needs Linux; on macOS use a Linux container (docker/) or a" \
        "virtual machine, on Windows launch/run.ps1." >&2
    return 2
}

check_given_python() {
    local missing asked='import importlib.util as u
print(*(name for name in ("torch", "transformers", "bitsandbytes", "zmq", "msgspec") if not u.find_spec(name)))'
    missing="$("$TANDEM_PYTHON" -c "$asked" </dev/null)" || missing="a Python that starts"
    [[ -n $missing ]] || return 0
    echo "error: TANDEM_PYTHON=$TANDEM_PYTHON lacks: $missing; install that, name another Python, or unset it for a" \
        ".venv." >&2
    return 2
}

is_set_up() {
    local made_for installed extra
    [[ -x $TANDEM_VENV/bin/python && -r $TANDEM_STAMP ]] || return
    { read -r made_for && read -r installed; } <"$TANDEM_STAMP" || return
    [[ $made_for == "$(fingerprint)" ]] || return
    for extra in "$@"; do
        [[ " $installed " == *" $extra "* ]] || return
    done
}

fingerprint() {
    { echo "$TANDEM_ROOT"; grep '^version' "$TANDEM_VENV/pyvenv.cfg"; cat "$TANDEM_ROOT/pyproject.toml"; } | cksum
}

install_into_venv() {
    local extras started=$SECONDS
    # Extras of an earlier set-up are brought along, or a changed pyproject.toml would leave them behind, outdated.
    extras="$({ printf '%s\n' "$@"; sed -n 2p "$TANDEM_STAMP" 2>/dev/null | tr ' ' '\n'; } | sed '/^$/d' | sort -u)"
    venv_is_whole || make_venv || return
    echo "Installing into $TANDEM_VENV (minutes the first time) ..." >&2
    [[ ! -e $TANDEM_STAMP ]] || mv -f "$TANDEM_STAMP" "$TANDEM_STAMP.before"
    if ! run_pip "${extras//$'\n'/,}"; then
        # pip fetches before it touches anything: without a network, what worked before still works.
        [[ ! -e $TANDEM_STAMP.before ]] || { venv_is_whole && mv -f "$TANDEM_STAMP.before" "$TANDEM_STAMP"; }
        echo "error: pip could not install into ${TANDEM_VENV##*/};" \
            "fix what its last lines say and run this again." >&2
        return 2
    fi
    printf '%s\n%s\n' "$(fingerprint)" "${extras//$'\n'/ }" >"$TANDEM_STAMP.new" || return
    mv -f "$TANDEM_STAMP.new" "$TANDEM_STAMP" && rm -f "$TANDEM_STAMP.before"
    echo "Installed in $((SECONDS - started)) s." >&2
}

run_pip() {
    local quiet=()
    [[ -t 2 ]] || quiet=(--quiet)
    cd "$TANDEM_ROOT" || return
    "$TANDEM_VENV/bin/python" -m pip install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"} -e ".${1:+[$1]}" \
        </dev/null >&2
}

# A kill in the middle of pip leaves one of these: no pip, a package without its list of files, a set-aside `~package`.
# A folder that was moved or copied counts as broken too: its scripts and its link to the sources point elsewhere.
venv_is_whole() {
    local info site
    [[ "$(sed -n 's/^command = //p' "$TANDEM_VENV/pyvenv.cfg" 2>/dev/null)" == *" $TANDEM_VENV" ]] || return
    "$TANDEM_VENV/bin/python" -m pip --version >/dev/null 2>&1 || return
    for site in "$TANDEM_VENV"/lib/python*/site-packages; do
        for info in "$site"/*.dist-info; do
            [[ -s $info/RECORD ]] || return
        done
        ! compgen -G "$site/~*" >/dev/null || return
    done
}

# `python -m venv` notes its command; uv and virtualenv do not. Such a folder may hold gigabytes that somebody needs.
is_made_by_another_tool() {
    [[ -e $TANDEM_VENV/pyvenv.cfg ]] || return
    ! grep -q '^command = ' "$TANDEM_VENV/pyvenv.cfg" && ! compgen -G "$TANDEM_STAMP*" >/dev/null
}

make_venv() {
    local python
    if is_made_by_another_tool; then
        echo "error: $TANDEM_VENV was not made by this script, which would replace it; rename or remove it, or" \
            "install Tandem into it ('uv pip install -e .') and set TANDEM_PYTHON=$TANDEM_VENV/bin/python." >&2
        return 2
    fi
    python="$(find_python)" || return
    echo "Making $TANDEM_VENV with $("$python" --version) ($python) ..." >&2
    rm -rf "$TANDEM_VENV"
    "$python" -m venv "$TANDEM_VENV" </dev/null >&2 && return
    echo "error: $python could not make $TANDEM_VENV; make room or name another one: PYTHON=/path/to/python." >&2
    return 2
}

# One that was named comes first, however new. pip finds no PyTorch for a Python that is newer than PyTorch
# knows, so such a one is taken only if there is no other: by now there may be a PyTorch for it.
find_python() {
    first_python 99 ${PYTHON:+"$PYTHON"} && return
    first_python 15 python3 python3.13 python3.12 python3.11 python3.14 && return
    first_python 99 python3 && return
    echo "error: no Python 3.11 or newer with its venv module was found; install one (Debian, Ubuntu: python3 and" \
        "python3-venv) or name it with PYTHON=/path/to/python." >&2
    return 2
}

# The first of these commands that is a Python from 3.11 on and older than 3.$1.
first_python() {
    local name path
    # ensurepip is asked for because some systems ship a Python whose venv module cannot work.
    local fits="import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, $1))"
    for name in "${@:2}"; do
        path="$(command -v "$name")" || continue
        if "$path" -c "$fits" </dev/null >/dev/null 2>&1; then
            echo "$path"
            return
        fi
    done
    return 1
}
