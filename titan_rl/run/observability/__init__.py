"""Output of a run for people: metrics, progress, transcripts, the report."""
