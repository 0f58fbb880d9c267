# shellcheck shell=bash
set -u
export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}" HOME=~
unset CUDA_VISIBLE_DEVICES  # of all steps together; each step gets its own
state=$(mktemp -d) || exit 1
here=$SLURMD_NODENAME
export AGENTRL_PLACED_FILE=$state/placed  # of the supervisor, which writes it when runners may start

log() { echo "$(date '+%F %T') $*" >&2; }

job_hosts() {  # prints the hosts that the job has now; fails when Slurm does not answer
    local hosts
    hosts=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && [ -n "$hosts" ] && scontrol show hostnames "$hosts"
}

assign_slots() {  # gives each slot one of the first hosts; the others are spare
    local hosts slot
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    for ((slot = 0; slot < slots; slot++)); do echo "${hosts[slot]-}" >"$state/slot-$slot"; done
}

check_slot() {  # SLOT: gives the slot a spare host if the job has lost its own; none if there is no spare
    local host hosts
    exec 9>"$state/lock" && flock 9
    host=$(<"$state/slot-$1")
    if hosts=$(job_hosts) && ! { [ -n "$host" ] && grep -qxF -- "$host" <<<"$hosts"; }; then
        grep -vxF -f <(cat "$state"/slot-*) <<<"$hosts" | head -n 1 >"$state/slot-$1.new"
        mv "$state/slot-$1.new" "$state/slot-$1"
    fi
    exec 9>&-
}

run_step() {  # NAME HOST GPUS COMMAND…: prints the command's exit status; nothing when the host was lost
    local name=$1 host=$2 gpus=$3 options=(--overlap --gres=none)  # without GPUs: shares all CPUs of the host
    shift 3
    if [ "$gpus" -gt 0 ]; then  # its own GPUs, and the same part of the CPUs
        options=(--exact "--cpus-per-task=$((SLURM_CPUS_ON_NODE * gpus / gpus_per_node))" "--gres=gpu:$gpus")
    fi
    # srun's own status does not tell: it is 0 for a lost host too. So the step prints its status.
    # shellcheck disable=SC2016
    srun --job-name="$name" --nodelist="$host" --nodes=1 --ntasks=1 --mem=0 "${options[@]}" --cpu-bind=none \
        --export=ALL --input=none --mpi=none bash -c 'trap : TERM; "$@" >&2; echo $?' step "$@"
}

keep() {  # NAME SLOT GPUS COMMAND…: runs a step until its command ends with status 0
    local name=$1 slot=$2 host status
    shift 2
    until [ -e "$state/placed" ] || [ -e "$state/stopping" ]; do sleep 0.5; done
    until [ -e "$state/stopping" ]; do
        host=$(<"$state/slot-$slot")
        if [ -n "$host" ]; then
            status=$(run_step "$name" "$host" "$@")
            [ "$status" = 0 ] && return
            log "$name on $host ended (status ${status:-unknown}): again in $pause_s s"
        else
            log "$name waits: the job has no spare host"
        fi
        sleep "$pause_s"
        check_slot "$slot"
    done
}

supervise() {  # COMMAND…: follows the run to its end; then no step is started again
    local status
    until [ -e "$state/stopping" ]; do
        status=$(run_step supervisor "$here" 0 "$@")
        case $status in
            0) touch "$state/stopping" ;;
            2) touch "$state/failed" && stop ;;
            *) log "supervisor ended (status ${status:-unknown}): again in $pause_s s" && sleep "$pause_s" ;;
        esac
    done
}

stop() {  # ends all steps; their task runners end their commands first. Again for steps that were just starting
    touch "$state/stopping"
    while scancel --signal=TERM "$SLURM_JOB_ID"; do sleep "$stop_s"; done &
}

# A job that has lost hosts would be queued for the hosts that are left.
# shellcheck disable=SC2016
queue_again='trap "" TERM; scontrol requeue "$1" && until scontrol update JobId="$1" NumNodes="$2-$2"; do sleep 1; done'

watch_here() {  # queues the job again when this host is lost; a step on another host does that, as Slurm does not
    local host look
    # shellcheck disable=SC2016
    look='while :; do
        sleep "$4" || exit 1  # a command fails too when the step is being ended; that must not queue the job
        hosts=$(squeue --noheader --jobs="$1" --format=%N) && [ -n "$hosts" ] || continue
        hosts=$(scontrol show hostnames "$hosts") || exit 1
        [[ " ${hosts//[[:space:]]/ } " == *" $3 "* ]] || break
    done; '$queue_again
    until [ -e "$state/stopping" ]; do
        host=$(job_hosts | grep -vxF -- "$here" | head -n 1)
        if [ -n "$host" ]; then
            run_step watch "$host" 0 bash -c "$look" watch "$SLURM_JOB_ID" "$nodes" "$here" "$watch_s" >/dev/null
        fi
        sleep "$watch_s"
    done
}

finish() {  # waits until every step has ended, and ends the job
    local process processes status=0
    processes=$(jobs -p)
    watch_here &
    trap stop TERM
    trap 'touch "$state/again"; stop' USR1  # the time limit is near
    for process in $processes; do
        while kill -0 "$process" 2>/dev/null; do wait "$process"; done
    done
    [ -e "$state/failed" ] && status=2
    [ -e "$state/again" ] && bash -c "$queue_again" queue "$SLURM_JOB_ID" "$nodes"
    # shellcheck disable=SC2046
    kill $(jobs -p) 2>/dev/null  # watch_here, and the loop of stop
    rm -rf -- "$state"
    exit "$status"
}
