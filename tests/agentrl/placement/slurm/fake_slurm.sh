#!/bin/bash
# Slurm's commands as the job's script uses them, for one job on this machine: `fake_slurm.sh COMMAND ARGUMENTS…`.
# FAKE_SLURM is a folder: `hosts` names the job's hosts, one a line. A step whose host is taken out of the file ends as
# Slurm's do: its processes are killed, and srun's status is 0. `calls` records what was asked of the controller.
set -u

srun() {
    local name="" host="" gres=none cpus=None overlap="" exact=""
    while [[ $1 == --* ]]; do
        case $1 in
            --job-name=*) name=${1#*=} ;;
            --nodelist=*) host=${1#*=} ;;
            --gres=*) gres=${1#*=} ;;
            --cpus-per-task=*) cpus=${1#*=} ;;
            --overlap) overlap=1 ;;
            --exact) exact=1 ;;
            --nodes=1 | --ntasks=1 | --mem=0 | --cpu-bind=none | --export=ALL | --input=none | --mpi=none) ;;
            *) echo "srun: unrecognized option $1" >&2 && exit 1 ;;
        esac
        shift
    done
    [ "$overlap$exact" = 1 ] && grep -qxF -- "$host" "$FAKE_SLURM/hosts" || exit 1
    SLURMD_NODENAME=$host STEP_OPTIONS="$gres $cpus" setsid "$@" &
    mkdir -p "$FAKE_SLURM/steps" && echo "$name" >"$FAKE_SLURM/steps/$!"
    while kill -0 $! 2>/dev/null; do
        grep -qxF -- "$host" "$FAKE_SLURM/hosts" || kill -KILL -- -$!
        sleep 0.05
    done
    rm "$FAKE_SLURM/steps/$!"
}

squeue() {
    [ ! -e "$FAKE_SLURM/controller-is-down" ] && paste -sd, "$FAKE_SLURM/hosts"
}

scontrol() {
    if [ "$1 $2" = "show hostnames" ]; then tr , '\n' <<<"$3"; else echo "scontrol $*" >>"$FAKE_SLURM/calls"; fi
}

scancel() {
    local step
    echo "scancel $*" >>"$FAKE_SLURM/calls"
    for step in "$FAKE_SLURM"/steps/*; do kill -TERM -- "-${step##*/}"; done
}

"$@"
