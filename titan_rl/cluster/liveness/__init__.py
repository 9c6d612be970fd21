"""Detection of dead and hanging processes and hosts: health checks, heartbeats, watchdogs. Independent of Monarch."""
