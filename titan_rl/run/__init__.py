"""One run, from a checked config to its end. A good order to read it in:

train           a run from start to end: its folder, processes, tasks, journal and loop, and their cleanup
session         setup and teardown around the work of a command, and its closing messages
controller      the training loop and its stages
stages/         the stages: rollouts, calls of the trainer, weight sync, validation, leagues
loop            base of the training loops, and their checkpoints
resumption      beginning of a run, and resumption from the newest checkpoint
trainer_recovery, shared_trainer   death of the trainer's processes; several experiments that share one trainer
journal/        events between two checkpoints
observability/  metrics, progress, transcripts and the summary
directory, json_lines, status    the run's folder and its files
sft/            supervised runs
machine/        environment, signals, and checks of the machine
terminal/       terminal output
"""
