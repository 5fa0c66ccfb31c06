"""Sockets of a command and of what it starts are found while they are open."""

import sys

import ports


def test_where_a_command_and_what_it_starts_listen():
    program = "import socket, time; kept = socket.create_server(('127.0.0.1', 0)); time.sleep(5)"
    status, found = ports.watch(["sh", "-c", f'{sys.executable} -c "{program}"; exit 3'])
    assert status == 3 and found == {"listens": {"127.0.0.1 python"}, "talks to": set()}
