"""Process that answers pings, as actor processes do: `python pulsing.py SOCKET`. It prints a line once it does."""

import sys
import threading
from pathlib import Path

from titan_rl.cluster.liveness.health_check import WorkProgress, answer_pings

answer_pings(Path(sys.argv[1]), WorkProgress())
print("pulsing", flush=True)
threading.Event().wait()
