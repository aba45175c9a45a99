#!/usr/bin/env bash
# Every check of the project, after the set-up with development tools. All stages run; any failure fails the call.
#
#   tests/run.sh                      format, lint, types, unit tests with their coverage, other tests, chaos
#   tests/run.sh static               format, lint, types
#   tests/run.sh unit [PYTEST ARGS]   the tests of one folder below tests/ (unit, integration, ...)
#   tests/run.sh PYTEST ARGS          whatever pytest understands: a file, -k word, --lf

source "$(dirname -- "${BASH_SOURCE[0]}")/../launch/setup.sh"
set_up dev || exit
cd "$TANDEM_ROOT" || exit

python="$TANDEM_VENV/bin/python"
started=$SECONDS
failed=()
# Tests compare bits: the same threads as the configuration's default, whatever the machine. And nothing is fetched.
export OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

stage() {
    local name=$1 since=$SECONDS
    shift
    echo "== $name"
    "$@" </dev/null || failed+=("$name")
    echo "   $name: $((SECONDS - since)) s"
}

static() {
    stage format "$python" -m ruff format --check .
    stage lint "$python" -m ruff check .
    stage types "$python" -m pyright --pythonpath "$python"
}

everything() {
    local folder others=()
    static
    # Coverage is asked of the unit tests alone: they must reach every line of the listed files without processes.
    stage unit "$python" -m pytest tests/unit --cov --cov-report=term
    for folder in tests/*/; do
        [[ $folder == tests/unit/ || $folder == tests/chaos/ ]] && continue
        ! compgen -G "${folder}test_*.py" >/dev/null || others+=("$folder")
    done
    [[ ${#others[@]} -eq 0 ]] || stage "${others[*]}" "$python" -m pytest "${others[@]}"
    stage chaos "$python" -m pytest tests/chaos
}

if [[ $# -eq 0 ]]; then
    everything
elif [[ $1 == static ]]; then
    static
elif [[ -d tests/$1 ]]; then
    stage "$1" "$python" -m pytest "tests/$1" "${@:2}"
else
    stage pytest "$python" -m pytest "$@"
fi

if [[ ${#failed[@]} -gt 0 ]]; then
    echo "FAILED in $((SECONDS - started)) s: ${failed[*]}"
    exit 1
fi
echo "All checks passed in $((SECONDS - started)) s."
