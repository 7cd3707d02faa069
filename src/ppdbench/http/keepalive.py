"""Peers that vanish: a machine without power or a cut link sends no FIN, and silence is no sign.

Its kernel, however, answers a probe for the slowest of programs, so asking harms none that lives.
"""

from __future__ import annotations

import socket

IDLE_S = 30
EVERY_S = 10
PROBES = 3
GONE_AFTER_S = IDLE_S + EVERY_S * PROBES
"""A connection breaks when its peer's kernel has said nothing for so long."""


def probe_peer(sock: socket.socket) -> None:
    """Probe the peer of ``sock``, or of every connection that a listening one takes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def limit_unacknowledged(sock: socket.socket) -> None:
    """There are no probes while something sent is not confirmed; so that has the same limit.

    It also ends with one who takes nothing, so it is for servers, which read what they are sent.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_S * 1000)
