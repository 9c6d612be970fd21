"""`titan-rl hosts RUN`: show the hosts of a run, add or drain one."""

from __future__ import annotations

import argparse

from titan_rl.cli.options import Parser
from titan_rl.cli.runs import find_run
from titan_rl.cluster.hosts.host_files import HostFiles, describe
from titan_rl.run.terminal.standard_streams import print_result, print_stderr

WAIT_S = 600.0  # a drain waits for the requests of the host
STOPPED = "stopped waiting; the run carries out the request, and `titan-rl hosts RUN list` shows its progress"


def set_up(parser: Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="list|add|drain")
    listing = actions.add_parser("list", help="show the hosts and what runs on them")
    listing.set_defaults(run=_list)
    adding = actions.add_parser("add", help="add the host of a worker")
    adding.add_argument(
        "what", metavar="ADDRESS", help="HOST:PORT on which its `titan-rl worker` listens; the default port is 22222"
    )
    adding.set_defaults(
        run=_ask, do="add", stopped=STOPPED, until="its processes are up, which takes as long as engines do"
    )
    draining = actions.add_parser("drain", help="drain a host: its requests finish or move before it leaves")
    draining.add_argument("what", metavar="HOST", help="name of the host, as shown by `list`")
    draining.set_defaults(run=_ask, do="drain", stopped=STOPPED, until="no process of the run is left on it")


def _list(arguments: argparse.Namespace) -> int:
    files = HostFiles(find_run(arguments.of, "titan-rl hosts"))
    waits = "the run's processes are still starting; this waits until they are up, or until Ctrl-C"
    states = files.states(WAIT_S, lambda: print_stderr(f"titan-rl: {waits}"))
    if not files.is_running:
        print_stderr("titan-rl: the run has ended; these were its hosts when it ended")
    print_result(describe(states))
    return 0


def _ask(arguments: argparse.Namespace) -> int:
    files = HostFiles(find_run(arguments.of, "titan-rl hosts"))
    waits = f"the run is asked to {arguments.do} {arguments.what}; this waits until {arguments.until}"
    files.ask(arguments.do, arguments.what, WAIT_S, on_wait=lambda: print_stderr(f"titan-rl: {waits}"))
    return _list(arguments)
