# Sourced by one_node.sbatch and learner.sbatch: `train RUN PRESET [OPTIONS OF run]` trains until the run is finished or
# the cluster wants the node back. A run folder that is there is resumed; preset and options count for its first start,
# as do further options in the array `settings`.
#
#   USR1, to this shell alone    time limit, or preemption with notice: the launcher gets TERM, finishes the step (an
#                                evaluation is given up, and the next start makes it) and writes a checkpoint, and the
#                                job goes back into the queue
#   TERM, to all processes       requeue, preemption without notice, scancel: the launcher has it already, and a second
#                                one would stop it at once. So this shell only waits
#   KILL                         some seconds after TERM (KillWait of the cluster), if a step takes longer than that:
#                                nothing is lost, `resume` goes on from checkpoint and journal
#
# No key is handled here. `run` makes them in RUN/keys, which only its owner can read.

# shellcheck shell=bash
# shellcheck source=launch/setup.sh
source launch/setup.sh || exit

launcher="" warned="" interrupted=""
[[ -v settings ]] || settings=()
trap stop_and_requeue USR1

stop_and_requeue() {
    interrupted=yes
    [[ -z $warned ]] || return 0
    warned=yes
    [[ -z $launcher ]] || kill -TERM "$launcher" 2>/dev/null
}

train() {
    local run=${1-} code
    if [[ $# -lt 2 ]]; then
        echo "error: got $# arguments, expected a run folder and a preset or file: sbatch SCRIPT RUN PRESET" >&2
        exit 2
    fi
    if [[ -e $run/config.json ]]; then
        set -- resume "$run"
    else
        set -- run "${@:2}" "${settings[@]}" --out "$run"
    fi
    echo "job ${SLURM_JOB_ID-} on $(hostname), start ${SLURM_RESTART_COUNT:-0}: $*"
    "$(tandem_python)" -m launch "$@" &
    launcher=$!
    trap '' TERM
    [[ -z $warned ]] || kill -TERM "$launcher" 2>/dev/null
    wait_for_launcher
    code=$?
    if [[ -n $warned ]] && ! is_done "$run"; then
        echo "stopped in time; back into the queue"
        scontrol requeue "$SLURM_JOB_ID" || code=1
    fi
    exit "$code"
}

# USR1 ends `wait` early, and bash may say -1 from then on. 127: the launcher's code was returned already.
wait_for_launcher() {
    local code=0 now
    while
        interrupted=""
        wait "$launcher"
        now=$?
        [[ $now -eq 127 || $now -lt 0 ]] || code=$now
        [[ -n $interrupted ]]
    do :; done
    while [[ $now -lt 0 ]] && kill -0 "$launcher" 2>/dev/null; do sleep 1; done
    return "$code"
}

# With eval.beside, the last evaluations may still be to be made, which the next start does.
is_done() {
    grep -qs '"status": "done"' "$1/summary.json" &&
        { [[ -e $1/eval/final.json ]] || ! grep -qs '"beside": true' "$1/config.json"; }
}
