"""What the processes of a run did when, from the files of its `trace` folder."""
