"""The processes of one run, before and beside `jax.distributed`: who is there, and who is lost.

`jax.distributed` aborts a process, past what Python can catch, when a peer dies, never comes, or finds its port taken.
So the processes meet here first, over plain TCP on the port after the coordinator's, and watch each other from then
on: a connection that breaks without a goodbye, or falls silent, ends every process with one message.

Process 0 listens; the others connect. What they say are lines of JSON. By the same way they agree on what the host
decides (whether to stop, to save, how much of the budget is used): a collective would need every device for it.
"""

import contextlib
import json
import logging
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tlt_jax.config import ConfigError

log = logging.getLogger("tlt_jax")

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0  # longer than this without a word, and a peer counts as lost
LOST = 3  # the exit code of a process that lost a peer: the same command, started again everywhere, goes on


@dataclass
class _Peer:
    process: int
    host: str
    link: socket.socket
    heard: float
    buffer: bytes = b""
    left: bool = False
    said: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def say(self, **message: Any) -> None:
        try:
            with self.lock:
                self.link.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # it is gone: whoever listens to it will notice
            return

    def words(self) -> list[dict[str, Any]] | None:
        """What has come since the last look, None once the connection is closed."""
        try:
            received = self.link.recv(65536)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not received:
            return None
        *lines, self.buffer = (self.buffer + received).split(b"\n")
        return [_parsed(line) for line in lines]


def leave_at_once(message: str, code: int) -> None:
    """Ends this process from whichever thread: the main one may hang in a collective with the one that is lost."""
    log.error("%s", message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Alone:
    """The company of a run in one process."""

    process = 0

    def agree(self, what: str, value: Any) -> list[Any]:
        """`value` alone."""
        return [value]


@dataclass
class Peers:
    """The other processes, watched by a thread from `meet` to `close`. Process 0 has all, the others have process 0."""

    process: int
    peers: list[_Peer]
    on_loss: Callable[[str, int], None] = leave_at_once
    lost: str | None = None
    _closing: threading.Event = field(default_factory=threading.Event)
    _watch: threading.Thread | None = None

    def start(self) -> "Peers":
        self._watch = threading.Thread(target=self._run, name="peers", daemon=True)
        self._watch.start()
        return self

    def agree(self, what: str, value: Any) -> list[Any]:
        """Every process's `value` (plain JSON), in their order, in every process; all must ask for the same `what`.

        Nobody comes back before all have asked, however long that takes: it is a barrier too.
        """
        if self.process:
            self.peers[0].say(at=what, value=value)
            answer = self._next(self.peers[0])
        else:
            answers = [self._next(peer) for peer in self.peers]
            answer = {"at": what, "values": [value, *(a["value"] for a in answers)]}
            apart = [str(peer) for peer, a in zip(self.peers, answers, strict=True) if a["at"] != what]
            assert not apart, f"{apart} went another way than {what!r}"
            for peer in self.peers:
                peer.say(**answer)
        assert answer["at"] == what, f"process 0 is at {answer['at']!r}, this one at {what!r}"
        return answer["values"]

    def _next(self, peer: _Peer) -> dict[str, Any]:
        while True:
            try:
                return peer.said.get(timeout=1.0)
            except queue.Empty:
                assert self.lost is None, self.lost  # where losing somebody does not end the process, as in a test

    def wait_for_loss(self, seconds: float) -> str | None:
        """Who was lost, waiting up to `seconds` to hear of it: an error in a collective is often the first sign."""
        deadline = time.monotonic() + seconds
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.lost

    def fail(self, why: str, code: int = LOST) -> None:
        """Tells the others that this process ends, why, and with which exit code they should."""
        self._closing.set()  # they may say the same to this one
        for peer in self.peers:
            peer.say(lost=f"process {self.process} on {socket.gethostname()}: {why}", code=code)
        self._leave()

    def close(self) -> None:
        """Says goodbye, so that the others do not take the end for a loss."""
        for peer in self.peers:
            peer.say(bye=True)
        self._leave()

    def _leave(self) -> None:
        self._closing.set()
        if self._watch is not None:
            self._watch.join(timeout=5 * BEAT_SECONDS)
        for peer in self.peers:
            peer.link.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self.peers:
                peer.link.settimeout(SILENCE_SECONDS)
                selector.register(peer.link, selectors.EVENT_READ, peer)
            beaten = 0.0
            while not self._closing.is_set() and self.lost is None:
                now = time.monotonic()
                if now - beaten >= BEAT_SECONDS:
                    beaten = now
                    for peer in self.peers:
                        peer.say(beat=True)
                for key, _ in selector.select(timeout=BEAT_SECONDS / 4):
                    self._hear(key.data, selector)
                for peer in self.peers:
                    if not peer.left and time.monotonic() - peer.heard > SILENCE_SECONDS:
                        self._lose(f"{peer} has not been heard of for {SILENCE_SECONDS:.0f} s")

    def _hear(self, peer: _Peer, selector: selectors.BaseSelector) -> None:
        words = peer.words()
        peer.heard = time.monotonic()
        if words is None:
            selector.unregister(peer.link)
            if not peer.left:
                self._lose(f"{peer} ended before the run did")
            return
        for word in words:
            if word.get("bye"):
                peer.left = True
            if word.get("lost"):
                self._lose(str(word["lost"]), word.get("code", LOST))
            if "at" in word:
                peer.said.put(word)

    def _lose(self, what: str, code: int = LOST) -> None:
        if self.lost is None and not self._closing.is_set():
            self.lost = what
            for peer in self.peers:
                peer.say(lost=what, code=code)
            hint = "; the run ends here, and the same command, started in every process, goes on"
            self.on_loss(what + hint if code == LOST else what, code)


def meet(address: str, processes: int, process: int, token: str, timeout: float) -> Peers:
    """The other processes of a run of `processes`, once all are there; `token` must be the same for all.

    `address` is host:port of process 0, where `jax.distributed` will listen; the processes meet at the port after it.
    Raises ConfigError, within about `timeout` seconds, if a port is taken, somebody does not come, or was started with
    something else.
    """
    host, port = split_address(address)
    if process == 0:
        return Peers(0, _gather(host, port, processes, token, timeout)).start()
    return Peers(process, [_call(host, port + 1, process, token, timeout)]).start()


def split_address(address: str) -> tuple[str, int]:
    """(host, port). Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65535):
        raise ConfigError(f"`device.coordinator` is {address!r}; expected host:port, the port from 1 to 65534")
    return host.strip("[]"), int(port)


def _gather(host: str, port: int, processes: int, token: str, timeout: float) -> list[_Peer]:
    """Process 0: waits for the others."""
    with _listen(host, port):
        pass  # what jax.distributed will listen on is free
    found: dict[int, _Peer] = {}
    arrived: queue.SimpleQueue[tuple[socket.socket, dict[str, Any]]] = queue.SimpleQueue()
    deadline = time.monotonic() + timeout
    with _listen(host, port + 1) as listener:
        listener.settimeout(0.05)
        while len(found) < processes - 1:
            left = deadline - time.monotonic()
            missing = sorted(set(range(1, processes)) - found.keys())
            if left <= 0:
                raise _refused(found, f"process {', '.join(map(str, missing))} did not come within {timeout:g} s")
            with contextlib.suppress(TimeoutError):
                _hear_out(listener.accept()[0], arrived)
            if arrived.empty():
                continue
            link, hello = arrived.get()
            if not isinstance(hello.get("process"), int):
                link.close()  # not one of ours
                continue
            peer = _Peer(hello["process"], str(hello.get("host")), link, time.monotonic())
            if peer.process not in missing:
                known = f"is there already, on {found[peer.process].host}" if peer.process in found else "is none"
                peer.say(refused=f"process {peer.process} of {processes} {known}")
                link.close()
                continue
            found[peer.process] = peer
            if hello.get("token") != token:
                raise _refused(found, f"{peer} was started with another config, code or number of processes")
    for peer in found.values():
        peer.say(welcome=True, host=socket.gethostname())
    return [found[process] for process in sorted(found)]


def _hear_out(link: socket.socket, arrived: queue.SimpleQueue) -> None:
    """Puts the link and its first word there, once it has come. Meanwhile others are heard: strangers may be silent."""
    link.settimeout(5.0)
    threading.Thread(target=lambda: arrived.put((link, _first_word(link))), daemon=True).start()


def _refused(found: dict[int, _Peer], reason: str) -> ConfigError:
    for peer in found.values():
        peer.say(refused=reason)
        peer.link.close()
    return ConfigError(f"`device.processes`: {reason}")


def _call(host: str, port: int, process: int, token: str, timeout: float) -> _Peer:
    """Another process: calls process 0 and waits until all are there."""
    deadline = time.monotonic() + timeout
    where = f"process 0 at {host}:{port} (`device.coordinator`)"
    while True:
        try:
            link = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1))
            break
        except socket.gaierror as error:
            raise ConfigError(f"{where}: there is no such host ({error.strerror})") from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{where} did not answer within {timeout:g} s ({error})") from None
            time.sleep(0.2)
    peer = _Peer(0, host, link, time.monotonic())
    peer.say(process=process, host=socket.gethostname(), token=token)
    link.settimeout(max(deadline - time.monotonic(), 0.0) + 5.0)
    answer = _first_word(link)
    if "refused" in answer:
        raise ConfigError(f"`device.processes`: {answer['refused']}")
    if "welcome" not in answer:
        raise ConfigError(f"{where} went away before all were there, or is not of this run")
    peer.host = str(answer.get("host"))
    return peer


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except socket.gaierror as error:
        raise ConfigError(f"`device.coordinator`: there is no host {host!r} here ({error.strerror})") from None
    except OSError as error:
        raise ConfigError(f"`device.coordinator`: port {port} of {host} cannot be had ({error.strerror})") from None


def _first_word(link: socket.socket) -> dict[str, Any]:
    """The first line that comes, {} if none does."""
    received = b""
    try:
        while b"\n" not in received and len(received) < 4096:
            part = link.recv(1)  # byte by byte: what follows the line is the watch's to read
            if not part:
                break
            received += part
    except OSError:
        return {}
    return _parsed(received)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        word = json.loads(line)
    except ValueError:
        return {}
    return word if isinstance(word, dict) else {}
