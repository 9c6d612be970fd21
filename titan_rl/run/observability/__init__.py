"""What a run tells people: metrics, progress, transcripts, the report."""
