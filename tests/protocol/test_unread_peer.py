"""Processes that read nothing of what a peer sends live on when that peer ends."""

import select
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import zmq

from tandem.protocol.sockets import (
    OUTPUT_HIGH_WATER_MARK,
    RECEIVE_HIGH_WATER_MARK,
    bind_heartbeat,
    bind_router,
    connect_dealer,
)

BODY = b"x" * 20
STALLED = """
import sys, time, zmq
from tandem.protocol import sockets
sockets.PING_INTERVAL_MS = 20
context = zmq.Context()
sock = getattr(sockets, sys.argv[1])(context, sys.argv[2])
if sock.type == zmq.DEALER:
    sock.send(b"hello")
elif sock.type == zmq.SUB:
    sock.recv()
print("connected", flush=True)
sys.stdin.readline()
time.sleep(0.5)  # many pings of libzmq's thread, which goes on
print(sock.recv_multipart()[-1].decode(), flush=True)
context.destroy(linger=0)
"""
"""A process with a loop that is stopped until its peer has gone."""


@pytest.mark.parametrize(
    ("stalled", "role", "count"),
    [
        ("connect_heartbeat", bind_heartbeat, 100),
        ("connect_dealer", bind_router, 2 * OUTPUT_HIGH_WATER_MARK),
        ("bind_router", connect_dealer, 2 * RECEIVE_HIGH_WATER_MARK),
    ],
)
def test_process_with_a_full_queue_outlives_its_peer(
    run_dir: Path, context: Any, stalled: str, role: Any, count: int
) -> None:
    endpoint = f"ipc://{run_dir}/peer"
    peer = role(context, endpoint)
    command = [sys.executable, "-c", STALLED, stalled, endpoint]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        if peer.type == zmq.PUB:
            while not select.select([process.stdout], [], [], 0.01)[0]:
                peer.send(BODY)
        assert process.stdout.readline() == "connected\n"
        address = [peer.recv_multipart()[0]] if peer.type == zmq.ROUTER else []
        for _ in range(count):
            peer.send_multipart([*address, BODY])
            if peer.type == zmq.PUB:
                time.sleep(0.001)  # it drops what is sent faster
        peer.close(linger=30_000)
        output, errors = process.communicate("gone\n", timeout=120)
    assert (process.returncode, output, errors) == (0, BODY.decode() + "\n", "")
