"""One run, from a checked config to its end. In the order in which it is read best:

launch          the story of a run: its folder, the machine, the processes, the loop, giving all of it back
controller      the training loop, with its schedule
stages/         what the loop calls: groups, calls of the trainer, weights, validation
checkpoints/    what is kept so that a run can go on, and going on
journal/        what happens between two checkpoints
observability/  what a run notes, shows and writes
stopping, end_messages    signals, and what is told when a run ends before its time
directory, json_lines     the run's folder and its files
machine/        what a run borrows from the machine, and how it gives it back
"""
