#!/bin/bash
# Written by `python -m learnerkit.launch --write-job slurm`; submit it with `sbatch`, and watch it with `squeue --me`.
# The job gets the folder and the environment (modules, conda, venv) of the shell that submits it.
# https://slurm.schedmd.com/sbatch.html has the options. You may edit this file.

# What the job asks for. One task on each node: the launcher, which starts one process per GPU.
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=train_autoencoder
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.out

# When its time is over, SLURM ends the job; 120 s before, it sends USR1 to this script alone (B:).
#SBATCH --signal=B:USR1@120

# The script may then put the job back into the queue. What all its runs print goes to the end of one file (--output).
#SBATCH --requeue
#SBATCH --open-mode=append

# Commands that prepare the environment stand here. They run once, on the first node; srun passes it on to all nodes.
set +eu  # If a command has set them: the rest of this script must go on after errors, and checks them itself.

# From version 22.05 on, srun does not take this number from the job by itself.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# On USR1 the training is to save and stop. SLURM sends a signal to every process of the step, and TERM or USR1 would
# kill those that load the data, too. URG kills none; the launchers take it for TERM, and send that to the ranks alone.
stopping=no
stop() {
    echo "$(date): the time is nearly over: stopping the training, to go on with it later"
    stopping=yes
    scancel --signal=URG "$SLURM_JOB_ID"
}
trap stop USR1

# In the background, since bash runs no trap before a command in the foreground has ended.
# If the launcher of one node fails, SLURM ends the others. All get the environment of this script.
srun --kill-on-bad-exit=1 --export=ALL \
    python -m learnerkit.launch -u \
    examples/train_autoencoder.py --epochs 40 --resume &
srun=$!

# USR1 interrupts `wait`, so wait until srun has ended; the last `wait` gives its exit code.
while kill -0 "$srun" 2>/dev/null; do
    wait "$srun"
done
wait "$srun"
code=$?

# Above 128 it was stopped by a signal. With 0 the training is complete, and an error of its own would only come again.
# In its next run the training script starts again, and goes on from the checkpoint that it finds.
if [ "$stopping" = yes ] && [ "$code" -gt 128 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
