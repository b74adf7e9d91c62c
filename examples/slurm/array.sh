#!/bin/bash
# One elastic job, each host a task of an array: `sbatch array.sh`. A lost node costs one task, and
# the next one takes its place. %N is how many run at once; change it while they run:
#
#     scontrol update JobId=ARRAY ArrayTaskThrottle=8     # more hosts
#     scancel --signal=USR1 ARRAY_3                       # task 3 leaves (lower the throttle before)
#
# The tasks behind the throttle are the reserve, for lost nodes and for time limits: with 32 tasks,
# of which 4 run at once, the job lives for 8 time limits. `sbatch array.sh` again goes on from there.

#SBATCH --job-name=gpt
#SBATCH --array=0-31%4
# One host a task.
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
# The next task takes its place, also where the time is over. USR1 counts as no second signal where
# SIGTERM follows.
#SBATCH --no-requeue --time=24:00:00 --signal=USR1@300
# Of several arrays of this name one runs at a time.
#SBATCH --dependency=singleton
#SBATCH --output=%x-%A_%a.log

# ---- edit from here ----------------------------------------------------------------------------
# On a disk that all nodes reach, yours, closed to other writers or with the sticky bit.
DURABLE=${DURABLE:-/shared/scalai}
# Workers of a host; fewest and most hosts.
WORKERS=${WORKERS:-8} FEWEST_HOSTS=${FEWEST_HOSTS:-1} MOST_HOSTS=${MOST_HOSTS:-8}
# Seconds for a host to leave; seconds that a failed one keeps its place.
DRAIN_S=${DRAIN_S:-200} RETRY_S=${RETRY_S:-60}
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
export SCALAI_JOB_TOKEN SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE
LEASE=$DURABLE/$SLURM_JOB_NAME.lease
mkdir -p "$LEASE" || exit 2

# They meet by the lease: the first task serves the job at its own address, and where that host is
# lost another one follows.
srun scalai-run --nnodes "$FEWEST_HOSTS:$MOST_HOSTS" --nproc-per-node "$WORKERS" \
  --coordinator slurm --coordinator-lease "file:$LEASE" --job "$SLURM_JOB_NAME" \
  --durable-dir "$DURABLE" --drain-timeout "$DRAIN_S" --drained-exit-code 76 \
  --preemption signal,slurm "${FLAGS[@]}" "${TRAIN[@]}" &
# For --signal=B:USR1@..., which reaches this shell only; a trapped signal ends a `wait`.
trap 'trap "" USR1; signalled=yes; scancel --signal=USR1 "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' USR1
signalled=yes
while [ "$signalled" ]; do
  signalled=
  wait $!
  code=$?
done

others() {
  squeue --noheader --jobs="$SLURM_ARRAY_JOB_ID" --states=RUNNING --format=%K |
    grep -cvx "$SLURM_ARRAY_TASK_ID"
}
over=
case $code in
75) exit 0 ;; # all hosts have left and the state is saved: the next tasks go on
76) exit 0 ;; # this host has left, others go on
0 | 2 | 3) over=yes ;; # done; refused, as the next task would be
1) [ "$(others)" -gt 0 ] || over=yes ;; # it has failed; with other hosts, perhaps this one alone
esac
if [ "$over" ]; then
  scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
elif [ $code -ne 0 ]; then
  echo "$SLURMD_NODENAME has failed; the next task takes its place in $RETRY_S s" >&2
  sleep "$RETRY_S" # else the tasks behind this one would fail here, one after the other
fi
exit $code
