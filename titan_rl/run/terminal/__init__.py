"""What is drawn on a terminal while a command goes on. It knows of no run: it is given what to show."""
