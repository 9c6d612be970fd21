"""Process that answers pings, as actor processes do: `python pulsing.py SOCKET`. It prints a line once it does."""

import sys
import threading
from pathlib import Path

from titan_rl.cluster.liveness.health_check import WorkProgress, answer_pings

work = WorkProgress()
with work.in_progress():
    sum(range(1_000_000))
answer_pings(Path(sys.argv[1]), work)
print("pulsing", flush=True)
threading.Event().wait()
