"""What every request goes through, whatever its protocol: its key, its size, its time, and how it is answered."""
