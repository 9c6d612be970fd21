"""The settings of a run: their tables (`sections`), the whole (`run`) and how they are read (`load`)."""
