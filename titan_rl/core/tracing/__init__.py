"""What each process of a run does when: spans in lanes, written as a Chrome trace."""
