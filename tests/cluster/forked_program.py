"""Program that a fork server runs instead of Monarch's. As `python forked_program.py PATH` it is that server."""

import json
import os
import socket
import sys
import threading
from pathlib import Path

if __name__ == "__main__" and len(sys.argv) > 1:
    from titan_rl.cluster.processes import fork_server

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{sys.argv[1]}{fork_server.STARTING}")
    listener.listen()
    fork_server.COMMON, fork_server.MODULES, fork_server.BOOTSTRAP = (), {"generator": ()}, "cluster.forked_program"
    if "thread" in sys.argv:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("listens", flush=True)
    fork_server.main(os.getppid(), Path(sys.argv[1]).parent, {"generator": listener.fileno()})
elif __name__ == "__main__":
    print(json.dumps([os.getpid(), os.getcwd(), dict(os.environ)]), flush=True)
    sys.exit(int(sys.stdin.readline() or 0))
