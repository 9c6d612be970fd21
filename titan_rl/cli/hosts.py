"""`titan-rl hosts RUN`: which hosts a run has, and have them come and go."""

from __future__ import annotations

import argparse

from titan_rl.cli.options import Parser
from titan_rl.cli.run_folder import find_run
from titan_rl.run.hosts.requests import HostFiles, describe
from titan_rl.run.terminal.standard_streams import say

WAIT_S = 600.0  # draining a host waits for its requests


def set_up(parser: Parser) -> None:
    parser.description = "Show the hosts of a run, or have one join or leave it while it goes on."
    parser.add_argument("of", metavar="RUN", help="the run's folder")
    actions = parser.add_subparsers(required=True, metavar="list|add|drain")
    listing = actions.add_parser("list", help="show the hosts and what runs on them")
    listing.set_defaults(run=_list)
    adding = actions.add_parser("add", help="take in the host of a worker")
    adding.add_argument("what", metavar="ADDRESS", help="HOST:PORT on which its `titan-rl worker` listens")
    adding.set_defaults(run=_ask, do="add")
    draining = actions.add_parser("drain", help="let a host go; its requests end or move first")
    draining.add_argument("what", metavar="HOST", help="its name, as `list` shows it")
    draining.set_defaults(run=_ask, do="drain")


def _list(arguments: argparse.Namespace) -> int:
    say(describe(HostFiles(find_run(arguments.of, "titan-rl hosts")).states()))
    return 0


def _ask(arguments: argparse.Namespace) -> int:
    HostFiles(find_run(arguments.of, "titan-rl hosts")).ask(arguments.do, arguments.what, WAIT_S)
    return _list(arguments)
