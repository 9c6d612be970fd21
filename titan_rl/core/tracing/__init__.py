"""Timeline of each process of a run: spans in lanes, written as a Chrome trace."""
