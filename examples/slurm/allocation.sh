#!/bin/bash
# One elastic job in one allocation: `sbatch allocation.sh`. It survives lost nodes; other nodes
# cannot join (array.sh). At its time limit it saves its state and goes back into the queue.

#SBATCH --job-name=gpt
# From MIN to MAX nodes: it starts with what is free. (With --ntasks-per-node here, with MIN.)
#SBATCH --nodes=2-8 --gpus-per-node=8
# The whole node. Without it one task has one CPU, whatever its workers need.
#SBATCH --exclusive --mem=0
# A failed node does not end the job; its steps need the same flag below.
#SBATCH --no-kill
# The signal that drains all hosts this many seconds before the time limit: more than DRAIN_S, and
# 60 s, by which it may come early. USR1 counts as no second signal where SIGTERM follows.
#SBATCH --time=24:00:00 --signal=USR1@300
#SBATCH --requeue --open-mode=append --output=%x-%j.log

# ---- edit from here ----------------------------------------------------------------------------
# On a disk that all nodes reach, yours, closed to other writers or with the sticky bit.
DURABLE=${DURABLE:-/shared/scalai}
# Workers of a node, and most nodes, as in --nodes.
WORKERS=${WORKERS:-8} MOST_NODES=${MOST_NODES:-8}
# Seconds for a host to leave; seconds to wait for the coordinator.
DRAIN_S=${DRAIN_S:-200} START_S=${START_S:-120}
# More flags of scalai-run, such as --replicas 2 or --health-check CMD.
read -ra FLAGS <<<"${FLAGS:-}"
# The script with its flags.
read -ra TRAIN <<<"${TRAIN:-pretrain_gpt.py --elastic elastic.toml}"
# Your environment: module load, source .venv/bin/activate, ...
# ---- to here -----------------------------------------------------------------------------------

# The job's secret: made once, in a file that only you can read, on a disk that all nodes reach.
TOKEN=${TOKEN:-$HOME/.scalai-token}
[ -s "$TOKEN" ] || (umask 077; openssl rand -hex 32 >"$TOKEN.$$" && ln "$TOKEN.$$" "$TOKEN"; rm "$TOKEN.$$")
SCALAI_JOB_TOKEN=$(<"$TOKEN") || exit 2
export SCALAI_JOB_TOKEN
# srun does not inherit it from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE

job=(--coordinator slurm --job "$SLURM_JOB_NAME")
run=(--nnodes "1:$MOST_NODES" --nproc-per-node "$WORKERS" "${job[@]}" --durable-dir "$DURABLE"
  --drain-timeout "$DRAIN_S" --drained-exit-code 76 --preemption signal,slurm "${FLAGS[@]}"
  "${TRAIN[@]}")
# In an array, its own task alone.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
export JOB=${JOB:-$SLURM_JOB_ID} FIRST=$SLURMD_NODENAME

# The coordinator has a step of its own: the end of an agent's step ends all of its processes.
srun --overlap --no-kill --wait=0 --nodes=1 --ntasks=1 --relative=0 --cpus-per-task=1 --gpus-per-node=0 \
  scalai coordinator -- "${run[@]}" &
coordinator=$!
until scalai status "${job[@]}" &>/dev/null; do
  if ! kill -0 $coordinator 2>/dev/null || ((SECONDS > START_S)); then
    echo "no coordinator on the first node of $SLURM_JOB_NODELIST after $SECONDS s" >&2
    scalai status "${job[@]}" >&2
    scancel "$JOB"
    exit 1
  fi
  sleep 1
done

# This shell and srun are on the first node. If it is lost the others go on, and tell Slurm of the
# end themselves: it would keep their nodes until the time is over. (`*`: it does not respond.)
# Some clusters signal a task's first process alone, others all: USR1 counts once in both.
host='
import os, signal, subprocess, sys

agent = subprocess.Popen(["scalai-run", *sys.argv[1:]])
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: agent.send_signal(signal.SIGUSR1))
code, job = agent.wait(), os.environ["JOB"]
if code == 76:  # drained; srun returns the highest code of all
    sys.exit(0)
asked = ["sinfo", "--noheader", "--nodes=" + os.environ["FIRST"], "--format=%T"]
state = subprocess.run(asked, capture_output=True, text=True).stdout
if "*" in state or "down" in state:
    subprocess.run(["scontrol", "requeue", job] if code == 75 else ["scancel", job])
sys.exit(code if code >= 0 else 128 - code)
'
# --wait=0: the end of a drained host does not end the others, nor does that of a failed one.
# A log of each host, as this one ends with the first node.
srun --no-kill --wait=0 --kill-on-bad-exit=0 --ntasks-per-node=1 --open-mode=append \
  --output="$SLURM_JOB_NAME-$JOB-%N.log" python3 -c "$host" "${run[@]}" &
# For --signal=B:USR1@..., which reaches this shell only; a trapped signal ends a `wait`.
trap 'trap "" USR1; signalled=yes; scancel --signal=USR1 "$JOB"' USR1
signalled=yes
while [ "$signalled" ]; do
  signalled=
  wait $!
  code=$?
done

# 75: stopped, with its state saved. It leaves with 0, so that RequeueExit=75 of this cluster does
# not act a second time; where it may not be requeued, RequeueExit decides.
if [ $code -eq 75 ] && scontrol requeue "$JOB"; then
  exit 0
fi
exit $code
