"""Settings of a run: their tables (`sections`), all of them together (`run`), and loading them (`load`)."""
