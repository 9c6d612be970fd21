"""The vocabulary that every package uses: errors, settings, arrays, calls of foreign code, tracing."""
