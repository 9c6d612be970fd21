"""Host providers, which start the workers of a run: ssh, Slurm, Kubernetes, or a user's own."""
