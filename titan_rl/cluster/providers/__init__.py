"""Where the hosts of a run come from if nobody starts their workers: ssh, Slurm, Kubernetes, or what a user has."""
